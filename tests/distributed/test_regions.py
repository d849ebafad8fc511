"""Regions that communicate: outputs in flight, on some ranks only, or local ones of DTensors."""

import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import storage_ops as so

from ..ranks import run_on_ranks

if not dist.is_available():
    pytest.skip("this torch has no distributed", allow_module_level=True)

from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH, ROWS = 32, 256


class Late(torch.autograd.Function):
    """Makes the other rank wait for this one."""

    @staticmethod
    def forward(ctx, x, seconds):
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class _Handle(torch.autograd.Function):
    """An unfinished all-gather in a plain tensor."""

    @staticmethod
    def forward(ctx, x, begun):
        whole = x.new_empty(len(x) * dist.get_world_size(), *x.shape[1:])
        begun.append(dist.all_gather_into_tensor(whole, x.contiguous(), async_op=True))
        return whole

    @staticmethod
    def backward(ctx, gradient):
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()].clone(), None


def compose(producer, consumer):
    return so.output_discard(producer, consumer)


def block(producer, consumer):
    def run(x):
        ckpt = so.OutputDiscardCheckpoint()
        h = ckpt.checkpoint(producer, x)
        with ckpt.consumer():
            y = consumer(h)
        ckpt.discard_output_and_register_recompute()
        return y

    return run


def hook(producer, consumer):
    def run(x):
        ckpt = so.OutputDiscardCheckpoint()
        y = consumer(ckpt.checkpoint(producer, x))
        ckpt.discard_output_and_register_recompute(y)
        return y

    return run


def chain(producer, consumer):
    def run(x):
        with so.OutputDiscardChain() as regions:
            return consumer(regions.checkpoint(torch.tanh, regions.checkpoint(producer, x)))

    return run


def whole_only(producer, consumer):
    """A checkpoint that keeps the output, around another that does not."""
    inside = so.output_discard(producer, consumer)
    return lambda x: checkpoint(inside, x, use_reentrant=False)


def checked(producer, consumer):
    """A region that compares the bytes, for which it waits."""
    return so.output_discard(producer, consumer, determinism_check="checksum")


WAYS = (compose, block, hook, chain, whole_only, checked)


def layers(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Linear(WIDTH, 2 * WIDTH, dtype=dtype), nn.Linear(2 * WIDTH, WIDTH, dtype=dtype)


def gradients(fn, x, modules, g):
    parameters = [p for m in modules for p in m.parameters() if p.requires_grad]
    results = []
    for _ in range(2):  # in the second, a reused buffer shows the effect of the first
        torch.manual_seed(2)
        leaf = x.clone().requires_grad_()
        y = fn(leaf)
        results += [y.detach(), *torch.autograd.grad(y, [leaf, *parameters], g)]
    return results


def same(ours, right, **tolerance):
    for a, b in zip(ours, right, strict=True):
        if tolerance:
            torch.testing.assert_close(a, b, **tolerance)
        else:
            assert torch.equal(a, b), (a - b).abs().max()


def in_flight(rank):
    mesh, world = init_device_mesh("cpu", (2,)), dist.group.WORLD
    x = torch.randn(2, ROWS, WIDTH, dtype=torch.float64)[rank]
    g = torch.randn(2 * ROWS, WIDTH, dtype=torch.float64)
    up, down = layers()
    drop = nn.Dropout(0.4)

    def local(x):
        return Late.apply(drop(up(x)), 0.03 * rank)

    def rows(x):
        return all_gather_tensor_autograd(local(x), 0, world)

    def viewed(x):
        return rows(x).view(-1, 2, WIDTH).transpose(0, 1)

    def redistributed(x):
        whole = DTensor.from_local(local(x), mesh, [Shard(0)])
        return whole.redistribute(placements=[Replicate()], async_op=True)

    def nested(x):
        return [{"gathered": rows(x), "other": 3}]

    def handle(x):
        begun = []
        return _Handle.apply(local(x), begun), begun[0]

    def wait(h):
        h[1].wait()
        return down(h[0])

    cases = {
        "rows": (rows, down),
        "viewed": (viewed, lambda h: down(h.transpose(0, 1).reshape(-1, 2 * WIDTH))),
        "redistributed": (redistributed, lambda h: down(h.to_local())),
        "local": (lambda x: redistributed(x).to_local(), down),
        "nested": (nested, lambda h: down(h[0]["gathered"])),
        "handle": (handle, wait),
    }
    for name, (producer, consumer) in cases.items():
        for way in WAYS:
            if way is chain:
                if name in ("redistributed", "nested", "handle"):
                    continue
                right = gradients(
                    lambda x, p=producer, c=consumer: c(torch.tanh(p(x))), x, (up, down), g
                )
            else:
                right = gradients(lambda x, p=producer, c=consumer: c(p(x)), x, (up, down), g)
            same(gradients(way(producer, consumer), x, (up, down), g), right)


def frozen(rank):
    """Only the other rank's consumer needs the gathered tensor."""
    x = torch.randn(2, ROWS, WIDTH, dtype=torch.float64)[rank]
    g = torch.randn(2 * ROWS, WIDTH, dtype=torch.float64)
    for who in (0, 1):
        for producer_saves in (True, False):
            up, down = layers()
            down.requires_grad_(rank != who)

            def gather(x, up=up, saves=producer_saves):
                h = up(x) if saves else torch.cat([x, x], 1)
                return all_gather_tensor_autograd(h, 0, dist.group.WORLD)

            modules = (up, down) if producer_saves else (down,)
            right = gradients(lambda x, f=gather, d=down: d(f(x)), x, modules, g)
            for way in (compose, block, hook):
                same(gradients(way(gather, down), x, modules, g), right)
            layered = nn.Sequential(up, Gather(), down) if producer_saves else nn.Sequential(down)
            if producer_saves:
                so.apply_activation_checkpoint(
                    layered, {"layer_classes": ["Gather"], "mode": "output_discard"}
                )
                same(gradients(layered, x, modules, g), right)


class Gather(nn.Module):
    def forward(self, x):
        return all_gather_tensor_autograd(x, 0, dist.group.WORLD)


class Parallel(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.last, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4)


def local_outputs(rank):
    """The local tensors of tensor parallelism are freed as others are."""
    mesh = init_device_mesh("cpu", (2,))
    net = Parallel().double()
    torch.manual_seed(1)
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    g = torch.randn(4, WIDTH, dtype=torch.float64)
    whole = gradients(lambda x: net.last(net.drop(net.down(net.up(x)))), x, (net,), g)
    parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for producer, consumer in (
        (net.up, lambda h: net.last(net.drop(net.down(h)))),
        (lambda x: net.down(net.up(x)), lambda h: net.last(net.drop(h))),
        (lambda x: net.drop(net.down(net.up(x))), net.last),
    ):
        for way in (compose, block, hook, checked):
            ours = gradients(way(producer, consumer), x, (net,), g)
            full = [t.full_tensor() if isinstance(t, DTensor) else t for t in ours]
            same(full, whole, rtol=1e-12, atol=1e-12)
        freed = []
        for _ in range(4):  # a gloo thread may briefly hold the output of its last work
            ckpt = so.OutputDiscardCheckpoint()
            h = ckpt.checkpoint(producer, x.clone().requires_grad_())
            with ckpt.consumer():
                y = consumer(h)
            ckpt.discard_output_and_register_recompute()
            freed.append(so.is_discarded(h))
            y.sum().backward()
        assert any(freed)


class FromCache(torch.autograd.Function):
    """Returns a view of a cached tensor."""

    @staticmethod
    def forward(ctx, x, cache):
        cache.copy_(x)
        return cache.view_as(cache)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def kept_by_others(rank):
    cache, up, down = torch.empty(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    holder = [cache]
    so.output_discard(lambda x: FromCache.apply(up(x), holder[0]), down)(torch.randn(4, 4))
    assert not so.is_discarded(cache)


def returned_parameter(rank):
    """A hook on a tensor that the region did not compute would stay forever."""
    up, down = nn.Linear(4, 4), nn.Linear(4, 4)

    def gather(x):
        return all_gather_tensor_autograd(up(x), 0, dist.group.WORLD), up.weight

    so.output_discard(gather, lambda h: down(h[0]) @ h[1])(torch.randn(4, 4)).sum().backward()
    assert not up.weight._backward_hooks


def every(rank):
    warnings.simplefilter("ignore", FutureWarning)
    for work in (in_flight, frozen, local_outputs, kept_by_others, returned_parameter):
        torch.manual_seed(3)
        work(rank)


@pytest.mark.in_turn
def test_two_ranks():
    run_on_ranks(every, 2)
