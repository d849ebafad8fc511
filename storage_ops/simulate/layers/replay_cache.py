"""Simulates the first call of each kind of modules, and carries out the others from recordings."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from storage_ops.checkpoint.discard import scope
from storage_ops.checkpoint.state.unchanged import undo_changes
from storage_ops.simulate.layers.recording import Recording, record
from storage_ops.simulate.layers.replay import check_edges, replayed
from storage_ops.simulate.mode import Simulation
from storage_ops.simulate.module_kinds import Kinds, Unlike, arguments_key


class Quick:
    """Stands around the calls of modules of a model in a simulation.

    Attributes:
        count: how many calls were carried out from a recording.
        is_spoiled: whether a recording that failed left tensors behind, so that this run is of no
            use.
    """

    def __init__(self, model: nn.Module, accumulate: bool) -> None:
        """`accumulate`: all parameters have gradients, to which backwards add."""
        self.count, self._accumulate, self.is_spoiled = 0, accumulate, False
        self._kinds = Kinds(model)
        self._recordings: dict[Hashable, Recording | None] = {}
        self._records = False

    def call(
        self, simulation: Simulation, module: nn.Module, name: str, call: Callable[..., Any],
        args: Any, kwargs: Any,
    ) -> tuple[bool, Any]:  # fmt: skip
        """Carry out a call from a recording: whether it has one, and what it returns."""
        number = self._kinds.of.get(id(module))
        if self._records or number is None or self._kinds.counts[number] < 2:
            return False, None
        if not module._modules or "forward" in vars(module) or self._kinds.is_hooked(module):
            return False, None
        if id(module) not in self._kinds.sharded:
            return self._carry_out(simulation, module, number, name, call, args, kwargs)
        plain = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            """The forward below the hooks of FSDP, which gathers parameters."""
            how = (simulation, module, number, name, plain, args, kwargs)
            done, result = self._carry_out(*how)
            return result if done else plain(*args, **kwargs)

        vars(module)["forward"] = forward
        try:
            with simulation.ledger.call(name):
                return True, call(*args, **kwargs)
        finally:
            del vars(module)["forward"]

    def _carry_out(
        self, simulation: Simulation, module: nn.Module, number: int, name: str,
        call: Callable[..., Any], args: Any, kwargs: Any,
    ) -> tuple[bool, Any]:  # fmt: skip
        if not _is_plain():
            return False, None
        try:
            key, tensors = arguments_key(args, kwargs)
        except Unlike:
            return False, None
        key = (number, torch.is_grad_enabled(), key)
        if key not in self._recordings:
            self._recordings[key] = self._record(simulation, module, name, call, args, kwargs)
        recording = self._recordings[key]
        if recording is None:
            return False, None
        self.count += 1
        return True, replayed(simulation, recording, module, name, tensors)

    def check(self, loss: Tensor) -> None:
        """Fail before the backward if it would differ from that of the calls' own nodes."""
        if self.count:
            check_edges(loss)

    def _record(
        self, simulation: Simulation, module: nn.Module, name: str, call: Callable[..., Any],
        args: Any, kwargs: Any,
    ) -> Recording | None:  # fmt: skip
        places = [(m, at) for m in module.modules() for at in self._kinds.places.get(id(m), ())]
        undo = undo_changes([module])
        self._records = True
        try:
            return record(simulation, module, name, call, args, kwargs, places, self._accumulate)
        except Exception:
            # It keeps something, or looks at its number. An error of its own will come again.
            for each in undo:
                each()
        finally:
            self._records = False
        self.is_spoiled = bool(simulation.parts[-1].alive())
        if self.is_spoiled:
            raise Unlike
        return None


def _is_plain() -> bool:
    """Whether nothing but the simulation follows ops, saved tensors and outputs."""
    modes = _get_current_dispatch_mode_stack()
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    hooked = torch.nn.modules.module._has_any_global_hook()
    autocast = any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
    is_top = bool(modes) and isinstance(modes[-1], Simulation)
    return is_top and hooks is None and not (hooked or autocast) and not scope.is_open()
