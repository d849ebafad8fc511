"""Under torch.compile, regions become checkpoints, and graphs contain no storage ops."""

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F

import storage_ops as so
from storage_ops.checkpoint.region import lowering

pytestmark = pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")


class Mlp(nn.Module):
    """An MLP with two wide activations, of 64 and 96 features."""

    def __init__(self, way):
        super().__init__()
        self.up, self.mid, self.down = nn.Linear(16, 64), nn.Linear(64, 96), nn.Linear(96, 16)
        self.way = way

    def act(self, h):
        return F.gelu(self.mid(h))

    def forward(self, x):
        return getattr(self, self.way)(x)

    def chain(self, x):
        with so.OutputDiscardChain() as chain:
            h = chain.checkpoint(self.up, x)
            a = chain.checkpoint(self.act, h)
            return self.down(a)

    def linked(self, x):
        first, second = so.OutputDiscardCheckpoint(), so.OutputDiscardCheckpoint()
        h = first.checkpoint(self.up, x)
        with first.consumer():
            a = second.checkpoint(self.act, h)
        first.discard_output_and_register_recompute()
        y = self.down(a)
        second.discard_output_and_register_recompute(y)
        return y

    def composed(self, x):
        return so.output_discard(lambda x: self.act(self.up(x)), self.down)(x)

    def plain(self, x):
        return self.down(self.act(self.up(x)))


def partitioners():
    from functorch.compile import default_partition, min_cut_rematerialization_partition

    return {"default": default_partition, "min cut": min_cut_rematerialization_partition}


def gradients(net, x):
    return torch.autograd.grad(net(x).square().sum(), (x, *net.parameters()))


def same(got, right):
    for a, b in zip(got, right, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.in_turn
@pytest.mark.parametrize("partitioner", ["default", "min cut"])
@pytest.mark.parametrize("way", ["chain", "linked", "composed"])
def test_a_compiled_graph_saves_no_wide_activation(way, partitioner):
    if way != "composed" and not lowering._HAS_NUMBERS:
        pytest.skip("this torch saves what passes from one checkpoint to the next")
    torch._dynamo.reset()
    net, x, saved = Mlp(way), torch.randn(8, 16, requires_grad=True), []

    def inspect(graph, inputs):
        output = next(node for node in graph.graph.nodes if node.op == "output")
        saved.extend(tuple(node.meta["val"].shape) for node in output.args[0] if node is not None)
        assert not any("storage_ops" in str(node.target) for node in graph.graph.nodes)
        return graph.forward

    backend = aot_autograd(fw_compiler=inspect, partition_fn=partitioners()[partitioner])
    compiled = torch.compile(net, fullgraph=True, backend=backend)
    got = torch.autograd.grad(compiled(x).square().sum(), (x, *net.parameters()))
    wide = {(8, 64), (64, 8), (8, 96), (96, 8)}
    assert saved and not wide & set(saved), saved
    net.way = "plain"
    same(got, gradients(net, x))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["chain", "linked", "composed"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor_with_static_and_dynamic_shapes(way, dynamic):
    torch._dynamo.reset()
    net, counter = Mlp(way), CompileCounter()
    compiled = torch.compile(net, fullgraph=True, dynamic=dynamic)
    for rows in (8, 5, 11) if dynamic else (8,):
        x = torch.randn(rows, 16, requires_grad=True)
        got = torch.autograd.grad(compiled(x).square().sum(), (x, *net.parameters()))
        net.way = "plain"
        right = gradients(net, x)
        net.way = way
        same(got, right)
    torch._dynamo.reset()
    counted = torch.compile(net, backend=counter, dynamic=dynamic)
    for rows in (8, 5, 11):
        counted(torch.randn(rows, 16, requires_grad=True))
    assert counter.frame_count <= (1 if dynamic else 3)


class Breaks(nn.Linear):
    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)


@pytest.mark.in_turn
@pytest.mark.parametrize("way", ["chain", "linked", "composed"])
def test_graph_breaks(way):
    torch._dynamo.reset()
    net, x = Mlp(way), torch.randn(8, 16, requires_grad=True)
    right = gradients(net, x)
    net.up.__class__ = Breaks
    same(gradients(torch.compile(net, backend="aot_eager"), x), right)


def test_compiled_regions_and_consumers_in_an_eager_discard(path):
    torch._dynamo.reset()
    net, x = Mlp("plain"), torch.randn(8, 16, requires_grad=True)
    right = gradients(net, x)
    producer = torch.compile(lambda x: net.act(net.up(x)), backend="aot_eager")
    consumer = torch.compile(net.down, backend="aot_eager")
    for p, c in (
        (producer, net.down),
        (lambda x: net.act(net.up(x)), consumer),
        (producer, consumer),
    ):
        y = so.output_discard(p, c)(x)
        same(torch.autograd.grad(y.square().sum(), (x, *net.parameters())), right)


@pytest.mark.parametrize("retain", [False, True])
def test_a_backend_that_runs_the_checkpoint_repeats_random_numbers(retain):
    up, down, x = nn.Linear(8, 32), nn.Linear(32, 8), torch.randn(4, 8, requires_grad=True)

    def act(x):
        return F.dropout(F.gelu(up(x)), 0.5)

    def step(f):
        torch.manual_seed(0)
        y = f(x)
        grads = [torch.autograd.grad(y.sum(), x, retain_graph=True) for _ in range(1 + retain)]
        return y, *(grad for (grad,) in grads), torch.get_rng_state()

    right = step(lambda x: down(act(x)))
    compiled = torch.compile(so.output_discard(act, down), backend="eager", fullgraph=True)
    for a, b in zip(step(compiled), right, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("way", ["chain", "composed", "wrapped"])
def test_a_region_under_a_transform_is_a_plain_call(way, backend):
    torch._dynamo.reset()
    net, x = Mlp("plain" if way == "wrapped" else way), torch.randn(3, 16)
    net = so.CheckpointWrapper(net) if way == "wrapped" else net

    def gradients(forward, x):
        grad = torch.func.grad(lambda x: forward(x).square().sum())
        return grad(x), torch.func.vmap(grad)(x), torch.func.vmap(lambda x: forward(x))(x)

    def compiled(x):
        return gradients(net, x)

    same(torch.compile(compiled, backend=backend, fullgraph=True)(x), gradients(net.plain, x))


@pytest.mark.parametrize(
    "look",
    [
        lambda model, x: so.checkpoint_report(model, x),
        lambda model, x: so.explain_policy(model, x, policy="every_other_mm"),
    ],
)
def test_a_model_is_compiled_after_a_report_about_it(look):
    torch._dynamo.reset()
    counter, inner = CompileCounter(), nn.Sequential(nn.Linear(16, 16), nn.GELU())
    model, x = (
        nn.Sequential(torch.compile(inner, backend=counter), nn.Linear(16, 8)),
        torch.randn(4, 16),
    )
    look(model, x)
    assert counter.frame_count == 0
    model(x)
    assert counter.frame_count > 0


def test_a_report_about_a_model_with_torch_cond():
    class Halved(nn.Module):
        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda x: (x / 2,), lambda x: (-x,), (x,))[0]

    torch._dynamo.reset()
    model, x = nn.Sequential(nn.Linear(16, 16), Halved()), torch.randn(4, 16)
    so.checkpoint_report(model, x)
    assert "cond" in str(so.explain_policy(model, x, policy="every_other_mm"))
    model(x)
