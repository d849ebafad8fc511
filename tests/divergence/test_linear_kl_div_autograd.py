"""linear_kl_div in autograd, torch.func, torch.compile and autocast. Its errors and memory."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import storage_ops as so
from storage_ops.divergence import reference

from ..refused import refused
from .test_linear_kl_div import DIVERGENCES, problem, run, smallest_budget, stored

FUNCTIONS = (so.linear_kl_div, reference.linear_kl_div)


def arguments(dtype=torch.float64, **sizes):
    tensors, weight = problem(dtype, **sizes)
    leaves = [tensors[k].requires_grad_() for k in ("x", "w")]
    return leaves, (tensors["t"], tensors["tw"]), weight


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("divergence", [d for d in DIVERGENCES if d != "tvd"])
@pytest.mark.parametrize("topk", [False, True])
def test_gradcheck(divergence, reduction, topk):
    tensors, weight = problem(torch.float64, (2, 3), 5, 4, 11)
    teacher = {"teacher_topk": stored(tensors, 3)} if topk else {
        "teacher_input": tensors["t"], "teacher_weight": tensors["tw"]
    }  # fmt: skip

    def loss(x, w, b):
        return so.linear_kl_div(x, w, linear_bias=b, divergence=divergence, beta=0.3, **teacher,
                                token_weight=weight, reduction=reduction)  # fmt: skip

    assert torch.autograd.gradcheck(loss, [tensors[k].requires_grad_() for k in ("x", "w", "b")])


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_backward_twice(reduction):
    leaves, teacher, _ = arguments()
    loss = so.linear_kl_div(*leaves, *teacher, reduction=reduction).sum()
    first = torch.autograd.grad(loss * 3, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves, retain_graph=True)
    torch.testing.assert_close(first, tuple(3 * g for g in second))
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), second)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_in_a_checkpoint(reduction, reentrant):
    leaves, teacher, _ = arguments()

    def loss(x, w):
        return so.linear_kl_div(x, w, *teacher, reduction=reduction).sum()

    right = torch.autograd.grad(loss(*leaves), leaves)
    checkpoint(loss, *leaves, use_reentrant=reentrant).backward()
    torch.testing.assert_close(tuple(t.grad for t in leaves), right)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_derivatives_are_refused(reduction):
    leaves, teacher, _ = arguments()
    loss = so.linear_kl_div(*leaves, *teacher, reduction=reduction).sum()
    grads = torch.autograd.grad(loss, leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        grads[0].sum().backward()
    with pytest.raises(RuntimeError, match="forward-mode AD is not supported"):
        torch.func.jvp(lambda w: so.linear_kl_div(leaves[0], w, *teacher), (leaves[1],) * 1,
                       (leaves[1],))  # fmt: skip


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_func_grad_and_vmap(reduction):
    tensors, weight = problem(torch.float64)
    results = []
    for function in FUNCTIONS:

        def loss(x, w, t, weight, function=function):
            value = function(x, w, t, tensors["tw"], token_weight=weight, reduction=reduction)
            return value.sum()

        args = (tensors["x"], tensors["w"], tensors["t"], weight)
        per_sample = torch.vmap(torch.func.grad(loss), (0, None, 0, 0))(*args)
        results.append((torch.func.grad(loss, (0, 1))(*args), per_sample,
                        torch.vmap(loss, (0, None, 0, 0))(*args)))  # fmt: skip
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("topk", [False, True])
def test_compile(backend, dynamic, topk):
    torch._dynamo.reset()
    tensors, weight = problem(torch.float32)
    known = stored(tensors, 4)

    def step(function, x, w, t, weight, values, ids):
        teacher = (None, None) if topk else (t, tensors["tw"])
        return function(
            x * 1.5, w, *teacher, token_weight=weight, shift=True, divergence="jsd",
            teacher_topk=(values, ids) if topk else None, memory_budget=100_000,
        ) + function(x, w, t, tensors["tw"], reduction="none").sum()  # fmt: skip

    compiled = torch.compile(lambda *a: step(so.linear_kl_div, *a), fullgraph=True,
                             backend=backend, dynamic=dynamic)  # fmt: skip
    for length in (9, 7):
        leaves = [tensors["x"][:, :length].detach().requires_grad_(), tensors["w"].requires_grad_()]
        args = [t[:, :length] for t in (tensors["t"], weight, *known)]
        ours, right = compiled(*leaves, *args), step(reference.linear_kl_div, *leaves, *args)
        torch.testing.assert_close(ours, right)
        got, expected = (torch.autograd.grad(v, leaves) for v in (ours, right))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tracing", ["real", "symbolic"])
def test_make_fx(tracing):
    tensors, _ = problem()

    def step(x, w, t, tw):
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        loss = so.linear_kl_div(x, w, t, tw)
        return loss, *torch.autograd.grad(loss, (x, w))

    args = [tensors[k] for k in ("x", "w", "t", "tw")]
    graph = make_fx(step, tracing_mode=tracing)(*args)
    assert not any("aten.mm" in str(node.target) for node in graph.graph.nodes)
    torch.testing.assert_close(graph(*args), step(*args))


def test_autocast():
    leaves, teacher, _ = arguments(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = so.linear_kl_div(*leaves, *teacher)
    loss.backward()
    assert loss.dtype == torch.float32 and leaves[1].grad.dtype == torch.float32
    low = [t.detach().bfloat16().requires_grad_() for t in leaves]
    right = so.linear_kl_div(*low, *(t.bfloat16() for t in teacher))
    right.backward()
    assert loss == right
    torch.testing.assert_close(leaves[1].grad, low[1].grad.float())


def test_no_grad():
    leaves, teacher, _ = arguments()
    with torch.no_grad():
        loss = so.linear_kl_div(*leaves, *teacher)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, so.linear_kl_div(*leaves, *teacher).detach())


@pytest.mark.slow
@pytest.mark.parametrize("topk", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("times", [1, 1.5, 4])
def test_the_budget_is_kept(dtype, reduction, topk, times):
    """Allocation events show it, and that nothing as large as the logits is ever allocated."""
    tokens, vocab = 400, 20_003
    tensors, weight = problem(dtype, (tokens,), 32, 48, vocab)
    options = {"token_weight": weight, "reduction": reduction, "divergence": "jsd"}
    options["softcap"] = 3.0 if times == 1.5 else None
    teacher = {"teacher_input": tensors["t"], "teacher_weight": tensors["tw"]}
    if topk:
        options["teacher_topk"], teacher = stored(tensors, 8), {}
    budget = int(smallest_budget(tensors, **options) * times)
    leaves = [tensors[k].requires_grad_() for k in ("x", "w", "b")]

    def step():
        loss = so.linear_kl_div(leaves[0], leaves[1], linear_bias=leaves[2], **teacher, **options,
                                memory_budget=budget)  # fmt: skip
        return loss, torch.autograd.grad(loss.sum(), leaves)

    step()
    with so.memory.measure() as m:
        loss, grads = step()
    returned = loss.nbytes + sum(g.nbytes for g in grads)
    assert m.peak_bytes - returned <= budget
    jumps = [b.nbytes - a.nbytes for a, b in zip(m.timeline, m.timeline[1:], strict=False)]
    assert max(jumps) < tokens * vocab * dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_sums_are_in_fp32_at_any_number_of_chunks(dtype):
    tensors, _ = problem(dtype, (512,), 64, 48, 1003)
    tensors = {k: t * 0.5 for k, t in tensors.items()}
    double = {k: t.double() for k, t in tensors.items()}
    _, right = run(reference.linear_kl_div, double)
    whole = run(reference.linear_kl_div, tensors)[1]
    least = smallest_budget(tensors)
    for budget in (None, least, 2 * least):
        _, grads = run(so.linear_kl_div, tensors, memory_budget=budget)
        for ours, plain, wanted in zip(grads, whole, right, strict=True):
            ours, plain = ((g.double() - wanted).norm() / wanted.norm() for g in (ours, plain))
            assert ours <= 1.1 * plain + 1e-3


GOOD = {"divergence": "jsd", "temperature": 2.0}


@pytest.mark.parametrize(
    "change, kind, message",
    [
        refused(ValueError, "`divergence` is 'kl'", divergence="kl"),
        refused(ValueError, "`beta` is 1.5", beta=1.5),
        refused(TypeError, "`beta` is", beta=torch.ones(())),
        refused(ValueError, "`temperature` is 0.0", temperature=0.0),
        refused(ValueError, "`temperature` is 1e-46", temperature=1e-46),
        refused(ValueError, "`temperature` is 1e+39", temperature=1e39),
        refused(ValueError, "`max_valid` is 9223", max_valid=2**63),
        refused(ValueError, "`teacher_softcap` is 100", teacher_softcap=10**400),
        refused(ValueError, "`reduction` is 'batchmean'", reduction="batchmean"),
        refused(TypeError, "`shift` is 1", shift=1),
        refused(TypeError, "`scale_by_temperature` is 'no'", scale_by_temperature="no"),
        refused(ValueError, "`softcap` is 0", softcap=0),
        refused(TypeError, "`teacher_softcap` is '1'", teacher_softcap="1"),
        refused(TypeError, "`process_group` is 3", process_group=3),
        refused(ValueError, "`teacher_tail` is 'drop'", teacher_tail="drop"),
        refused(TypeError, "`teacher_input` is None", teacher_input=None),
        refused(TypeError, "`teacher_weight` is None", teacher_weight=None),
        refused(ValueError, "`teacher_input` has shape (2, 16)", teacher_input=torch.randn(2, 16)),
        refused(ValueError, "`teacher_weight` has shape", teacher_weight=torch.randn(130, 16)),
        refused(TypeError, "`teacher_weight` is", teacher_weight=torch.randn(131, 16).double()),
        refused(ValueError, "`teacher_bias` has shape", teacher_bias=torch.randn(3)),
        refused(ValueError, "`linear_weight` has shape", linear_weight=torch.randn(131, 25)),
        refused(ValueError, "`linear_bias` has shape (2,)", linear_bias=torch.randn(2)),
        refused(ValueError, "`token_weight` has shape (2,)", token_weight=torch.ones(2)),
        refused(ValueError, "requires grad", token_weight=torch.ones(3, 9, requires_grad=True)),
        refused(TypeError, "`teacher_topk` is a Tensor", teacher_topk=torch.ones(3)),
        refused(
            ValueError,
            "`teacher_topk` is given together",
            teacher_topk=(torch.ones(3, 9, 2), torch.ones(3, 9, 2).long()),
        ),
        refused(ValueError, "`linear_weight` has shape", valid_classes=200),
        refused(ValueError, "`valid_classes` is 0", valid_classes=0),
        refused(ValueError, "`max_valid` is -2", max_valid=-2),
        refused(ValueError, "`memory_budget` is 'much'", memory_budget="much"),
        refused(ValueError, "`memory_budget` is 10 bytes", memory_budget=10),
        refused(TypeError, "`input` is torch.int64", input=torch.ones(3, 9, 24).long()),
        refused(TypeError, "`input` is a list", input=[1]),
    ],
)
def test_errors(change, kind, message):
    tensors, weight = problem()
    args = {
        "input": tensors["x"], "linear_weight": tensors["w"], "teacher_input": tensors["t"],
        "teacher_weight": tensors["tw"], "token_weight": weight, **GOOD,
    }  # fmt: skip
    so.linear_kl_div(**args)
    with pytest.raises(kind) as raised:
        so.linear_kl_div(**{**args, **change})
    assert message in str(raised.value) and "Expected" in str(raised.value)


def test_errors_of_a_stored_teacher():
    tensors, _ = problem()
    values, ids = stored(tensors, 4)
    for wrong, kind, message in (
        (ids.float(), TypeError, "int64, int32 or uint8 class indices"),
        (ids[..., :3], ValueError, "`teacher_topk` has shapes"),
        (ids + 200, RuntimeError, "classes from 0 to 130"),
        (ids * 0, RuntimeError, "the id 0 twice for a token"),
    ):
        with pytest.raises(kind, match=message):
            so.linear_kl_div(tensors["x"], tensors["w"], teacher_topk=(values, wrong))
