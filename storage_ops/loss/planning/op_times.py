"""Measured times of ops on a device, beside its rates: points of work and seconds."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Points = Sequence[tuple[float, float]]
MOVING = "aten::copy_"  # the op that stands for all memory traffic
MULTIPLYING = "aten::mm"  # the op that stands for matrix products without points of their own


@dataclass(frozen=True)
class HostTimes:
    """Seconds of host work on a CPU, where it adds to the time of kernels.

    Attributes:
        op: for an op, including autograd and the views before it.
        region: for a checkpointed layer.
        discard: for a module whose output is discarded.
        decision: to decide whether a selective checkpoint saves a result, or to look it up.
    """

    op: float = 0.0
    region: float = 0.0
    discard: float = 0.0
    decision: float = 0.0


@dataclass(frozen=True)
class MeasuredTimes:
    """Seconds of ops without their launch, by the work of a call.

    The work of an op is its floating-point operations if a formula is known, and otherwise the
    bytes that it reads and writes.

    Attributes:
        points: for a name of ops and a dtype, pairs of work and seconds in ascending order. The
            name is the `family` of `OpFacts`. The dtype is that of the first result.
    """

    points: Mapping[str, Mapping[str, Points]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.points)

    def seconds(self, name: str, dtype: str, work: float, any_dtype: bool = False) -> float | None:
        """Return the seconds of an op, or None if it was not measured.

        Args:
            name: name of the op.
            dtype: dtype of its result.
            work: its work.
            any_dtype: use the points of another dtype if this one was not measured.
        """
        by_dtype = self.points.get(name, {})
        points = by_dtype.get(dtype)
        if points is None and any_dtype:
            points = next(iter(by_dtype.values()), None)
        return None if points is None else interpolated(points, work)

    def traffic(self, dtype: str, nbytes: float) -> float | None:
        """Return the seconds to read and write bytes, or None if they were not measured."""
        return self.seconds(MOVING, dtype, nbytes, any_dtype=True)


def interpolated(points: Points, work: float) -> float:
    """Return the seconds for some work: straight lines between points, on logarithmic scales.

    The rate of the largest point holds for more work. For less work than that of the smallest point
    the first line goes on, but a smaller call never has a higher rate.
    """
    if work <= 0:
        return 0.0
    last, seconds = points[-1]
    if work >= last or len(points) == 1:
        return seconds * work / last
    place = max(1, bisect_left(points, work, key=lambda point: point[0]))
    (x0, y0), (x1, y1) = points[place - 1], points[place]
    slope = math.log(y1 / y0) / math.log(x1 / x0)
    if work < x0:
        slope = min(slope, 1.0)
    return y0 * math.exp(slope * math.log(work / x0))


def reduced(samples: Sequence[tuple[float, float]], most: int = 8) -> Points:
    """Return ascending points that summarise measured pairs of work and seconds.

    Equal shares of the logarithmic range of work have one point each. Its coordinates are the
    geometric means of the pairs in it. Seconds never fall from a point to the next.
    """
    logs = sorted((math.log(work), math.log(seconds)) for work, seconds in samples)
    low, high = logs[0][0], logs[-1][0]
    step = max(math.log(2.0), (high - low) / most)
    groups: dict[int, list[tuple[float, float]]] = {}
    for pair in logs:
        groups.setdefault(int((pair[0] - low) / step), []).append(pair)
    points: list[tuple[float, float]] = []
    for group in groups.values():
        work, seconds = (math.exp(sum(column) / len(group)) for column in zip(*group, strict=True))
        points.append((work, max(seconds, points[-1][1] if points else 0.0)))
    return tuple(points)
