"""The results that the repository stores, in benchmarks/results/<hardware>/<stem>.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks._gpu_queue import is_stale
from benchmarks._harness import RESULTS, text_of
from benchmarks.report.rows import Result, load, shapes


def merged(old: Result | None, new: Result) -> Result:
    """Return `old` with its shapes replaced by those of `new`, and the new shapes added."""
    calls = {} if old is None else old.get("calls", {})
    if "call" in new:
        calls = {**calls, new["call"]: new["commit"]}
        new = {key: value for key, value in new.items() if key != "call"}
    new = {**new, "calls": calls} if calls else new
    if old is None:
        return new
    new_shapes = shapes(new)
    if shapes(old).keys() <= new_shapes.keys():
        return new
    commits = dict.fromkeys([*old["commit"].split(", "), new["commit"]])
    rows = [row for each in (shapes(old) | new_shapes).values() for row in each]
    kept = {"commit": ", ".join(commits), "rows": rows}
    still = {k: v for k, v in old.get("skipped", {}).items() if k.split(": ")[0] not in new_shapes}
    skipped = {**still, **new.get("skipped", {})}
    return {**old, **new, **kept, "skipped": skipped}


def take(files: Iterable[Path]) -> Iterator[Path]:
    """Copy results into the folder of their hardware. Yield their new paths.

    Raises:
        ValueError: a result is of a quick run, or lacks its name, hardware or commit.
    """
    for new in load(files):
        if new.get("quick") or not {"stem", "hardware", "commit"} <= new.keys():
            raise ValueError(
                f"The result of {new.get('stem')} at {new.get('commit')} on {new.get('hardware')} "
                f"is {'quick' if new.get('quick') else 'incomplete'}. Expected a complete result."
            )
        if "running" in new:
            print(f"{new['stem']} did not reach its end, it stopped at: {new['running']}")
        new = {key: value for key, value in new.items() if key not in ("running", "done")}
        path = RESULTS / new["hardware"] / f"{new['stem']}.json"
        old = json.loads(path.read_text()) if path.is_file() else None
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text_of(merged(old, new)))
        yield path


def mark_stale() -> Iterator[Path]:
    """Mark the stored results whose code has changed since. Yield the stale ones.

    The mark is in the file, so that pages depend only on the files.
    """
    for path in sorted(RESULTS.glob("*/*.json")):
        result = json.loads(path.read_text())
        stale = is_stale({"stem": path.stem, **result})
        if stale:
            yield path
        rest = {key: value for key, value in result.items() if key not in ("stale", "rows")}
        mark = {"stale": True} if stale else {}
        path.write_text(text_of({**rest, **mark, "rows": result["rows"]}))


def kept() -> dict[str, list[Result]]:
    """Return the results by hardware, GPUs first."""
    by_hardware: dict[str, list[Result]] = {}
    for path in sorted(RESULTS.glob("*/*.json")):
        result = {"stem": path.stem, **json.loads(path.read_text())}
        by_hardware.setdefault(path.parent.name, []).append(result)
    return dict(sorted(by_hardware.items(), key=lambda item: item[1][0]["gpu"] is None))


def results_of(stem: str) -> Iterator[Result]:
    """Yield the results of a benchmark, one per hardware."""
    for results in kept().values():
        yield from (result for result in results if result["stem"] == stem)
