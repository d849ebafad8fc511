"""The package's own products in plain torch."""

from __future__ import annotations

from torch import Tensor


def product(out: Tensor, left: Tensor, right: Tensor, scratch: Tensor, add: bool) -> None:
    """out (m, n), in fp32, = left (m, k) @ right (k, n), or out += it; needs no scratch memory."""
    value = left.float() @ right.float()
    out.copy_(out + value if add else value)


def transposed_product(
    out: Tensor, left: Tensor, right: Tensor, scratch: Tensor, add: bool
) -> None:
    """out (m, n) = left (k, m).T @ right (k, n), or out += it; `left` is spent."""
    product(out, left.t(), right, scratch, add)
