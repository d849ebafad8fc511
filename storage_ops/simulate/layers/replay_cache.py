"""Simulates the first call of each kind of module, and replays the other calls."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from storage_ops.checkpoint.discard import scope
from storage_ops.checkpoint.state.unchanged import undo_changes
from storage_ops.foundation.autocast import autocast_dtypes
from storage_ops.foundation.ledger import Block, Ledger
from storage_ops.foundation.ops import Args, Kwargs
from storage_ops.simulate.layers.key_value_caches import Caches
from storage_ops.simulate.layers.recording import Recording, record
from storage_ops.simulate.layers.replay import check_graph, replayed
from storage_ops.simulate.layers.variants import Variants
from storage_ops.simulate.mode import Simulation
from storage_ops.simulate.module_kinds import Kinds, ModuleKind, NotComparable, arguments_key


class Quick:
    """Wraps the calls of a model's modules in a simulation.

    Attributes:
        count: how many calls were replayed.
        is_spoiled: whether a failed recording left tensors behind, or a layer has changed values
            that it reads. Both make this run useless.
    """

    def __init__(
        self, model: nn.Module, accumulate: bool, refused: Collection[nn.Module] = ()
    ) -> None:
        """Start without recordings.

        Args:
            model: the model.
            accumulate: whether parameters have gradients, to which backwards add.
            refused: modules whose calls are not replayed.
        """
        self.count, self._accumulate, self.is_spoiled = 0, accumulate, False
        self._refused = refused
        self._replays: Counter[nn.Module] = Counter()  # replays with a backward
        self._shared: set[Block | None] = set()  # of inputs and results of replays
        self._kinds = Kinds(model)
        self._recordings = Variants[Recording]()
        self._records = False

    def call(
        self, simulation: Simulation, module: nn.Module, name: str, call: Callable[..., Any],
        args: Args, kwargs: Kwargs,
    ) -> tuple[bool, Any]:  # fmt: skip
        """Replay a call if it has a recording. Return whether it does, and the result."""
        kind = self._kinds.of.get(id(module))
        if self._records or kind is None or not kind.can_be_replayed or module in self._refused:
            return False, None
        if len(kind.group.members) < 2:
            return False, None
        if not module._modules or "forward" in vars(module) or self._kinds.is_hooked(module):
            return False, None
        if not self._kinds.is_current(module):
            return False, None
        if id(module) not in self._kinds.sharded:
            return self._carry_out(simulation, module, kind, name, call, args, kwargs)
        plain = module.forward

        def forward(*args: object, **kwargs: object) -> Any:
            """Run the forward inside the hooks of FSDP, which gathers parameters."""
            call_parts = (simulation, module, kind, name, plain, args, kwargs)
            done, result = self._carry_out(*call_parts)
            return result if done else plain(*args, **kwargs)

        vars(module)["forward"] = forward
        try:
            with simulation.ledger.call(name):
                return True, call(*args, **kwargs)
        finally:
            del vars(module)["forward"]

    def _carry_out(
        self, simulation: Simulation, module: nn.Module, kind: ModuleKind, name: str,
        call: Callable[..., Any], args: Args, kwargs: Kwargs,
    ) -> tuple[bool, Any]:  # fmt: skip
        if not _is_plain():
            return False, None
        try:
            caches = Caches(module, args, kwargs)
            key, tensors = arguments_key(*caches.arguments(), simulation.identity)
        except NotComparable:
            return False, None
        key = (torch.is_grad_enabled(), autocast_dtypes(), key, caches.key)
        known = self._recordings.find(kind, key, simulation)
        if known is None:
            if self._recordings.is_alone(kind, key, simulation):
                return False, None
            known = self._recordings.run(
                kind,
                key,
                simulation,
                lambda _: self._record(simulation, module, kind, name, call, caches),
            )
            left = any(s.nbytes() for part in simulation.parts for s in part.alive())
            self.is_spoiled = left or self._recordings.have_written
            if self.is_spoiled:
                raise NotComparable
        _, recording = known
        if recording is None:
            return False, None
        self.count += 1
        self._replays[module] += recording.needs_grad
        result, changes = replayed(simulation, recording, module, name, tensors)
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._shared.update(map(simulation.ledger.block_of, (*tensors, *results)))
        caches.change(changes)
        return True, result

    def check(self, loss: Tensor, ledger: Ledger) -> None:
        """Raise an error before a backward that would differ from that of the calls' own nodes."""
        self.check_discards(ledger)
        if self.count:
            check_graph(loss, self._replays)

    def check_discards(self, ledger: Ledger) -> None:
        """Raise `NotComparable` if an input or a result of a replayed call was discarded.

        Code that discards looks for the tensors that saved it, which a replay does not have.
        """
        if not self._shared.isdisjoint(ledger.discarded):
            raise NotComparable

    def _record(
        self, simulation: Simulation, module: nn.Module, kind: ModuleKind, name: str,
        call: Callable[..., Any], caches: Caches,
    ) -> Recording:  # fmt: skip
        undo = undo_changes([module])
        self._records = True
        try:
            stand_ins = caches.stand_ins()
            args, kwargs = caches.arguments(stand_ins)
            recording = record(
                simulation, module, name, call, args, kwargs, stand_ins, self._accumulate
            )
            with _own_forward(module):
                if not self._kinds.is_current(module):
                    raise NotComparable  # a replay would not change the module
            return recording
        except Exception as error:
            for restore in undo:
                restore()
            if kind.group.watched:
                raise  # perhaps an error about a watched value
            raise NotComparable from error  # an error of the layer itself will be raised again
        finally:
            self._records = False


@contextlib.contextmanager
def _own_forward(module: nn.Module) -> Iterator[None]:
    """Remove the forward that `Quick.call` has set on a module of FSDP inside a with block."""
    forward = vars(module).pop("forward", None)
    try:
        yield
    finally:
        if forward is not None:
            vars(module)["forward"] = forward


def _is_plain() -> bool:
    """Return True if only the simulation observes ops, saved tensors and outputs."""
    modes = _get_current_dispatch_mode_stack()
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    hooked = torch.nn.modules.module._has_any_global_hook()
    is_top = bool(modes) and isinstance(modes[-1], Simulation)
    return is_top and hooks is None and not hooked and not scope.is_open()
