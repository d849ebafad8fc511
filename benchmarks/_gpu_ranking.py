"""What to look at first after a run on a GPU: faults, then missed goals, then what is slow.

A log of tests is read for what _failures_at_once prints, one of compute-sanitizer for its findings,
results of benchmarks for how ours does against its goals and its peers.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from benchmarks._report import Result, Row, is_ours, points, shapes

COPY_SHARE = 0.85  # of a copy's bandwidth, for the row kernel
MILLISECONDS = {("h200", "R1 bfloat16"): 17.3}  # of the loss, by hardware and shape
PEERS_TIME = 1.0  # of the fastest peer's that the loss may take
QUACK_TIME = 1.03
LOSS_APART = 0.01  # of the median; logits of 16 bits are no better
MOST = 15  # lines of a kind
FAILED = re.compile(r"^(?:FAILED|ERROR) (.*? - .*)$", re.MULTILINE)
FINDING = re.compile(
    r"^========= (?!COMPUTE-SANITIZER|\w+ SUMMARY|No attached)(\S.*)$", re.MULTILINE
)
# What faulthandler, by which pytest watches a test, says of one that is still running.
RUNNING = re.compile(r'^  File ".*?(tests/[^"]*)", line (\d+) in (test\w*)$', re.MULTILINE)
Stage = Mapping[str, str | int]  # stage, outcome, seconds


def ranked(
    stages: Sequence[Stage], logs: Mapping[str, str], results: Sequence[Result]
) -> list[str]:
    """What to look at, first things first.

    Args:
        stages: how each ended.
        logs: what each wrote, by its name.
        results: of all benchmarks, also those that were stopped.
    """
    bad = {str(s["stage"]): str(s["outcome"]) for s in stages if not str(s["outcome"]).startswith(
        ("ok", "rehearsed", "not run"))}  # fmt: skip
    first = ("packages", "build")
    judged = [result for result in results if not result.get("quick")]
    kinds = {
        "preparation": [f"{name} {bad[name]}" for name in first if name in bad],
        "failed test": [text for log in logs.values() for text in FAILED.findall(log)],
        "stuck test": [text for log in logs.values() for text in stuck(log)],
        "wrong loss": [text for result in judged for text in wrong_losses(result)],
        "sanitizer": [text for name, log in logs.items() for text in findings(name, log)],
        "stage": [f"{name} {how}" for name, how in bad.items() if name not in first],
        "below its goal": [text for result in judged for text in missed(result)],
        "slow": [text for _, text in sorted(pair for r in judged for pair in slow(r))][::-1],
        "not run": [str(s["stage"]) + str(s["outcome"]).removeprefix("not run")
                    for s in stages if str(s["outcome"]).startswith("not run")],
        "not measured": list(dict.fromkeys(
            f"{name}: {why}" for r in judged for name, why in r.get("skipped", {}).items())),
    }  # fmt: skip
    lines = []
    for kind, texts in kinds.items():
        lines += [f"{kind}: {text}" for text in texts[:MOST]]
        lines += [f"{kind}: and {len(texts) - MOST} more"] * (len(texts) > MOST)
    return [f"{number:3}. {line}" for number, line in enumerate(lines, 1)]


def stuck(log: str) -> Iterator[str]:
    """Tests that ran for so long that their stack was printed."""
    for dump in log.split("\nTimeout (")[1:]:
        if found := RUNNING.search(dump):
            yield "{}:{}, {}".format(*found.groups())


def findings(name: str, log: str) -> Iterator[str]:
    """What compute-sanitizer found, each once, the most frequent first."""
    for text, count in Counter(FINDING.findall(log)).most_common():
        yield f"{name}: {count} x {text}"


def wrong_losses(result: Result) -> Iterator[str]:
    """Losses that are not what the others of the same shape computed."""
    for shape, rows in shapes(result).items():
        losses = {row["case"]: row["loss"] for row in rows if isinstance(row.get("loss"), float)}
        numbers = [loss for loss in losses.values() if math.isfinite(loss)]
        usual = statistics.median(numbers) if numbers else 0.0
        for case, loss in losses.items():
            if not math.isclose(loss, usual, rel_tol=LOSS_APART):
                yield f"{shape}: {case} computed {loss}, the median is {usual}"


def missed(result: Result) -> Iterator[str]:
    """Goals of the row kernel and of the loss that were not reached."""
    for shape, rows in shapes(result).items():
        if result["stem"] == "row_kernel":
            for row in rows:
                share = 1 / row["time / copy"]
                if row["case"] == "row kernel" and share < COPY_SHARE:
                    yield f"{shape}: {share:.0%} of a copy's bandwidth, goal {COPY_SHARE:.0%}"
        if result["stem"] == "linear_cross_entropy":
            yield from _missed_by_the_loss(result["hardware"], shape, rows)


def _missed_by_the_loss(hardware: str, shape: str, rows: list[Row]) -> Iterator[str]:
    each = {case: time for case, _, time in points(rows) if not case.startswith("floor")}
    ours = min((case for case in each if is_ours(case)), key=lambda case: each[case], default=None)
    if ours is None:
        return
    taken = next(row["ms"] for row in rows if row["case"] == ours)
    for (device, which), goal in MILLISECONDS.items():
        if device in hardware and which == shape and taken > goal:
            yield f"{shape}: {ours} takes {taken} ms, goal {goal} ms"
    for peer in (case for case in each if not is_ours(case)):
        ratio, goal = (
            each[ours] / each[peer],
            QUACK_TIME if peer.startswith("quack") else PEERS_TIME,
        )
        if ratio > goal:
            yield f"{shape}: {ours} takes {ratio:.2f} of the time of {peer}, goal {goal}"


def slow(result: Result) -> Iterator[tuple[float, str]]:
    """How much longer our fastest takes than the fastest peer, where there is no goal."""
    if result["stem"] in ("row_kernel", "linear_cross_entropy"):
        return
    for shape, rows in shapes(result).items():
        each = [(time, case) for case, _, time in points(rows)]
        ours = min((p for p in each if is_ours(p[1])), default=None)
        peer = min((p for p in each if not is_ours(p[1])), default=None)
        if ours and peer and ours[0] > peer[0]:
            ratio = ours[0] / peer[0]
            text = f"{shape}: {ours[1]} takes {ratio:.2f} of the time of {peer[1]}"
            yield ratio, f"{result['stem']}, {text}"
