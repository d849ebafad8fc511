"""Targets and a teacher in one call: the cross-entropy uses the logits of the divergence."""

import pytest
import torch

import storage_ops as so
from storage_ops import losses
from storage_ops.divergence import reference
from storage_ops.divergence import targets as targets_of_divergence
from storage_ops.loss.engine import tokens as tokens_of_loss
from storage_ops.matmul import of

from ..refused import refused
from .test_linear_kl_div import DIVERGENCES, TOLERANCE, error, problem, smallest_budget, stored


def targets(tokens=(3, 9), vocab=131):
    ids = torch.randint(vocab, tokens)
    ids[torch.rand(tokens) < 0.3] = -100
    ids[..., -1] = 1
    return ids


def results(function, tensors, wide=False, upstream=None, **options):
    """Return the loss and gradients of the student, in float64 if `wide`."""
    inputs = {k: t.double() for k, t in tensors.items()} if wide else tensors
    leaves = [inputs[k].detach().clone().requires_grad_() for k in ("x", "w", "b")]
    if "teacher_topk" not in options:
        options |= {"teacher_input": inputs["t"], "teacher_weight": inputs["tw"]}
    loss = function(leaves[0], leaves[1], linear_bias=leaves[2], **options)
    upstream = torch.ones_like(loss) if upstream is None else upstream.to(loss)
    return loss.detach(), torch.autograd.grad(loss, leaves, upstream)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("divergence", DIVERGENCES[:3])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("budget", ["default", "smallest"])
def test_loss_and_gradients_against_float64(dtype, divergence, reduction, budget):
    tensors, weight = problem(dtype)
    for shift, more in (
        (False, {}),
        (True, {"token_weight": weight, "temperature": 1.7, "scale_by_temperature": True}),
        (False, {"softcap": 2.5, "valid_classes": 120, "temperature": 0.8}),
        (True, {"teacher_topk": stored(tensors, 5), "token_weight": weight}),
    ):
        options = {"target": targets(vocab=120), "target_weight": 0.7, "shift": shift}
        options |= {"reduction": reduction, "divergence": divergence, "beta": 0.3, **more}
        exact_options = {k: v for k, v in options.items() if k != "teacher_topk"}
        least = smallest_budget(tensors, **options)
        options["memory_budget"] = least if budget == "smallest" else None
        upstream = torch.rand((3, 9 - shift) if reduction == "none" else ()).double() + 0.5
        loss, grads = results(so.linear_kl_div, tensors, upstream=upstream, **options)
        if "teacher_topk" in more:
            exact_options["teacher_topk"] = (
                more["teacher_topk"][0].double(),
                more["teacher_topk"][1],
            )
        expected, right = results(reference.linear_kl_div, tensors, True, upstream, **exact_options)
        assert error(loss, expected) < TOLERANCE[dtype]
        for ours, wanted in zip(grads, right, strict=True):
            assert ours.dtype == dtype and error(ours, wanted) < TOLERANCE[dtype]


def test_the_loss_is_a_divergence_plus_a_cross_entropy():
    tensors, _ = problem(torch.float64)
    target = targets()
    divergence = results(so.linear_kl_div, tensors, token_weight=(target != -100).double())
    x, w, b = (tensors[k].clone().requires_grad_() for k in ("x", "w", "b"))
    nll = so.linear_cross_entropy(x, w, target, linear_bias=b)
    both = results(so.linear_kl_div, tensors, target=target, target_weight=2.0)
    torch.testing.assert_close(both[0], divergence[0] + 2 * nll.detach())
    grads_of_nll = torch.autograd.grad(nll, (x, w, b))
    for ours, of_divergence, of_nll in zip(both[1], divergence[1], grads_of_nll, strict=True):
        torch.testing.assert_close(ours, of_divergence + 2 * of_nll)


@pytest.mark.in_turn
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("times", [1, 3])
def test_the_budget_is_kept(dtype, reduction, times):
    tokens, vocab = 400, 20_003
    tensors, _ = problem(dtype, (tokens,), 32, 48, vocab)
    options = {"target": targets((tokens,), vocab), "reduction": reduction, "divergence": "jsd"}
    options["memory_budget"] = smallest_budget(tensors, **options) * times
    results(so.linear_kl_div, tensors, **options)
    leaves = [tensors[k].requires_grad_() for k in ("x", "w", "b")]
    with so.memory.measure() as m:
        loss = so.linear_kl_div(leaves[0], leaves[1], tensors["t"], tensors["tw"],
                                linear_bias=leaves[2], **options)  # fmt: skip
        grads = torch.autograd.grad(loss.sum(), leaves)
    returned = loss.nbytes + sum(g.nbytes for g in grads)
    assert m.peak_bytes - returned <= options["memory_budget"]


@pytest.mark.parametrize("same_dtype", [True, False], ids=["one dtype", "another dtype"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_only_a_teacher_of_another_dtype_needs_a_third_tile(same_dtype, temperature):
    """With one dtype the gradient overwrites the teacher's logits.

    At temperature 1, one kernel computes the gradient of both, over the student's logits.
    """
    tokens, vocab = 256, 20_003
    tensors, _ = problem(torch.float32, (tokens,), 32, 48, vocab)
    x, w = tensors["x"].requires_grad_(), tensors["w"].requires_grad_()
    t, head = ((tensors[k] if same_dtype else tensors[k].bfloat16()) for k in ("t", "tw"))
    peaks = []
    for target in (None, torch.randint(vocab, (tokens,))):
        with so.memory.measure() as m:
            loss = so.linear_kl_div(
                x, w, t, head, target=target, temperature=temperature, memory_budget="1 GiB"
            )
            torch.autograd.grad(loss, (x, w))
        peaks.append(m.peak_bytes)
    tile = tokens * vocab * 4
    more = (peaks[1] - peaks[0]) / tile
    assert more < 0.1 if same_dtype or temperature == 1 else more > 0.9


def test_products_of_knowledge_distillation(monkeypatch):
    """There are four products, including the teacher's. Two separate losses need seven."""
    kind, products = type(of(torch.float32, "cpu", 1)), []
    for name in ("logits", "input_gradient", "weight_gradient"):
        plain = getattr(kind, name)
        monkeypatch.setattr(
            kind,
            name,
            lambda *args, f=plain, n=name, **more: (products.append(n), f(*args, **more)),
        )
    x, w = torch.randn(8, 9, 16, requires_grad=True), torch.randn(300, 16, requires_grad=True)
    teacher = torch.randn(8, 9, 12), torch.randn(300, 12)
    loss = losses.kd(x, w, *teacher, torch.randint(300, (8, 9)), temperature=2.0, shift=True)
    loss.backward()
    assert sorted(products) == ["input_gradient", "logits", "logits", "weight_gradient"]


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compile_checkpoint_and_transforms(reduction):
    torch._dynamo.reset()
    tensors, _ = problem(torch.float64)
    leaves = tuple(tensors[k].requires_grad_() for k in ("x", "w"))
    teacher, target = (tensors["t"], tensors["tw"]), targets()

    def loss(x, w):
        options = {"target": target, "target_weight": 0.4, "reduction": reduction}
        return so.linear_kl_div(x, w, *teacher, **options).sum()

    right = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    checkpointed = torch.utils.checkpoint.checkpoint(loss, *leaves, use_reentrant=False)
    for got in (
        torch.autograd.grad(compiled(*leaves), leaves),
        torch.autograd.grad(checkpointed, leaves),
        torch.func.grad(loss, (0, 1))(*leaves),
    ):
        torch.testing.assert_close(got, right)


@pytest.mark.parametrize(
    "change, kind, message",
    [
        refused(TypeError, "`target` is torch.float32", target=torch.zeros(3, 9)),
        refused(ValueError, "`target` has shape (3, 8)", target=torch.zeros(3, 8).long()),
        refused(TypeError, "`target` is a list", target=[1]),
        refused(ValueError, "`target_weight` is -1.0", target_weight=-1.0),
        refused(TypeError, "`target_weight` is a tensor", target_weight=torch.ones(())),
        refused(ValueError, "`target_weight` is nan", target_weight=float("nan")),
        refused(ValueError, "`target_weight` is 1e+39", target_weight=1e39),
    ],
)
def test_errors(change, kind, message):
    tensors, _ = problem()
    args = {"target": targets(), "target_weight": 1.0}
    with pytest.raises(kind) as raised:
        so.linear_kl_div(
            tensors["x"], tensors["w"], tensors["t"], tensors["tw"], **{**args, **change}
        )
    assert message in str(raised.value) and "Expected" in str(raised.value)


@pytest.mark.kernels
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("with_targets", [False, True])
def test_a_simulation_counts_the_tiles(reduction, with_targets):
    tensors, _ = problem(torch.float32, (256,), 32, 48, 8003)
    leaves = [tensors[k].requires_grad_() for k in ("x", "w")]
    options = {"target": torch.randint(8003, (256,))} if with_targets else {}

    def step():
        loss = so.linear_kl_div(*leaves, tensors["t"], tensors["tw"], reduction=reduction,
                                memory_budget="4 MiB", **options)  # fmt: skip
        torch.autograd.grad(loss.sum(), leaves)

    step()
    with so.memory.measure() as m:
        step()
    estimated = so.memory.estimate(step)
    assert estimated.peak_bytes - estimated.input_bytes == pytest.approx(m.peak_bytes, rel=0.01)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_the_gradient_of_a_certain_target_is_rounded_once(reduction):
    """p - 1 would lose most of its digits if p was rounded before. These logits are exact."""
    tokens, vocab = 40, 300
    target = torch.randperm(vocab)[:tokens]
    w, head = (torch.randint(2, (vocab, 20)).mul_(2).sub_(1).bfloat16() for _ in range(2))
    x, t = w[target], head[target]
    found = []
    for function, dtype in ((so.linear_kl_div, torch.bfloat16), (reference.linear_kl_div, None)):
        leaves = [each.to(dtype or torch.float64) for each in (x, w, t, head)]
        # Every target occurs once, and the bias receives the gradient of the logits.
        bias = torch.zeros(vocab, dtype=leaves[0].dtype).requires_grad_()
        options = {"linear_bias": bias, "target": target, "target_weight": 0.5}
        if dtype:
            options["memory_budget"] = "10 MiB"
        loss = function(*leaves, reduction=reduction, **options)
        others = torch.autograd.grad(loss.sum(), bias)[0].double()
        found.append(others[target])
    # Other tokens add their rounded probabilities to the same class.
    difference = (found[0] - found[1]).abs()
    assert found[1].abs().median() < 1e-2 and difference.median() < 1e-5


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_target_out_of_range(monkeypatch, reduction, temperature):
    """A CPU raises an error. A GPU does not wait for the target, and returns nan."""
    tensors, _ = problem(torch.float32)
    x, w = (tensors[k].requires_grad_() for k in ("x", "w"))
    ids = targets()
    ids[0, 3], ids[1, 2] = 131, 5
    options = {"target": ids, "temperature": temperature, "reduction": reduction}
    with pytest.raises(RuntimeError, match=r"`target` 131 is out of range\. Expected ignore"):
        so.linear_kl_div(x, w, tensors["t"], tensors["tw"], **options)
    if temperature != 1:
        return  # the row kernel of a CPU raises
    for module in (tokens_of_loss, targets_of_divergence):
        monkeypatch.setattr(module, "may_count", lambda _: False)
    loss = so.linear_kl_div(x, w, tensors["t"], tensors["tw"], **options)
    grad = torch.autograd.grad(loss.sum(), x)[0]
    if reduction == "none":
        assert loss[0, 3].isnan() and loss.isnan().sum() == 1
        assert grad[0, 3].isnan().all() and grad[1, 2].isfinite().all()
    else:
        assert loss.isnan()
