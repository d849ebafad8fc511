"""Linear cross-entropy under torch.func, make_fx and torch.compile with every kind of output."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import storage_ops as so
from storage_ops.loss import reference

REDUCTIONS = ["mean", "sum", "none"]


@pytest.fixture
def problem():
    x, w, b = torch.randn(3, 5, 6), torch.randn(70, 6), torch.randn(70)
    target = torch.randint(70, (3, 5))
    target[0, 2] = -100
    return x, w, b, target


def both(problem, call):
    """Return `call` of the package's loss and of the reference."""
    *_, target = problem
    for function in (so.linear_cross_entropy, reference.linear_cross_entropy):

        def loss(x, w, b, reduction="mean", function=function, target=target):
            return function(x, w, target, linear_bias=b, reduction=reduction, softcap=5.0).sum()

        yield call(loss)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_func_grad_and_vjp(problem, reduction):
    x, w, b = (t.double() for t in problem[:3])

    def gradients(loss):
        value, pull = torch.func.vjp(lambda x, w: loss(x, w, b, reduction), x, w)
        return torch.func.grad(loss, (0, 1, 2))(x, w, b, reduction), value, pull(value * 2)

    ours, right = both(problem, gradients)
    torch.testing.assert_close(ours, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("in_dims", [(0, None), (None, 0), (0, 0)])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_vmap(problem, in_dims, reduction):
    x, w, _, target = problem
    many = torch.stack([w, 2 * w, w - 1])

    def mapped(function):
        def loss(x, w, target):
            return function(x, w, target, reduction=reduction)

        arguments = (x if in_dims[0] == 0 else x[0], w if in_dims[1] is None else many)
        dims = (*in_dims, 0 if in_dims[0] == 0 else None)
        return torch.vmap(loss, dims)(*arguments, target if in_dims[0] == 0 else target[0])

    ours, right = mapped(so.linear_cross_entropy), mapped(reference.linear_cross_entropy)
    torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)


def test_per_sample_gradients(problem):
    x, w, _, target = problem

    def gradients(function):
        def loss(w, x, target):
            return function(x, w, target)

        return torch.vmap(torch.func.grad(loss), (None, 0, 0))(w, x, target)

    ours, right = gradients(so.linear_cross_entropy), gradients(reference.linear_cross_entropy)
    torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)


def test_second_derivatives_are_refused(problem):
    x, w, _, target = problem

    def loss(w):
        return so.linear_cross_entropy(x, w, target)

    with pytest.raises(RuntimeError):
        torch.func.grad(lambda w: torch.func.grad(loss)(w).square().sum())(w)
    with pytest.raises(RuntimeError, match="forward-mode AD is not supported"):
        torch.func.jvp(loss, (w,), (w,))
    with pytest.raises(RuntimeError, match="forward-mode AD is not supported"):
        torch.func.hessian(loss)(w)


@pytest.mark.parametrize("tracing", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_make_fx(problem, tracing, reduction):
    x, w, _, target = problem

    def step(x, w, target):
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        loss = so.linear_cross_entropy(x, w, target, reduction=reduction, shift=True)
        return loss, *torch.autograd.grad(loss.sum(), (x, w))

    graph = make_fx(step, tracing_mode=tracing)(x, w, target)
    assert not any("aten.mm" in str(node.target) for node in graph.graph.nodes)
    torch.testing.assert_close(graph(x, w, target), step(x, w, target))


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_compile_with_many_outputs(problem, backend, dynamic):
    torch._dynamo.reset()
    x, w, b, target = problem

    def head(function, x, w, b, target):
        nll, entropy, correct = function(
            x * 1.5, w, target, linear_bias=b, label_smoothing=0.1, shift=True, softcap=4.0,
            memory_budget=60_000, returns=("nll", "entropy", "correct"),
        )  # fmt: skip
        return (nll * 0.5 + entropy).sum() + correct.sum()

    compiled = torch.compile(
        lambda *a: head(so.linear_cross_entropy, *a), fullgraph=True, backend=backend,
        dynamic=dynamic,
    )  # fmt: skip
    for tokens in (5, 4):
        leaves = [t.detach().requires_grad_() for t in (x[:, :tokens], w, b)]
        ours = compiled(*leaves, target[:, :tokens])
        right = head(reference.linear_cross_entropy, *leaves, target[:, :tokens])
        torch.testing.assert_close(ours, right)
        got, expected = (torch.autograd.grad(v, leaves) for v in (ours, right))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.in_turn
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_code_adds_to_the_buffer_of_accumulate_into(problem, backend):
    torch._dynamo.reset()
    x, w, _, target = problem
    results = []
    for run in (lambda f: f, lambda f: torch.compile(f, backend=backend)):
        buffer, leaf = torch.ones(70, 6), w.detach().requires_grad_()

        def step(x, w, buffer):
            return so.linear_cross_entropy(x, w, target, accumulate_into=buffer) * 2

        run(step)(x, leaf, buffer).backward()
        assert leaf.grad is None
        results.append(buffer)
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("reduction", ["mean", "none"])  # "none" keeps a tile of logits
def test_a_batch_of_upstream_gradients(reduction):
    x, w = torch.randn(6, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    t, upstream = torch.randint(11, (6,)), torch.randn((3, 6) if reduction == "none" else 3)
    losses = (
        so.linear_cross_entropy(x, w, t, reduction=reduction),
        F.cross_entropy(F.linear(x, w), t, reduction=reduction),
    )
    for retain in (True, False):
        gradients = [
            torch.autograd.grad(loss, (x, w), upstream, is_grads_batched=True, retain_graph=retain)
            for loss in losses
        ]
        torch.testing.assert_close(*gradients)


def test_vmap_of_an_empty_batch():
    x, w, h = torch.empty(0, 5, 8), torch.randn(31, 8), torch.randn(31, 7)
    target, whole = torch.empty(0, 5, dtype=torch.int64), torch.randint(31, (5,))

    def loss(x, w):
        return so.linear_cross_entropy(x, w, whole)

    def per_token(x, target):
        names = "nll", "argmax"
        return so.linear_cross_entropy(x, w, target, shift=True, returns=names)

    def divergence(x, scores):
        return so.linear_kl_div(x, w, teacher_topk=scores.log_softmax(-1).topk(4), reduction="none")

    assert torch.vmap(loss, (1, None))(x.movedim(0, 1), w).shape == (0,)
    grads = torch.vmap(torch.func.grad(loss, (0, 1)), (0, None))(x, w)
    assert [g.shape for g in grads] == [(0, 5, 8), (0, 31, 8)]
    nll, argmax = torch.vmap(per_token)(x, target)
    assert nll.shape == argmax.shape == (0, 4) and argmax.dtype == torch.int64
    assert torch.vmap(divergence)(x, torch.empty(0, 5, 31)).shape == (0, 5)
    grad = torch.func.grad(lambda x: so.linear_kl_div(x, w, x @ w[:7].T, h))
    assert torch.vmap(grad)(x).shape == x.shape


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "transform",
    [
        "grad",
        *(
            pytest.param(f"{a} of {b}", marks=pytest.mark.slow)
            for a, b in (("grad", "vmap"), ("vmap", "grad"))
        ),
    ],
)
def test_func_grad_in_torch_compile_runs_without_a_graph(transform):
    x, w, target = torch.randn(3, 5, 8), torch.randn(31, 8), torch.randint(31, (5,))

    def loss(x):
        divergence = so.linear_kl_div(x, w, x.detach() @ w[:7].T, w[:, :7])
        return so.linear_cross_entropy(x, w, target) + divergence

    step = torch.func.grad(loss)
    if transform == "grad of vmap":
        step = torch.func.grad(lambda x: torch.vmap(loss)(x).sum())
    step, x = (step, x[0]) if transform == "grad" else (step, x)
    step = torch.vmap(step) if transform == "vmap of grad" else step
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"inside torch\.func\.grad.*Pass fullgraph=False"):
        torch.compile(step, backend="aot_eager", fullgraph=True)(x)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(step, backend="aot_eager")(x), step(x))


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_results_may_be_modified_in_place(problem, grad, dense):
    x, w, _, target = problem
    if dense:
        target = target.clamp(min=0)
    x, w = x.requires_grad_(grad), w.requires_grad_(grad)
    results = []
    for write in (lambda t: t.mul_(2), lambda t: t * 2):
        outputs = so.linear_cross_entropy(
            x, w, target, reduction="none", returns=("loss", "nll", "lse", "topk"), top_k=2
        )
        loss, nll, lse, (top, _) = outputs
        divergence = so.linear_kl_div(x, w, -x, -w, reduction="none")
        values = [write(t) for t in (loss, lse, top, divergence)]
        assert torch.equal(nll.detach(), values[0].detach() / 2)
        total = sum(t.sum() for t in values)
        results.append((total.detach(), torch.autograd.grad(total, (x, w)) if grad else ()))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.filterwarnings("error:.*may not alias:UserWarning")
def test_compiled_results_share_no_memory(problem):
    x, w, _, target = problem
    x, target = x.requires_grad_(), target.clamp(min=0)

    def losses(x, w):
        options = {"reduction": "none", "returns": ("loss", "nll")}
        return so.linear_cross_entropy(x, w, target, **options)

    compiled = torch.compile(losses, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, w), losses(x, w), rtol=0, atol=0)
