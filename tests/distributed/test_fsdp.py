"""FSDP2: a recompute runs below FSDP's hooks, with parameters that FSDP gathers."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import storage_ops as so

from ..ranks import run_on_ranks

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed")
WIDTH, LAYERS = 8, 4
WAYS = ("before", "after", "hook", "captured", "given")


class Mlp(nn.Module):
    """A block. `way` says how it discards its activation."""

    def __init__(self, way):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop, self.way = nn.Dropout(0.3), way

    def forward(self, x):
        weight, bias, drop = self.up.weight, self.up.bias, self.drop

        def act(x):
            return self.drop(torch.tanh(self.up(x)))

        def captured(x):  # reaches only the parameters, as does the next function
            return drop(torch.tanh(nn.functional.linear(x, weight, bias)))

        def given_to(x, weight, bias):
            return drop(torch.tanh(nn.functional.linear(x, weight, bias)))

        if self.way not in ("hook", "captured", "given"):
            return x + self.down(act(x))
        fn = {"hook": act, "captured": captured, "given": given_to}[self.way]
        args = (x, weight, bias) if self.way == "given" else (x,)
        # Megatron-LM's call: the gradient of the block's output restores before FSDP's hook.
        ckpt = so.OutputDiscardCheckpoint()
        h = ckpt.checkpoint(fn, *args)
        y = x + self.down(h)
        ckpt.discard_output_and_register_recompute(y)
        assert so.is_discarded(h)
        return y


def build(way, names=("0", "1"), nested=False, **how):
    torch.manual_seed(0)
    net = nn.Sequential(*(Mlp(way) for _ in range(LAYERS))).double()
    config = {"layer_names": list(names), "mode": "output_discard"}
    if way == "before":
        so.apply_activation_checkpoint(net, config)
    for block in net:
        if nested:
            fully_shard(block.up, **how)
        fully_shard(block, **how)
    fully_shard(net, **how)
    if way == "after":
        so.apply_activation_checkpoint(net, config)
    return net


def train(net, x, accumulate=False):
    """Return losses and gradients of two steps. Dropout draws the same numbers for every net."""
    torch.manual_seed(1)
    results = []
    for _ in range(2):
        net.zero_grad()
        for last in (False, True) if accumulate else (True,):
            net.set_requires_gradient_sync(last)
            loss = net(x).square().mean()
            loss.backward()
            results.append(loss.detach())
        results += [p.grad.full_tensor() for p in net.parameters()]
        assert not whole(net)
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.1 * p.grad
    return results


def states(net):
    return {m: m._get_fsdp_state() for m in net.modules() if isinstance(m, FSDPModule)}


def groups(net):
    present = []
    for state in states(net).values():
        group = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        present += [g for g in group if g is not None]
    return present


def whole(net):
    """Return the groups of parameters that are gathered."""
    return [group for group in groups(net) if group.is_unsharded]


def same(ours, right):
    assert len(ours) == len(right)
    for a, b in zip(ours, right, strict=True):
        assert torch.equal(a, b), (a - b).abs().max()


def every_way(rank):
    x = torch.randn(3, 5, WIDTH, dtype=torch.float64)[rank]
    for options in (
        {},
        {"nested": True},
        {"reshard_after_forward": False},
        {"names": ("0", "2")},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float32)},
        {"accumulate": True},
    ):
        accumulate = options.pop("accumulate", False)
        right = train(build("plain", **options), x, accumulate)
        # A nested module gathers its parameters only when it is called.
        for way in WAYS[:3] if "nested" in options else WAYS:
            same(train(build(way, **options), x, accumulate), right)


def hybrid(rank):
    x = torch.randn(4, 5, WIDTH, dtype=torch.float64)[rank]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for options in ({}, {"accumulate": True}, {"reshard_after_forward": False}):
        accumulate = options.pop("accumulate", False)
        right = train(build("plain", mesh=mesh, **options), x, accumulate)
        for way in WAYS:
            same(train(build(way, mesh=mesh, **options), x, accumulate), right)


def tensor_parallel(rank):
    """A mesh with two dimensions equals one process. No random numbers, as they would differ."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    torch.manual_seed(0)
    alone = nn.Sequential(*(Mlp("plain") for _ in range(LAYERS))).double().eval()
    alone(x).square().mean().backward()
    for way in WAYS[:3]:
        torch.manual_seed(0)
        net = nn.Sequential(*(Mlp(way) for _ in range(LAYERS))).double().eval()
        config = {"layer_names": ["0", "1"], "mode": "output_discard"}
        if way == "before":
            so.apply_activation_checkpoint(net, config)
        for block in net:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tensor"], plan)
            fully_shard(block, mesh=mesh["data"])
        fully_shard(net, mesh=mesh["data"])
        if way == "after":
            so.apply_activation_checkpoint(net, config)
        for _ in range(2):
            net.zero_grad()
            net(x[mesh["data"].get_local_rank()]).square().mean().backward()
            for p, right in zip(net.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(p.grad.full_tensor(), right.grad, rtol=1e-12, atol=1e-12)


def gathers(rank):
    """Nothing is gathered twice for one layer, or for a row, whose outputs stay here."""
    x = torch.randn(3, 5, WIDTH, dtype=torch.float64)[rank]
    counts, most = {}, {}
    for way, names in (("plain", ()), ("before", ("1",)), ("hook", ()), ("row", ("0", "1", "2"))):
        net = build("before" if way == "row" else way, names)
        most[way] = 0

        def look(*_, net=net, way=way):
            most[way] = max(most[way], len(whole(net)))

        for block in net:
            block.up.register_forward_hook(look)
            block.down.register_forward_hook(lambda *a: a[-1].register_hook(look) and None)
        for _ in range(2):  # the first step learns the order of modules
            wraps = _fsdp_param_group.foreach_all_gather
            with mock.patch.object(_fsdp_param_group, "foreach_all_gather", wraps=wraps) as gather:
                net(x).sum().backward()
            counts[way] = gather.call_count
    assert counts["before"] == counts["hook"] == counts["row"] == counts["plain"]
    assert most["plain"] <= most["before"] <= most["row"] <= 3 and most["hook"] <= 2, most


class SequentialSubclass(nn.Sequential):
    """Calls its first module, which FSDP shards, in a region."""

    def forward(self, x):
        return self[2](so.output_discard(self[0], self[1])(x))


def a_part(rank):
    """If the backward ends before that of the module, its parameters are sharded again."""
    x = torch.randn(3, 5, WIDTH, dtype=torch.float64)[rank]
    for kind in (nn.Sequential, SequentialSubclass):
        torch.manual_seed(0)
        net = kind(Mlp("plain"), nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()
        block, head, _ = net
        fully_shard(block)
        fully_shard(net)
        inner = []
        head.register_forward_hook(lambda *a, inner=inner: inner.append(a[-1]))
        if kind is nn.Sequential:
            so.apply_activation_checkpoint(net, {"layer_names": ["0"], "mode": "output_discard"})
        for whole_graph in (True, False, True):
            outputs = []
            for disabled in (so.disable_checkpointing(), contextlib.nullcontext()):
                torch.manual_seed(1)
                with disabled:
                    y = net(x)
                # FSDP has no hook in a backward that begins below the output of its root.
                begin = y if whole_graph else inner[-1]
                (weight,) = torch.autograd.grad(begin.square().sum(), [head.weight])
                outputs.append([y.detach(), weight])
                assert not whole(block)
            same(*outputs)
            with torch.no_grad():  # parameters that stayed whole would keep their old values
                for p in net.parameters():
                    p.mul_(1.1)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise KeyboardInterrupt


class Failing(nn.Module):
    """Raises in its recompute or in its backward."""

    calls = 0

    def __init__(self):
        super().__init__()
        self.linear, self.when = nn.Linear(WIDTH, WIDTH), ""

    def forward(self, x):
        Failing.calls += 1  # the recompute would restore an attribute of the instance
        if self.when == "recompute" and Failing.calls == 2:
            raise KeyboardInterrupt
        x = torch.tanh(self.linear(x))
        return _Fails.apply(x) if self.when == "backward" else x


def errors(rank):
    """After an error in or after the recompute, the layer is sharded as in forward."""
    x = torch.randn(3, 5, WIDTH)[rank]
    for when in ("recompute", "backward"):
        failing = Failing()
        net = nn.Sequential(failing, nn.Linear(WIDTH, WIDTH))
        fully_shard(failing)
        fully_shard(net)
        so.apply_activation_checkpoint(net, {"layer_names": ["0"], "mode": "output_discard"})
        net(x).sum().backward()
        failing.when, Failing.calls = when, 0
        with pytest.raises(KeyboardInterrupt):
            net(x).sum().backward()
        assert Failing.calls == 2 and not whole(failing)


def all_of(rank):
    every_way(rank)
    gathers(rank)
    a_part(rank)
    errors(rank)


@pytest.mark.in_turn
def test_two_ranks():
    run_on_ranks(all_of, 2)


@pytest.mark.slow
@pytest.mark.parametrize("work", [hybrid, tensor_parallel])
def test_meshes(work):
    run_on_ranks(work, 4)
