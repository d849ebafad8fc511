"""discard_storage refuses parameters, leaves and their views, because nothing recomputes them."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import storage_ops as so


def weight():
    return nn.Linear(4, 3).weight


def frozen():
    return nn.Parameter(torch.ones(2), requires_grad=False)


def leaf():
    return torch.ones(2, requires_grad=True)


def viewed_without_grad():
    with torch.no_grad():
        return weight().t()


def jagged():
    parts = [torch.ones(2), torch.ones(3)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)


LEAVES = {
    "Parameter": {
        "parameter": weight,
        "frozen parameter": frozen,
        "wrapped parameter": lambda: nn.Parameter(TwoTensor(torch.ones(2), torch.ones(2))),
        "wrapper of parameters": lambda: TwoTensor(frozen(), frozen()),
    },
    "leaf tensor that requires grad": {
        "leaf": leaf,
        "view that became a leaf": lambda: torch.ones(3)[1:].requires_grad_(),
        "wrapped leaf": lambda: TwoTensor(torch.ones(2), torch.ones(2)).requires_grad_(),
        "jagged leaf": jagged,
    },
    "view of a Parameter": {
        "slice": lambda: weight()[1:],
        "view of a slice": lambda: weight()[1:].t().unsqueeze(0),
        "view without grad": viewed_without_grad,
        "slice of a frozen parameter": lambda: frozen()[1:],
        "chunk": lambda: weight().chunk(3)[1],
    },
    "view of a leaf tensor that requires grad": {"view of a leaf": lambda: leaf().view(1, 2)},
}


@pytest.mark.parametrize(
    "kind, make", [(kind, make) for kind, makers in LEAVES.items() for make in makers.values()]
)
def test_leaves_are_refused_by_name(path, kind, make):
    t = make()
    with pytest.raises(
        RuntimeError, match=f"^discard_storage: `t` is a {kind}, of .*allow_leaf=True"
    ):
        so.discard_storage(t)
    assert not so.is_discarded(t)
    so.discard_storage(t, allow_leaf=True)
    assert so.is_discarded(t)


def test_a_layer_works_after_the_refusal(path):
    layer, x = nn.Linear(4, 3), torch.randn(2, 4)
    right, kept = layer(x), layer.weight.detach().clone()
    with pytest.raises(RuntimeError, match="`t` is a Parameter"):
        so.discard_storage(layer.weight)
    assert torch.equal(layer(x), right)
    so.discard_storage(layer.weight, allow_leaf=True)
    so.share_storage(layer.weight, kept)
    assert torch.equal(layer(x), right)


def test_activations_and_plain_tensors_are_freed(path):
    layer, x = nn.Linear(4, 3), torch.randn(2, 4)
    with torch.no_grad():
        unused = layer(x)
    parts = TwoTensor(torch.randn(2), torch.randn(2))
    ours = [layer(x), layer(x)[1:], layer(x).detach(), unused, x.clone()[1:], parts, jagged() * 2]
    for t in ours:
        so.discard_storage(t)
        assert so.is_discarded(t)


def test_leaves_are_refused_in_simulations_and_transforms():
    with FakeTensorMode(), pytest.raises(RuntimeError, match="`t` is a view of a Parameter"):
        so.discard_storage(weight()[1:])
    with pytest.raises(RuntimeError, match="`t` is a leaf tensor that requires grad"):
        torch.func.grad(lambda x: so.discard_storage(x) or x.sum())(torch.ones(2))
    with pytest.raises(RuntimeError, match="`t` is a Parameter"):
        so.memory.estimate(lambda: so.discard_storage(weight()))


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_code_refuses_parameters(fullgraph):
    layer, x = nn.Linear(4, 3), torch.randn(2, 4)

    def step(x, allow_leaf):
        h = layer(x)
        so.discard_storage(h)
        so.discard_storage(layer.weight, allow_leaf=allow_leaf)
        return h.sin()

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=fullgraph, backend="aot_eager")
    with pytest.raises(RuntimeError, match="discard_storage: `t` is a Parameter"):
        compiled(x, False)
    assert torch.equal(compiled(x, True), layer(x).sin())


def test_a_discard_adds_nothing_to_a_graph_of_dynamo():
    def step(h):
        so.discard_storage(h)
        so.discard_storage(h[1:])
        return h.sin()

    def inspect(graph, inputs):
        graphs.append(graph)
        return graph.forward

    graphs = []
    x = torch.randn(6, requires_grad=True)
    h = (x * 2).view(2, 3)  # a view of a tensor outside the graph
    torch._dynamo.reset()
    assert torch.equal(torch.compile(step, fullgraph=True, backend=inspect)(h), h.sin())
    names = [node.name for node in graphs[0].graph.nodes if node.op.startswith("call")]
    assert names == ["sin"]
    torch._dynamo.reset()
    y = torch.compile(step, fullgraph=True, backend="aot_eager")(h)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], 2 * (2 * x).cos())
