"""Find the objects that a function may read besides its arguments.

They are the object that it is bound to, the values in its closure, its defaults, and globals.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from storage_ops._subclass import below_parametrizations
from storage_ops.checkpoint.state import code_writes, known_walks
from storage_ops.checkpoint.state.contents import SMALL
from storage_ops.checkpoint.state.known_walks import Facts, KnownWalk, Objects, Reads
from storage_ops.checkpoint.state.registered import buffers_of
from storage_ops.foundation.functions import Name, cells_of, globals_of, scopes_of
from storage_ops.foundation.values import (
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
    attributes_of,
    is_data,
    is_module_of_torch,
    is_of_torch,
    is_opaque,
    kind_of,
    names_of_slots,
    package_of,
    slots_of,
    values_in,
)

_ATOMS = frozenset({str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device})
_KINDS_OF_CONTAINER = frozenset(CONTAINERS)
_DEEP = 4  # nested calls and containers that are searched


@dataclass
class Surroundings:
    """The objects that a call depends on, each once. The call *reaches* these objects.

    Attributes:
        modules: the modules, with all their submodules.
        generators: the random generators.
        tensors: the tensors that are not arguments, and not parameters, buffers or attributes.
        devices: the devices of tensors and arguments, except the CPU.
        names: the variables of enclosing functions, and globals, whose values are tensors or
            modules, if the code reads them.
        attributes: the attributes of modules whose class is not torch's own.
        objects: the attributes of other objects whose class is not torch's own.
        slotted: the objects whose classes have `__slots__`, arguments included.
        containers: the short containers that are not part of an argument.
        argument_state: the attributes of objects that are arguments, and containers in them.
        writes: how the code may write tensors (`code_writes`).
        code: the names that the code uses, a set for each function or group of modules.
        called: the names that each function uses.
        classes: the classes of the modules and objects, except torch's own.
        elsewhere: the results of `code_writes.elsewhere_of` for the functions.
        known: the known walk, if there is one. Then only `devices` is set, until `look` is called.
    """

    modules: list[nn.Module] = field(default_factory=list)
    generators: dict[Any, None] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    devices: set[torch.device] = field(default_factory=set)
    names: list[Name] = field(default_factory=list)
    attributes: list[dict[str, Any]] = field(default_factory=list)
    objects: list[dict[str, Any]] = field(default_factory=list)
    slotted: list[Any] = field(default_factory=list)
    containers: list[Any] = field(default_factory=list)
    argument_state: list[Any] = field(default_factory=list)
    writes: int = 0
    code: list[frozenset[str]] = field(default_factory=list)
    called: list[frozenset[str]] = field(default_factory=list)
    classes: dict[Any, None] = field(default_factory=dict)
    elsewhere: dict[Any, None] = field(default_factory=dict)
    known: KnownWalk | None = None
    _reads: Reads | None = None  # of the walk, if it may become known

    @staticmethod
    def of(fn: Callable[..., Any], arguments: list[Any], tensors: Iterable[Tensor]) -> Surroundings:
        """Return the surroundings of a call.

        Args:
            fn: the function that is called.
            arguments: the arguments that are not tensors.
            tensors: the tensors among the arguments, and in containers among them.
        """
        surroundings = Surroundings()
        for t in tensors:
            surroundings._add_device(t)
        start = known_walks.start_of(fn, arguments)
        if start is not None:
            surroundings.known, surroundings._reads = known_walks.find(start)
            if surroundings.known is not None:
                return surroundings
        no_names = frozenset[str]()
        called = [fn] if start is None else start.roots
        roots = [*((value, 0, False, no_names) for value in called)]
        roots += [(value, 0, True, no_names) for value in arguments]
        surroundings._reach(roots, {id(t) for t in tensors})
        code = surroundings.classes, surroundings.called, surroundings.elsewhere
        surroundings.writes |= code_writes.of_calls(*map(tuple, code))
        if start is not None and surroundings._reads is not None:
            reads = surroundings._reads
            known_walks.know(start, reads, *surroundings._result(reads))
        surroundings._reads = None
        return surroundings

    def look(self) -> None:
        """Set the attributes from the known walk."""
        assert self.known is not None
        objects, facts = self.known.objects(), self.known.facts
        self.modules, self.objects = objects.modules, objects.objects
        self.containers = objects.containers
        self.attributes = [vars(m) for m in self.modules if not is_module_of_torch(type(m))]
        self.names = list(zip(objects.scopes, facts.names, objects.values, strict=True))
        self.code, self.writes = facts.code, facts.writes

    def _result(self, reads: Reads) -> tuple[Objects, Facts]:
        """Return the result of the walk for later calls. Give up if later calls must walk too."""
        for container in (*self.attributes, *self.objects, *self.containers):
            reads.add_values(container)
        if self.tensors or self.generators or self.argument_state:
            reads.give_up()
        if any(kind_of(type(value)) != MODULE for _, _, value in self.names):
            reads.give_up()
        parameters: list[Tensor] = [
            p for m in self.modules for p in m._parameters.values() if p is not None
        ]
        unseen = self.writes & code_writes.UNSEEN != 0
        has_others = unseen or any("max_norm" in vars(m) for m in self.modules)
        buffers: dict[Tensor, bool] = {}
        for t, trusted in buffers_of(self.modules):
            buffers.setdefault(t, trusted)
            is_plain = type(t) in (Tensor, nn.Buffer) and t.layout is torch.strided
            has_others = has_others or not is_plain or t.nbytes > SMALL
        if has_others:  # then Python copies all of them
            buffers = {}
        scopes, names, values = zip(*self.names, strict=True) if self.names else ((), (), ())
        objects = Objects(
            self.modules, parameters, list(buffers), self.objects, self.containers, list(scopes),
            list(values),
        )  # fmt: skip
        by_version = tuple(buffers.values())
        return objects, Facts(list(names), self.code, self.writes, by_version, has_others)

    def _add_device(self, t: Tensor) -> None:
        if not (t.is_cpu or t.is_meta):
            self.devices.add(t.device)

    def _inside_attributes(self, attributes: dict[str, Any], names: frozenset[str]) -> list[Any]:
        """Note the generators among attributes. Return the values in which the search continues.

        Args:
            attributes: the attributes of a module or another object.
            names: the names that the code uses. Objects with other names are skipped, except
                containers and modules.
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
        """Note the objects that calls of the values on `stack` may read, except those in `seen`.

        The search follows the closure of a function, its defaults, the globals that its code names,
        and the object that it is bound to. It follows the submodules and hooks of a module, and the
        items of short containers. For an object, it follows the attributes that code names, and the
        methods that run when the object is called.

        Args:
            stack: tuples of a value, its distance from the call, whether it is an argument or a
                part of one, and the names that the code around it uses.
            seen: the ids of values to skip.
        """
        while stack:
            value, depth, is_argument, names = stack.pop()
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
                deeper = depth  # a partial is a part of the call, not a nested call
            elif kind == METHOD:
                if self._reads is not None:
                    self._reads.add_method(value)
                inside, deeper = [value.__self__, value.__func__], depth
            elif kind == FUNCTION:
                if not is_of_torch(value):
                    inside, names = self._inside_function(value)
                is_argument = False
            elif kind == MODULE:
                (inside, names), is_argument = self._inside_module(value, seen), False
            elif kind in (CONTAINER, TUPLE):
                if is_argument and kind == CONTAINER:
                    self.argument_state.append(value)
                if self._reads is not None:
                    self._reads.add_container(value, kind == CONTAINER)
                if not is_data(value):
                    inside = list(values_in(value))
                    if not is_argument and kind == CONTAINER:
                        self.containers.append(value)
            elif kind == GENERATOR:
                self.generators[value] = None
            elif kind == REFERENCE:
                inside = [value()]
                if self._reads is not None:
                    self._reads.give_up()
            else:
                inside = self._inside_object(value, is_argument)
            if depth < _DEEP and inside:
                stack += [(v, deeper, is_argument, names) for v in inside]

    def _inside_object(self, value: object, is_argument: bool) -> list[Any]:
        cls: Any = type(value)
        inside: list[Any] = []
        if not is_opaque(cls):
            attributes = attributes_of(value)
            if attributes:
                (self.argument_state if is_argument else self.objects).append(attributes)
                inside = self._inside_attributes(attributes, _Everything)
            inside += [attribute for _, attribute in slots_of(value)]
            slots = names_of_slots(cls)
            if slots:
                self.slotted.append(value)
            if attributes or slots:
                self.classes[cls] = None
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
        types = dict.fromkeys(map(below_parametrizations, modules))
        facts = _facts_of(tuple(types))
        self.code.append(facts.names)
        if self._reads is not None:
            self._note_modules(self._reads, modules, facts)
        inside: list[Any] = []
        for module in modules:
            if below_parametrizations(module) in facts.own:
                self.attributes.append(vars(module))
                values = self._inside_attributes(vars(module), facts.names)
                # A module that is an attribute but no submodule is usually the enclosing model.
                inside += [value for value in values if kind_of(type(value)) != MODULE]
            if module._forward_pre_hooks or module._forward_hooks:
                inside += [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        if facts.adapters:
            adapters = (m for m in modules if below_parametrizations(m) in facts.adapters)
            may_write = (getattr(m, "merged", False) for m in adapters)
            if not any(may_write):
                # The forward of an adapter names the method that removes a merged adapter from the
                # weights, but calls it only if the adapter is merged.
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
        for cls in dict.fromkeys(map(below_parametrizations, modules)):
            reads.own(code_writes.run_by(cls))
        for base in facts.bases:
            reads.add_class(base)
        for module in modules:
            if below_parametrizations(module) in facts.adapters and hasattr(module, "merged"):
                # PEFT derives `merged` from this list. Whether it is empty matters to the walk.
                adapters = vars(module).get("merged_adapters")
                if isinstance(adapters, list):
                    reads.add_container(adapters, False)
                else:
                    reads.give_up()

    def _inside_function(self, fn: FunctionType) -> tuple[list[Any], frozenset[str]]:
        facts = code_writes.facts_of(fn.__code__)
        if self._reads is not None:
            self._reads.add_function(fn, scopes_of(fn))
        self.writes |= facts.writes
        self.called.append(facts.names)
        self.code.append(facts.names)
        if elsewhere := code_writes.elsewhere_of(fn):
            self.elsewhere.update(dict.fromkeys(elsewhere))
        inside: list[Any] = []
        for name in (*cells_of(fn), *globals_of(fn)) if fn.__closure__ else globals_of(fn):
            inside.append(name[2])
            if kind_of(type(name[2])) in _NAMED:
                self.names.append(name)
        if fn.__defaults__:
            inside += fn.__defaults__
        if fn.__kwdefaults__:
            inside += fn.__kwdefaults__.values()
        return inside, facts.names


def _modules_in(root: nn.Module) -> Iterable[nn.Module]:
    """Return the same modules as `root.modules()` in the same order, in a third of the time."""
    modules: dict[nn.Module, None] = {}
    stack: list[nn.Module | None] = [root]
    while stack:
        module = stack.pop()
        if module is not None and module not in modules:
            modules[module] = None
            if module._modules:
                stack += [*module._modules.values()][::-1]
    return modules


class _Classes(NamedTuple):
    """Facts about some classes of modules that do not change between calls.

    Attributes:
        names: the names that the code of the classes uses.
        own: the classes that are not torch's own.
        adapters: the classes of PEFT.
        bases: the classes in `own` and their bases, if class attributes of them may be state.
    """

    names: frozenset[str]
    own: frozenset[type]
    adapters: frozenset[type]
    bases: tuple[type, ...]


@functools.lru_cache(maxsize=4096)
def _facts_of(classes: tuple[type, ...]) -> _Classes:
    own = [cls for cls in classes if not is_module_of_torch(cls)]
    adapters = frozenset(cls for cls in own if package_of(cls) == "peft")
    bases = dict.fromkeys(base for cls in own for base in cls.__mro__[:-1])
    bases = {b: None for b in bases if not (is_of_torch(b) or package_of(b) == "storage_ops")}
    names = code_writes.names_of_classes(classes)
    return _Classes(names, frozenset(own), adapters, tuple(bases))


def _shared_state(cls: type, names: frozenset[str]) -> list[Any]:
    """Return the tensors, generators and containers that are class attributes in `names`."""
    attributes = vars(cls)
    shared = {n for n in attributes.keys() & names if kind_of(type(attributes[n])) in _SHARED}
    return [attributes[name] for name in attributes if name in shared] if shared else []


_SHARED, _NAMED = frozenset({TENSOR, GENERATOR, CONTAINER}), frozenset({TENSOR, MODULE})


class _EveryName(frozenset[str]):
    """A set that contains every name."""

    def __contains__(self, name: object) -> bool:
        return True


_Everything = _EveryName()
