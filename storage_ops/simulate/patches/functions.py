"""Functions of torch in a simulation that are not ops, or that differ on the meta device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map

from storage_ops.simulate.mode import Simulation
from storage_ops.simulate.patches.packed import OF_PACKED, call_packed
from storage_ops.simulate.patches.prods import OF_EXTREMA, OF_PRODS, call_extremum, call_prod
from storage_ops.simulate.values.wrappers import is_wrapper

_DATA: Any = Tensor.data
_REQUIRES_GRAD: Any = Tensor.requires_grad
_GRAD: Any = Tensor.grad
# Functions that change a tensor from outside without an op.
_OF_LEAVES = {
    Tensor.requires_grad_, _REQUIRES_GRAD.__set__, _GRAD.__set__, Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
}  # fmt: skip


# On the meta device these functions drop their numbers.
_OF_NUMBERS: set[object] = {torch.tensor, torch.as_tensor, Tensor.new_tensor}
# These functions read lengths that are no tensors, without an op.
_CTC: set[object] = {F.ctc_loss, torch.ctc_loss}


class Functions(TorchFunctionMode):
    """Lets `t.data = value` replace the memory of twins, not of the tensors themselves.

    It also records the state of tensors before their flags, gradients or hooks change, and provides
    the values for `tolist`. For tensors on the meta device it raises an error if autocast would
    have no effect, and creates the sparse tensors of SparseAdam.
    """

    def __init__(self, simulation: Simulation, on_meta: bool) -> None:
        super().__init__()
        self._simulation, self._on_meta = simulation, on_meta

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _OF_LEAVES and self._simulation.twins.is_from_outside(args[0]):
            self._simulation.twins.note_leaf(args[0])
        if func == _DATA.__set__ and self._simulation.twins.is_from_outside(args[0]):
            return self._simulation.twins.exchange(*args)
        if func == _DATA.__get__ and self._simulation.twins.is_exchanged(args[0]):
            return args[0].detach()
        if func is Tensor.tolist and not is_wrapper(args[0]):
            return self._simulation.listed(args[0])
        if func in OF_PACKED:
            return call_packed(self._simulation, func, args)
        if func in OF_PRODS:
            return call_prod(func, args, kwargs or {})
        if func in OF_EXTREMA:
            return call_extremum(func, args, kwargs or {})
        if func in _CTC:
            args, kwargs = _with_tensors_of_lengths(args, kwargs or {})
        if self._on_meta and torch.is_autocast_enabled("cpu"):
            raise RuntimeError(
                "estimate: the simulated code uses torch.autocast('cpu'), which does nothing to "
                "tensors on the meta device. Expected parameters and arguments on the CPU."
            )
        if (
            self._on_meta
            and func is Tensor.new
            and args[0].layout == torch.sparse_coo
            and len(args) > 1
        ):
            return torch.sparse_coo_tensor(*args[1:])
        if func in (torch.tensor, torch.as_tensor):
            args, kwargs = _with_numbers(self._simulation, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if func in _OF_NUMBERS and result.is_meta:
            place = 1 if func is Tensor.new_tensor else 0
            data = args[place] if len(args) > place else (kwargs or {}).get("data")
            _offer_numbers(self._simulation, result, data)
        return result


def _offer_numbers(simulation: Simulation, t: Tensor, data: Any) -> None:
    """Let the simulation read the numbers from which a meta tensor was created."""
    if any(isinstance(leaf, Tensor) for leaf in tree_leaves(data)):
        return
    with no_dispatch(), torch._C.DisableTorchFunction():
        numbers = torch.tensor(data, dtype=t.dtype, device="cpu")
    simulation.values.offer(simulation.twins.of(t), numbers)


def _with_numbers(
    simulation: Simulation, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `torch.tensor` with numbers for the tensors of a list.

    torch reads such tensors without an op.
    """
    data = args[0] if args else None
    leaves = tree_leaves(data)
    if isinstance(data, Tensor) or not leaves or not all(isinstance(t, Tensor) for t in leaves):
        return args, kwargs
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in leaves))
    return (tree_map(simulation.listed, data), *args[1:]), {"dtype": dtype, **kwargs}


def _with_tensors_of_lengths(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `ctc_loss` with lengths as tensors, which it reads by an op."""

    def as_tensor(lengths: object) -> Tensor:
        return lengths if isinstance(lengths, Tensor) else torch.tensor(lengths)

    names = ("input_lengths", "target_lengths")
    named = {key: as_tensor(v) if key in names else v for key, v in kwargs.items()}
    return (*args[:2], *map(as_tensor, args[2:4]), *args[4:]), named


@contextlib.contextmanager
def autocast_off_on_meta() -> Iterator[None]:
    """Let `torch.autocast("meta", enabled=False)` do nothing in a with block.

    Without this, torch raises an error. Rotary embeddings of transformers 4 turn autocast off for
    the device of their input.
    """
    kind: Any = torch.autocast
    plain = kind.__init__

    def __init__(
        self: torch.autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        known = "cpu" if device_type == "meta" and not enabled else device_type
        plain(self, known, dtype, enabled, cache_enabled)

    kind.__init__ = __init__
    try:
        yield
    finally:
        kind.__init__ = plain


@contextlib.contextmanager
def distributions_unchecked() -> Iterator[None]:
    """Turn off the checks of `torch.distributions` for argument values in a with block."""
    kind: Any = torch.distributions.Distribution
    before = kind._validate_args
    kind._validate_args = False
    try:
        yield
    finally:
        kind._validate_args = before
