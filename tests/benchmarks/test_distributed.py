"""A sliced vocabulary sends no more than those that `benchmarks/distributed.py` compares with."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import storage_ops as so

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


class Head(nn.Module):
    def __init__(self, x, w, options):
        super().__init__()
        self.x, self.w, self.options = nn.Parameter(x.detach()), nn.Parameter(w.detach()), options

    def forward(self, target):
        return so.linear_cross_entropy(
            self.x, self.w, target, process_group=dist.group.WORLD, **self.options
        )


def peaks(rank):
    from benchmarks._harness import peak
    from benchmarks.distributed import steps

    tokens, hidden, vocab = 512, 128, 4096
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(tokens, hidden).to(dtype).requires_grad_()
        w = torch.randn(vocab // dist.get_world_size(), hidden).to(dtype).requires_grad_()
        target = torch.randint(vocab, (tokens,))
        part = x.chunk(dist.get_world_size())[rank]
        for end, given, options in (
            ("", x, {}), (", sharded", part, {"input_grad": "reduce_scatter"})
        ):  # fmt: skip
            step = so.memory.simulate_step(Head(given, w, options), target, device="cpu")
            estimated = (step.peak_bytes - step.timeline[0].nbytes) / 2**20
            found = []
            for _ in range(3):  # a thread of gloo may be the last to hold a tensor
                x.grad = w.grad = None
                found.append(peak(steps(x, w, target)["storage_ops" + end]))
            found = min(found)
            assert abs(found - estimated) <= 0.01 * estimated + 0.05, (end, found, estimated)


@pytest.mark.in_turn
def test_a_ranks_peak_is_as_estimated():
    run_on_ranks(peaks, 2)


@pytest.mark.in_turn
@pytest.mark.parametrize("ranks", [2, 4])
def test_no_more_bytes_than_peers(ranks):
    run_on_ranks(work, ranks)
