"""Predicts the time of the streamed row kernel on an H200, relative to a copy of the same bytes.

`python -m benchmarks._row_model` prints the predictions. The model simulates one multiprocessor
with two blocks, in steps of 10 ns:

* Memory serves the pieces of both blocks in their order, reads and writes, at the rate of a copy. A
  read also takes the latency of memory. A read begins when its slot becomes free.
* A piece takes the issue slots of its instructions. A block alone uses at most 70 % of the slots
  that two blocks can use.
* Between the two passes of a row, a block waits for its reductions, and for its cluster.

The numbers of instructions are those of the compiled kernel for sm_90. The usable issue slots and
the waits are assumptions, so there are three of each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

MULTIPROCESSORS, CLOCK = 132, 1.755e9
COPY_RATE = 4.27e12 / MULTIPROCESSORS  # bytes per second, read or written, as measured
LATENCY = 0.8e-6
STEP = 10e-9
# As in cuda/streamed_rows.cuh.
PIECE, SLOTS, ROW_PIECES, MOST_BLOCKS, WARPS = 16 << 10, 7, 5, 8, 16
# Clusters at a time. A group of 16 or 18 multiprocessors has room for four clusters of 8 blocks.
CLUSTERS = {1: 264, 2: 132, 4: 66, 8: 32}
# Instructions of a warp for a piece in the first and in the second pass, by bytes of an element.
INSTRUCTIONS = {2: (132, 151), 4: (78, 105)}
ALONE = 0.7


class Assumption(NamedTuple):
    """What the model cannot know.

    Attributes:
        issue: the share of issue slots that two blocks can use.
        wait: seconds between the passes of a row in one block.
        cluster: more of these seconds for a row in several blocks.
    """

    issue: float
    wait: float
    cluster: float


ASSUMPTIONS = {
    "best": Assumption(0.85, 0.6e-6, 0.5e-6),
    "expected": Assumption(0.75, 0.9e-6, 0.8e-6),
    "worst": Assumption(0.7, 1.5e-6, 1.0e-6),
}


@dataclass
class Block:
    """A block that works on its parts of rows, piece by piece.

    Attributes:
        arrivals: when each piece arrives, in the order of their copies.
        piece: the piece in work, counted over all rows.
        second: True in the second pass.
        work: seconds of issue slots that the piece in work has used.
        waits_until: the end of the wait between two passes.
    """

    arrivals: list[float] = field(default_factory=list)
    piece: int = 0
    second: bool = False
    work: float = 0.0
    waits_until: float = 0.0


def blocks_of(row_bytes: int) -> int:
    """Return how many blocks a row has, or 0 if it is too long to be streamed."""
    for blocks in (1, 2, 4, MOST_BLOCKS):
        if math.ceil(row_bytes / blocks / PIECE) <= ROW_PIECES:
            return blocks
    return 0


def seconds(
    rows: int, part: float, passes: tuple[float, float], issue: float, wait: float
) -> float:
    """Return how long a multiprocessor takes.

    Args:
        rows: rows of each of its two blocks.
        part: bytes of a row in a block.
        passes: seconds of issue slots of a piece in the two passes.
        issue: the usable share of the issue slots.
        wait: seconds between the two passes of a row.
    """
    pieces = math.ceil(part / PIECE)
    transfer = part / pieces / COPY_RATE
    now = memory = 0.0
    blocks = [Block(), Block()]

    def copy(block: Block) -> None:
        nonlocal memory
        memory = max(memory, now) + transfer
        block.arrivals.append(memory + LATENCY)

    for _ in range(SLOTS):
        for block in blocks:
            copy(block)
    while blocks:
        ready = [
            block for block in blocks
            if block.waits_until <= now and (block.second or block.arrivals[block.piece] <= now)
        ]  # fmt: skip
        for block in ready:
            block.work += STEP * issue * (ALONE if len(ready) == 1 else 1 / len(ready))
            if block.work < passes[block.second]:
                continue
            block.work = 0.0
            block.piece += 1
            if block.second:
                memory = max(memory, now) + transfer  # the write
                copy(block)
            if block.piece % pieces == 0:
                if not block.second:
                    block.piece -= pieces
                    block.waits_until = now + wait
                block.second = not block.second
        now += STEP
        blocks = [block for block in blocks if block.piece < rows * pieces]
    return now


def predicted(rows: int, columns: int, itemsize: int, assumption: Assumption) -> float | None:
    """Return the time relative to a copy, or None if the rows are too long to be streamed."""
    blocks = blocks_of(columns * itemsize)
    if blocks == 0:
        return None
    part = columns * itemsize / blocks
    filled = part / (math.ceil(part / PIECE) * PIECE)
    first, second = (
        count * WARPS / 4 / CLOCK * filled for count in INSTRUCTIONS[itemsize]
    )  # four warps issue an instruction at a time
    rows_of_block = math.ceil(rows / CLUSTERS[blocks])
    wait = assumption.wait + (assumption.cluster if blocks > 1 else 0)
    took = seconds(rows_of_block, part, (first, second), assumption.issue, wait)
    return took / (2 * rows * columns * itemsize / (COPY_RATE * MULTIPROCESSORS))


def main() -> None:
    """Print the predictions for the shapes of the benchmark."""
    from benchmarks.row_kernel import SHAPES

    for name, (rows, columns) in SHAPES["cuda"].items():
        for itemsize in INSTRUCTIONS:
            times = {key: predicted(rows, columns, itemsize, a) for key, a in ASSUMPTIONS.items()}
            text = ", ".join(f"{key} {t:.2f}" for key, t in times.items() if t is not None)
            blocks = blocks_of(columns * itemsize)
            print(f"{name}, {itemsize} bytes, {blocks} blocks: {text or 'not streamed'}")


if __name__ == "__main__":
    main()
