"""Compiled and traced steps on a GPU."""

import copy
import warnings

import pytest
import torch
from torch.nn import functional as F

import storage_ops as so

from ..checkpoint.blocks import Model
from ..loss.test_linear_cross_entropy import error, exact, problem
from .devices import each_device, moved

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def gradients(run, leaves):
    loss = run()
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.mark.cuda
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_compiles_as_one_graph(dtype, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(so.linear_cross_entropy, fullgraph=True, dynamic=dynamic)
    for tokens in (37, 64):
        x, w, target, b = problem(tokens, dtype=dtype)
        right, right_grads = exact(x, w, target, b)
        x, w, target, b = moved((x, w, target, b), "cuda")
        leaves = [t.requires_grad_() for t in (x, w, b)]
        got = gradients(lambda: compiled(x, w, target, linear_bias=b), leaves)  # noqa: B023
        tolerance = 1e-5 if dtype == torch.float32 else 1.5e-2
        for ours, expected in zip(got, (right, *right_grads), strict=True):
            assert error(ours.cpu(), expected) < tolerance


@pytest.mark.cuda
def test_the_compiled_loss_under_cuda_graph_trees():
    torch._dynamo.reset()
    compiled = torch.compile(so.linear_cross_entropy, fullgraph=True, mode="reduce-overhead")
    x, w, target, _ = moved(problem(256, 64, 3001), "cuda")
    leaves = [x.requires_grad_(), w.requires_grad_()]
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            x.normal_()
        got = [t.clone() for t in gradients(lambda: compiled(x, w, target), leaves)]
        right = gradients(lambda: so.linear_cross_entropy(x, w, target), leaves)
        for a, b in zip(got, right, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def cross_entropy(x, w, t):
    return F.cross_entropy(F.linear(x, w).float(), t)


def focal(x, w, t):
    p = torch.log_softmax(F.linear(x, w).float(), -1).gather(1, t[:, None])
    return -((1 - p.exp()) ** 2 * p).mean()


def concentration(x, w, t):
    """Return a loss that does not become the op, but is chunked by the general rewrite."""
    return torch.softmax(F.linear(x, w).float(), -1).square().sum(-1).mean()


def preference(x, w, t):
    """Return a preference loss of pairs of sequences."""
    p = torch.log_softmax(F.linear(x, w).float(), -1).gather(1, t[:, None])
    chosen, rejected = p.view(8, -1).mean(1).chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()


@pytest.mark.cuda
@pytest.mark.parametrize(
    "hidden", [64, 512]
)  # with 512, the weight gradient has room for all logits
@pytest.mark.parametrize("loss", [cross_entropy, focal, preference, concentration])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_auto_chunker(hidden, loss, dtype):
    torch._dynamo.reset()
    tokens, vocab = 512, 8003
    x = torch.randn(tokens, hidden, device="cuda").to(dtype).requires_grad_()
    w = (torch.randn(vocab, hidden, device="cuda") / 8).to(dtype).requires_grad_()
    target = torch.randint(vocab, (tokens,), device="cuda")
    options = {"num_chunks": 8, "strict": True}
    compiled = torch.compile(loss, backend="storage_ops", options=options)
    double = [t.detach().double().requires_grad_() for t in (x, w)]
    right = gradients(lambda: loss(*double, target), double)
    got = gradients(lambda: compiled(x, w, target), [x, w])
    for a, b in zip(got, right, strict=True):
        difference = (a.double() - b).norm()
        assert difference < (1e-5 if dtype == torch.float32 else 2e-2) * b.norm()
    with so.memory.measure("cuda") as m:
        gradients(lambda: compiled(x, w, target), [x, w])
    assert m.peak_bytes < tokens * vocab * dtype.itemsize + 2 * w.nbytes


@pytest.mark.cuda
@pytest.mark.parametrize("mode", ["output_discard", "full", None])
def test_checkpointed_layers_compile(mode):
    torch._dynamo.reset()
    plain = Model(layers=2, width=64, dropout=0.0).cuda()
    rules = {"policy": "matmuls"} if mode is None else {"mode": mode}
    ours = so.apply_activation_checkpoint(copy.deepcopy(plain), {"layer_classes": ["MLP"], **rules})
    x = torch.randn(2, 16, 64, device="cuda", requires_grad=True)
    compiled = torch.compile(ours, fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = gradients(lambda: compiled(x).square().sum(), [x, *ours.parameters()])
    right = gradients(lambda: plain(x).square().sum(), [x, *plain.parameters()])
    for a, b in zip(got, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@each_device
@pytest.mark.parametrize("mode", ["output_discard", "full", "matmuls"])
def test_a_traced_step_with_dropout_equals_eager(device, mode):
    plain = Model(layers=2, width=32, dropout=0.3).to(device)
    rules = {"policy": mode} if mode == "matmuls" else {"mode": mode}
    ours = so.apply_activation_checkpoint(
        copy.deepcopy(plain), {"layer_classes": ["Block"], **rules}
    )
    x = torch.randn(2, 16, 32, device=device)

    def train(x):
        loss = ours(x).square().sum()
        loss.backward()
        return loss.detach()

    step = so.graph.trace_step(train, x)
    before = step.gm.meta["storage_ops_before"].graph
    assert len(step.gm.graph.nodes) > len(before.nodes)  # some ops run twice
    for seed in range(2):
        plain.zero_grad()
        ours.zero_grad()
        torch.manual_seed(seed)
        right = plain(x).square().sum()
        right.backward()
        torch.manual_seed(seed)
        assert torch.equal(step(x), right.detach())
        for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)
