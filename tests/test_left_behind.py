"""An error at any op of any part of the package leaves the process unchanged.

An op that raises represents all errors there, such as no memory, Ctrl-C or a dead rank. The tests
then check everything that the package changes: modes and hooks of torch, patched classes and
functions, threads, settings, storages of tensors, and objects.
"""

import gc
import os
import threading
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import storage_ops as so
from storage_ops import progress
from storage_ops.checkpoint.discard import scope
from storage_ops.checkpoint.saved.outputs import producers

SHARE = 5 if os.environ.get("CI") else 1  # CI tries every fifth op or call


class Planned(Exception):
    pass


class FailsAt(TorchDispatchMode):
    """Raises an error at the op with this number."""

    def __init__(self, at, error):
        super().__init__()
        self.left, self.error = at, error

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == 0:
            raise self.error("on purpose")
        return func(*args, **(kwargs or {}))


class Calls:
    """Raises an error at the call with this number, for simulations.

    Their ops run in dispatch modes, called from C++ functions that must not throw.
    """

    left, error = 0, None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.left = 0

    def count(self, _=None):
        self.left -= 1
        if self.left == 0:
            raise self.error("on purpose")


calls = Calls()


def calls_fail_at(at, error):
    calls.left, calls.error = at, error
    return calls


class Counting(nn.Linear):
    """Counts forwards and backwards."""

    def forward(self, x):
        calls.count()
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(calls.count)
        return y


def layers():
    torch.manual_seed(0)
    block = nn.Sequential(nn.LayerNorm(8), Counting(8, 16), nn.GELU(), Counting(16, 8))
    return nn.Sequential(block, Counting(8, 8))


def loss(**options):
    x, w = torch.randn(24, 8, requires_grad=True), torch.randn(40, 8, requires_grad=True)
    target = torch.arange(24)
    return [x, w, target], lambda: so.linear_cross_entropy(x, w, target, **options).sum().backward()


def divergence():
    x, w, t, v = (torch.randn(n, 8) for n in (24, 40, 24, 40))
    tensors = [x.requires_grad_(), w.requires_grad_(), t, v]
    return tensors, lambda: so.linear_kl_div(*tensors, memory_budget=20_000).backward()


def preference():
    x, w = torch.randn(4, 6, 8, requires_grad=True), torch.randn(40, 8, requires_grad=True)
    target, ref = torch.randint(40, (4, 6)), torch.randn(4, 6, 8)

    def run():
        so.losses.dpo(x, w, target, ref_input=ref, ref_weight=w.detach()).backward()

    return [x, w, target, ref], run


def model_with(config):
    model, x = layers(), torch.randn(4, 8)
    so.apply_activation_checkpoint(model, {"layer_names": ["0"], **config})
    return [*model.parameters(), x], lambda: model(x).sum().backward()


def region():
    model, x = layers(), torch.randn(4, 8, requires_grad=True)
    run = so.output_discard(model[0], model[1])
    return [*model.parameters(), x], lambda: run(x).sum().backward()


def shared():
    x, y = torch.randn(8), torch.randn(8)

    def run():
        a, b = x * 1, y * 1
        so.discard_storage(a)
        so.share_storage(a, b)
        a.add_(1)

    return [x, y], run


def simulated(what):
    model, x = layers(), torch.randn(4, 8)

    def measured():
        with so.memory.measure("cpu"):
            model(x).sum().backward()

    runs = {
        "estimate": lambda: so.memory.estimate(lambda: model(x).sum().backward()),
        "simulate_step": lambda: so.memory.simulate_step(model, x),
        "fit": lambda: so.fit(model, x, "1GiB"),
        "measure": measured,
    }
    return [*model.parameters(), x], runs[what]


OFFLOAD = {"mode": "selective", "policy": so.policies.offload(so.policies.matmuls)}
SIMULATED = ("estimate", "simulate_step", "fit")
PARTS = {
    "loss": loss,
    "loss in little memory": lambda: loss(memory_budget=12_000, reduction="none"),
    "divergence": divergence,
    "preference": preference,
    "full": lambda: model_with({"mode": "full"}),
    "discarded outputs": lambda: model_with({"mode": "output_discard"}),
    "offload": lambda: model_with(OFFLOAD),
    "region": region,
    "share": shared,
    **{name: partial(simulated, name) for name in (*SIMULATED, "measure")},
}


def state(tensors):
    """Return everything that a call could leave behind, in a form to compare."""
    classes = (nn.Module, nn.Linear, nn.LayerNorm, nn.Sequential, nn.GELU, torch.Tensor)
    return {
        "hooks of saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "scopes": bool(scope._scopes.open),
        "checkpoints disabled": so.checkpoint.state.execution.is_disabled(),
        "what is shown": progress._say,
        "classes": [{k: id(v) for k, v in vars(c).items()} for c in classes],
        "functions": [id(getattr(torch, n)) for n in ("empty", "matmul", "mm", "utils", "load")],
        "threads": {t.name for t in threading.enumerate()},
        "collector": gc.isenabled(),
        "grad mode": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "precision": torch.get_float32_matmul_precision(),
        "dtype": torch.get_default_dtype(),
        "tensors": [
            (type(t), t.untyped_storage().nbytes(), t.shape, [*(t._backward_hooks or ())])
            for t in tensors
        ],
        "values": [t.tolist() for t in tensors],
    }


def discarded_now():
    return [o for o in gc.get_objects() if type(o) is torch.Tensor and so.is_discarded(o)]


def forget_gradients(tensors):
    for t in tensors:
        t.grad = None


@pytest.mark.slow
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("error", [Planned, KeyboardInterrupt])
@pytest.mark.parametrize("part", PARTS)
def test_an_error_leaves_nothing_behind(part, error):
    tensors, run = PARTS[part]()
    run()  # fills caches
    forget_gradients(tensors)
    gc.collect()
    before, discarded = state(tensors), len(discarded_now())
    at, ended = 1, False
    while not ended:
        try:
            with (calls_fail_at if part in SIMULATED else FailsAt)(at, error):
                run()
            ended = True
        except error as e:
            e.__traceback__ = None
        forget_gradients(tensors)
        now = state(tensors)
        assert now == before, f"op {at}: {[name for name in now if now[name] != before[name]]}"
        at += SHARE
    gc.collect()
    assert at > 2
    assert len(discarded_now()) == discarded
    assert not [r for r in producers.values() if r.outputs.discardable]
    run()  # works again
