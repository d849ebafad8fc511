"""Log-probabilities of classes on several ranks, and of the most probable of all."""

import pytest
import torch
import torch.distributed as dist

import storage_ops as so
from storage_ops.loss import reference

from ..loss.test_loss_options import Forced, outputs
from ..ranks import run_on_ranks

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed")
VOCAB, HIDDEN = 66, 4
OPTIONS = [
    {},
    {"softcap": 3.0, "logit_scale": 0.7, "shift": 2},
    {"label_smoothing": 0.1, "reduction": "none"},
    {"valid_classes": 61},
]


def compare(rank, sizes, options, key):
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    # With small integers, products are exact and many logits on several ranks are equal.
    x = torch.randint(-2, 3, (2, 9, HIDDEN)).double()
    w, b = torch.randint(-2, 3, (VOCAB, HIDDEN)).double(), torch.zeros(VOCAB).double()
    last = options.get("valid_classes", VOCAB)
    target, ids = torch.randint(last, (2, 9)), torch.randint(last, (2, 9, 6))
    target[0, 3], ids[1, 5, 0], ids[..., 1] = -100, -100, ids[..., 2]
    slices, whole = ([x.clone(), w[s].clone(), b[s].clone()] for s in (mine, slice(None)))
    for t in (*slices, *whole):
        t.requires_grad_()
    rest = {"returns": ("loss", "selected", "topk"), "selected_ids": ids, "top_k": 25, **options}
    ours = outputs(
        so.linear_cross_entropy(
            *slices[:2], target, linear_bias=slices[2], process_group=dist.group.WORLD,
            plan=Forced(key) if key else None, **rest,
        )
    )  # fmt: skip
    right = outputs(
        reference.linear_cross_entropy(*whole[:2], target, linear_bias=whole[2], **rest)
    )
    assert torch.equal(ours[3], right[3])
    upstream = [torch.randn_like(r) for r in right[:3]]
    for o, r in zip(ours[:3], right[:3], strict=True):
        torch.testing.assert_close(o, r)
    got = torch.autograd.grad(ours[:3], slices, upstream)
    expected = torch.autograd.grad(right[:3], whole, upstream)
    for g, e, part in zip(got, expected, (slice(None), mine, mine), strict=True):
        torch.testing.assert_close(g, e[part])


def work(rank):
    for sizes in ([22, 22, 22], [30, 24, 12], [40, 3, 23]):
        for options in OPTIONS:
            for key in ("", "vocab-sliced 7 9", "token-chunked 5 66"):
                compare(rank, sizes, options, key)
    x, w = torch.randn(4, HIDDEN), torch.randn(22, HIDDEN)
    group, target = dist.group.WORLD, torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"`top_k` is 67\. Expected at most 66"):
        so.linear_cross_entropy(x, w, target, process_group=group, returns=("topk",), top_k=67)
    with pytest.raises(ValueError, match=r"The selected classes on ranks 0 and 1 .* differ"):
        ids = torch.full((4, 2), int(rank == 1))
        so.linear_cross_entropy(
            x, w, target, process_group=group, returns=("selected",), selected_ids=ids
        )


@pytest.mark.in_turn
def test_every_rank_returns_all_log_probabilities():
    run_on_ranks(work, 3)
