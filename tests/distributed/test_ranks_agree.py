"""Ranks with slices of different sizes, with padding, and with different calls."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import storage_ops as so
from storage_ops.loss.engine import ranks

from ..ranks import run_on_ranks

WORLD, VOCAB, HIDDEN = 3, 66, 8
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed")


class Plan:
    def __init__(self, key):
        self.key = key


PLANS = ["", "token-chunked 7 66", "token-chunked 16 7", "token-chunked 40 5", "vocab-sliced 7 9"]


def arguments(dtype=torch.float64, tokens=40):
    x, w = torch.randn(tokens, HIDDEN).to(dtype), torch.randn(VOCAB, HIDDEN).to(dtype)
    target = torch.randint(VOCAB, (tokens,))
    return x, w, target


def slices_of(sizes, rank):
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def compare(rank, sizes, valid, options, plan, tokens):
    """Compare a rank's part of loss and gradients with the whole without padding."""
    x, w, target = arguments(tokens=tokens)
    last = valid or VOCAB
    target.remainder_(last)[3] = -100
    b, c, mine = torch.randn(VOCAB).double(), torch.rand(VOCAB).double(), slices_of(sizes, rank)
    slices = [x.clone(), w[mine].clone(), b[mine].clone()]
    whole = [x.clone(), w.clone(), b.clone()]
    for t in (*slices, *whole):
        t.requires_grad_()
    rest = {"linear_bias": slices[2], "weight": c[mine], "valid_classes": valid,
            "process_group": dist.group.WORLD, **options}  # fmt: skip
    if plan:
        rest["plan"] = Plan(plan)
    ours = so.linear_cross_entropy(slices[0], slices[1], target, **rest)
    logits = F.linear(*whole)[:, :last]
    right = F.cross_entropy(logits, target, weight=c[:last], **options)
    torch.testing.assert_close(ours, right)
    ours.sum().backward()
    right.sum().backward()
    torch.testing.assert_close(slices[0].grad, whole[0].grad)
    for a, e in zip(slices[1:], whole[1:], strict=True):
        torch.testing.assert_close(a.grad, e.grad[mine])


def unequal_slices(rank):
    for sizes, valid in (([30, 20, 16], None), ([22, 22, 22], 60), ([30, 20, 16], 51),
                         ([1, 2, 63], None)):  # fmt: skip
        for options in ({}, {"label_smoothing": 0.2, "reduction": "sum"}, {"reduction": "none"}):
            for plan in PLANS:
                for tokens in (40, 6):
                    compare(rank, sizes, valid, options, plan, tokens)


def sliced_as_by_dtensor(rank):
    """507 classes on four ranks: 127, 127, 127 and 126."""
    globals()["VOCAB"] = 507
    sizes = [len(part) for part in torch.arange(VOCAB).chunk(4)]
    for options in ({}, {"reduction": "none", "label_smoothing": 0.1}):
        for plan in ("", "token-chunked 16 70"):
            compare(rank, sizes, None, options, plan, 40)


def rounded(rank):
    """16-bit sums in the memory of the gradient of borrowed classes."""
    sizes, (x, w, target) = [30, 20, 16], arguments(torch.bfloat16, 4)
    mine = slices_of(sizes, rank)
    slices, whole = ([x.clone(), v.clone()] for v in (w[mine], w.double()))
    whole[0] = whole[0].double()
    for t in (*slices, *whole):
        t.requires_grad_()
    group = dist.group.WORLD
    so.linear_cross_entropy(
        *slices, target, process_group=group, plan=Plan("token-chunked 4 64 0 1 1")
    ).backward()
    F.cross_entropy(F.linear(*whole), target).backward()
    torch.testing.assert_close(slices[0].grad.double(), whole[0].grad, rtol=0.05, atol=0.02)
    torch.testing.assert_close(slices[1].grad.double(), whole[1].grad[mine], rtol=0.05, atol=0.02)


def partial(rank):
    x, w, target = arguments()
    mine, grads = slices_of([22] * 3, rank), []
    for how in ("replicate", "partial"):
        for reduction in ("mean", "none"):
            leaf = x.clone().requires_grad_()
            so.linear_cross_entropy(
                leaf, w[mine], target, process_group=dist.group.WORLD, input_grad=how,
                reduction=reduction,
            ).sum().backward()  # fmt: skip
            if how == "partial":
                dist.all_reduce(leaf.grad)
            grads.append(leaf.grad)
    torch.testing.assert_close(grads[0], grads[2])
    torch.testing.assert_close(grads[1], grads[3])


def calls_that_differ(rank):
    """Each call raises on all ranks, and the next call is correct."""
    group = dist.group.WORLD
    x, w, target = arguments()
    w, other = w[slices_of([22] * 3, rank)], torch.randint(VOCAB, (40,))
    alone = rank == 1
    for message, changed, options in [
        ("The targets", {"target": other + 0 * rank if not alone else other.flip(0)}, {}),
        ("The number of tokens", {"x": x[: 40 - alone], "target": target[: 40 - alone]}, {}),
        ("The hidden size", {"x": x[:, : 8 - alone], "w": w[:, : 8 - alone]}, {}),
        ("The token weights", {}, {"token_weight": torch.ones(40).index_fill(0, torch.tensor(3),
                                                                            0.5 + 0.1 * rank)}),
        ("options", {}, {"label_smoothing": 0.1 * alone}),
        ("options", {}, {"reduction": "sum" if alone else "mean"}),
        ("options", {"x": x.clone().requires_grad_(alone)}, {}),
        ("options", {"x": x.float(), "w": w.float()} if alone else {}, {}),
        ("options", {}, {"valid_classes": 60 + alone}),
        ("The divisor", {}, {"reduction": "sum", "divisor": torch.tensor(7.0 + alone)}),
    ]:  # fmt: skip
        args = {"x": x, "w": w, "target": target, **changed}
        with pytest.raises(ValueError, match=f"{message}.* on ranks 0 and 1 .* differ"):
            so.linear_cross_entropy(*args.values(), process_group=group, **options)
        so.linear_cross_entropy(x, w, target, process_group=group)
    # The other ranks get an error that one rank raises by itself.
    for changed, error in (({"w": w[:0]}, ValueError), ({"target": target.short()}, TypeError)):
        args = {"x": x, "w": w, "target": target, **(changed if alone else {})}
        kind, message = (error, "Expected") if alone else (ValueError, "Rank 1 .* has refused")
        with pytest.raises(kind, match=message):
            so.linear_cross_entropy(*args.values(), process_group=group)
        so.linear_cross_entropy(x, w, target, process_group=group)
    with pytest.raises(ValueError, match=r"`valid_classes` is 44\. Expected 45 to 66"):
        so.linear_cross_entropy(x, w, target, process_group=group, valid_classes=44)
    # Every rank raises for a target that is no class, on whichever rank its class would be.
    with pytest.raises(RuntimeError, match="`target` 66 is out of range"):
        so.linear_cross_entropy(x, w, target.index_fill(0, torch.tensor(2), 66),
                                process_group=group)  # fmt: skip
    so.linear_cross_entropy(x, w, target, process_group=group)


def asked_in_the_backward(rank):
    """Only the forward compares the ranks' calls."""
    x, w, target = arguments()
    w = w[slices_of([22] * 3, rank)].requires_grad_()
    with mock.patch.object(ranks, "_compared", wraps=ranks._compared) as compared:
        loss = so.linear_cross_entropy(
            x, w, target, process_group=dist.group.WORLD, reduction="none"
        )
        assert compared.call_count == 1
        loss.sum().backward()
        assert compared.call_count == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "work", [unequal_slices, rounded, partial, calls_that_differ, asked_in_the_backward]
)
def test_ranks(work):
    run_on_ranks(work, WORLD)


@pytest.mark.in_turn
def test_slices_that_do_not_divide_the_vocabulary():
    run_on_ranks(sliced_as_by_dtensor, 4)
