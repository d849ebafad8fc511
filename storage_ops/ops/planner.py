"""From shapes and a memory budget to a plan for linear cross-entropy, in pure Python."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20
SCALARS = 64  # bytes of the loss, the count of tokens and the like
SLICE = 1024  # vocabulary rows of a 16-bit weight gradient that are formed at a time


@dataclass(frozen=True)
class Plan:
    """How linear cross-entropy will run, and what it will cost.

    Attributes:
        num_chunks: chunks of tokens that run one after another.
        rows: tokens of the largest chunk; all chunks are equal but for the last.
        peak_bytes: scratch memory beyond inputs, outputs and returned gradients; what a math
            library allocates inside a matrix product is not known here.
        flops: floating-point operations of the matrix products.
    """

    num_chunks: int
    rows: int
    peak_bytes: int
    flops: int


def padded(vocab: int) -> int:
    """Elements from one row of the logits buffer to the next."""
    return -(-vocab // 64) * 64


def scratch_bytes(
    rows: int, tokens: int, hidden: int, vocab: int, itemsize: int, grads: tuple[bool, bool, bool]
) -> int:
    """Bytes beyond inputs, outputs and gradients when chunks have `rows` tokens."""
    arithmetic = max(itemsize, 4)
    total = rows * padded(vocab) * itemsize + tokens * arithmetic + SCALARS
    if grads[1] and itemsize < 4 and rows < tokens:
        # The accumulator, and a slice of a chunk's product in 16 bits and cast for the addition.
        total += (vocab * 4 + min(SLICE, vocab) * (itemsize + 4)) * hidden
    if grads[2]:
        total += 3 * vocab * arithmetic
    return total


def plan(
    tokens: int,
    hidden: int,
    vocab: int,
    itemsize: int,
    *,
    grads: tuple[bool, bool, bool] = (True, True, True),
    memory_budget: int | None = None,
) -> Plan:
    """Choose the largest equal chunks of tokens that fit in the budget.

    Args:
        tokens, hidden, vocab: N, D and V of `input (N, D) @ linear_weight (V, D).T`.
        itemsize: bytes per element of the input.
        grads: whether input, weight and bias need gradients.
        memory_budget: bytes of scratch that may be used. None takes a quarter of the logits, at
            least 32 MiB and at most 1 GiB, plus the fp32 accumulator of a 16-bit weight gradient
            (which a single chunk does without).

    Raises:
        ValueError: the budget is below what one token at a time needs; names that smallest budget.

    Example:
        >>> plan(2048, 768, 50257, 4, memory_budget=100 << 20).num_chunks
        4
    """

    def scratch(rows: int) -> int:
        return scratch_bytes(rows, tokens, hidden, vocab, itemsize, grads)

    least = scratch(min(1, tokens))
    if memory_budget is None:
        quarter = tokens * padded(vocab) * itemsize // 4
        budget = least + min(max(quarter, 32 * MIB), 1024 * MIB)
    elif memory_budget < least:
        raise ValueError(
            f"memory_budget is {memory_budget} bytes; expected at least {least} for {tokens} "
            f"tokens, hidden size {hidden}, vocabulary {vocab} and {itemsize} bytes per element"
        )
    else:
        budget = memory_budget
    rows = tokens
    if scratch(tokens) > budget:
        rows = 1 + (budget - least) // (padded(vocab) * itemsize)
    num_chunks = -(-tokens // rows) if tokens else 0
    rows = -(-tokens // num_chunks) if tokens else 0
    products = 1 + grads[0] + grads[1]
    return Plan(num_chunks, rows, scratch(rows), 2 * products * tokens * hidden * vocab)
