"""A sliced vocabulary sends no more than those that `benchmarks/distributed.py` compares with."""

import pytest
import torch
import torch.distributed as dist

from ..ranks import run_on_ranks

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed")
TOKENS, HIDDEN, VOCAB = 128, 16, 256


def work(rank):
    from benchmarks.distributed import sent, steps

    ranks = dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(TOKENS, HIDDEN).to(dtype).requires_grad_()
        w = torch.randn(VOCAB // ranks, HIDDEN).to(dtype).requires_grad_()
        found = {
            name: sent(run) for name, run in steps(x, w, torch.randint(VOCAB, (TOKENS,))).items()
        }
        around = 2 * (ranks - 1) / ranks * TOKENS  # bytes that a rank sends to sum a byte per token
        for end in ("", ", sharded"):
            ours, peer = found["storage_ops" + end], found["torch loss_parallel" + end]
            # The maximum, the sum and the gradient; and the loss and what calls are compared by.
            least = around * (8 + HIDDEN * dtype.itemsize)
            assert least < ours <= least + 100 * ranks
            assert ours <= peer and ours <= found["Megatron-LM's formula"], found


@pytest.mark.parametrize("ranks", [2, 4])
def test_no_more_bytes_than_peers(ranks):
    run_on_ranks(work, ranks)
