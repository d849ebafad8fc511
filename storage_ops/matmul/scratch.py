"""How much scratch the package's own products take: what csrc/products knows, once more."""

from __future__ import annotations

import functools

from storage_ops.loss import devices

# Rows and columns of the tile of our own products that registers hold, and the slots of depth that
# these have of each row.
TILE = (32, 32, 16) if devices.has_amx() else (8, 48, 1)
# Slots of a thread's scratch, at most: they lie in its second-level cache. AMX computes so fast
# that fewer copies of the left operand are worth more of that.
MOST = 160 << 10
MOST_COPIED = (320 if devices.has_amx() else 160) << 10
# Rows of a 16-bit product of our own that are formed at a time, at most.
ROUNDED = 2048 if devices.has_amx() else 1024
ROWS = 16  # and at least
# Depth of a 16-bit product of our own that needs no sums beside its result.
ONE_PASS = 8192 if devices.has_amx() else 4096


def parts(total: int, size: int) -> int:
    """How many pieces of up to this size there are."""
    return -(-total // size) if total else 0


def packed_slots(
    rows: int, columns: int, depth: int, threads: int, narrow: bool = False, direct: bool = False
) -> int:
    """Scratch of 4 bytes each that our own product (rows, depth) @ (depth, columns) works in.

    Room for blocks of both operands for each thread, in its second-level cache: all that is copied,
    up to MOST a thread, but not beyond 256 KiB in all, or half of the tile of logits if that is
    the left operand and copied (with AMX: of any), unless that were less than a tile's rows and
    columns.

    Args:
        narrow: the result is in 16 bits: pairs of numbers are copied, and the depth is not divided
            up to ONE_PASS.
        direct: the left operand is read in place.
    """
    high, wide, square = TILE
    slots = parts(depth, 2 * square) * square if narrow else depth
    height = high if direct else min(-(-rows // high) * high, 128)
    across = -(-columns // wide) * wide
    half = rows * depth // (4 if narrow else 2)
    if direct:
        half = rows * min(columns, depth) // 4 if square > 1 else 0
    half = max(half, 1 << 16)
    if narrow and depth <= ONE_PASS and square > 1:  # sums of a block lie beside its operands
        group = min(slots, 128)
        whole, least = height * group + across * (slots + 128), high * group + wide * (slots + high)
    else:
        group = slots if narrow and depth <= ONE_PASS else min(slots, 256)
        whole, least = height * group + across * slots, (high + wide) * group
    most = min(MOST if direct else MOST_COPIED, parts(half, threads))
    return threads * max(min(whole, most), least)


def rounded_rows(rows: int, columns: int, depth: int) -> int:
    """Rows of our own product that are formed at a time if it is rounded to 16 bits.

    After more than one pass over the depth that takes sums in fp32: they have no more than a
    quarter of the bytes of the tile of logits, which is the left operand.
    """
    if depth <= ONE_PASS:
        return rows
    return max(ROWS, min(rows, ROUNDED, rows * depth // (8 * max(columns, 1))))


def sum_slots(rows: int, columns: int, depth: int) -> int:
    """Scratch of 4 bytes each for those sums, of so many rows."""
    return rows * columns if depth > ONE_PASS else 0


@functools.lru_cache(maxsize=4096)
def piece(
    rows: int, columns: int, depth: int, threads: int, rounded: bool, direct: bool
) -> tuple[int, int]:
    """Rows of our own product that are formed at a time, and the scratch that they take."""
    if not rounded:
        return rows, packed_slots(rows, columns, depth, threads, direct=direct)
    height = rounded_rows(rows, columns, depth)
    slots = packed_slots(height, columns, depth, threads, True, direct)
    return height, slots + sum_slots(height, columns, depth)
