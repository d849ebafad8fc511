"""Find the actions to try for a layer, and the cost of each."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from storage_ops.checkpoint.layers.config_policy import class_of
from storage_ops.fitting.actions import LOSS, Action, loss_actions
from storage_ops.fitting.heads import heads_in
from storage_ops.fitting.probe import Cost, Probe
from storage_ops.fitting.record import LayerCall
from storage_ops.fitting.step import Op
from storage_ops.simulate.rates import SimulatedDevice
from storage_ops.simulate.values.assume import Assumption

# Shares of the bytes of all results that the sets of saved ones take, at least.
_SHARES = (1 / 32, *(i / 16 for i in range(1, 7)), 1 / 2, 3 / 4, 1)
_TILES = (2, 4, 8, 16)
# What an action may fail with, when a layer does what it cannot repeat.
_REFUSALS = (RuntimeError, TypeError, ValueError)


def costs_of(
    call: LayerCall, allowed: Sequence[str], device: SimulatedDevice, assumption: Assumption
) -> dict[Action, Cost]:
    """Return actions for a call of a layer with their costs. The first action keeps everything.

    Args:
        call: the call of the layer.
        allowed: names of actions.
        device: the simulated device.
        assumption: the caller's assumptions about unknown values.
    """
    probe, rates = Probe(call, device, assumption), device.rates
    keep = Action("keep")
    costs = {keep: probe.cost(keep)}
    hides = int(rates.link * costs[keep].forward_seconds)
    if rates.fuses and "selective" in allowed:
        # Compiled code computes norms and activations at their readers if it keeps the products.
        allowed = [name for name in allowed if name != "output_discard"]
    for action in _candidates(call.unit.module, probe, allowed, costs[keep].kept, hides):
        try:
            costs[action] = probe.cost(action)
        except _REFUSALS:
            continue
    return costs


def _candidates(
    layer: nn.Module, probe: Probe, allowed: Sequence[str], most: int, hides: int
) -> list[Action]:
    """Return actions to try. `hides`: bytes that can be copied each way while the layer runs."""
    actions: list[Action] = []
    if "full" in allowed:
        actions.append(Action("full"))
    offloads = "offload" in allowed and hides > 0
    if "selective" in allowed or offloads:
        try:
            ops, count = probe.ops()
        except _REFUSALS:
            ops, count = [], 0
        sets = _selections(ops[:count])
        if "selective" in allowed:
            actions += [_selective(s) for s in sets if sum(op.nbytes for op in s) < most]
        if offloads:
            for chosen in sets:
                away = _that_fit(chosen, hides)
                if away and ("selective" in allowed or len(away) == len(chosen)):
                    actions.append(_selective(chosen, away))
    if "output_discard" in allowed:
        actions += _discards(layer)
    if LOSS in allowed and probe.logits and heads_in(layer):
        actions += loss_actions(probe.logits)
    if "tile" in allowed:
        names = _token_wise(layer)
        modes = ("keep", *(["full"] if "full" in allowed else []))
        if names:
            actions += [Action(mode, tiled=names, tiles=n) for mode in modes for n in _TILES]
    return actions


def _selections(ops: list[Op]) -> list[list[Op]]:
    """Return sets of ops to save. Ops that take long for their bytes come first.

    Each set is the best of all sets with at most its bytes. They are the greedy solutions of a
    knapsack at their own sizes.
    """
    saveable = [op for op in ops if op.saveable and op.nbytes > 0]
    order = sorted(saveable, key=lambda op: -op.seconds / op.nbytes)
    total = sum(op.nbytes for op in order)
    sets: list[list[Op]] = []
    taken, reached = 0, 0
    for number, op in enumerate(order, 1):
        taken += op.nbytes
        before, reached = reached, sum(taken >= share * total for share in _SHARES)
        if reached > before:
            sets.append(order[:number])
    return sets


def _that_fit(ops: list[Op], nbytes: int) -> list[Op]:
    """Return ops, the largest first, whose results together take at most `nbytes`."""
    fitting_ops = []
    for op in sorted(ops, key=lambda op: -op.nbytes):
        if op.nbytes <= nbytes:
            nbytes -= op.nbytes
            fitting_ops.append(op)
    return fitting_ops


def _selective(ops: list[Op], away: Sequence[Op] = ()) -> Action:
    saved = (op.call for op in ops if op not in away)
    return Action("selective", tuple(sorted(saved)), tuple(sorted(op.call for op in away)))


def _discards(layer: nn.Module) -> list[Action]:
    """Return actions that discard the modules with cheap outputs: norms, activations, dropouts."""
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
    """Return the outermost modules in a layer that have linear layers, norms and activations only.

    With random numbers a tile draws other numbers than the whole, so such modules are left out. For
    classes other than `Sequential`, the name of the class decides.
    """
    names: list[str] = []
    for name, module in layer.named_modules():
        if not name or any(name.startswith(f"{outer}.") for outer in names):
            continue
        inside = list(module.modules())
        linear = sum(isinstance(m, nn.Linear) for m in inside)
        plain = isinstance(module, nn.Sequential) or _is_called(module, "mlp|feedforward|ffn")
        if linear >= 2 and plain and all(map(_may_be_tiled, inside)):
            names.append(name)
    return tuple(names)


def _may_be_tiled(module: nn.Module) -> bool:
    """Return True if a module handles each token alone, without a look at its children."""
    if "forward" in vars(module):
        return False
    if any(True for _ in module.children()):
        containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
        return isinstance(module, containers) or _is_called(module, "mlp|feedforward|ffn|linear")
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return len(module.normalized_shape) == 1
    if isinstance(module, (nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.GLU)):
        return module.dim == -1
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return not (module.training and module.p > 0)
    if isinstance(module, (nn.Linear, nn.Identity, nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        return True
    if isinstance(module, (nn.MultiheadAttention, nn.Softmax2d, nn.RReLU)):
        return False
    of_torch = class_of(module).__module__ == nn.GELU.__module__
    single = all(p.numel() == 1 for p in module.parameters())  # PReLU may have one for each token
    return single and (of_torch or _is_called(module, "activation"))


def _is_called(module: nn.Module, words: str) -> bool:
    return re.search(words, class_of(module).__name__.lower()) is not None
