import functools
import itertools

import pytest
import torch

import storage_ops as so
from storage_ops.divergence import reference
from storage_ops.loss.engine import tokens as loss_tokens

DIVERGENCES = ["forward", "reverse", "jsd", "tvd"]
# Relative error against float64. Some classes have equal 16-bit logits in both heads, for which the
# gradient of tvd may have another sign.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 1e-2}
FLIPS = 0.5


def problem(dtype=torch.float32, tokens=(3, 9), hidden=24, teacher=16, vocab=131):
    """Return the tensors of both heads, and token weights, some of which are 0."""
    sizes = {
        "x": (*tokens, hidden), "w": (vocab, hidden), "b": (vocab,),
        "t": (*tokens, teacher), "tw": (vocab, teacher), "tb": (vocab,),
    }  # fmt: skip
    tensors = {k: (torch.randn(n) * (0.3 if "w" in k else 1)).to(dtype) for k, n in sizes.items()}
    weight = torch.rand(tokens) + 0.1
    weight[torch.rand(tokens) < 0.3] = 0
    weight[..., -1:] = 1
    return tensors, weight


def stored(tensors, count, temperature=1.0):
    """Return the teacher's most probable classes."""
    z = tensors["t"].double() @ tensors["tw"].double().T + tensors["tb"].double()
    values, ids = torch.log_softmax(z / temperature, -1).topk(count)
    wide = torch.float64 if tensors["t"].dtype == torch.float64 else torch.float32
    return values.to(wide), ids


def run(function, tensors, upstream=None, teacher_topk=None, **options):
    """Return the loss and gradients of the student."""
    leaves = [tensors[k].detach().requires_grad_() for k in ("x", "w", "b")]  # with their strides
    teacher = (tensors["t"], tensors["tw"])
    if teacher_topk is None:
        options["teacher_bias"] = tensors["tb"]
    else:
        teacher, options["teacher_topk"] = (None, None), teacher_topk
    loss = function(leaves[0], leaves[1], *teacher, linear_bias=leaves[2], **options)
    upstream = torch.ones_like(loss) if upstream is None else upstream.to(loss.dtype)
    loss.backward(upstream)
    return loss.detach(), [t.grad for t in leaves]


def exact(tensors, upstream=None, teacher_topk=None, token_weight=None, **options):
    if teacher_topk is not None:
        teacher_topk = (teacher_topk[0].double(), teacher_topk[1])
    double = {k: t.double() for k, t in tensors.items()}
    weight = None if token_weight is None else token_weight.double()
    return run(reference.linear_kl_div, double, upstream, teacher_topk, token_weight=weight,
               **options)  # fmt: skip


def away_from_the_kink(tensors, weight, margin, likely, shift, temperature, teacher_topk=None,
                       teacher_tail="bucket", softcap=None, teacher_softcap=None, **_):  # fmt: skip
    """Return token weights, 0 where a class is about equally likely in both heads.

    The sign in the gradient of tvd has a ramp there. A class less than `likely` has little effect.
    """

    def head(x, w, bias, cap):
        z = tensors[x].double() @ tensors[w].double().T + tensors[bias].double()
        z = z if cap is None else cap * torch.tanh(z / cap)
        return (z / temperature).softmax(-1)

    q = head("x", "w", "b", softcap)
    if teacher_topk is None:
        p = head("t", "tw", "tb", teacher_softcap)
    else:
        p, q = teacher_topk[0].double().exp(), q.gather(-1, teacher_topk[1])
        if teacher_tail == "renormalize":
            p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
        else:
            p, q = (torch.cat([t, 1 - t.sum(-1, keepdim=True)], -1) for t in (p, q))
    apart = ((q < likely) | ((p / q).log().abs() > margin)).all(-1)
    return weight.where(apart.roll(1, -1) if shift else apart, 0)


def error(ours, expected):
    return ((ours.double() - expected).norm() / expected.norm().clamp_min(1e-300)).item()


def smallest_budget(tensors, **options):
    with pytest.raises(ValueError, match="Expected at least") as complaint:
        run(so.linear_kl_div, tensors, memory_budget=0, **options)
    return int(str(complaint.value).split("at least ")[1].split()[0])


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["default", "smallest"])
@pytest.mark.parametrize("teacher", ["hidden", "topk", "topk renormalize"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_loss_and_gradients_against_float64(dtype, divergence, reduction, teacher, budget):
    tensors, weight = problem(dtype)
    flips = divergence == "tvd" and dtype.itemsize == 2 and teacher == "hidden"
    caps = {"softcap": 2.5} if teacher != "hidden" else {"softcap": 2.5, "teacher_softcap": 1.5}
    for shift, temperature, more in ((False, 1.0, {}), (True, 1.7, {}), (True, 0.8, caps)):
        options = {
            "divergence": divergence, "reduction": reduction, "shift": shift, "beta": 0.3,
            "temperature": temperature, "token_weight": weight, **more,
        }  # fmt: skip
        if teacher != "hidden":
            options["teacher_topk"] = stored(tensors, 5, temperature)
            options["teacher_tail"] = "renormalize" if "re" in teacher else "bucket"
        if divergence == "tvd":
            margin, likely = (0.05 if dtype.itemsize == 2 else 2e-4), (0.03 if flips else 0)
            options["token_weight"] = away_from_the_kink(tensors, weight, margin, likely, **options)
        least = smallest_budget(tensors, **options)
        memory_budget = least if budget == "smallest" else None
        shape = (3, 9 - shift) if reduction == "none" else ()
        upstream = (torch.rand(shape) + 0.5).double()
        loss, grads = run(
            so.linear_kl_div, tensors, upstream, memory_budget=memory_budget, **options
        )
        expected, right = exact(tensors, upstream, **options)
        assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert error(loss, expected) < TOLERANCE[dtype]
        for ours, wanted in zip(grads, right, strict=True):
            assert ours.dtype == dtype
            assert error(ours, wanted) < (FLIPS if flips else TOLERANCE[dtype])


def test_the_definitions_from_their_formulas():
    """Compare with the formulas, written independently of the reference."""
    tensors, _ = problem(torch.float64)
    p = ((tensors["t"] @ tensors["tw"].T + tensors["tb"]) / 2).softmax(-1).flatten(0, 1)
    q = ((tensors["x"] @ tensors["w"].T + tensors["b"]) / 2).softmax(-1).flatten(0, 1)

    def kl(one, other):
        return torch.distributions.kl_divergence(
            torch.distributions.Categorical(one), torch.distributions.Categorical(other)
        )

    m = 0.2 * p + 0.8 * q
    right = {
        "forward": kl(p, q), "reverse": kl(q, p), "jsd": 0.2 * kl(p, m) + 0.8 * kl(q, m),
        "tvd": (p - q).abs().sum(-1) / 2,
    }  # fmt: skip
    for divergence, per_token in right.items():
        for function in (so.linear_kl_div, reference.linear_kl_div):
            for reduction in ("mean", "sum", "none"):
                loss, _ = run(function, tensors, divergence=divergence, beta=0.2, temperature=2.0,
                              reduction=reduction)  # fmt: skip
                wanted = (
                    per_token.view(3, 9) if reduction == "none" else getattr(per_token, reduction)()
                )
                torch.testing.assert_close(loss, wanted)


def test_the_ends_of_beta():
    tensors, _ = problem(torch.float64)
    value = functools.partial(run, so.linear_kl_div, tensors)
    assert value(divergence="jsd", beta=0)[0] == value(divergence="forward")[0]
    assert value(divergence="jsd", beta=1)[0] == value(divergence="reverse")[0]
    small = 1e-7
    for beta, name in ((small, "forward"), (1 - small, "reverse")):
        (loss, grads), (wanted, right) = value(divergence="jsd", beta=beta), value(divergence=name)
        assert error(loss / small, wanted) < 1e-2 and error(grads[0] / small, right[0]) < 1e-2


def test_temperature_squared_is_an_option():
    tensors, _ = problem(torch.float64)
    plain, grads = run(so.linear_kl_div, tensors, temperature=3.0)
    scaled, more = run(so.linear_kl_div, tensors, temperature=3.0, scale_by_temperature=True)
    torch.testing.assert_close(scaled, plain * 9)
    torch.testing.assert_close(more, [g * 9 for g in grads])


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_stored_teacher_of_all_classes_is_the_teacher(divergence):
    tensors, _ = problem(vocab=50)
    expected, right = run(so.linear_kl_div, tensors, divergence=divergence)
    for tail in ("bucket", "renormalize"):
        loss, grads = run(so.linear_kl_div, tensors, teacher_topk=stored(tensors, 50),
                          teacher_tail=tail, divergence=divergence)  # fmt: skip
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(grads, right, rtol=1e-4, atol=1e-5)


def test_classes_outside_a_stored_teacher():
    tensors, _ = problem(torch.float64)
    whole = run(so.linear_kl_div, tensors, reduction="none")[0]
    before = torch.zeros_like(whole)
    for count in (1, 5, 30, 131):  # with fewer classes the heads differ less
        part = run(
            so.linear_kl_div, tensors, reduction="none", teacher_topk=stored(tensors, count)
        )[0]
        assert ((part >= before - 1e-12) & (part <= whole + 1e-12)).all()
        before = part
    torch.testing.assert_close(before, whole)
    # The stored classes have all the probability of the teacher, so all others have 0.
    values, ids = stored(tensors, 5)
    values = values.log_softmax(-1)
    log_q = torch.log_softmax(tensors["x"] @ tensors["w"].T + tensors["b"], -1).gather(-1, ids)
    part = run(so.linear_kl_div, tensors, reduction="none", teacher_topk=(values, ids))[0]
    torch.testing.assert_close(part, (values.exp() * (values - log_q)).sum(-1))


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_classes_without_probability(divergence):
    tensors, _ = problem(torch.float64, tokens=(4,))
    tensors["tb"][3] = tensors["b"][3] = -torch.inf  # 0 log 0 is 0
    loss, grads = run(so.linear_kl_div, tensors, divergence=divergence, beta=0.4)
    without = {k: torch.cat([t[:3], t[4:]]) if k in ("w", "b", "tw", "tb") else t
               for k, t in tensors.items()}  # fmt: skip
    expected, right = exact(without, divergence=divergence, beta=0.4)
    torch.testing.assert_close(loss, expected)
    grads[1:] = [torch.cat([g[:3], g[4:]]) for g in grads[1:]]
    torch.testing.assert_close(grads, right)
    tensors["tb"][5] = -torch.inf
    loss = run(so.linear_kl_div, tensors, divergence=divergence, beta=0.4)[0]
    assert loss.isinf() if divergence == "reverse" else loss.isfinite()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_ignored_tokens_are_not_read(reduction):
    tensors, weight = problem(torch.float64)
    expected, right = run(so.linear_kl_div, tensors, token_weight=weight, reduction=reduction)
    for name in ("x", "t"):
        tensors[name][weight == 0] = torch.nan
    loss, grads = run(so.linear_kl_div, tensors, token_weight=weight, reduction=reduction)
    torch.testing.assert_close((loss, grads), (expected, right))
    mask = weight > 0
    loss, grads = run(so.linear_kl_div, tensors, token_weight=mask, reduction=reduction)
    expected, right = run(
        so.linear_kl_div, tensors, token_weight=mask.double(), reduction=reduction
    )
    torch.testing.assert_close((loss, grads), (expected, right))


def test_nothing_to_do():
    tensors, weight = problem()
    loss, grads = run(so.linear_kl_div, tensors, token_weight=torch.zeros_like(weight))
    assert loss.isnan() and all(not g.any() for g in grads)
    empty, _ = problem(tokens=(0,))
    loss, grads = run(so.linear_kl_div, empty, reduction="sum")
    assert loss == 0 and all(not g.any() for g in grads)


def test_padding_of_the_vocabulary():
    tensors, weight = problem(torch.float64)
    tensors["tw"], tensors["tb"] = (torch.cat([tensors[k], tensors[k][:9]]) for k in ("tw", "tb"))
    for budget, reduction in itertools.product((None, 60_000), ("mean", "none")):
        options = {"valid_classes": 100, "token_weight": weight, "reduction": reduction}
        loss, grads = run(so.linear_kl_div, tensors, memory_budget=budget, **options)
        expected, right = exact(tensors, **options)
        torch.testing.assert_close((loss, grads), (expected, right))
        assert not grads[1][100:].any() and not grads[2][100:].any()


def test_a_teacher_of_another_dtype():
    tensors, _ = problem()
    for name in ("t", "tw", "tb"):
        tensors[name] = tensors[name].bfloat16()
    loss, grads = run(so.linear_kl_div, tensors)
    expected, right = exact(tensors)
    assert error(loss, expected) < 1e-2
    assert all(error(a, b) < 1e-2 for a, b in zip(grads, right, strict=True))


@pytest.mark.parametrize("targets", [False, True])
def test_strides_that_kernels_refuse(targets):
    tensors, _ = problem(torch.float64)
    options = {"target": torch.randint(131, (3, 9))} if targets else {}
    expected = run(so.linear_kl_div, tensors, **options)
    for name, tensor in tensors.items():
        tensors[name] = torch.stack((tensor, tensor * 0), -1)[..., 0]
    torch.testing.assert_close(run(so.linear_kl_div, tensors, **options), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_tvd_of_heads_that_are_both_sure(dtype):
    """Logits that two passes round in other ways must not give a class both signs."""
    tensors, _ = problem(dtype, hidden=64, teacher=64)
    tensors["w"] = tensors["tw"] = torch.randn(131, 64).to(dtype)
    tensors["x"] = tensors["w"][torch.randint(131, (3, 9))]
    tensors["t"] = 1.1 * tensors["x"]
    budget = smallest_budget(tensors, divergence="tvd", reduction="none")
    for factor in (1, 1.5, 3):
        _, grads = run(so.linear_kl_div, tensors, torch.ones(3, 9), divergence="tvd",
                       reduction="none", memory_budget=int(budget * factor))  # fmt: skip
        assert grads[0].abs().max() < 0.7  # with both signs more than 1


@pytest.mark.parametrize("frozen", [{"x"}, {"w", "b"}, {"b"}, {"x", "w", "b"}])
def test_frozen_arguments(frozen):
    tensors, _ = problem(torch.float64)
    _, right = run(so.linear_kl_div, tensors)
    leaves = {k: tensors[k].clone().requires_grad_(k not in frozen) for k in ("x", "w", "b")}
    teacher = [tensors[k].clone().requires_grad_() for k in ("t", "tw", "tb")]
    loss = so.linear_kl_div(leaves["x"], leaves["w"], *teacher[:2], linear_bias=leaves["b"],
                            teacher_bias=teacher[2])  # fmt: skip
    assert loss.requires_grad == (len(frozen) < 3)
    if loss.requires_grad:
        loss.backward()
    for (name, leaf), wanted in zip(leaves.items(), right, strict=True):
        assert leaf.grad is None if name in frozen else torch.allclose(leaf.grad, wanted)
    assert all(t.grad is None for t in teacher)


@pytest.mark.parametrize("teacher", ["hidden", "topk"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("shift", [False, True])
def test_ignored_tokens_on_a_gpu_have_no_effect(monkeypatch, shift, reduction, teacher):
    """A GPU computes all tokens, or the first max_valid."""
    tensors, weight = problem(torch.float64)
    options = {"token_weight": weight, "shift": shift, "reduction": reduction}
    if teacher == "topk":
        options["teacher_topk"] = stored(tensors, 4)
    expected = run(so.linear_kl_div, tensors, **options)
    count = int((weight[:, 1:] if shift else weight).count_nonzero())
    with pytest.raises(RuntimeError, match=f"`max_valid` is {count - 1}"):
        run(so.linear_kl_div, tensors, max_valid=count - 1, **options)
    monkeypatch.setattr(loss_tokens, "may_count", lambda target: False)
    for max_valid in (None, "sync", count, count + 2):
        torch.testing.assert_close(
            run(so.linear_kl_div, tensors, max_valid=max_valid, **options), expected
        )
    loss, _ = run(so.linear_kl_div, tensors, max_valid=count - 1, **options)
    assert loss.isnan().any()
