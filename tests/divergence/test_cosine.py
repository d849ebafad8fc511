"""The cosine distance of two heads' logits."""

import pytest
import torch

import storage_ops as so
from storage_ops import losses
from storage_ops.loss import reference as loss_reference

from .test_linear_kl_div import TOLERANCE, error, problem, run, smallest_budget, stored


def exact(tensors, upstream, weight=None, cap=0.0, classes=None, shift=False):
    """Return loss and gradients in float64, from dot products and norms of all logits."""
    x, w, b, t, tw, tb = (tensors[k].double().clone() for k in ("x", "w", "b", "t", "tw", "tb"))
    leaves = [v.requires_grad_() for v in (x, w, b)]
    z, c = (x @ w.T + b)[..., :classes], (t @ tw.T + tb)[..., :classes]
    z, c = (cap * torch.tanh(v / cap) if cap else v for v in (z, c))
    distance = 1 - (z * c).sum(-1) / (z.square().sum(-1).sqrt() * c.square().sum(-1).sqrt())
    weight = torch.ones(distance.shape) if weight is None else weight.double()
    if shift:
        distance, weight = distance[..., :-1], weight[..., 1:]
    loss = distance * weight if upstream.dim() else (distance * weight).sum() / weight.sum()
    loss.backward(upstream)
    return loss.detach(), [v.grad for v in leaves]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_loss_and_gradients_against_float64(dtype):
    tensors, weight = problem(dtype)
    for reduction, exact_options, more in (
        ("mean", {}, {}),
        ("none", {"weight": weight, "shift": True}, {"token_weight": weight, "shift": True}),
        ("mean", {"cap": 2.5}, {"softcap": 2.5, "teacher_softcap": 2.5}),
        ("none", {"classes": 100}, {"valid_classes": 100}),
    ):
        options = {"divergence": "cosine", "reduction": reduction, **more}
        shape = (3, 9 - exact_options.get("shift", 0)) if reduction == "none" else ()
        upstream = torch.rand(shape).double() + 0.5
        expected, right = exact(tensors, upstream, **exact_options)
        for budget in (None, smallest_budget(tensors, **options)):
            loss, grads = run(so.linear_kl_div, tensors, upstream, memory_budget=budget, **options)
            assert error(loss, expected) < TOLERANCE[dtype]
            for ours, wanted in zip(grads, right, strict=True):
                assert ours.dtype == dtype and error(ours, wanted) < TOLERANCE[dtype]


def test_equal_opposite_and_zero_heads():
    tensors, _ = problem(torch.float64)
    same = {**tensors, "t": tensors["x"], "tw": 3 * tensors["w"], "tb": 3 * tensors["b"]}
    for factor, distance in ((1, 0), (-2, 2), (0, 1)):
        inputs = {**same, "tw": factor * same["tw"], "tb": factor * same["tb"]}
        loss, grads = run(so.linear_kl_div, inputs, divergence="cosine")
        torch.testing.assert_close(loss, torch.tensor(distance).double(), atol=1e-12, rtol=0)
        assert all(g.abs().max() < 1e-12 for g in grads)


def test_knowledge_distillation():
    tensors, _ = problem(torch.float64)
    target = torch.randint(131, (3, 9))
    target[0, :4] = -100
    mask = (target != -100).double()
    cosine, right = exact(tensors, torch.ones(()).double(), mask)
    leaves = [tensors[k].clone().requires_grad_() for k in ("x", "w", "b")]
    x, w, b = leaves
    nll = loss_reference.linear_cross_entropy(x, w, target, linear_bias=b)
    wanted = [0.3 * g + 0.7 * h for g, h in zip(right, torch.autograd.grad(nll, leaves),
                                                strict=True)]  # fmt: skip

    loss = losses.kd(x, w, tensors["t"], tensors["tw"], target, alpha=0.3, divergence="cosine",
                     linear_bias=b, teacher_bias=tensors["tb"])  # fmt: skip
    torch.testing.assert_close(loss, 0.3 * cosine + 0.7 * nll)
    torch.testing.assert_close(list(torch.autograd.grad(loss, leaves)), wanted)


def test_no_logits_are_in_memory():
    tensors, _ = problem(torch.float32, (400,), 32, 48, 20_003)
    options = {"divergence": "cosine", "target": torch.randint(20_003, (400,))}
    budget = 8 * smallest_budget(tensors, **options)
    run(so.linear_kl_div, tensors, memory_budget=budget, **options)
    with so.memory.measure() as m:
        _, grads = run(so.linear_kl_div, tensors, memory_budget=budget, **options)
    leaves = sum(tensors[k].nbytes for k in ("x", "w", "b"))  # `run` copies these
    assert m.peak_bytes - leaves - sum(g.nbytes for g in grads) <= budget
    assert budget < 400 * 20_003 * 4 / 2


def test_options_that_cosine_refuses():
    tensors, _ = problem()
    for options, message in (
        ({"temperature": 2.0}, "`temperature` is 2.0. Expected 1 with divergence='cosine'"),
        (
            {"teacher_topk": stored(tensors, 5)},
            "`divergence` is 'cosine'. Expected another divergence",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            run(so.linear_kl_div, tensors, divergence="cosine", **options)
