"""The number of tiles of the op that replaces a loss."""

import pytest
import torch
from torch.nn import functional as F

from storage_ops.autochunk.cross_entropy.recognise import recognise

N, D, V = 64, 8, 4096


def tiles_of(tokens, classes, *limits):
    counts = []

    def backend(gm, inputs):
        counts.append(recognise(gm, *limits).num_chunks)
        return gm

    torch._dynamo.reset()  # otherwise another number of classes becomes a symbol
    x, w = (torch.randn(n, D, requires_grad=True) for n in (tokens, classes))
    t = torch.randint(classes, (tokens,))
    torch.compile(lambda x, w: F.cross_entropy(x @ w.T, t), backend=backend)(x, w)
    return counts[0]


@pytest.mark.parametrize("num_chunks", [4, N, 16 * N])
def test_no_more_tiles_than_tokens(num_chunks):
    assert min(num_chunks, N // 4) <= tiles_of(N, V, num_chunks) <= N


@pytest.mark.parametrize("tokens, classes", [(N, V), (16 * N, 256)])
def test_with_an_impossible_budget_there_are_no_more_tiles_than_tokens(tokens, classes):
    assert 1 < tiles_of(tokens, classes, None, 1) <= tokens
