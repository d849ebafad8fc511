"""Chooses an action for each call of a layer, so that the step fits and recomputes the least.

The tensors that layers keep add up in the order of their forwards and are freed in the opposite
order. So at every moment the first few layers of the order are in memory. Later layers need only
the sum of the kept bytes. A dynamic program over this sum is exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

_MOST = 2000  # the most sums of kept bytes that are followed after each layer
_ASSIGNMENTS = 64  # of actions to layers that run several times in a step


@dataclass(frozen=True)
class Option:
    """The effect of an action on one call.

    Attributes:
        kept: bytes between forward and backward.
        highest: bytes at the highest level while the call runs, forward and backward, with the
            bytes outside of layers at that time.
        seconds: seconds added to the step.
    """

    kept: int
    highest: int
    seconds: float


@dataclass(frozen=True)
class Moment:
    """A moment of a step.

    Attributes:
        level: bytes in memory.
        alive: how many calls, from the first, are in memory.
        running: the place of the call that runs, if one does.
    """

    level: int
    alive: int
    running: int | None


def _level(moment: Moment) -> int:
    return moment.level


@dataclass(frozen=True)
class ActionProblem:
    """Options of calls in the order of their forwards.

    Attributes:
        options: options of each call. Equal calls share their list.
        between: for each n from 0 to all calls, the highest level outside of layers while the first
            n calls are in memory. The bytes that they keep are not in it.
        repeated: the places of the calls of each layer that runs several times. Its calls share an
            action, so their lists of options have one length.
    """

    options: Sequence[Sequence[Option]]
    between: Sequence[int]
    repeated: Sequence[Sequence[int]] = ()

    def peak(self, choice: Sequence[int]) -> int:
        """Return the bytes at the peak of a step with these options."""
        return self.at_peak(choice).level

    def at_peak(self, choice: Sequence[int]) -> Moment:
        """Return the moment of the peak."""
        kept, moment = 0, Moment(self.between[0], 0, None)
        for place, (options, index) in enumerate(zip(self.options, choice, strict=True)):
            option = options[index]
            moment = max(moment, Moment(kept + option.highest, place, place), key=_level)
            kept += option.kept
            after = Moment(kept + self.between[place + 1], place + 1, None)
            moment = max(moment, after, key=_level)
        return moment

    def seconds(self, choice: Sequence[int]) -> float:
        """Return the seconds added to a step with these options."""
        return sum(
            options[index].seconds for options, index in zip(self.options, choice, strict=True)
        )

    def smallest(self) -> list[int]:
        """Return the choice with the lowest peak of all."""
        if self.repeated:
            choices = [_inserted(part.smallest(), fixed) for fixed, part in self._parts]
            return min(choices, key=lambda choice: (self.peak(choice), self.seconds(choice)))
        low, high = 0, self.peak([0] * len(self.options))
        while low < high:
            middle = (low + high) // 2
            if self._leanest(middle) is None:
                low = middle + 1
            else:
                high = middle
        leanest = self._leanest(high)
        assert leanest is not None
        # The fastest of the choices with that peak.
        return self.fastest(high) or leanest

    def _leanest(self, budget: int) -> list[int] | None:
        """Return the choice that keeps the least within a budget.

        Keeping less allows more later.
        """
        if self.between[0] > budget:
            return None
        kept, choice = 0, []
        for place, options in enumerate(self.options):
            fits = [i for i, o in enumerate(options) if kept + o.highest <= budget]
            if not fits:
                return None
            best = min(fits, key=lambda i: (options[i].kept, options[i].seconds))
            choice.append(best)
            kept += options[best].kept
            if kept + self.between[place + 1] > budget:
                return None
        return choice

    def fastest(self, budget: int) -> list[int] | None:
        """Return the choice that adds the fewest seconds within a budget, or None."""
        if self.repeated:
            parts = ((fixed, part.fastest(budget)) for fixed, part in self._parts)
            choices = [_inserted(choice, fixed) for fixed, choice in parts if choice is not None]
            return min(choices, key=self.seconds, default=None)
        if self.between[0] > budget:
            return None
        # Sums of bytes, ascending, with fewer seconds each: (kept, seconds, index, state before).
        states: list[_State] = [_State(0, 0.0, -1, None)]
        for place, options in enumerate(self.options):
            room = budget - self.between[place + 1]
            after = [
                _State(s.kept + o.kept, s.seconds + o.seconds, index, s)
                for index, o in enumerate(options)
                for s in states
                if s.kept + o.highest <= budget and s.kept + o.kept <= room
            ]
            states = _best(after)
            if not states:
                return None
        choice: list[int] = []
        state: _State | None = states[-1]
        while state is not None and state.before is not None:
            choice.append(state.index)
            state = state.before
        return choice[::-1]

    @cached_property
    def _parts(self) -> list[tuple[dict[int, int], ActionProblem]]:
        """Return problems in which repeated layers have one option, with that option."""
        assignments = list(self._assignments())
        step = max(1, -(-len(assignments) // _ASSIGNMENTS))
        thinned = [*assignments[:-1:step], assignments[-1]]
        parts = []
        for assigned in thinned:
            pairs = zip(self.repeated, assigned, strict=True)
            fixed = {place: index for places, index in pairs for place in places}
            options = [[o[fixed[i]]] if i in fixed else o for i, o in enumerate(self.options)]
            parts.append((fixed, replace(self, options=options, repeated=())))
        return parts

    def _assignments(self) -> Iterator[list[int]]:
        """Yield an option for each repeated layer: first no action, then less kept each time.

        Each step changes the layer and the option that save the most bytes for a second.
        """
        totals = [
            [
                (sum(o.kept for o in calls), sum(o.seconds for o in calls))
                for calls in zip(*(self.options[place] for place in places), strict=True)
            ]
            for places in self.repeated
        ]
        assigned = [0] * len(totals)
        yield list(assigned)
        while True:
            steps = [
                ((kept - less) / max(more - seconds, 1e-12), -layer, index)
                for layer, options in enumerate(totals)
                for kept, seconds in [options[assigned[layer]]]
                for index, (less, more) in enumerate(options)
                if less < kept
            ]
            if not steps:
                return
            _, layer, index = max(steps)
            assigned[-layer] = index
            yield list(assigned)


def _inserted(choice: Sequence[int], fixed: dict[int, int]) -> list[int]:
    return [fixed.get(place, index) for place, index in enumerate(choice)]


@dataclass(frozen=True)
class _State:
    kept: int
    seconds: float
    index: int
    before: _State | None


def _best(states: list[_State]) -> list[_State]:
    """Return the states that no other beats in both bytes and seconds, thinned if very many."""
    best: list[_State] = []
    for state in sorted(states, key=lambda s: (s.kept, s.seconds)):
        if not best or state.seconds < best[-1].seconds - 1e-12:
            best.append(state)
    if len(best) <= _MOST:
        return best
    step = (best[-1].kept - best[0].kept) / _MOST
    thinned = [best[0]]
    for state, following in zip(best[1:], [*best[2:], None], strict=True):
        # The last of each step is the fastest of it.
        if following is None or following.kept - best[0].kept >= step * len(thinned):
            thinned.append(state)
    return thinned
