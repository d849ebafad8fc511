"""Random tails after the logits: the gradients are right, chunked or not."""

import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .losses import V, arguments, interpreted, logits, run

LARGE = {
    "tanh": torch.tanh,
    "softmax": lambda z: torch.softmax(z, -1),
    "log_softmax": lambda z: torch.log_softmax(z, -1),
    "scale": lambda z: z * 0.3 + 0.1,
    "center": lambda z: z - z.mean(-1, keepdim=True),
    "across": lambda z: z - z.mean(1, keepdim=True),
    "batch": lambda z: z + z.flip(0),
    "bias": lambda z: z + torch.linspace(0, 1, V),
    "mask": lambda z: z.masked_fill(torch.arange(V) % 3 == 0, -2.0),
    "flat": lambda z: z.reshape(-1, V),
    "sorted": lambda z: z.sort(-1)[0],
    "padded": lambda z: torch.nn.functional.pad(z, (1, 1)),
    "half": lambda z: z[..., : V // 2],
    "transposed": lambda z: z.transpose(0, 1),
}
SMALL = {
    "lse": lambda z: torch.logsumexp(z, -1),
    "sum": lambda z: z.square().sum(-1),
    "first": lambda z: z[..., 0],
    "max": lambda z: z.max(-1)[0],
}
AFTER = {
    "square": torch.square,
    "exp": lambda v: torch.sigmoid(v),
    "sequence": lambda v: v.sum(-1),
    "shift": lambda v: v[1:] - v[:-1],
    "log": lambda v: torch.log1p(v.abs()),
}
LAST = {
    "mean": torch.mean,
    "sum": torch.sum,
    "root": lambda v: v.square().mean().sqrt(),
    "ratio": lambda v: v.sum() / (1 + v.detach().abs().sum()),
}


@pytest.mark.slow
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.sampled_from(sorted(LARGE)), max_size=3),
    st.sampled_from(sorted(SMALL)),
    st.lists(st.sampled_from(sorted(AFTER)), max_size=2),
    st.sampled_from(sorted(LAST)),
    st.integers(2, 6),
)
def test_random_tails(large, small, after, last, num_chunks):
    torch._dynamo.reset()

    def loss(x, w, t):
        value = logits(x, w)
        if "flat" in large:  # these need a dimension that is gone then
            value = torch.tanh(value)
        for name in large:
            if value.dim() == 3 or name not in ("across", "transposed"):
                value = LARGE[name](value) if value.shape[-1] == V else value * 1.1
        value = SMALL[small](value)
        for name in after:
            value = AFTER[name](value)
        return LAST[last](value)

    given_ = arguments()
    want = run(loss, *(a.double() if a.is_floating_point() else a for a in given_))
    plain = run(loss, *given_)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = run(interpreted(loss, num_chunks, strict=False), *given_)
    for ours, eager, exact in zip(got, plain, want, strict=True):
        scale = exact.norm().clamp(min=1e-6)
        error = (ours.double() - exact).norm() / scale
        assert error <= 4 * (eager.double() - exact).norm() / scale + 1e-5
