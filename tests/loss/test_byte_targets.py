"""Class indices of uint8 give the results of int64, as in `F.cross_entropy`."""

import pytest
import torch
from torch.nn import functional as F

import storage_ops as so
from storage_ops import losses

N, D, V = 12, 6, 9


@pytest.fixture
def problem():
    x = torch.randn(N, D, dtype=torch.float64, requires_grad=True)
    w = torch.randn(V, D, dtype=torch.float64, requires_grad=True)
    return x, w, torch.randint(V, (N,), dtype=torch.uint8)


def same(got, expected, *leaves):
    torch.testing.assert_close(got, expected)
    grads = (torch.autograd.grad(loss, leaves, retain_graph=True) for loss in (got, expected))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("ignore_index", [-100, 3, 255])
def test_against_cross_entropy(problem, ignore_index):
    x, w, target = problem
    if ignore_index == 255:
        target[::3] = 255
    options = {"ignore_index": ignore_index, "label_smoothing": 0.1}
    wanted = F.cross_entropy(x @ w.T, target, **options)
    same(so.linear_cross_entropy(x, w, target, **options), wanted, x, w)
    compiled = torch.compile(so.linear_cross_entropy, fullgraph=True, backend="aot_eager")
    same(compiled(x, w, target, **options), wanted, x, w)


def test_every_function_of_class_indices(problem):
    x, w, target = problem
    teacher, head = torch.randn(N, D).double(), torch.randn(V, D).double()
    pairs, rows = x.view(2, N // 2, D), target.view(2, N // 2)
    topk = torch.log_softmax(teacher @ head.T, -1).topk(3)
    heads = torch.randn(V, 2, D, dtype=torch.float64, requires_grad=True)

    def functions(index):
        """Yield the result of every function of class indices, with indices of one dtype."""
        one, two = index(target), index(rows)
        yield so.linear_cross_entropy(
            x, w, one, returns=("selected",), selected_ids=index(target.view(N, 1))
        ).sum()
        yield so.linear_cross_entropy(x, heads, index(torch.stack([target] * 2, 1)))
        yield so.linear_kl_div(x, w, teacher, head, target=one)
        yield so.linear_kl_div(x, w, teacher_topk=(topk.values, index(topk.indices)))
        yield losses.kd(x, w, teacher, head, one)
        yield losses.sft(x, w, one)
        yield losses.sft(x, w, one, cu_seqlens=torch.tensor([0, 5, 12]), shift=True)
        yield losses.dpo(pairs, w, two, shift=True)
        yield losses.orpo(pairs, w, two, nll_target=two.flip(1))
        yield losses.grpo(pairs, w, two, torch.randn(2).sign().abs())

    for got, expected in zip(functions(torch.Tensor.byte), functions(torch.Tensor.long),
                             strict=True):  # fmt: skip
        same(got, expected, x)
