"""Chooses an action for each call of a layer, so that the step fits and recomputes the least.

The tensors that layers keep add up in the order of their forwards and are freed in the opposite
order. So at every moment the first few layers of the order are in memory. Later layers need only
the sum of the kept bytes. A dynamic program over this sum is exact.

Autocast keeps its casts of parameters to the end of the forward, also those that no backward needs.
So a second sum, which counts only in the forward, has the casts that are not kept anyway.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

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
        casts: bytes of casts that stay from the call to the end of the forward, besides `kept`.
        in_forward: as `highest`, while the forward of the call runs.
    """

    kept: int
    highest: int
    seconds: float
    casts: int = 0
    in_forward: int = 0


@dataclass(frozen=True)
class Moment:
    """A moment of a step.

    Attributes:
        level: bytes in memory.
        alive: how many calls, from the first, are in memory.
        running: the place of the call that runs, if one does.
        has_casts: whether the casts of these calls are in memory.
    """

    level: int
    alive: int
    running: int | None
    has_casts: bool = False


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
        between_forwards: as `between`, in the forward. Empty if the two are equal.
    """

    options: Sequence[Sequence[Option]]
    between: Sequence[int]
    repeated: Sequence[Sequence[int]] = ()
    between_forwards: Sequence[int] = ()

    def peak(self, choice: Sequence[int]) -> int:
        """Return the bytes at the peak of a step with these options."""
        return self.at_peak(choice).level

    def at_peak(self, choice: Sequence[int]) -> Moment:
        """Return the moment of the peak."""
        state, moments = _NOTHING, [Moment(self.between[0], 0, None)]
        in_forward = self.between_forwards or self.between
        for place, (options, index) in enumerate(zip(self.options, choice, strict=True)):
            option = options[index]
            moments.append(Moment(state.kept + option.highest, place, place))
            moments.append(Moment(state.in_forward + option.in_forward, place, place, True))
            state = state.then(index, option)
            moments.append(Moment(state.kept + self.between[place + 1], place + 1, None))
            level = state.in_forward + in_forward[place + 1]
            moments.append(Moment(level, place + 1, None, True))
        return max(moments, key=_level)

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
        found = [0] * len(self.options)
        low, high = 0, self.peak(found)
        while low < high:
            middle = (low + high) // 2
            leanest = self._leanest(middle)
            if leanest is None:
                low = middle + 1
            else:
                found, high = leanest, middle
        # The fastest of the choices with that peak.
        return self.fastest(high) or found

    def _leanest(self, budget: int) -> list[int] | None:
        """Return the choice that keeps the least within a budget.

        Keeping less allows more later. With casts, this assumes that an option that keeps less than
        another one of its call also takes less in the forward.
        """
        if self.between[0] > budget:
            return None
        state = _NOTHING
        for place in range(len(self.options)):
            after = self._after(place, [state], budget)
            if not after:
                return None
            state = min(after, key=lambda s: (s.kept, s.seconds))
        return state.choice()

    def fastest(self, budget: int) -> list[int] | None:
        """Return the choice that adds the fewest seconds within a budget, or None."""
        if self.repeated:
            parts = ((fixed, part.fastest(budget)) for fixed, part in self._parts)
            choices = [_inserted(choice, fixed) for fixed, choice in parts if choice is not None]
            fastest = min(choices, key=self.seconds, default=None)
            return None if fastest is None else self._relaxed(fastest, budget)
        if self.between[0] > budget:
            return None
        states = [_NOTHING]
        for place in range(len(self.options)):
            states = _best(self._after(place, states, budget))
            if not states:
                return None
        return min(states, key=lambda state: state.seconds).choice()

    def _after(self, place: int, states: list[_State], budget: int) -> list[_State]:
        """Return the states after a call, from all states before it, that are within a budget."""
        room = budget - self.between[place + 1]
        room_in_forward = budget - (self.between_forwards or self.between)[place + 1]
        return [
            after
            for number, option in enumerate(self.options[place])
            for state in states
            if state.kept + option.highest <= budget
            and state.in_forward + option.in_forward <= budget
            and (after := state.then(number, option)).kept <= room
            and after.in_forward <= room_in_forward
        ]

    def _relaxed(self, choice: list[int], budget: int) -> list[int]:
        """Return a choice in which no repeated layer could take a faster option in the budget."""
        seconds = self.seconds(choice)
        changed = [
            _inserted(choice, dict.fromkeys(places, index))
            for places in self.repeated
            for index in range(len(self.options[places[0]]))
        ]
        faster = [other for other in changed if self.seconds(other) < seconds - 1e-12]
        for other in sorted(faster, key=self.seconds):
            if self.peak(other) <= budget:
                return self._relaxed(other, budget)
        return choice

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


class _State(NamedTuple):
    """Sums of one option for each of the first few calls: bytes kept, in the forward, seconds."""

    kept: int
    in_forward: int
    seconds: float
    number: int = -1
    before: _State | None = None

    def then(self, number: int, option: Option) -> _State:
        """Return the sums with an option of the next call, and its number."""
        kept = self.kept + option.kept
        in_forward = self.in_forward + option.kept + option.casts
        return _State(kept, in_forward, self.seconds + option.seconds, number, self)

    def choice(self) -> list[int]:
        """Return the numbers of the options."""
        choice: list[int] = []
        state = self
        while state.before is not None:
            choice.append(state.number)
            state = state.before
        return choice[::-1]


_NOTHING = _State(0, 0, 0.0)


def _best(states: list[_State]) -> list[_State]:
    """Return the states that no other beats in bytes and seconds, thinned if very many."""
    best: list[_State] = []
    # Bytes in the forward, ascending, with fewer seconds each: the best of the states so far.
    in_forward: list[int] = []
    seconds: list[float] = []
    for state in sorted(states, key=lambda s: s[:3]):
        place = bisect_right(in_forward, state.in_forward)
        if place and seconds[place - 1] <= state.seconds + 1e-12:
            continue
        best.append(state)
        end = place
        while end < len(seconds) and seconds[end] >= state.seconds:
            end += 1
        in_forward[place:end], seconds[place:end] = [state.in_forward], [state.seconds]
    if len(best) <= _MOST:
        return best
    step = (best[-1].kept - best[0].kept) / _MOST
    thinned = [best[0]]
    for state, following in zip(best[1:], [*best[2:], None], strict=True):
        # Without casts, the last of each step is the fastest of it.
        if following is None or following.kept - best[0].kept >= step * len(thinned):
            thinned.append(state)
    return thinned
