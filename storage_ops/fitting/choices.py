"""Which actions are worth a look for a layer, and what each of them costs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from storage_ops.checkpoint.rules import class_of
from storage_ops.fitting.actions import Action
from storage_ops.fitting.probe import Cost, Probe
from storage_ops.fitting.record import Call
from storage_ops.fitting.step import Op
from storage_ops.loss.devices import DEVICES, Rates, named, rates_of

# Shares of the bytes of all results that the sets of saved ones take, at least.
_SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1)
_TILES = (2, 4, 8, 16)
# What an action may fail with, when a layer does what it cannot repeat.
_REFUSALS = (RuntimeError, TypeError, ValueError)


def costs_of(call: Call, allowed: Sequence[str], on_gpu: bool, rates: Rates) -> dict[Action, Cost]:
    """Actions for a call of a layer, the first of them to keep all, without those that are worse.

    Args:
        call: of the layer.
        allowed: names of actions.
        on_gpu: whether sizes and kernels are those of a GPU.
        rates: of the device.
    """
    probe = Probe(call, on_gpu, rates)
    keep = Action("keep")
    costs = {keep: probe.cost(keep)}
    for action in _candidates(call.unit.module, probe, allowed, costs[keep].kept):
        try:
            costs[action] = probe.cost(action)
        except _REFUSALS:
            continue
    return {
        action: cost
        for action, cost in costs.items()
        if action == keep or not any(_is_worse(cost, c) for a, c in costs.items() if a != action)
    }


def _is_worse(cost: Cost, other: Cost) -> bool:
    ours = (cost.kept, cost.forward, cost.backward, cost.seconds)
    theirs = (other.kept, other.forward, other.backward, other.seconds)
    return ours != theirs and all(a >= b for a, b in zip(ours, theirs, strict=True))


def _candidates(layer: nn.Module, probe: Probe, allowed: Sequence[str], most: int) -> list[Action]:
    found: list[Action] = []
    if "full" in allowed:
        found.append(Action("full"))
    if "selective" in allowed:
        try:
            ops, again = probe.ops()
        except _REFUSALS:
            ops, again = [], 0
        found += [Action("selective", saved=saved) for saved in _selections(ops[:again], most)]
    if "output_discard" in allowed:
        found += _discards(layer)
    if "tile" in allowed:
        names = _token_wise(layer)
        modes = ("keep", *(["full"] if "full" in allowed else []))
        if names:
            found += [Action(mode, tiled=names, tiles=n) for mode in modes for n in _TILES]
    return found


def _selections(ops: list[Op], most: int) -> list[tuple[tuple[str, int], ...]]:
    """Sets of ops to save, of less than `most` bytes; those first that take long for their bytes.

    Each is the best of all sets that take no more bytes than it (the greedy solutions of a knapsack
    at its own sizes).
    """
    saveable = [op for op in ops if op.saveable and op.nbytes > 0]
    order = sorted(saveable, key=lambda op: -op.seconds / op.nbytes)
    total = sum(op.nbytes for op in order)
    sets: list[tuple[tuple[str, int], ...]] = []
    taken, saved = 0, []
    for op in order:
        taken += op.nbytes
        saved.append(op.call)
        reached = sum(taken >= share * total for share in _SHARES)
        if reached > len(sets) and taken < most:
            sets += [tuple(sorted(saved))] * (reached - len(sets))
    return list(dict.fromkeys(sets))


def _discards(layer: nn.Module) -> list[Action]:
    """All modules in a layer whose outputs are cheap to compute: norms, activations, dropouts."""
    cheap = [
        (name, module)
        for name, module in layer.named_modules()
        if name and not any(True for _ in module.children()) and _is_cheap(module)
    ]
    norms = tuple(name for name, module in cheap if any(True for _ in module.parameters()))
    names = tuple(name for name, _ in cheap)
    return [Action("output_discard", discarded=s) for s in dict.fromkeys((names, norms)) if s]


def _is_cheap(module: nn.Module) -> bool:
    if isinstance(module, (nn.Identity, nn.Embedding, nn.Flatten)):
        return False
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.training and module.p > 0
    return all(p.ndim <= 1 for p in module.parameters())


def _token_wise(layer: nn.Module) -> tuple[str, ...]:
    """The outermost modules in a layer made of linear layers and activations only.

    With random numbers a tile draws others than the whole, so such modules are left alone. Those of
    other classes are token-wise by their name: an MLP.
    """
    found: list[str] = []
    for name, module in layer.named_modules():
        if not name or any(name.startswith(f"{outer}.") for outer in found):
            continue
        leaves = [m for m in module.modules() if not any(True for _ in m.children())]
        linear = sum(isinstance(m, nn.Linear) for m in leaves)
        plain = isinstance(module, nn.Sequential) or any(
            word in class_of(module).__name__.lower() for word in ("mlp", "feedforward", "ffn")
        )
        random = any(isinstance(m, nn.Dropout) and m.training and m.p > 0 for m in leaves)
        if linear >= 2 and plain and not random and "forward" not in vars(module):
            found.append(name)
    return tuple(found)


def rates_for(device: str | torch.device | None, model: nn.Module) -> Rates:
    """The rates of a device by its name; None: of where the parameters are, an H200 for meta."""
    if device is None:
        kinds = {p.device for p in model.parameters() if p.device.type != "cpu"}
        device = next(iter(kinds), torch.device("cpu"))
    if str(device).lower() in DEVICES:
        return named(str(device).lower())
    found = torch.device(device)
    if found.type == "cuda" and torch.cuda.is_available():
        return rates_of(found)
    return named("cpu" if found.type == "cpu" else "h200")
