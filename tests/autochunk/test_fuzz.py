"""Random functions of logits have the right gradients, chunked or not."""

import os
import warnings

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from .losses import arguments, interpreted, weighted
from .tails import AFTER, HEADS, LARGE, LAST, SMALL

EXAMPLES = 5 if os.environ.get("CI") else 30
CHOOSING = {"sort", "cummax", "max", "median", "top", "gather"}


def names(table, most=None):
    one = st.sampled_from(sorted(table))
    return one if most is None else st.lists(one, max_size=most)


def error(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-6))


class Rounded(TorchDispatchMode):
    """Perturbs every op's result by a random rounding error, to estimate the effect of rounding."""

    def __init__(self):
        super().__init__()
        self.random = torch.Generator().manual_seed(0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out if func.is_view else tree_map_only(torch.Tensor, self.round, out)

    def round(self, tensor):
        if tensor.is_floating_point():
            step = torch.finfo(tensor.dtype).eps
            tensor.mul_(1 + step * (2 * torch.rand(tensor.shape, generator=self.random) - 1))
        return tensor


@pytest.mark.in_turn
@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
@given(
    names(HEADS), names(LARGE, 3), names(SMALL), names(AFTER, 2), names(LAST),
    st.integers(2, 6), st.booleans(), st.sampled_from([8, 2]),
)  # fmt: skip
# A dimension of size 1, and dimensions that only the gradient of a result has.
@example("heads", ["product"], "binary", [], "all", 2, True, 8)
@example("bias", ["product"], "cross entropy", [], "all", 2, True, 8)
@example("bias", [], "binary", ["chunk"], "all", 2, True, 8)
# A chunked span that reads a result of another chunked span.
@example("bias", ["with itself", "batch"], "binary", [], "with another", 2, False, 8)
def test_random_tails(head, large, small, after, last, num_chunks, dynamic, length):
    """With sequences of length 2, logits fit into the gradient of the weight."""
    torch._dynamo.reset()

    def loss(x, w, t):
        value = HEADS[head](x, w)
        for name in large:
            value = LARGE[name](value)
        value = SMALL[small](value)
        for name in after:
            value = AFTER[name](value)
        return LAST[last](value)

    x, w, t = arguments()
    given_, reports = (x[:, :length], w, t[:, :length]), []
    exact = weighted(loss, *(a.double() if a.is_floating_point() else a for a in given_))
    plain = weighted(loss, *given_)
    with Rounded():
        rounded = weighted(loss, *given_)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = interpreted(loss, num_chunks, strict=False, dynamic=dynamic, reports=reports)
        got = weighted(compiled, *given_)
    assert reports and reports[0].error is None, reports[0].reason
    # Rounded to 16 bits, many values are equal, so ops that choose one may choose another.
    if "cast" in large and CHOOSING & {*large, small}:
        return
    floor = 2e-2 if "cast" in large else 1e-5
    for ours, eager, off, want in zip(got, plain, rounded, exact, strict=True):
        assert ours.shape == eager.shape and ours.dtype == eager.dtype
        rounding = (off - want).norm()
        if not want.isfinite().all():  # for example the mean of no rows
            assert torch.equal(ours.isfinite(), eager.isfinite())
        elif want.norm() < 1e-12:  # sums of rounded numbers near 1 that cancel
            assert ours.norm() < max(1e-5, 4 * eager.norm())
        elif want.norm() <= rounding:  # terms cancel, and only their rounding errors remain
            assert (ours - want).norm() <= 4 * rounding
        else:  # eager may be exact by chance, so the estimated rounding error counts as well
            allowed = 4 * max(error(eager, want), error(off, want)) + floor
            assert error(ours, want) <= allowed
