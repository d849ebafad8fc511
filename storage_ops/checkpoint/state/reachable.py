"""Find what a function depends on besides its arguments.

That is what it closes over, is bound to or names.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from storage_ops.checkpoint.state import code_writes, known_walks
from storage_ops.checkpoint.state.known_walks import Found, Objects, Reads
from storage_ops.foundation.walk import (
    CONTAINER,
    CONTAINERS,
    FUNCTION,
    GENERATOR,
    METHOD,
    MODULE,
    OF_EVERY_MODULE,
    PARTIAL,
    PLAIN,
    REFERENCE,
    TENSOR,
    TUPLE,
    Name,
    attributes_of,
    cells_of,
    globals_of,
    is_data,
    is_of_torch,
    is_opaque,
    kind_of,
    names_of_globals,
    names_of_slots,
    package_of,
    slots_of,
    values_in,
)

_ATOMS = frozenset({str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device})
_KINDS_OF_CONTAINER = frozenset(CONTAINERS)
_DEEP = 4  # functions that call one another, containers in containers


@dataclass
class Surroundings:
    """The objects that a call depends on, each once.

    Attributes:
        modules: that it reaches, with all in them.
        generators: that are reached, or are attributes of something that is.
        tensors: that are reached by themselves, and not given.
        devices: of tensors, given or not, but the CPU.
        names: variables of enclosing functions, and globals, that its code reads, with tensors and
            modules in them.
        attributes: those of modules that are reached and are not torch's own.
        objects: the attributes of other objects that are reached and are not torch's own.
        containers: short ones that are reached and not given.
        given: the attributes of objects that are given, and containers in them.
        writes: how code among all this may write tensors (`code_writes`).
        code: the names that code among all this uses.
        called: the names that each function that is reached uses.
        classes: those of the modules and objects that are reached and are not torch's own.
        elsewhere: classes and functions that these functions name (`code_writes.elsewhere_of`).
        known: what an earlier walk tells; then `look` fills in what is not `devices`.
    """

    modules: list[nn.Module] = field(default_factory=list)
    generators: dict[Any, None] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    devices: set[torch.device] = field(default_factory=set)
    names: list[Name] = field(default_factory=list)
    attributes: list[dict[str, Any]] = field(default_factory=list)
    objects: list[dict[str, Any]] = field(default_factory=list)
    containers: list[Any] = field(default_factory=list)
    given: list[Any] = field(default_factory=list)
    writes: int = 0
    code: list[frozenset[str]] = field(default_factory=list)
    called: list[frozenset[str]] = field(default_factory=list)
    classes: dict[Any, None] = field(default_factory=dict)
    elsewhere: dict[Any, None] = field(default_factory=dict)
    known: Found | None = None
    _reads: Reads | None = None  # of the walk, where later calls may know it

    @staticmethod
    def of(fn: Callable[..., Any], given: list[Any], tensors: Iterable[Tensor]) -> Surroundings:
        """Return the surroundings of a call of `fn` with what is given, and these tensors in it."""
        found = Surroundings()
        for t in tensors:
            found._add_device(t)
        start = known_walks.roots_of(fn, given)
        if start is not None:
            found.known, found._reads = known_walks.find(start)
            if found.known is not None:
                return found
        nothing = frozenset[str]()
        called = [fn] if start is None else start
        roots = [*((value, 0, False, nothing) for value in called)]
        roots += [(value, 0, True, nothing) for value in given]
        found._reach(roots, {id(t) for t in tensors})
        code = found.classes, found.called, found.elsewhere
        found.writes |= code_writes.of_calls(*map(tuple, code))
        if start is not None and found._reads is not None:
            known_walks.know(start, found._reads, found._objects(found._reads))
        found._reads = None
        return found

    def look(self) -> None:
        """Fill in what a known walk has found."""
        assert self.known is not None
        found = self.known.objects()
        self.modules, self.objects, self.containers = found[0], found[2], found[3]
        self.attributes = [vars(m) for m in self.modules if not is_of_torch(type(m))]
        self.names = list(zip(found.scopes, found.names, found.values, strict=True))
        self.code, self.writes = found.code, found.writes

    def _objects(self, reads: Reads) -> Objects:
        """Return what a later call takes from this walk; give its reads up where it must walk."""
        for held in (*self.attributes, *self.objects, *self.containers):
            reads.add_values(held)
        if self.tensors or self.generators or self.given:
            reads.give_up()
        if any(kind_of(type(value)) != MODULE for _, _, value in self.names):
            reads.give_up()
        parameters: list[Tensor] = [
            p for m in self.modules for p in m._parameters.values() if p is not None
        ]
        has_bytes = code_writes.may_write_parameters(self.writes) or any(
            "max_norm" in vars(m) or any(b is not None for b in m._buffers.values())
            for m in self.modules
        )
        scopes, names, values = zip(*self.names, strict=True) if self.names else ((), (), ())
        return Objects(
            self.modules, parameters, self.objects, self.containers, list(scopes), list(values),
            list(names), self.code, self.writes, has_bytes,
        )  # fmt: skip

    def _add_device(self, t: Tensor) -> None:
        if not (t.is_cpu or t.is_meta):
            self.devices.add(t.device)

    def _inside_attributes(self, attributes: dict[str, Any], names: frozenset[str]) -> list[Any]:
        """Note the generators among attributes; return the values that code may use further.

        Args:
            attributes: of a module or another object.
            names: those that the code around uses; objects under other names are passed over.
        """
        inside = []
        for name, value in attributes.items():
            cls = type(value)
            if cls in _ATOMS or (cls in _KINDS_OF_CONTAINER and name in OF_EVERY_MODULE):
                continue
            kind = kind_of(cls)
            if kind == GENERATOR:
                self.generators[value] = None
            elif kind in (CONTAINER, MODULE) or (name in names and kind != TENSOR):
                inside.append(value)
        return inside

    def _reach(self, stack: list[tuple[Any, int, bool, frozenset[str]]], seen: set[int]) -> None:
        """Note the objects that calls of these may read, except those in `seen`.

        They may read the closure of a function, its defaults, the globals that its code names, and
        the object that it is bound to. They may read the modules in a module. The same holds for
        the functions among them, for the methods that an object runs, for the attributes of objects
        that code names, and for the items of short containers.

        Args:
            stack: values, with the distance of each from the call, and the names that the code
                around uses. It also has whether the value is given, by itself or as a part of an
                object or container that is.
            seen: the identities of values to pass over.
        """
        while stack:
            value, depth, given, names = stack.pop()
            kind = kind_of(type(value))
            if kind == PLAIN or id(value) in seen:
                continue
            seen.add(id(value))
            inside: list[Any] = []
            deeper = depth + 1
            if kind == TENSOR:
                self.tensors.append(value)
                self._add_device(value)
            elif kind == PARTIAL:
                if self._reads is not None:
                    self._reads.add_partial(value)
                inside = [value.func, *value.args, *value.keywords.values()]
                deeper = depth  # it is the call itself
            elif kind == METHOD:
                if self._reads is not None:
                    self._reads.add_method(value)
                inside, deeper = [value.__self__, value.__func__], depth
            elif kind == FUNCTION:
                if not is_of_torch(value):
                    inside, names = self._inside_function(value)
                given = False
            elif kind == MODULE:
                (inside, names), given = self._inside_module(value, seen), False
            elif kind in (CONTAINER, TUPLE):
                if given and kind == CONTAINER:
                    self.given.append(value)
                if self._reads is not None:
                    self._reads.add_container(value, kind == CONTAINER)
                if not is_data(value):
                    inside = list(values_in(value))
                    if not given and kind == CONTAINER:
                        self.containers.append(value)
            elif kind == GENERATOR:
                self.generators[value] = None
            elif kind == REFERENCE:
                inside = [value()]
                if self._reads is not None:
                    self._reads.give_up()
            else:
                inside = self._inside_object(value, given)
            if depth < _DEEP and inside:
                stack += [(v, deeper, given, names) for v in inside]

    def _inside_object(self, value: object, given: bool) -> list[Any]:
        cls: Any = type(value)
        inside: list[Any] = []
        if not is_opaque(cls):
            attributes = attributes_of(value)
            if attributes:
                (self.given if given else self.objects).append(attributes)
                inside = self._inside_attributes(attributes, _Everything)
                self.classes[cls] = None
            inside += [each for _, each in slots_of(value)]
        if self._reads is not None:
            if not is_opaque(cls) and cls.__dictoffset__:
                self._reads.add_object(value)
            if not is_opaque(cls) and names_of_slots(cls):
                self._reads.give_up()
            self._reads.own(code_writes.run_by(cls))
        return inside + list(code_writes.run_by(cls))

    def _inside_module(self, root: nn.Module, seen: set[int]) -> tuple[list[Any], frozenset[str]]:
        modules = [m for m in _modules_in(root) if m is root or id(m) not in seen]
        self.modules += modules
        seen.update(map(id, modules))
        types = dict.fromkeys(map(type, modules))
        facts = _facts_of(tuple(types))
        self.code.append(facts.names)
        if self._reads is not None:
            self._note_modules(self._reads, modules, facts)
        inside: list[Any] = []
        for module in modules:
            if type(module) in facts.own:
                self.attributes.append(vars(module))
                found = self._inside_attributes(vars(module), facts.names)
                # A module that is an attribute but no part is the model around, mostly.
                inside += [value for value in found if kind_of(type(value)) != MODULE]
            if module._forward_pre_hooks or module._forward_hooks:
                inside += [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        if facts.adapters:
            may_write = (getattr(m, "merged", False) for m in modules if type(m) in facts.adapters)
            if not any(may_write):
                # Their forward names the method that takes a merged adapter out of the weights.
                types = dict.fromkeys(cls for cls in types if cls not in facts.adapters)
        for cls in types:
            inside += code_writes.run_by(cls)
        self.classes.update(types)
        for base in facts.bases:
            inside += _shared_state(base, facts.names)
        return inside, facts.names

    def _note_modules(self, reads: Reads, modules: list[nn.Module], facts: _Classes) -> None:
        for module in modules:
            reads.add_module(module)
        for cls in dict.fromkeys(map(type, modules)):
            reads.own(code_writes.run_by(cls))
        for base in facts.bases:
            reads.add_class(base)
        if facts.adapters:
            reads.give_up()

    def _inside_function(self, fn: FunctionType) -> tuple[list[Any], frozenset[str]]:
        facts = code_writes.facts_of(fn.__code__)
        if self._reads is not None:
            self._reads.add_function(fn, names_of_globals(fn.__code__))
        self.writes |= facts.writes
        self.called.append(facts.names)
        self.code.append(facts.names)
        if elsewhere := code_writes.elsewhere_of(fn):
            self.elsewhere.update(dict.fromkeys(elsewhere))
        inside: list[Any] = []
        for found in (*cells_of(fn), *globals_of(fn)) if fn.__closure__ else globals_of(fn):
            inside.append(found[2])
            if kind_of(type(found[2])) in _NAMED:
                self.names.append(found)
        if fn.__defaults__:
            inside += fn.__defaults__
        if fn.__kwdefaults__:
            inside += fn.__kwdefaults__.values()
        return inside, facts.names


def _modules_in(root: nn.Module) -> Iterable[nn.Module]:
    """Return the modules of `root.modules()`, in the same order and in a third of the time."""
    found: dict[nn.Module, None] = {}
    stack: list[nn.Module | None] = [root]
    while stack:
        module = stack.pop()
        if module is not None and module not in found:
            found[module] = None
            if module._modules:
                stack += [*module._modules.values()][::-1]
    return found


class _Classes(NamedTuple):
    """Facts that do not change between calls of modules of some classes.

    Attributes:
        names: that the code of the classes uses.
        own: the classes that are not torch's own.
        adapters: those of PEFT among them.
        bases: the classes among their bases, and themselves, that may have state of their own.
    """

    names: frozenset[str]
    own: frozenset[type]
    adapters: frozenset[type]
    bases: tuple[type, ...]


@functools.lru_cache(maxsize=4096)
def _facts_of(classes: tuple[type, ...]) -> _Classes:
    own = [cls for cls in classes if not is_of_torch(cls)]
    adapters = frozenset(cls for cls in own if package_of(cls) == "peft")
    lines = [itertools.takewhile(_is_not_of_torch, cls.__mro__) for cls in own]
    bases = dict.fromkeys(itertools.chain.from_iterable(lines))
    bases = {base: None for base in bases if package_of(base) != "storage_ops"}
    names = code_writes.names_of_classes(classes)
    return _Classes(names, frozenset(own), adapters, tuple(bases))


def _is_not_of_torch(cls: type) -> bool:
    return not is_of_torch(cls)


def _shared_state(cls: type, names: frozenset[str]) -> list[Any]:
    """Return the tensors, generators and containers that a class has under these names."""
    attributes = vars(cls)
    found = {n for n in attributes.keys() & names if kind_of(type(attributes[n])) in _SHARED}
    return [attributes[name] for name in attributes if name in found] if found else []


_SHARED, _NAMED = frozenset({TENSOR, GENERATOR, CONTAINER}), frozenset({TENSOR, MODULE})


class _EveryName(frozenset[str]):
    """Has every name."""

    def __contains__(self, name: object) -> bool:
        return True


_Everything = _EveryName()
