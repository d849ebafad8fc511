"""How tiles of logits lie in memory, and the scratch that working on them takes."""

from __future__ import annotations

from storage_ops.loss import devices

SLICE = 1024  # rows of a 16-bit product that are formed at a time before they are summed in fp32
ROWS = 16  # chunks of tokens are multiples of this
# Rows and columns of the tile of our own products that registers hold, and the slots of depth that
# these have of each row.
TILE = (32, 32, 16) if devices.has_amx() else (8, 48, 1)
# Slots of a thread's scratch, at most: they lie in its second-level cache. AMX computes so fast
# that fewer copies of the left operand are worth more of that.
MOST = 160 << 10
MOST_COPIED = (320 if devices.has_amx() else 160) << 10
# Rows of a 16-bit product of our own that are formed at a time, at most.
ROUNDED = 2048 if devices.has_amx() else SLICE
PLAIN = 1 << 17  # elements that the row kernel in plain torch works on at a time, or one row
# Depth of a 16-bit product of our own that needs no sums beside its result.
ONE_PASS = 8192 if devices.has_amx() else 4096


def padded(columns: int) -> int:
    """Elements from one row of a tile to the next.

    Rows start on 64 elements: odd sizes stay on the fast paths of products. Never a multiple of
    512: rows a power of two apart share their places in a cache.
    """
    width = -(-columns // 64) * 64
    return width + 64 if width % 512 == 0 else width


def parts(total: int, size: int) -> int:
    """How many pieces of up to this size there are."""
    return -(-total // size) if total else 0


def parked_rows(rows: int, columns: int, hidden: int) -> int:
    """Of the rows of a tile, those that fit in the gradient of the weight of its classes."""
    room = hidden * columns // padded(columns)
    return rows if room >= rows else room // ROWS * ROWS


def blocks(vocab: int, rows: int, hidden: int, columns: int) -> list[int]:
    """Widths of slices of the vocabulary whose logits all wait in the weight's gradient, in order.

    Those of a slice wait in the rows that the gradient of the next slice is written to afterwards.
    Those of the last, `columns` wide, have memory of their own. With fewer tokens than the hidden
    size the rows of a slice have room for more logits than its own, so that slices grow from the
    last on. Empty where they would shrink instead.
    """
    sizes, left = [columns], vocab - columns
    while left > 0:
        width = block_before(sizes[-1], left, rows, hidden)
        if not width:
            return []
        sizes.append(width)
        left -= width
    return sizes[::-1]


def block_before(columns: int, left: int, rows: int, hidden: int) -> int:
    """The width of the slice, of so many classes left, before one; 0 if it would be narrower.

    If the last slice has one before it, then that has one too, and so on.
    """
    room = hidden * columns // max(rows, 1)
    width = min(unpadded(room), left) if room >= 64 else 0
    return width if width >= min(columns, left) else 0


def unpadded(columns: int) -> int:
    """The largest width of a tile, up to this, whose rows need no padding."""
    width = max(columns // 64, 1) * 64
    return width - 64 * (width % 512 == 0)


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


def piece(
    rows: int, columns: int, depth: int, threads: int, rounded: bool, direct: bool
) -> tuple[int, int]:
    """Rows of our own product that are formed at a time, and the scratch that they take."""
    if not rounded:
        return rows, packed_slots(rows, columns, depth, threads, direct=direct)
    height = rounded_rows(rows, columns, depth)
    slots = packed_slots(height, columns, depth, threads, True, direct)
    return height, slots + sum_slots(height, columns, depth)


def plain_rows(rows: int, columns: int) -> int:
    """Rows that the row kernel in plain torch works on at a time."""
    return max(1, min(rows, PLAIN // max(columns, 1)))


def plain_elements(rows: int, columns: int) -> int:
    """The most elements of a tile, or of one with fewer columns, that it works on at a time."""
    return max(columns, min(rows * columns, PLAIN))
