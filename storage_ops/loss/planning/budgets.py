"""The default budgets of losses: how much memory their logits may take."""

from __future__ import annotations

from collections.abc import Callable

from storage_ops.loss.planning.devices import Rates

LEAST, GIB = 32 << 20, 1 << 30
# On a GPU with more memory than 32 GiB, logits may take this part of it if that pays. On an H200 or
# H100 it has room for all logits of 8192 tokens and 151936 classes in 16 bits, so that the backward
# of a loss per token computes none of them again.
OF_MEMORY = 32
# More than 1 GiB pays if it saves this part of the time. Predictions are a few percent off, and
# without gradients or with a frozen weight, larger tiles save only a few tenths of a percent.
WORTH = 0.01
# A budget is too small for speed if its plan takes longer than this multiple of the products alone.
SLOW = 1.35


def most(rates: Rates) -> int:
    """Return the largest default budget for logits on a device: 1 GiB, or a share of a GPU."""
    return max(GIB, rates.memory // OF_MEMORY)


def bounded(part: int, most: int) -> int:
    """Return the default budget for a part of the logits: at least 32 MiB, and at most `most`."""
    return min(max(part, LEAST), most)


def larger_if_worth(
    budget: Callable[[int], int], seconds: Callable[[int], float], most: int
) -> int:
    """Return the budget for up to 1 GiB of logits, or for up to `most` if that saves enough time.

    Args:
        budget: returns a default budget in bytes from the largest size of logits.
        seconds: returns the predicted time of the plan for a budget.
        most: the largest size of logits on the device in bytes.
    """
    small, large = budget(GIB), budget(most)
    if large <= small or seconds(large) > (1 - WORTH) * seconds(small):
        return small
    return large


def least_within(limit: float, seconds: Callable[[int], float], slow: int, fast: int) -> int:
    """Return the least budget whose plan takes at most `limit` seconds, up to 2 % more.

    Args:
        limit: the most seconds.
        seconds: returns the predicted time of the plan for a budget.
        slow: a budget in bytes whose plan takes longer.
        fast: a larger budget whose plan does not.
    """
    while fast - slow > fast // 50:
        middle = (slow + fast) // 2
        if seconds(middle) <= limit:
            fast = middle
        else:
            slow = middle
    return fast
