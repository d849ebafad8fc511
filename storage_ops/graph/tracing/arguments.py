"""Arguments and results of a traced function.

Arguments have stand-ins in the trace and are checked at each call. Results are returned as a flat
list of graph outputs, and are rebuilt from it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from storage_ops.graph.tracing.slots import Closure, Slot, closure_of

Build = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class Layout:
    """The properties of an input that a graph relies on."""

    shape: tuple[int | None, ...]
    stride: tuple[int | None, ...] | None
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @staticmethod
    def of(t: Tensor, dynamic: frozenset[int] = frozenset()) -> Layout:
        """Return the layout of a tensor. Dimensions in `dynamic` may have any size."""
        shape = tuple(None if i in dynamic else s for i, s in enumerate(t.shape))
        # If a size may change, so may the strides of other dimensions.
        stride = None
        if t.layout == torch.strided and not dynamic and t.numel() > 0:
            stride = tuple(s if n != 1 else None for s, n in zip(t.stride(), t.shape, strict=True))
        return Layout(shape, stride, t.dtype, t.device, t.requires_grad)

    def check(self, name: str, t: object) -> None:
        """Raise an error unless `t` has the layout of the trace."""
        if not isinstance(t, Tensor):
            raise TypeError(f"traced step: {name} is {t!r}. Expected a tensor, as when traced.")
        for property, traced, actual in (
            ("shape", self.shape, tuple(t.shape)),
            ("stride", self.stride, t.stride() if self.stride is not None else None),
            ("dtype", self.dtype, t.dtype),
            ("device", self.device, t.device),
            ("requires_grad", self.requires_grad, t.requires_grad),
        ):
            same = actual == traced
            if isinstance(traced, tuple) and isinstance(actual, tuple):
                same = len(traced) == len(actual) and all(
                    a is None or a == b for a, b in zip(traced, actual, strict=True)
                )
            if not same:
                raise ValueError(
                    f"traced step: {name} has {property} {actual}. Expected {traced}, as when "
                    "traced. Trace the function again for another value."
                )


class Arguments:
    """The arguments of one trace.

    Attributes:
        stand_ins: the plain stand-in tensors, which are inputs of the graph.
        names: the argument that each stand-in represents.
        tensors: the stand-in of each tensor argument, by its position among the leaves.
        dynamic: whether a dimension of a stand-in may have any size.
    """

    def __init__(
        self, args: object, kwargs: object, closure: Closure, fake_mode: FakeTensorMode
    ) -> None:
        paths, self._spec = tree_flatten_with_path((args, kwargs))
        self._names = [_name(keystr(path)) for path, _ in paths]
        self._leaves = [leaf for _, leaf in paths]
        self._fake_mode = fake_mode
        self.stand_ins: list[Any] = []
        self.names: list[str] = []
        self.tensors: dict[int, Tensor] = {}
        self.dynamic = False
        self._layouts: dict[int, Layout] = {}
        self._attributes: dict[int, dict[str, Any]] = {}
        # An autograd leaf is one tensor in the trace, too, even if fn gets it several times.
        self._tied: dict[int, tuple[str, Callable[[list[Any]], Any]]] = {}
        self._holders: set[int] = set()
        firsts: dict[int, int] = {}
        flat = list(self._leaves)
        for place, leaf in enumerate(self._leaves):
            if isinstance(leaf, Tensor):
                dynamic = frozenset(getattr(leaf, "_dynamo_dynamic_indices", ()))
                self.dynamic = self.dynamic or bool(dynamic)
                self._layouts[place] = Layout.of(leaf, dynamic)
                if leaf.requires_grad and not leaf.is_leaf:
                    raise ValueError(
                        f"trace_step: {self._names[place]} has a grad_fn, whose backward would not "
                        "be part of the step. Pass a leaf, such as its .detach()."
                    )
                self._attributes[place] = _attributes(leaf)
                self._leaves[place] = None
                if leaf.requires_grad and id(leaf) in closure.slots:
                    slot = closure.slots[id(leaf)]
                    self._tied[place] = slot.name, reader(None, slot)
                    continue
                first = firsts.setdefault(id(leaf), place) if leaf.requires_grad else place
                if first != place:
                    self._tied[place] = self._names[first], operator.itemgetter(first)
                    flat[place] = flat[first]
                    continue
                stand_in = self._stand_in(leaf, dynamic)
                self.names += [self._names[place]] * (len(self.stand_ins) - len(self.names))
                stand_in.__dict__.update(_attributes(leaf))
                if isinstance(leaf, nn.Parameter):
                    stand_in._is_param = True  # isinstance reads it
                self.tensors[place] = flat[place] = stand_in
            elif closure_of([(self._names[place], leaf)]).tensors:
                self._holders.add(place)
        self.args, self.kwargs = tree_unflatten(flat, self._spec)

    def _stand_in(self, t: object, dynamic: frozenset[int]) -> Any:
        if not isinstance(t, Tensor):  # a wrapper may have a mesh as an inner value
            return t
        if is_traceable_wrapper_subclass(t):
            names, context = t.__tensor_flatten__()
            inner = {name: self._stand_in(getattr(t, name), frozenset()) for name in names}
            stand_in = type(t).__tensor_unflatten__(inner, context, t.size(), t.stride())
            return stand_in.requires_grad_(t.requires_grad)
        options: dict[str, Any] = {"static_shapes": True}
        if dynamic:
            from torch._dynamo.source import ConstantSource
            from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

            sizes = [
                DimDynamic.DYNAMIC if d in dynamic else DimDynamic.STATIC for d in range(t.dim())
            ]
            options = {
                "symbolic_context": StatelessSymbolicContext(dynamic_sizes=sizes),
                "source": ConstantSource(f"input_{len(self.stand_ins)}"),
            }
        fake = self._fake_mode.from_tensor(t.detach(), **options)
        self.stand_ins.append(fake.requires_grad_(t.requires_grad))
        return fake

    def flatten(self, args: object, kwargs: object) -> tuple[list[Any], list[Tensor]]:
        """Return the leaves of a call's arguments, and the plain tensors among and inside them.

        Raises:
            TypeError, ValueError: they differ from those of the trace.
        """
        paths, spec = tree_flatten_with_path((args, kwargs))
        if spec != self._spec:
            raise TypeError(
                f"traced step: the arguments have the structure {spec}. Expected {self._spec}, as "
                "when traced."
            )
        leaves = [leaf for _, leaf in paths]
        plain: list[Tensor] = []
        for place, (leaf, traced) in enumerate(zip(leaves, self._leaves, strict=True)):
            if place in self._layouts:
                self._layouts[place].check(self._names[place], leaf)
                self._check_attributes(place, leaf)
                if place not in self._tied:
                    plain.extend(_parts(leaf))
                    continue
                name, read = self._tied[place]
                if leaf is not read(leaves):
                    raise ValueError(
                        f"traced step: {self._names[place]} and {name} are two tensors. Expected "
                        "one, as when traced. Trace the function again with two."
                    )
            elif place in self._holders:
                if leaf is not traced:
                    raise ValueError(
                        f"traced step: {self._names[place]} is another {type(leaf).__name__} than "
                        "when traced. Pass the same object, whose tensors are read at each call. "
                        "Or pass a pytree of tensors, such as a dict."
                    )
            elif not _equal(leaf, traced):
                raise ValueError(
                    f"traced step: {self._names[place]} is {leaf!r}. Expected {traced!r}: "
                    "arguments that are not tensors are constants of the trace."
                )
        shape_env = self._fake_mode.shape_env
        if shape_env is not None and not shape_env.evaluate_guards_for_args(self.stand_ins, plain):
            sizes = [tuple(t.shape) for t in plain]
            guards = [str(guard.expr) for guard in shape_env.guards]
            raise ValueError(
                f"traced step: the arguments have the sizes {sizes}. Expected every dynamic "
                f"dimension to be 2 or more{' and ' if guards else ''}{' and '.join(guards)}, as "
                "when traced. Trace the function again for other sizes."
            )
        return leaves, plain

    def _check_attributes(self, place: int, t: Tensor) -> None:
        now = _attributes(t)
        for name, traced in self._attributes[place].items():
            value_now = now.get(name)
            plain = not isinstance(traced, Tensor) and type(value_now) is type(traced)
            if value_now is not traced and not (plain and value_now == traced):
                raise ValueError(
                    f"traced step: {self._names[place]}.{name} is {value_now!r}. Expected "
                    f"{traced!r}, as when traced."
                )


def _equal(value: object, traced: object) -> bool:
    if value is traced:
        return True
    try:
        same = value == traced
        return bool(same.all() if hasattr(same, "all") else same)  # an array compares each element
    except Exception:
        return False


def _attributes(t: Tensor) -> dict[str, Any]:
    """Return the attributes that users set on a tensor.

    Names with a leading underscore are torch's.
    """
    inner = t.__tensor_flatten__()[0] if is_traceable_wrapper_subclass(t) else ()
    return {k: v for k, v in vars(t).items() if not k.startswith("_") and k not in inner}


def reader(place: int | None, slot: Slot) -> Callable[[list[Any]], Tensor]:
    """Return a function that reads a leaf at each call, from its argument or its slot."""
    return lambda leaves: slot.value() if place is None else leaves[place]


def holders(args: object, kwargs: object) -> list[tuple[str, Any]]:
    """Return the leaves of arguments that are not tensors, with their names."""
    paths, _ = tree_flatten_with_path((args, kwargs))
    return [(_name(keystr(path)), leaf) for path, leaf in paths if not isinstance(leaf, Tensor)]


def _name(path: str) -> str:
    return "args" + path[3:] if path.startswith("[0]") else "kwargs" + path[3:]


def _parts(t: object) -> list[Tensor]:
    if not isinstance(t, Tensor):
        return []
    if not is_traceable_wrapper_subclass(t):
        return [t]
    names, _ = t.__tensor_flatten__()
    return [part for name in names for part in _parts(getattr(t, name))]


class Packer:
    """Collects the values that a graph must return.

    Attributes:
        outputs: plain tensors and numbers of the trace, in the order the graph returns them.
        constants: all other values, which each call returns unchanged.
    """

    def __init__(self, lift: Callable[[Any], Any]) -> None:
        self._lift = lift
        self.outputs: list[Any] = []
        self.constants: list[Any] = []

    def tree(self, value: object) -> Build:
        """Add a pytree. Return a function that builds it from the graph's outputs."""
        leaves, spec = tree_flatten(value)
        builds = [self.leaf(leaf) for leaf in leaves]
        return lambda outputs: tree_unflatten([build(outputs) for build in builds], spec)

    def leaf(self, value: object) -> Build:
        """Add one value: a tensor, a wrapper subclass, a number of the trace, or a constant."""
        if isinstance(value, Tensor) and is_traceable_wrapper_subclass(value):
            return self._subclass(value)
        if not isinstance(value, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
            self.constants.append(value)
            return lambda outputs: value
        place = len(self.outputs)
        self.outputs.append(self._lift(value))
        return lambda outputs: outputs[place]

    def _subclass(self, value: Any) -> Build:
        names, context = value.__tensor_flatten__()
        parts = {name: self.leaf(getattr(value, name)) for name in names}
        size, stride, kind = value.size(), value.stride(), type(value)

        def build(outputs: Sequence[Any]) -> Any:
            inner = {name: part(outputs) for name, part in parts.items()}
            return kind.__tensor_unflatten__(inner, context, size, stride)

        return build
