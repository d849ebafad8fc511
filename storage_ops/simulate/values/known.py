"""The values that a simulation knows: those of small tensors that determine sizes.

The values of integers, booleans and single floating-point numbers are followed if they come from
real tensors, constants and factories. So are short floating-point tensors such as masks, except for
parameters. Results of known values alone are computed, so they are known, too. Floating-point
numbers in memory that was not written, such as in `torch.empty`, are unknown.

Activations, and values computed from them, are unknown unless the caller makes an assumption. Then
conditions (`x > 0`) and choices (`topk`) get values that match it. Values that follow from these,
such as the counts of an expert and their sum, are consistent. Numbers are assumed to be finite.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map_only

from storage_ops._op_arguments import tensors_in, with_tensors
from storage_ops.foundation.op_names import Overload, is_allocation
from storage_ops.foundation.ops import Args, Kwargs
from storage_ops.simulate.values.assume import Assumption, Source, name_of
from storage_ops.simulate.values.supposed import (
    CHOICES,
    along,
    choices,
    of_finite_numbers,
    some_true,
)
from storage_ops.simulate.values.wrappers import is_wrapper

_aten = torch.ops.aten
# Tensors with more elements or bytes are not followed. The limit allows one-hot choices of 8 among
# 128 experts for 32768 tokens.
_LIMIT = 256 << 20
_SHORT = 16 << 20  # most bytes of floating-point data and constants that are followed
# Ops whose result does not depend on earlier values of the tensor that they write to.
_OVERWRITING = {
    _aten.copy_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default
}  # fmt: skip


@dataclass(frozen=True)
class Known:
    """The values of a tensor, without the tensor. Objects with equal values are equal.

    Attributes:
        digest: a digest of the values, or "" if they are unknown.
        elements: the elements in memory order, from the first to the last, or None if unknown.
        source: the op that made them unknown.
    """

    digest: str
    elements: Tensor | None = field(compare=False, repr=False)
    source: Source | None = field(compare=False, repr=False)

    @staticmethod
    def of(real: Tensor | None, last: int, source: Source | None) -> Known:
        """Return the values of a real tensor.

        `last` is the distance from its first to its last element.
        """
        if real is None:
            return Known("", None, source)
        with no_dispatch(), torch.no_grad():
            elements = real.as_strided((last + 1,), (1,), real.storage_offset()).clone()
            content: Any = elements.view(torch.uint8).numpy()
        return Known(hashlib.blake2b(content, digest_size=16).hexdigest(), elements, None)


def _digest(t: Tensor) -> str:
    """Return a digest of the values of a real tensor, or "" if a simulation does not follow it."""
    if not _is_followed(t) or t.numel() == 0:
        return ""
    with no_dispatch(), torch.no_grad():
        return Known.of(t.cpu().contiguous(), t.numel() - 1, None).digest


# Ops whose integer results depend only on integers.
_PACKS = _aten._pack_padded_sequence.default


class Values:
    """The known bytes of each storage. For other storages, the op that made them unknown.

    Attributes:
        reads: how often a value was read that may determine a size.
    """

    def __init__(self, assumption: Assumption) -> None:
        self.reads = 0
        self._is_off = False
        self._assumption = assumption
        self._bytes: dict[int, Tensor] = {}
        # Functions that compute bytes that were not needed yet.
        self._later: dict[int, Callable[[], Tensor]] = {}
        self._sources: dict[int, Source] = {}
        self._known: dict[int, dict[Any, Known]] = {}
        self._writes: Counter[int] = Counter()  # how often each storage was written to
        self._digests: dict[int, tuple[Tensor, str]] = {}  # of tensors from outside, by their ids
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @contextlib.contextmanager
    def unfollowed(self) -> Iterator[None]:
        """Follow no results in a with block, such as those of a kernel that determine no sizes."""
        self._is_off, before = True, self._is_off
        try:
            yield
        finally:
            self._is_off = before

    def offer(self, twin: Tensor, real: Tensor) -> None:
        """Use the values of a real tensor for its twin if they are needed."""
        if not _is_real(real):
            return
        is_data = _is_short(real) and not real.requires_grad and not isinstance(real, nn.Parameter)
        # The caller's assumption overrides data.
        if not _is_followed(real) and not (is_data and self._assumption.is_empty):
            return

        def copied() -> Tensor:
            storage = real.untyped_storage()
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            return torch.empty_like(whole, device="cpu").copy_(whole)

        key = self._key(twin)
        if key not in self._bytes:
            self._later[key] = copied

    def imitate(self, new: Tensor, t: Tensor) -> None:
        """Copy the values of a followed tensor to a fake tensor with a new storage."""
        if not _is_followed(t):
            return
        real = self._read(t)
        if real is not None:
            self._know(new, partial(_same, real.clone()))
        elif t.untyped_storage()._cdata in self._sources:
            self._sources[self._key(new)] = self._sources[t.untyped_storage()._cdata]

    def identity(self, parts: Sequence[Tensor]) -> Hashable:
        """Return what identifies the present values of tensors, or None if none are known.

        Values of a tensor that `imitate` does not copy are not identified. Tensors with different
        storages have different identities, also if their values are equal.
        """
        # References to storages and not their keys, because a later storage can get the same key.
        known = [
            (weakref.ref(part.untyped_storage()), self._writes[_key_of(part)])
            for part in parts
            if _is_strided(part) and _is_followed(part) and (_is_real(part) or self.knows(part))
        ]
        return tuple(known) or None

    def digest(self, t: Tensor) -> str:
        """Return a digest of the present values of a tensor.

        It is "" if its values are not known, or if it is larger than sizes and masks.

        Args:
            t: a fake tensor, or a tensor from outside that no op has used.
        """
        if is_wrapper(t) or not _is_strided(t) or t.untyped_storage().nbytes() > _SHORT:
            return ""
        if not _is_real(t):
            known = self.known(t)
            return "" if known is None else known.digest
        if id(t) not in self._digests:
            self._digests[id(t)] = t, _digest(t)
        return self._digests[id(t)][1]

    def read(self, t: Tensor) -> Tensor | None:
        """Return the values of a fake tensor, or None. Later writes change the result."""
        self.reads += 1
        return self._read(t)

    def _read(self, t: Tensor) -> Tensor | None:
        if not self.knows(t):
            return None
        key = _key_of(t)
        with no_dispatch(), torch.no_grad():
            if key in self._later:
                self._bytes[key] = self._later.pop(key)()
            return _view(self._bytes[key], t.dtype, t.shape, t.stride(), t.storage_offset())

    def knows(self, t: object) -> bool:
        """Return True if the values of a fake tensor are known."""
        if not _is_strided(t) or t.numel() > _LIMIT:
            return False
        key = _key_of(t)
        return key in self._bytes or key in self._later

    def _knows_all(self, args: object) -> bool:
        return all(map(self.knows, tensors_in(args)))

    def known(self, t: Tensor) -> Known | None:
        """Return the values of a fake tensor for use by others. None if it is not followed."""
        is_followed = _is_strided(t) and (_is_followed(t) or (_is_short(t) and self.knows(t)))
        if not is_followed or t.numel() == 0:
            return None
        last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
        place = (self._writes[_key_of(t)], int(t.storage_offset()), last, t.dtype)
        numbers = self._known.setdefault(self._key(t), {})
        if place not in numbers:
            numbers[place] = Known.of(self._read(t), last, self.source(t))
        return numbers[place]

    def assign(self, new: Tensor, known: Known) -> None:
        """Assign the values of another tensor to a fake tensor at the start of a new storage.

        Unknown values stay unknown.
        """
        key, elements = self._key(new), known.elements
        self._drop([new])
        if elements is None:
            if known.source is not None:
                self._sources[key] = known.source
            return
        size = new.untyped_storage().nbytes()

        def made() -> Tensor:
            whole = torch.zeros(size, dtype=torch.uint8)
            whole[: elements.nbytes].copy_(elements.view(torch.uint8))
            return whole

        self._later[key] = made

    def source(self, args: object) -> Source | None:
        """Return the op that made one of these values unknown."""
        for t in tensors_in(args):
            if _is_strided(t) and not self.knows(t):
                return self._sources.get(_key_of(t))
        return None

    def compute(self, func: Overload, args: Args, kwargs: Kwargs, any_numbers: bool = False) -> Any:
        """Run an op on known values. Return None if some values are unknown.

        Args:
            func, args, kwargs: the op and its arguments.
            any_numbers: whether unknown floating-point numbers may have arbitrary values.
        """
        self.reads += 1
        return self._compute(func, args, kwargs, any_numbers)

    def _compute(self, func: Overload, args: Args, kwargs: Kwargs, any_numbers: bool) -> Any:
        inputs = tensors_in((args, kwargs))
        known = {}
        for t in inputs:
            known[id(t)] = self._read(t)
            if known[id(t)] is None and any_numbers and t.is_floating_point():
                with no_dispatch():
                    # Different numbers give a matrix full rank. A separate generator leaves the
                    # program's random numbers unchanged.
                    some = torch.rand(t.shape[-2:], dtype=t.dtype, generator=torch.Generator())
                    known[id(t)] = some.expand(t.shape)
            if known[id(t)] is None:
                return None
        cpu = torch.device("cpu")
        with no_dispatch(), torch.no_grad(), _private_random_numbers(func):
            args, kwargs = with_tensors(lambda t: known[id(t)], (args, kwargs))
            args, kwargs = tree_map_only(torch.device, lambda _: cpu, (args, kwargs))
            # GPUs support integers.
            if name_of(func) == "histc" and not args[0].is_floating_point():
                return func(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)
            try:
                return func(*args, **kwargs)
            except (RuntimeError, IndexError):  # the CPU has no such kernel
                return None

    def follow(self, func: Overload, args: Args, kwargs: Kwargs, out: object) -> None:
        """Record the effect of an op on values after it ran on fake tensors."""
        if func is _aten._amp_foreach_non_finite_check_and_unscale_.default:
            return  # found_inf stays 0.0, because numbers are finite
        if is_allocation(func):  # numbers stay unknown, as those of activations
            if _is_strided(out) and _is_followed(out):
                self._know_zeros(out)  # as each run would read other bytes
            return
        targets = list(_written(func, args, kwargs))
        self._writes.update(map(self._key, targets))
        if self._is_off:
            self._drop(targets)
            return
        if func in _OVERWRITING and any(map(_is_whole, targets)) and self._knows_all(args[1:]):
            self._know_zeros(targets[0])
        results = [t for t in tensors_in(out) if _is_strided(t) and _is_followed(t)]
        if not results and not any(map(_is_followed, targets)):
            self._follow_numbers(func, args, kwargs, out, targets)
            return
        input_keys = {_key_of(t) for t in tensors_in((args, kwargs)) if _is_strided(t)}
        outputs = [
            (i, leaf)
            for i, leaf in enumerate(tree_leaves(out))
            if _is_strided(leaf) and _key_of(leaf) not in input_keys and _is_followed(leaf)
        ]
        if not outputs and not any(map(_is_followed, targets)):
            return  # a view
        real = self._compute(func, args, kwargs, func is _PACKS)
        if real is not None:
            computed = tree_leaves(real)
            for i, leaf in outputs:
                self._know(leaf, partial(_same, computed[i]))
            return
        cause = self.source((args, kwargs))
        for t in targets:
            if _is_followed(t):
                self._is_unknown(func, t, "value", cause)
        self._drop(targets)
        for _, leaf in outputs:
            self._suppose(func, args, kwargs, leaf, cause)

    def _drop(self, written: list[Tensor]) -> None:
        """Forget the values of tensors that have got unknown ones."""
        for t in written:
            self._bytes.pop(_key_of(t), None)
            self._later.pop(_key_of(t), None)

    def _know_zeros(self, t: Tensor) -> None:
        self._know(t, partial(torch.zeros, t.shape, dtype=t.dtype))

    def _follow_numbers(
        self, func: Overload, args: Args, kwargs: Kwargs, out: object, written: list[Tensor]
    ) -> None:  # fmt: skip
        """Record the effect of an op on short data and constants, such as one that makes a mask."""
        inputs = tensors_in((args, kwargs))
        real = None
        if torch.Tag.nondeterministic_seeded not in func.tags and self._knows_all(inputs):
            keys = {_key_of(t) for t in inputs}
            results = [
                (i, leaf)
                for i, leaf in enumerate(tree_leaves(out))
                if _is_strided(leaf) and _is_short(leaf) and _key_of(leaf) not in keys
            ]
            if results or written:
                real = self._compute(func, args, kwargs, False)
            computed = tree_leaves(real)
            for i, leaf in results if real is not None else ():
                self._know(leaf, partial(_same, computed[i]))
        if real is None:
            self._drop(written)

    def _know(self, t: Tensor, value: Callable[[], Tensor]) -> None:
        """Compute the values of a fake tensor with a new storage when they are needed."""
        size = t.untyped_storage().nbytes()
        dtype, shape, stride, offset = t.dtype, t.shape, t.stride(), t.storage_offset()

        def made() -> Tensor:
            whole = torch.zeros(size, dtype=torch.uint8)
            numbers = value()
            for dim, (n, step) in enumerate(zip(shape, stride, strict=True)):
                once = 1 if step == 0 else n  # expanded elements exist once
                numbers = numbers.narrow(dim, 0, min(once, numbers.shape[dim]))
            _view(whole, dtype, numbers.shape, stride, offset).copy_(numbers)
            return whole

        self._later[self._key(t)] = made

    def _suppose(
        self, func: Overload, args: Args, kwargs: Kwargs, t: Tensor, cause: Source | None
    ) -> None:
        """Assume values of a tensor that depends on unknown values."""
        name = name_of(func)
        is_integer = not t.dtype.is_floating_point and not t.dtype.is_complex
        if t.dtype == torch.bool:
            kind = "condition"
        else:
            kind = "choice" if name in CHOICES and is_integer else "value"
        self._is_unknown(func, t, kind, cause)
        if kind == "value" or t.numel() == 0:
            return
        finite = of_finite_numbers(func, args) if kind == "condition" else None
        if finite is not None:
            count: int | None = int(finite) * t.numel()
        else:
            count = self._assumption.count(Source.here(func, kind), t.numel())
        if count is None:
            return
        if kind == "condition":
            self._know(t, partial(some_true, t.shape, count))
        else:
            dim = along(name, args, kwargs)
            self._know(t, partial(choices, dim, args[0].shape, t.shape, count))

    def _is_unknown(self, func: Overload, t: Tensor, kind: str, cause: Source | None) -> None:
        """Record the op to name in an error if the values of a tensor are needed.

        `cause`: the op that made values among the arguments of `func` unknown, if any.
        """
        if cause is None or cause.kind == "value":
            cause = Source.here(func, kind)
        self._sources[self._key(t)] = cause

    def _key(self, t: Tensor) -> int:
        """Return the key of a storage. Its entries are removed with the storage."""
        storage, key = t.untyped_storage(), _key_of(t)
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, partial(self._gone, key))
        return key

    def _gone(self, key: int, reference: object) -> None:
        for table in (
            self._bytes,
            self._later,
            self._sources,
            self._known,
            self._alive,
            self._writes,
        ):
            table.pop(key, None)


def _key_of(t: Tensor) -> int:
    key: int = t.untyped_storage()._cdata
    return key


def _is_real(t: Tensor) -> bool:
    return not (t.is_meta or isinstance(t, FakeTensor))


def _is_strided(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.layout == torch.strided


def _is_followed(t: Tensor) -> bool:
    if t.dtype.is_floating_point or t.dtype.is_complex:
        return t.untyped_storage().nbytes() == t.itemsize
    return t.untyped_storage().nbytes() <= _LIMIT


def _is_short(t: Tensor) -> bool:
    """Return True for floating-point tensors of the size of masks and small data."""
    return t.is_floating_point() and _is_strided(t) and t.untyped_storage().nbytes() <= _SHORT


def _is_whole(t: Tensor) -> bool:
    """Return True if a tensor that may be followed contains each element of its storage once."""
    is_small = _is_followed(t) or _is_short(t)
    return is_small and t.numel() * t.itemsize == t.untyped_storage().nbytes()


def _written(func: Overload, args: Args, kwargs: Kwargs) -> Iterator[Tensor]:
    """Yield the tensors that an op writes to."""
    for i, name in _places_written(func):
        value = args[i] if i < len(args) else kwargs.get(name)
        yield from filter(_is_strided, tensors_in(value))


@functools.cache
def _places_written(func: Overload) -> list[tuple[int, str]]:
    arguments = enumerate(func._schema.arguments)
    return [(i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]


@contextlib.contextmanager
def _private_random_numbers(func: Overload) -> Iterator[None]:
    """Let an op draw the same random numbers every time. Restore the generator afterwards."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        yield


def _same(value: Tensor) -> Tensor:
    return value


def _view(
    whole: Tensor,
    dtype: torch.dtype,
    shape: Sequence[int],
    stride: Sequence[int],
    offset: int | torch.SymInt,
) -> Tensor:
    """Return a view of bytes."""
    elements = whole[: len(whole) // dtype.itemsize * dtype.itemsize].view(dtype)
    return elements.as_strided(shape, stride, offset)
