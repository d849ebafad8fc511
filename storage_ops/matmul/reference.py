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


def product_scratch(
    rows: int, columns: int, depth: int, threads: int, rounded: bool, direct: bool
) -> tuple[int, int]:
    """Rows of a product that are formed at a time, and scratch of 4 bytes each: all, and none."""
    return rows, 0


def product_kind() -> tuple[str, int]:
    """The instructions of the package's own products, and the depth that they round once after.

    Here there are none; what is deeper is summed in float32 all the same.
    """
    return "", 4096
