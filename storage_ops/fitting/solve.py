"""Which action each call of a layer gets, so that the step fits and the least is computed twice.

What layers keep adds up in the order of their forwards and is freed in the opposite order, so at
every moment the first few layers of the order are in memory. The sum of what these keep is all that
the later ones need to know of them: a dynamic program over it is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_MOST = 2000  # sums that are told apart after each layer


@dataclass(frozen=True)
class Option:
    """What an action does to one call.

    Attributes:
        kept: bytes between forward and backward.
        highest: bytes at the highest level while the call runs, forward and backward, with what is
            outside of layers then.
        seconds: added to the step.
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
        options: of each call; calls that are alike share their list.
        between: the highest level outside of layers while the first n calls are in memory, for each
            n from 0 to all of them, without what they keep.
    """

    options: Sequence[Sequence[Option]]
    between: Sequence[int]

    def peak(self, choice: Sequence[int]) -> int:
        """Bytes at the peak of a step with these options."""
        return self.at_peak(choice).level

    def at_peak(self, choice: Sequence[int]) -> Moment:
        """Where the peak is."""
        kept, moment = 0, Moment(self.between[0], 0, None)
        for place, (options, index) in enumerate(zip(self.options, choice, strict=True)):
            option = options[index]
            moment = max(moment, Moment(kept + option.highest, place, place), key=_level)
            kept += option.kept
            after = Moment(kept + self.between[place + 1], place + 1, None)
            moment = max(moment, after, key=_level)
        return moment

    def seconds(self, choice: Sequence[int]) -> float:
        """Seconds added to a step with these options."""
        return sum(
            options[index].seconds for options, index in zip(self.options, choice, strict=True)
        )

    def smallest(self) -> list[int]:
        """The choice with the lowest peak of all."""
        low, high = 0, self.peak([0] * len(self.options))
        while low < high:
            middle = (low + high) // 2
            if self._leanest(middle) is None:
                low = middle + 1
            else:
                high = middle
        found = self._leanest(high)
        assert found is not None
        # Of the choices with that peak the fastest.
        return self.fastest(high) or found

    def _leanest(self, budget: int) -> list[int] | None:
        """The choice that keeps the least within a budget: with less kept, more is allowed."""
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
        """The choice that adds the fewest seconds within a budget; None if there is none."""
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


@dataclass(frozen=True)
class _State:
    kept: int
    seconds: float
    index: int
    before: _State | None


def _best(states: list[_State]) -> list[_State]:
    """Those than which no other keeps less and takes less; of very many, some of each size."""
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
