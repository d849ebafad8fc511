"""Fills a ledger from a graph whose nodes and values are known before it runs.

A graph of ops has a block for each storage (`graph/schedule.py`). In a graph that Inductor fuses,
only some values have memory. `autochunk/analysis/predict.py` knows which.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from storage_ops.foundation.ledger import Block, Ledger


@dataclass
class Moment:
    """The effect of one node on memory.

    Attributes:
        name: the name of the node.
        makes: the size in bytes of each block that the node allocates.
        reads: blocks that must still exist. A block without later readers ends after this moment.
        scratch: bytes of temporary memory while the node runs.
        overwrites: blocks that the result may reuse. The result reuses a block that ends here and
            has the total size of `makes`.
    """

    name: str
    makes: Mapping[Any, int] = field(default_factory=dict)
    reads: Collection[Any] = ()
    scratch: int = 0
    overwrites: Collection[Any] = ()


def levels_during(moments: Sequence[Moment]) -> list[int]:
    """Return the bytes of the nodes' results in memory while each node runs."""
    last: dict[Any, int] = {}
    for at, moment in enumerate(moments):
        last.update(dict.fromkeys((*moment.makes, *moment.reads), at))
    ending: list[list[Any]] = [[] for _ in moments]
    for key, at in last.items():
        ending[at].append(key)
    ledger, blocks, marks = Ledger(round_up=int), dict[Any, Block](), []
    for moment, keys in zip(moments, ending, strict=True):
        new_blocks = {k: _block(n, moment) for k, n in moment.makes.items() if k not in blocks}
        size = sum(block.nbytes for block in new_blocks.values())
        ends = (k for k in keys if k in moment.overwrites and k in blocks)
        over = next((k for k in ends if blocks[k].nbytes == size), None) if new_blocks else None
        if over is not None:
            ledger.give_back(blocks.pop(over))
        blocks |= {key: ledger.take(block) for key, block in new_blocks.items()}
        inside = ledger.take(_block(moment.scratch, moment))
        marks.append(ledger.mark())
        ledger.give_back(inside)
        for key in keys:
            if key in blocks:
                ledger.give_back(blocks[key])
    levels = ledger.levels()
    return [levels[mark] for mark in marks]


def _block(nbytes: int, moment: Moment) -> Block:
    return Block(nbytes, (nbytes,), torch.uint8, moment.name)
