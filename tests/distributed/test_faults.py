"""If one rank fails or dies where ranks communicate, every rank ends with an error."""

import datetime
import gc
import os
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import storage_ops as so
from storage_ops.checkpoint.saved.outputs import producers

from ..ranks import forked, free_port

if not dist.is_available():
    pytest.skip("this torch has no distributed", allow_module_level=True)

TIMEOUT = 8  # seconds
WIDTH = 8


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


class Fault(torch.autograd.Function):
    """Calls a function in its backward."""

    @staticmethod
    def forward(ctx, x, fault):
        ctx.fault = fault
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.fault("backward")
        return gradient, None


def step(fault):
    """Run one step. Return weak references to objects that must not stay."""
    up, down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
    seen, calls = [], []

    def producer(x):
        calls.append(0)
        h = up(x)
        fault("forward" if len(calls) == 1 else "recompute")
        return Fault.apply(Gather.apply(h), fault)

    def consumer(h):
        seen.append(weakref.ref(h))
        fault("consumer")
        return down(h)

    error = None
    try:
        so.output_discard(producer, consumer)(torch.randn(4, WIDTH)).sum().backward()
    except (RuntimeError, KeyboardInterrupt) as e:
        error = type(e)
        e.__traceback__ = None
    nothing_is_left()
    assert not [h for ref in seen if (h := ref()) is not None and so.is_discarded(h)]
    return error


def nothing_is_left():
    gc.collect()
    until = time.monotonic() + 5  # a gloo thread may hold an input of its last work
    while producers and time.monotonic() < until:
        time.sleep(0.05)
    assert not producers
    assert not [t for t in gc.get_objects() if type(t) is torch.Tensor and so.is_discarded(t)]
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0
    assert threading.enumerate() == [threading.main_thread()]


def step_of_loss(fault):
    """The same for a sliced vocabulary, whose collectives run beside products."""
    x, w = torch.randn(64, WIDTH, requires_grad=True), torch.randn(50, WIDTH, requires_grad=True)
    target, error = torch.arange(64), None
    group = dist.group.WORLD
    try:
        fault("forward of the loss")
        loss = so.linear_cross_entropy(
            x, w, target, process_group=group, reduction="none", memory_budget=30_000
        )
        fault("backward of the loss")
        loss.sum().backward()
    except (RuntimeError, KeyboardInterrupt) as e:
        error = type(e)
        e.__traceback__ = None
    nothing_is_left()
    return error


def work(rank, port, when, how, folder):
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=TIMEOUT)
    dist.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=timeout
    )

    def fault(now):
        if rank == 1 and now == when:
            if how == "dies":
                os._exit(7)
            raise KeyboardInterrupt if how == "interrupt" else RuntimeError("on purpose")

    one = step_of_loss if "loss" in when else step
    assert one(lambda now: None) is None
    begun = time.monotonic()
    error = one(fault)
    took = time.monotonic() - begun
    (folder / str(rank)).write_text(f"{error.__name__ if error else None} {took}")
    os._exit(0)  # the group is broken


WHEN = (
    "forward", "consumer", "recompute", "backward", "forward of the loss", "backward of the loss",
)  # fmt: skip
CASES = [(when, how) for when in WHEN for how in ("raises", "dies")]


@pytest.mark.slow
@pytest.mark.parametrize(("when", "how"), [*CASES, ("recompute", "interrupt")])
def test_every_rank_ends_with_an_error(when, how, tmp_path):
    context, port = forked(), free_port()
    ranks = [
        context.Process(target=work, args=(rank, port, when, how, tmp_path)) for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(10 * TIMEOUT)
    assert [rank.exitcode for rank in ranks] == [0, 7 if how == "dies" else 0]
    for rank in range(1 if how == "dies" else 2):
        error, took = (tmp_path / str(rank)).read_text().split()
        expected = "KeyboardInterrupt" if rank == 1 and how == "interrupt" else "RuntimeError"
        assert error == expected, error
        assert float(took) < TIMEOUT + 5
