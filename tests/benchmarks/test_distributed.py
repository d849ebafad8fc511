"""A sliced vocabulary sends no more bytes than its peers in `benchmarks/distributed.py`."""

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
        sent_bytes = {
            name: sent(run) for name, run in steps(x, w, torch.randint(VOCAB, (TOKENS,))).items()
        }
        # The bytes that a rank sends to sum one byte per token.
        per_byte = 2 * (ranks - 1) / ranks * TOKENS
        for end in ("", ", sharded"):
            ours, peer = sent_bytes["storage_ops" + end], sent_bytes["torch loss_parallel" + end]
            # Bytes for the maximum, the sum and the gradient. The loss and its checks add some.
            least = per_byte * (8 + HIDDEN * dtype.itemsize)
            assert least < ours <= least + 100 * ranks
            assert ours <= peer and ours <= sent_bytes["Megatron-LM's formula"], sent_bytes


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
        for end, inputs, options in (
            ("", x, {}), (", sharded", part, {"input_grad": "reduce_scatter"})
        ):  # fmt: skip
            step = so.memory.simulate_step(Head(inputs, w, options), target, device="cpu")
            estimated = (step.peak_bytes - step.timeline[0].nbytes) / 2**20
            measured = []
            for _ in range(3):  # a gloo thread may hold a tensor for longer
                x.grad = w.grad = None
                measured.append(peak(steps(x, w, target)["storage_ops" + end]))
            measured = min(measured)
            assert abs(measured - estimated) <= 0.01 * estimated + 0.05, (end, measured, estimated)


@pytest.mark.in_turn
def test_a_ranks_peak_is_as_estimated():
    run_on_ranks(peaks, 2)


@pytest.mark.in_turn
@pytest.mark.parametrize("ranks", [2, 4])
def test_no_more_bytes_than_peers(ranks):
    run_on_ranks(work, ranks)
