"""Parameters that FSDP2 has sharded by the time a region is repeated.

FSDP gathers the parameters of a module when the gradient of its output comes, and frees them when
the backward of the module is done. An output that was discarded is needed earlier, in the backward
of its consumers. So a repetition gathers what it reads itself, or waits for it where FSDP does so
already, and leaves it to FSDP to free it. That is the gather that FSDP would do next, not another.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state"
_MAPPING = "torch.distributed._composable_state"


def is_used() -> bool:
    """Whether there may be modules of FSDP2. Its code alone, torch.compile has imported as well."""
    return _STATE in sys.modules and bool(sys.modules[_MAPPING]._module_state_mapping.data)


def states() -> Iterator[Any]:
    """What FSDP keeps of modules, in the order in which they were sharded, that of every rank."""
    if is_used():
        kind = sys.modules[_STATE].FSDPState
        mapping = sys.modules[_MAPPING]._module_state_mapping
        found = dict.fromkeys(reference() for reference in mapping.values())
        yield from (state for state in found if isinstance(state, kind))


def groups(state: Any) -> list[Any]:
    """The groups of parameters of a state that are gathered together."""
    found = getattr(state, "_fsdp_param_groups", None)
    if found is None:  # before torch 2.12
        return [g for g in (state._fsdp_param_group,) if g is not None]
    return list(found)


def _groups() -> Iterator[tuple[Any, Any]]:
    return ((state, group) for state in states() for group in groups(state))


@contextlib.contextmanager
def gathered(read: Iterable[Tensor], lasts: bool) -> Iterator[None]:
    """Have parameters whole in a block.

    Args:
        read: tensors; those that are parameters as FSDP gathers them count.
        lasts: whether a backward pass runs that needs them next, after which FSDP frees them. If
            not, what is whole after the block and was not before is sharded again.
    """
    sharded = [(s, g, g._all_gather_result) for s, g in _groups() if not g.is_unsharded]
    wanted = {id(t if t._base is None else t._base) for t in read}
    failed = True
    try:
        for _, group, _ in sharded if wanted else ():
            if any(id(getattr(p, "_unsharded_param", None)) in wanted for p in group.fsdp_params):
                group.unshard()
                group.wait_for_unshard()
        yield
        failed = False
    finally:
        # Modules of FSDP that were called in the block have gathered theirs by themselves.
        whole = [(s, g, begun) for s, g, begun in sharded if g.is_unsharded]
        if whole and lasts and not failed:
            _leave_to_fsdp([(state, group) for state, group, _ in whole])
        else:
            for _, group, begun in whole:
                if failed or begun is None:
                    group.reshard()


def _leave_to_fsdp(whole: list[tuple[Any, Any]]) -> None:
    states = dict.fromkeys(state for state, _ in whole)
    contexts = {id(s._state_ctx): s._state_ctx for s in states}.values()
    ours = [c for c in contexts if not c.post_backward_final_callback_queued]
    engine: Any = torch.autograd.Variable._execution_engine
    for state in states:
        state._register_root_post_backward_final_callback()
    engine.queue_callback(_GatheredPass([group for _, group in whole], ours))


class _GatheredPass:
    """What a backward pass has gathered; only the pass has a reference.

    It is called when the pass ends, and FSDP does the rest. If it dies before, the pass has failed.
    """

    def __init__(self, groups: list[Any], contexts: list[Any]) -> None:
        self._groups, self._contexts = groups, contexts

    def __call__(self) -> None:
        self._groups, self._contexts = [], []

    def __del__(self) -> None:
        for group in self._groups:
            group.reshard()
        for context in self._contexts:
            context.post_backward_final_callback_queued = False


def lacks_parameters(fn: object) -> bool:
    """Return True if DeepSpeed holds only a part of a parameter of a region's module.

    Such a parameter has an empty `.data`.
    """
    of_method, of_partial = getattr(fn, "__self__", None), getattr(fn, "args", ())
    modules = [m for m in (of_method, *of_partial) if isinstance(m, torch.nn.Module)]
    found = (p for module in modules for p in module.parameters())
    return any(hasattr(p, "ds_status") and p.numel() == 0 for p in found)


def is_parameter(value: object) -> bool:
    """Return True if a value is a parameter or a view of one."""
    base = value._base if isinstance(value, Tensor) else None
    return isinstance(value if base is None else base, torch.nn.Parameter)
