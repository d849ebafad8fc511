"""The owners of a simulation's memory: those known beforehand, and the modules' calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from storage_ops.foundation.ledger import Block
from storage_ops.measure.measurement import Life, Sample
from storage_ops.measure.owners import (
    BUFFERS,
    GRADIENTS,
    INPUTS,
    PARAMETERS,
    STATE,
    TEMPORARIES,
    WORKSPACES,
    activations_of,
)
from storage_ops.simulate.kernels.cuda import THREADS, keep_workspaces
from storage_ops.simulate.mode import Simulation
from storage_ops.simulate.ranks.fsdp import GATHERED, REDUCED
from storage_ops.simulate.rates import SimulatedDevice


class Roles:
    """The roles of a simulation's blocks: owners that are known beforehand, such as "parameters".

    A block keeps its first role.

    Attributes:
        of: the role of each block that has one.
    """

    def __init__(self, simulation: Simulation) -> None:
        self.of: dict[Block, str] = {}
        self._simulation = simulation

    def note(self, role: str, tensors: Iterable[Any]) -> int:
        """Record a role for the blocks of tensors that have none. Return the bytes of these blocks.

        Objects that are no tensors are skipped.
        """
        owned = [t for t in tensors if isinstance(t, Tensor)]
        blocks = {block for t in owned for block in self._simulation.blocks_of(t)}
        new = blocks.difference(self.of)
        self.of |= dict.fromkeys(new, role)
        return sum(block.nbytes for block in new)

    def note_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Record the gradients of parameters."""
        self.note(GRADIENTS, (p.grad for p in parameters))

    def note_modules(self, modules: Iterable[nn.Module]) -> None:
        """Record the parameters and buffers of modules."""
        for module in modules:
            self.note(PARAMETERS, module.parameters())
            self.note(BUFFERS, module.buffers())

    def note_optimizers(self, optimizers: Iterable[Optimizer]) -> None:
        """Record the parameters of optimizers, their gradients and their states."""
        for optimizer in optimizers:
            parameters = tree_leaves([group["params"] for group in optimizer.param_groups])
            self.note(PARAMETERS, parameters)
            self.note_gradients(parameters)
            self.note(STATE, tree_leaves(list(optimizer.state.values())))

    def add_workspaces(self, device: SimulatedDevice, threads: int = THREADS) -> None:
        """Add the workspaces of threads that multiplied matrices, as if from the start."""
        if self._simulation.multiplies:
            added = keep_workspaces(self._simulation.ledger, device.workspace, threads)
            self.of |= dict.fromkeys(added, WORKSPACES)

    def blocks(self, role: str) -> set[Block]:
        """Return the blocks with a role."""
        return {block for block, its_role in self.of.items() if its_role == role}

    def totals(self) -> dict[str, Any]:
        """Return the fields of an `Estimate` or a `StepEstimate` at the end of a simulation."""
        ledger = self._simulation.ledger
        levels = ledger.levels()
        seconds = [0.0, *(at for at, _, _ in ledger.events)]
        peak = max(levels)
        peak_at = levels.index(peak)
        began: dict[Block, int] = dict.fromkeys(ledger.inputs, 0)
        ended: list[tuple[Block, int, int | None]] = []
        for count, (_, block, taken) in enumerate(ledger.events, 1):
            if taken:
                began[block] = count
            else:
                ended.append((block, began.pop(block), count))
        ended += [(block, start, None) for block, start in began.items()]
        lives, at_peak = [], []
        by_owner: Counter[str] = Counter()
        for block, start, end in sorted(ended, key=lambda life: life[1]):
            owner = self.of.get(block) or _owner_of(block, end)
            lives.append(Life(owner, block.nbytes, start, end))
            if start <= peak_at and (end is None or end > peak_at):
                at_peak.append(block)
                by_owner[owner] += block.nbytes
        return {
            "peak_bytes": peak, "kept_bytes": levels[-1], "sent_bytes": dict(self._simulation.sent),
            "timeline": [Sample(at, level) for at, level in zip(seconds, levels, strict=True)],
            "at_peak": sorted(at_peak, key=lambda block: -block.nbytes), "lives": lives,
            "by_owner": {owner: n for owner, n in by_owner.most_common() if n},
        }  # fmt: skip


def _owner_of(block: Block, end: int | None) -> str:
    call = block.call
    if call is not None and call.name in (GATHERED, REDUCED):
        return call.name
    if block.made_by == "input":
        return INPUTS
    if call is None or call.end is None or (end is not None and end <= call.end):
        return TEMPORARIES
    return activations_of(call.name)
