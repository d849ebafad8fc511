"""How many tiles the op has where it takes the place of a loss."""

import pytest
import torch
from torch.nn import functional as F

from storage_ops.autochunk.cross_entropy.recognise import recognise

N, D, V = 64, 8, 4096


@pytest.mark.parametrize("num_chunks", [4, N, 16 * N])
def test_no_more_tiles_than_tokens(num_chunks):
    found = []

    def backend(gm, inputs):
        found.append(recognise(gm, num_chunks))
        return gm

    x, w, t = torch.randn(N, D), torch.randn(V, D, requires_grad=True), torch.randint(V, (N,))
    torch.compile(lambda x, w: F.cross_entropy(x @ w.T, t), backend=backend)(x, w)
    assert min(num_chunks, N // 4) <= found[0].num_chunks <= N
