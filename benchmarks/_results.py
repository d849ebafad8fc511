"""The kept results, and what the README and the pages in docs/ say of them.

`python -m benchmarks._results [FILE...]` takes result files into benchmarks/results/<hardware>/,
reports on every hardware there, rewrites the pages between the markers of each section, and draws
docs/demo.png.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import _pictures, _report
from benchmarks._gpu_queue import is_stale
from benchmarks._harness import RESULTS, ROOT, text_of
from benchmarks._report import PEAK, Result, Row, cells, shapes
from benchmarks.linear_cross_entropy import GPU_SHAPES, SHAPES
from storage_ops.loss.planning import plan, planner
from storage_ops.loss.planning.devices import GPUS
from storage_ops.quantities import readable

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
DEMO = ROOT / "docs" / "demo.png"
SECTION = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
TRADEOFF = "time against peak memory"
SHORT = {"float32": "fp32", "bfloat16": "bf16"}


def merged(old: Result | None, new: Result) -> Result:
    """`new` in place of what `old` has of the same shapes; the rest of `old` stays."""
    calls = {} if old is None else old.get("calls", {})
    if "call" in new:
        calls = {**calls, new["call"]: new["commit"]}
        new = {key: value for key, value in new.items() if key != "call"}
    new = {**new, "calls": calls} if calls else new
    if old is None:
        return new
    again = shapes(new)
    if shapes(old).keys() <= again.keys():
        return new
    commits = dict.fromkeys([*old["commit"].split(", "), new["commit"]])
    rows = [row for each in (shapes(old) | again).values() for row in each]
    kept = {"commit": ", ".join(commits), "rows": rows}
    still = {k: v for k, v in old.get("skipped", {}).items() if k.split(": ")[0] not in again}
    skipped = {**still, **new.get("skipped", {})}
    return {**old, **new, **kept, "skipped": skipped}


def take(files: Iterable[Path]) -> Iterator[Path]:
    """Bring results into the folder of their hardware; yield where they are.

    Raises:
        ValueError: a result is of a quick run, or does not say what it is.
    """
    for new in _report.load(files):
        if new.get("quick") or not {"stem", "hardware", "commit"} <= new.keys():
            raise ValueError(
                f"result of {new.get('stem')} at {new.get('commit')} on {new.get('hardware')} is "
                f"{'quick' if new.get('quick') else 'incomplete'}; expected one worth keeping"
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
    """Write into every kept result whether its code has changed since; yield those that are stale.

    The mark is a part of the file, so that pages follow from the files alone.
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
    found: dict[str, list[Result]] = {}
    for path in sorted(RESULTS.glob("*/*.json")):
        result = {"stem": path.stem, **json.loads(path.read_text())}
        found.setdefault(path.parent.name, []).append(result)
    return dict(sorted(found.items(), key=lambda item: item[1][0]["gpu"] is None))


def results_of(stem: str) -> Iterator[Result]:
    """One per hardware."""
    for results in kept().values():
        yield from (result for result in results if result["stem"] == stem)


def machine(result: Result) -> str:
    """What a result was measured on, and how."""
    note = f" ({result['note']})" if result.get("note") else ""
    return f"On {result['hardware']}, torch {result['torch']}{note}"


def link(path: Path) -> str:
    """A file as pages in docs/ link to it."""
    return f"../{path.relative_to(ROOT)}"


def source(result: Result) -> str:
    """Return where the numbers of a table come from, with the peers' versions on a GPU."""
    report = link(RESULTS / result["hardware"] / "report.md")
    peers = result.get("packages", {}) if result["gpu"] is not None else {}
    versions = "".join(f", {name} {version}" for name, version in peers.items())
    stale = "; **stale**: the code has changed since" if result.get("stale") else ""
    return f"{machine(result)}{versions}{stale}; [all figures]({report}):\n\n"


def picture(name: str, shows: str) -> str:
    """Return a picture of the first hardware that has it: a GPU, if one has."""
    found = (RESULTS / hardware / name for hardware in kept())
    path = next((path for path in found if path.is_file()), None)
    return f"\n![{shows}]({link(path)})\n" if path else ""


def at(rows: list[Row], case: str) -> Row | None:
    """The row of a case."""
    return next((row for row in rows if row["case"] == case), None)


def point(row: Row | None) -> str:
    """Time and memory in one cell."""
    if row is None:
        return ""
    column = _report.time_of(row)
    return f"{row[column]:.2f}, {row[PEAK]:.0f} MiB" if column else ""


def table(titles: list[str], lines: list[list[str]]) -> str:
    """A table without the columns that nothing stands in."""
    used = [k for k in range(len(titles)) if k == 0 or any(line[k] for line in lines)]
    head = cells(titles[k] for k in used) + cells("---" for _ in used)
    return head + "".join(cells(line[k] or "-" for k in used) for line in lines)


SUMMARY = {
    "plain": "plain PyTorch",
    "full_checkpoint": "full checkpoint of every block",
    "checkpoint": "`torch.utils.checkpoint` of every block",
    "linear_cross_entropy": "`linear_cross_entropy`",
    "output_discard": "`output_discard`",
    "selective_checkpoint": "selective checkpointing",
    "all": "these three together",
    "compile": "`torch.compile`",
    "compile+all": "`torch.compile`, these three together",
    "autochunk": '`torch.compile(backend="storage_ops")`',
}


def summary() -> str:
    """Return the table of the README: what each part saves in a step of a small model."""
    result = next(r for r in results_of("train_gpt") if r["gpu"] is None)
    shape, rows = next(iter(shapes(result).items()))
    found = {name: at(rows, case) for case, name in SUMMARY.items()}
    lines = [[name, f"{row[PEAK]:.0f} MiB", f"{row['peak / plain']:.2f}",
              f"{row['time / plain']:.2f}"] for name, row in found.items() if row]  # fmt: skip
    return f"{shape}. {machine(result)}:\n\n" + table(
        ["one training step", "peak", "peak / plain", "time / plain"], lines
    )


def demo() -> str:
    """The two trainings side by side."""
    text = ""
    for result in results_of("demo"):
        plain, ours = list(shapes(result).values())[-1]
        saved = 100 * (1 - ours[PEAK] / plain[PEAK])
        apart, ratio = ours["losses apart by"], ours["time / plain"]
        lines = [
            ["final loss", plain["final loss"], ours["final loss"], f"{apart:.1e} at most"],
            ["peak memory of a step", f"{plain[PEAK]:.0f} MiB", f"{ours[PEAK]:.0f} MiB",
             f"{saved:.0f} % saved"],
            ["time of a step", f"{plain['ms']:.0f} ms", f"{ours['ms']:.0f} ms",
             f"x {ratio:.2f} ({ours['least - most']})"],
        ]  # fmt: skip
        text += source(result) + table(["", "plain PyTorch", "storage_ops", "difference"], lines)
    return text


def output_discard() -> str:
    """Simulated peaks at the published size."""
    text = ""
    for result in list(results_of("output_discard"))[:1]:  # simulated: the same on any hardware
        lines = []
        for shape, rows in shapes(result).items():
            plain, theirs, ours = (at(rows, way) for way in ("plain", "checkpoint", "discard"))
            if plain is None or theirs is None or ours is None or not shape.endswith("x8"):
                continue
            if published := ours["GPU, fp32, published (MiB)"]:
                peaks = [row["GPU, fp32 (MiB)"] for row in (plain, theirs)]
                block = shape.removesuffix(" x8")
                lines.append([f"`{block}`", *peaks, published, ours["GPU, fp32 (MiB)"]])
        titles = ["", "plain", "torch.utils.checkpoint", "OLMo-core's, published", "ours"]
        text += source(result) + table(titles, lines)
    return text


def linear_cross_entropy() -> str:
    """Time over the products, and memory, of peers and ours."""
    ours = {"ours, default": "default budget", "ours, 1/4 of the logits": "1/4", "1/64": "1/64"}
    peers = (
        "eager",
        "torch.compile",
        "F.linear_cross_entropy at its best",
        "Liger",
        "CCE",
        "quack",
    )
    columns = {peer: peer for peer in peers}
    columns |= {title: f"storage_ops, {case}" for title, case in ours.items()}
    text = ""
    for result in results_of("linear_cross_entropy"):
        lines = []
        for shape, rows in shapes(result).items():
            name, _, dtype = shape.rpartition(" ")
            sizes = (SHAPES | GPU_SHAPES).get(name)
            if sizes:
                label = f"{' x '.join(map(str, sizes))}, {SHORT[dtype]}"
                lines.append([label, *(point(at(rows, case)) for case in columns.values())])
        text += source(result) + table(["tokens x D x classes", *columns], lines) + "\n"
    return text.removesuffix("\n") + picture("linear_cross_entropy.png", TRADEOFF)


def train_gpt() -> str:
    """What each part of the package buys in a training job."""
    text = ""
    for result in results_of("train_gpt"):
        for shape, rows in shapes(result).items():
            shown = ("case", PEAK, "peak / plain", "time / plain", "tokens / s", "loss apart")
            some = [{key: row[key] for key in shown if key in row} for row in rows]
            text += f"{shape}. " + source(result) + _report.markdown_table(some) + "\n"
    return text.removesuffix("\n") + picture("train_gpt-memory.png", "memory over one step")


PLANS = ("case", "budget (MiB)", "simulated (MiB)", PEAK, "predicted", "time / none")


def columns_of(stem: str, shown: tuple[str, ...]) -> str:
    """Some columns of every row of a benchmark."""
    text = ""
    for result in results_of(stem):
        rows = [{key: row[key] for key in shown if key in row} for row in result["rows"]]
        text += source(result) + _report.markdown_table(rows) + "\n"
    return text.removesuffix("\n")


def published_peaks() -> str:
    """Estimates against what others measured on GPUs."""
    shown = ("shape", "case", "on", "published (MiB)", "estimate (MiB)", "difference",
             "because of")  # fmt: skip
    text = ""
    for result in results_of("published_peaks"):  # simulated: the same on any hardware
        rows = [{"source": row["shape"], **{key: row.get(key, "") for key in shown[1:]}}
                for row in result["rows"]]  # fmt: skip
        text = source(result) + _report.markdown_table(rows)
    return text


def by_shape(stem: str) -> str:
    """Every case of a benchmark and every shape; those that are fewer are the columns."""
    text = ""
    for result in results_of(stem):
        found = shapes(result)
        cases = list(dict.fromkeys(row["case"] for row in result["rows"]))
        lines = [[shape, *(point(at(rows, case)) for case in cases)]
                 for shape, rows in found.items()]  # fmt: skip
        grid = [["", *cases], *lines]
        if len(cases) > len(found):
            grid = [list(column) for column in zip(*grid, strict=True)]
        text += source(result) + table(grid[0], grid[1:]) + "\n"
    return text.removesuffix("\n") + picture(f"{stem}.png", TRADEOFF)


def planned() -> str:
    """What the example of the planner prints."""
    p = plan.problem_of(
        8192, 4096, 128256, "bf16", ("input", "weight"), "mean", None, None, None, "h200"
    )
    rates = GPUS["h200"]
    least = planner.smallest_budget(p)
    most = planner.peak_bytes(p, planner.allowed(p)[0], p.tokens, p.vocab)
    some = {f"{size} MiB": size << 20 for size in (64, 400)}
    budgets = {"smallest possible": least, **some, "all logits at once": most}
    lines = []
    for name, budget in budgets.items():
        chosen = planner.choose(p, budget, rates)
        tiles = f"{chosen.strategy}, {chosen.num_chunks} x {chosen.num_slices} tiles"
        lines.append([name, tiles, readable(chosen.peak_bytes), f"{chosen.seconds * 1e3:.1f} ms"])
    return table(["budget", "plan", "peak", "predicted for an H200"], lines)


SECTIONS: dict[str, Callable[[], str]] = {
    "summary": summary,
    "demo": demo,
    "output_discard": output_discard,
    "linear_cross_entropy": linear_cross_entropy,
    "selective_checkpoint": lambda: by_shape("selective_checkpoint"),
    "autochunk": lambda: by_shape("autochunk"),
    "train_gpt": train_gpt,
    "carried_plans": lambda: (
        columns_of("carried_plans", PLANS) + picture("carried_plans.png", TRADEOFF)
    ),
    "fit_plans": lambda: by_shape("fit_plans"),
    "fit_compiled": lambda: by_shape("fit_compiled"),
    "published_peaks": published_peaks,
    "plan": planned,
}


def filled(text: str) -> str:
    """A page with every section as the kept results have it.

    Raises:
        ValueError: a marker names no section.
    """

    def fill(found: re.Match[str]) -> str:
        name = found[2]
        if name not in SECTIONS:
            raise ValueError(f"section is {name!r}; expected one of {', '.join(SECTIONS)}")
        return f"{found[1]}{SECTIONS[name]()}{found[3]}"

    return SECTION.sub(fill, text)


def main() -> None:
    """Take results in, report on all, rewrite the pages, draw the demo."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("files", nargs="*", type=Path, help="new results")
    console: Any = Console()
    for path in take(options.parse_args().files):
        console.print(f"taken into {os.path.relpath(path)}")
    for path in mark_stale():
        console.print(f"stale: {path.relative_to(RESULTS)}")
    for hardware, results in kept().items():
        _report.write(RESULTS / hardware, results, console)
    for page in PAGES:
        page.write_text(filled(page.read_text()))
    _pictures.demo(DEMO, next(results_of("demo")))


if __name__ == "__main__":
    main()
