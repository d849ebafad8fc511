"""What was found by running one of several layers that differ in numbers and strings at most.

The layer runs with these values watched. What was found is right for the layers whose values give
the same answers to all that its code asked. If the code uses a value in a way that cannot be told
for other values, layers with equal values share what is found.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

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
Variant = frozenset[tuple[Expression, object]]  # the answers that its layers give


class Variants(Generic[T]):
    """Results by the kind of a layer, by what else decides, and by what its code asks."""

    def __init__(self) -> None:
        self._known: dict[Hashable, list[tuple[Answers, T | None]]] = {}

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()

    def find(self, kind: ModuleKind, key: Hashable) -> tuple[Variant, T | None] | None:
        """Return what is known of a layer, or None if it has to run.

        Args:
            kind: of the layer.
            key: what decides besides the layer, such as its arguments.
        """
        for answers, result in self._known.get((kind.group, key), ()):
            if would_answer(answers, kind.values):
                return frozenset(answers.items()), result
        return None

    def is_alone(self, kind: ModuleKind, key: Hashable) -> bool:
        """Return True if no other layer is known to do the same, as far as code has asked yet."""
        known = self._known.get((kind.group, key), ())
        asked: list[Expression] = [e for answers, _ in known for e in answers]
        if kind.group.is_by_value:
            asked += exactly(kind.values, kind.group.differing)
        ours = [learned(expression, kind.values) for expression in asked]
        return not any(
            [learned(expression, other.values) for expression in asked] == ours
            for other in kind.group.members
            if other is not kind
        )

    def run(
        self, kind: ModuleKind, key: Hashable, run: Callable[[list[object]], T]
    ) -> tuple[Variant, T | None]:
        """Run a layer and remember what it finds.

        Args:
            kind, key: as of `find`, which knows nothing of them.
            run: runs the layer. It adds to a list what the backward of the layer is reached from,
                if it does not run the backward. If it raises, it leaves no trace. If it raises
                `NotComparable`, None is remembered.
        """
        group, result = kind.group, None
        watched = group.watched
        watch = Watch({position: kind.spots[position] for position in watched})
        held: list[object] = []
        try:
            with watch:
                result = run(held)
            is_known = not (watch.is_refused or watch.is_kept)
        except NotComparable:
            is_known = not watch.is_refused
        except Exception:
            if not watched:
                raise
            is_known = False
        answers: Answers = watch.answers
        held.clear()
        if not is_known:
            group.is_by_value = True
            try:
                result = run([])
            except NotComparable:
                result = None
        if group.is_by_value:
            answers = exactly(kind.values, group.differing)
        self._known.setdefault((group, key), []).append((answers, result))
        return frozenset(answers.items()), result
