"""Gathers parameters that FSDP2 has sharded again, before a region is repeated.

FSDP gathers the parameters of a module when the gradient of its output comes, and frees them when
the backward of the module is done. A discarded output is needed earlier, in the backward of its
consumers. So a repetition gathers the parameters that it reads, or waits if FSDP is already
gathering them. FSDP frees them afterwards. The gather replaces FSDP's next one, so no parameter is
gathered twice.
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
    """Return True if FSDP2 may be in use.

    Checking `sys.modules` is not enough, because torch.compile imports FSDP2, too.
    """
    return _STATE in sys.modules and bool(sys.modules[_MAPPING]._module_state_mapping.data)


def states() -> Iterator[Any]:
    """Yield FSDP's state of each module, in the order of sharding, which all ranks share."""
    if is_used():
        kind = sys.modules[_STATE].FSDPState
        mapping = sys.modules[_MAPPING]._module_state_mapping
        all_states = dict.fromkeys(reference() for reference in mapping.values())
        yield from (state for state in all_states if isinstance(state, kind))


def groups(state: Any) -> list[Any]:
    """Return the groups of parameters of a state that are gathered together."""
    param_groups = getattr(state, "_fsdp_param_groups", None)
    if param_groups is None:  # before torch 2.12
        return [g for g in (state._fsdp_param_group,) if g is not None]
    return list(param_groups)


def _groups() -> Iterator[tuple[Any, Any]]:
    return ((state, group) for state in states() for group in groups(state))


@contextlib.contextmanager
def gathered(tensors: Iterable[Tensor], lasts: bool) -> Iterator[None]:
    """Gather parameters for a block.

    Args:
        tensors: only those that are parameters of FSDP are gathered.
        lasts: whether a running backward pass needs the parameters next, after which FSDP frees
            them. If not, parameters that this block gathered are sharded again after it.
    """
    sharded = [(s, g, g._all_gather_result) for s, g in _groups() if not g.is_unsharded]
    ids = {id(t if t._base is None else t._base) for t in tensors}
    failed = True
    try:
        for _, group, _ in sharded if ids else ():
            if any(id(getattr(p, "_unsharded_param", None)) in ids for p in group.fsdp_params):
                group.unshard()
                group.wait_for_unshard()
        yield
        failed = False
    finally:
        # Modules of FSDP that were called in the block have gathered their parameters.
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
    """The parameters that a backward pass has gathered. Only the pass has a reference to them.

    It is called when the pass ends, and FSDP frees the parameters. If it is deleted before that,
    the pass has failed.
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

    The local part of such a parameter, `.data`, is empty.
    """
    of_method, of_partial = getattr(fn, "__self__", None), getattr(fn, "args", ())
    modules = [m for m in (of_method, *of_partial) if isinstance(m, torch.nn.Module)]
    parameters = (p for module in modules for p in module.parameters())
    return any(hasattr(p, "ds_status") and p.numel() == 0 for p in parameters)


def is_parameter(value: object) -> bool:
    """Return True if a value is a parameter or a view of one."""
    base = value._base if isinstance(value, Tensor) else None
    return isinstance(value if base is None else base, torch.nn.Parameter)
