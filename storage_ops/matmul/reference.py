"""The package's own products in plain torch."""

from __future__ import annotations

from torch import Tensor


def product(out: Tensor, left: Tensor, right: Tensor, scratch: Tensor, add: bool) -> None:
    """Compute out (m, n) = left (m, k) @ right (k, n) in fp32, or out += with `add`.

    `scratch` is not used.
    """
    value = left.float() @ right.float()
    out.copy_(out + value if add else value)


def transposed_product(
    out: Tensor, left: Tensor, right: Tensor, scratch: Tensor, add: bool
) -> None:
    """Compute out (m, n) = left (k, m).T @ right (k, n), or out +=. `left` may be overwritten."""
    product(out, left.t(), right, scratch, add)


def product_scratch(
    rows: int, columns: int, depth: int, threads: int, rounded: bool, direct: bool
) -> tuple[int, int]:
    """Return the rows of a product computed at a time, and its 4-byte scratch slots: all and 0."""
    return rows, 0


def product_kind() -> tuple[str, int]:
    """Return the instructions of the package's own products, and the depth that is summed at once.

    Plain torch returns no instructions. It sums any depth in float32.
    """
    return "", 4096
