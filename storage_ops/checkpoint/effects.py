"""What a region changes besides what it returns, undone for its recompute and put back after it.

Three kinds of places are looked after, wherever a region reaches them:

- bytes: buffers, and other tensors without a gradient that are attributes, also of objects that are
  given, or captured;
- names: the parameters and buffers of modules, tensors and tuples of them that are attributes,
  tensors and modules in variables that its code reads;
- all that objects have that are given as arguments, such as a cache of keys and values, and the
  contents of lists, dictionaries, sets and deques in them. (Containers that are given themselves
  are made anew for the recompute.)

A recompute finds in them what the forward found, and when it ends they hold what they held when it
began. So what a forward does to them happens once, however often it is recomputed, and what is
exchanged between forward and backward (`functional_call`, the variable of a loop) is used as the
forward had it.

Names and contents cost references. Bytes have to be copied before it is known whether they will be
written. Small tensors are copied at each forward: not every write moves a version counter (those of
batch norm and of `.data` do not). A larger buffer is copied until a forward has left it alone, and
from the first forward on that writes it after that. What was not copied and is written all the
same, parameters and what is larger still, cannot be repeated, and the recompute says so. Only an
embedding with `max_norm` may write its weight: the recompute leaves that out (`repeated_writes`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.jit import ScriptModule
from torch.nn.modules.batchnorm import _NormBase

from storage_ops.checkpoint.containers import MISSING, Undo, copy_of, has, put, set_item
from storage_ops.checkpoint.makers import maker_of
from storage_ops.checkpoint.reachable import MAPPINGS, Surroundings, is_of_torch
from storage_ops.checkpoint.repeated_writes import RepeatedWrites, fail_parameter
from storage_ops.checkpoint.saved import fail, set_versions
from storage_ops.checkpoint.uses import Use

if TYPE_CHECKING:
    from storage_ops.checkpoint.region import Region

_SMALL = 256 << 10  # bytes of a tensor that is copied at every forward
_LARGE = 64 << 20  # of one that is never copied
_MANY = 4096  # items of a container beyond which it is data
_COPIED = (Tensor, nn.Parameter, nn.Buffer)

# Whether larger buffers are left alone, by their names and whether the module is in training.
_quiet: weakref.WeakKeyDictionary[nn.Module, dict[tuple[str, bool], bool]]
_quiet = weakref.WeakKeyDictionary()


class Effects:
    """What can change in the surroundings of one call, as it is before the call."""

    def __init__(self, around: Surroundings) -> None:
        """Look, and copy what may be written; `finish` when the forward has run."""
        self._names = [(place, name, _named(value)) for place, name, value in around.names]
        self._contents = [(c, copy_of(c)) for c in around.given if len(c) <= _MANY]
        self._attributes = [(held, dict(held)) for held in around.attributes]
        self._slots: list[tuple[dict[str, Any], str, Tensor, int]] = []
        for module in around.modules:
            parameters, buffers = _named_tensors(module)
            for name, t in parameters.items():
                if t is not None and not isinstance(t, nn.UninitializedParameter):
                    version = -1 if t.is_inference() else t._version
                    self._slots.append((parameters, name, t, version))
            if buffers:
                self._attributes.append((buffers, dict(buffers)))
                self._slots += [(buffers, n, b, -1) for n, b in buffers.items() if b is not None]
        self._bytes = list(_bytes(around))
        self._unkept: list[_Bytes] = []
        self._written: list[tuple[Tensor, int]] = []  # parameters, and their versions before
        self._uncopied: list[tuple[weakref.ref[Tensor], int]] = []
        self._running = True

    def finish(self) -> None:
        """Let go of what the forward has left alone."""
        self._running = False
        changes = [(held, _changed(before, held)) for held, before in self._attributes]
        # Without their graphs, which hold what the region before has kept, and that the one before.
        self._attributes = [
            (held, {name: _without_graph(value) for name, value in changed.items()})
            for held, changed in changes
            if changed
        ]
        self._written = self._find_written()
        if self._written:
            self._slots = [(held, n, t, min(v, 0) or t._version) for held, n, t, v in self._slots]
        kept = []
        for each in self._bytes:
            each.finish()
            if each.before is not None:
                kept.append(each)
            elif each.after != each.version:
                self._unkept.append(each)
            else:
                self._uncopied.append((weakref.ref(each.tensor), each.after))
        self._bytes = kept

    def _find_written(self) -> list[tuple[Tensor, int]]:
        """Return the parameters that the forward has written so far, and their versions before."""
        written = {id(t): (t, v) for _, _, t, v in self._slots if v >= 0 and t._version != v}
        return list(written.values())

    def check(self, region: str) -> None:
        """Raise if the forward has written what was not copied."""
        for each in self._unkept:
            t = each.tensor
            advice = f"expected a buffer of at most {_LARGE >> 20} MiB, which is copied"
            if each.key is not None and t.nbytes <= _LARGE:
                advice = "expected a write from the first forward on; it is copied from the next on"
            fail(
                f"{region} itself modifies a tensor of shape {tuple(t.shape)} in place, of which "
                f"no copy is kept for the recompute; {advice}. Or make a new tensor in place of "
                "the write, or write outside of the region"
            )

    def without_repeated_writes(self, region: str, checks: bool) -> Any:
        """Return what is active in a recompute, so that it writes no parameter again.

        Args:
            region: its name in errors.
            checks: whether to raise where the recompute would read other contents.

        Raises:
            RuntimeError: a parameter was written more than once, or again since the forward.
        """
        written = self._find_written() if self._running else self._written
        uncopied = [(t, version) for ref, version in self._uncopied if (t := ref()) is not None]
        changed = [t for t, version in uncopied if t._version != version]
        if not written and not changed:
            return contextlib.nullcontext()
        for t, version in written:
            if checks and t._version != version + 1:
                fail_parameter(region, t)
        return RepeatedWrites(region, [t for t, _ in written], changed, checks)

    def modified(self) -> list[Tensor]:
        """The parameters that were modified in place since the forward."""
        return [t for _, _, t, v in self._slots if 0 <= v != t._version]

    def exchanged(self) -> list[Tensor]:
        """The parameters and buffers that are not in their places any more."""
        return [t for held, name, t, _ in self._slots if held.get(name) is not t]

    def restore(self, undo: Undo) -> None:
        """Make all what it was before the forward; `undo` gets what puts back what is now."""
        for place, name, value in self._names:
            if not isinstance(value, _Output):
                _set_name(place, name, value, undo)
            elif not value.is_in(place, name):
                _set_name(place, name, value.read(), undo)
        for held, name, t, _ in self._slots:
            now = held.get(name)
            if now is t or now is None:
                continue
            # Not if it is in another layout: sharded, or gathered, by who looks after that.
            if getattr(now, "_spec", None) == getattr(t, "_spec", None):
                set_item(held, name, t, undo)
        for held, before in self._attributes:
            changed = _changed(before, held) if self._running else before
            for name, value in changed.items():
                set_item(held, name, value, undo)
        for container, contents in self._contents:
            if not has(container, contents):
                undo.append(partial(put, container, copy_of(container)))
                put(container, contents)
        for each in self._bytes:
            each.restore(undo, self._running)


class _Output:
    """An output of another region that a variable names; to remember it is not to hold it."""

    def __init__(self, t: Tensor, maker: Region) -> None:
        self._ref, self._use, self._needs_grad = weakref.ref(t), Use(t, maker), t.requires_grad

    def is_in(self, place: Any, name: str) -> bool:
        """Whether the variable still names it."""
        output = self._ref()
        return output is not None and _value_of(place, name) is output

    def read(self) -> Tensor:
        """The output, made again where it was discarded."""
        return self._use.read().detach().requires_grad_(self._needs_grad)


def _named(value: Any) -> Any:
    maker = maker_of(value) if isinstance(value, Tensor) else None
    return value if maker is None else _Output(value, maker)


class _Bytes:
    """A tensor that may be written, and a copy of it where one was made."""

    __slots__ = ("after", "before", "key", "tensor", "trusted", "version")

    def __init__(
        self, t: Tensor, trusted: bool, key: tuple[nn.Module, str] | None, copied: bool
    ) -> None:
        """A tensor, and where it is from.

        Args:
            t: the tensor.
            trusted: whether its version says if it was written.
            key: the module and the name, if it is a larger buffer.
            copied: whether to copy it.
        """
        self.tensor, self.trusted, self.key = t, trusted, key
        self.version = self.after = t._version
        self.before = _memory(t).clone() if copied else None

    def finish(self) -> None:
        """Remember whether a larger buffer was left alone, and let go of its copy if it was."""
        t, self.after = self.tensor, self.tensor._version
        if self.key is None:
            return
        module, name = self.key
        known, place = _quiet.setdefault(module, {}), (name, module.training)
        if self.after != self.version:
            known[place] = False
        if self.before is None or known.get(place) is False:
            return
        if t.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # what is in it cannot be asked
        same = isinstance(t, FakeTensor) or t.is_meta or torch.equal(_memory(t), self.before)
        known[place] = same
        if same:
            self.before = None

    def restore(self, undo: Undo, running: bool) -> None:
        """Put the copy into the tensor. Versions are as in the forward, and what others wrote
        since then still counts."""
        t, now = self.tensor, self.tensor._version
        if self.before is None or (self.trusted and now == self.version):
            return
        undo.append(_Write(t, _memory(t).clone(), now))
        _Write(t, self.before, self.version if running else self.version + now - self.after)()


def _named_tensors(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters and the buffers of a module itself; copies where it is TorchScript's, which
    exchanges none."""
    parameters, buffers = module._parameters, module._buffers
    if isinstance(parameters, dict):
        return parameters, buffers
    return dict(parameters.items()), dict(buffers.items())


def _bytes(around: Surroundings) -> Iterator[_Bytes]:
    seen: set[int] = set()

    def may_change(t: Any) -> bool:
        if not isinstance(t, Tensor) or id(t) in seen or t.requires_grad:
            return False
        seen.add(id(t))
        plain = type(t) in _COPIED or isinstance(t, FakeTensor)
        if not plain or t.layout is not torch.strided or t.is_quantized or t.is_inference():
            return False
        return maker_of(t) is None  # what a region can make again it restores itself

    for module in around.modules:
        _, buffers = _named_tensors(module)
        if not buffers:
            continue
        own = not is_of_torch(type(module)) or isinstance(module, (_NormBase, ScriptModule))
        quiet = _quiet.get(module, {})
        for name, t in buffers.items():
            if may_change(t):
                assert t is not None
                if t.nbytes <= _SMALL:
                    yield _Bytes(t, not own, None, True)
                else:
                    left_alone = quiet.get((name, module.training), False)
                    copied = t.nbytes <= _LARGE and not left_alone
                    yield _Bytes(t, True, (module, name), copied)
    for held in (*around.attributes, *around.given):
        for t in _values(held):
            if may_change(t) and not isinstance(t, nn.Parameter):
                yield _Bytes(t, False, None, t.nbytes <= _SMALL)
    for t in around.tensors:
        if may_change(t) and not isinstance(t, nn.Parameter):
            yield _Bytes(t, False, None, t.nbytes <= _SMALL)


def _values(held: Any) -> Any:
    """The values of a mapping, or the items of another container; none where there are many."""
    if len(held) > _MANY:
        return ()
    return held.values() if type(held) in MAPPINGS else held


def _memory(t: Tensor) -> Tensor:
    """A tensor without what an expanded one repeats; what is written to it moves no version."""
    t = t.data
    for dim, stride in enumerate(t.stride()):
        if stride == 0:
            t = t.narrow(dim, 0, min(1, t.shape[dim]))
    return t


class _Write:
    """Gives a tensor contents and a version."""

    __slots__ = ("contents", "tensor", "version")

    def __init__(self, tensor: Tensor, contents: Tensor, version: int) -> None:
        self.tensor, self.contents, self.version = tensor, contents, version

    def __call__(self) -> None:
        memory = _memory(self.tensor)
        if memory.shape == self.contents.shape:
            memory.copy_(self.contents)
        else:  # resized, as observers of ranges do at their first call
            self.tensor.data = self.contents.clone()
        set_versions((self.tensor,), (self.version,))


def _is_state(value: Any) -> bool:
    """Whether a value is a tensor, or a tuple with some in it, as a recurrent layer's state is."""
    return isinstance(value, Tensor) or (isinstance(value, tuple) and any(map(_is_state, value)))


def _without_graph(value: Any) -> Any:
    if isinstance(value, tuple) and _is_state(value):
        parts = map(_without_graph, value)
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, Tensor) and value.grad_fn is not None:
        return value.detach().requires_grad_()
    return value


def _changed(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """What was under the names that have, or had, another state; `MISSING` where nothing was."""
    if has(now, before):
        return {}
    changed = {}
    for name in {**before, **now}:
        then, value = before.get(name, MISSING), now.get(name, MISSING)
        if then is not value and (_is_state(then) or _is_state(value)):
            changed[name] = then
    return changed


def _set_name(place: Any, name: str, value: Any, undo: Undo) -> None:
    if isinstance(place, dict):
        set_item(place, name, value, undo)
        return
    now = _value_of(place, name)
    if now is not value:
        undo.append(lambda: _set_name(place, name, now, []))
        if value is MISSING:
            delattr(place, name)
        else:
            setattr(place, name, value)


def _value_of(place: Any, name: str) -> Any:
    if isinstance(place, dict):
        return place.get(name, MISSING)
    try:
        return getattr(place, name)
    except ValueError:  # a cell that nothing is bound to
        return MISSING
