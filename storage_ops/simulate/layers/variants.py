"""Shares results among layers that differ only in numbers and strings.

One layer runs with these values watched. Its result is right for all layers whose values give the
same answers to the code's questions. If the code uses a value in a way that cannot be answered for
other values, only layers with equal values share a result.

If the code reads the values of tensors, such as of a buffer with a size, only layers share a result
whose tensors have equal values.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from storage_ops.simulate.mode import Simulation
from storage_ops.simulate.module_kinds import ModuleKind, NotComparable
from storage_ops.simulate.plain_values import (
    Answers,
    Expression,
    Watch,
    exactly,
    learned,
    would_answer,
)

T = TypeVar("T")
Variant = Hashable  # what the layers with a result have in common, beside their kind


class Variants(Generic[T]):
    """Results by kind of layer, other conditions, and the questions of the layer's code.

    Attributes:
        have_written: whether a layer has changed values that its code reads. Its result is None,
            because the results of other layers would change no values.
    """

    def __init__(self) -> None:
        self.have_written = False
        self._known: dict[Hashable, list[tuple[Answers, T | None]]] = {}

    def clear(self) -> None:
        """Remove all results."""
        self._known.clear()

    def find(
        self, kind: ModuleKind, key: Hashable, simulation: Simulation
    ) -> tuple[Variant, T | None] | None:
        """Return the known result of a layer, or None if it must run.

        Args:
            kind: the kind of the layer.
            key: other conditions of the result, such as the layer's arguments.
            simulation: the simulation that runs the layers.
        """
        whole = _whole(kind, key, simulation)
        for answers, result in self._known.get(whole, ()):
            if would_answer(answers, kind.values):
                return _variant(answers, whole), result
        return None

    def is_alone(self, kind: ModuleKind, key: Hashable, simulation: Simulation) -> bool:
        """Return True if, by the questions so far, no other layer has the same result."""
        whole = _whole(kind, key, simulation)
        known = self._known.get(whole, ())
        questions: list[Expression] = [e for answers, _ in known for e in answers]
        if kind.group.is_by_value:
            questions += exactly(kind.values, kind.group.differing)
        ours = [learned(expression, kind.values) for expression in questions]
        return not any(
            [learned(expression, other.values) for expression in questions] == ours
            for other in kind.group.members
            if other is not kind and _whole(other, key, simulation) == whole
        )

    def run(
        self,
        kind: ModuleKind,
        key: Hashable,
        simulation: Simulation,
        run: Callable[[list[object]], T],
    ) -> tuple[Variant, T | None]:
        """Run a layer and store its result.

        Args:
            kind, key, simulation: as in `find`, which has no result for them.
            run: runs the layer. If it does not run the layer's backward, it adds the tensors from
                which the backward is reached to a list. If it raises, it leaves no trace. If it
                raises `NotComparable`, None is remembered.
        """
        group, result = kind.group, None
        watched = group.watched
        watch = Watch({i: kind.spots[i] for i in watched}, simulation.may_know)
        kept_alive: list[object] = []
        reads, tensors = simulation.values.reads, simulation.digests(kind.tensors)
        try:
            with watch:
                result = run(kept_alive)
            is_known = not (watch.is_refused or watch.is_kept)
        except NotComparable:
            is_known = not watch.is_refused
        except Exception:
            if not watched:
                raise
            is_known = False
        answers: Answers = watch.answers
        kept_alive.clear()
        if not is_known:
            group.is_by_value = True
            try:
                result = run([])
            except NotComparable:
                result = None
        if group.is_by_value:
            answers = exactly(kind.values, group.differing)
        group.reads_tensors = group.reads_tensors or simulation.values.reads > reads
        if group.reads_tensors and simulation.digests(kind.tensors) != tensors:
            self.have_written, result = True, None
        whole = group, key, tensors if group.reads_tensors else None
        self._known.setdefault(whole, []).append((answers, result))
        return _variant(answers, whole), result


def _variant(answers: Answers, whole: tuple[Hashable, ...]) -> Variant:
    """Return the answers of layers, and the values of their tensors if those matter."""
    return frozenset(answers.items()), whole[-1]


def _whole(kind: ModuleKind, key: Hashable, simulation: Simulation) -> tuple[Hashable, ...]:
    """Return all conditions of a layer's result, except for numbers and strings."""
    values = simulation.digests(kind.tensors) if kind.group.reads_tensors else None
    return kind.group, key, values
