"""The sections of the README and of docs/ with measured figures, between their markers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from benchmarks._harness import RESULTS, ROOT
from benchmarks.linear_cross_entropy import GPU_SHAPES
from benchmarks.report.kept import kept, results_of
from benchmarks.report.markdown import table, table_of_rows
from benchmarks.report.rows import (
    IN_MIB,
    PEAK,
    Result,
    Row,
    at,
    in_readable_units,
    shapes,
    time_of,
    unit_of,
)
from benchmarks.report.sizes import SIZES, spelled_out, without_names
from storage_ops.loss.planning import plan, planner
from storage_ops.loss.planning.devices import GPUS
from storage_ops.quantities import MIB, readable

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
SECTION = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
TRADEOFF = "time against peak memory"


def machine(result: Result) -> str:
    """Return the hardware and the torch version of a result, with its note."""
    note = f" ({without_names(result['note'])})" if result.get("note") else ""
    return f"On {result['hardware']}, torch {result['torch']}{note}"


def link(path: Path) -> str:
    """Return the link to a file from pages in docs/."""
    return f"../{path.relative_to(ROOT)}"


def source(result: Result) -> str:
    """Return the source of a table's numbers, on a GPU with the peers' versions."""
    report = link(RESULTS / result["hardware"] / "report.md")
    peers = result.get("packages", {}) if result["gpu"] is not None else {}
    versions = "".join(f", {name} {version}" for name, version in peers.items())
    stale = "; **stale**: the code has changed since" if result.get("stale") else ""
    return f"{machine(result)}{versions}{stale}; [all figures]({report}):\n\n"


def picture(name: str, shows: str) -> str:
    """Return a picture of the first hardware that has it, preferably a GPU."""
    candidates = (RESULTS / hardware / name for hardware in kept())
    path = next((path for path in candidates if path.is_file()), None)
    return f"\n![{shows}]({link(path)})\n" if path else ""


def point(row: Row | None, unit: str, size: float) -> str:
    """Return the time and peak of a row in one cell. `size` is the size of `unit` in MiB."""
    if row is None:
        return ""
    column = time_of(row)
    digits = 0 if size == 1 else 1
    return f"{row[column]:.2f}, {row[PEAK] / size:.{digits}f} {unit}" if column else ""


HALF = "storage_ops, with the loss, 51%"  # a plan for half the memory
# Rows of the README's table: benchmark, shape, plain case, and the names of the other cases in the
# table.
GAINS = (
    ("carried_plans", "Llama, 2 x 8192 tokens", "none", {
        HALF: "Llama of 1.5 billion parameters, `fit` with the loss",
        "storage_ops, with the loss, 34%": "Llama of 1.5 billion parameters, a smaller budget",
        "storage_ops, with all, 30%":
            "Llama of 1.5 billion parameters, offloading and tiles too",
    }),
    ("train_gpt", "gpt2-small, 16 x 1024 tokens, bfloat16", "plain", {
        "linear_cross_entropy": "gpt2-small, 16 x 1024 tokens, `linear_cross_entropy`",
        "all": "gpt2-small, 16 x 1024 tokens, output discarding and selective checkpointing too",
    }),
    ("linear_cross_entropy", "R1 bfloat16", "eager", {
        "storage_ops, 1/4": f"loss alone, {' x '.join(map(str, GPU_SHAPES['R1']))}, "
        "a quarter of the logits",
    }),
)  # fmt: skip


def on_gpu(stem: str, shape: str, *cases: str) -> list[Row]:
    """Return the rows of some cases on the first GPU."""
    result = next(result for result in results_of(stem) if result["gpu"] is not None)
    return [row for case in cases if (row := at(shapes(result)[shape], case)) is not None]


def headline() -> str:
    """Return the first figures of the README."""
    plain, ours = on_gpu("carried_plans", "Llama, 2 x 8192 tokens", "none", HALF)
    return (
        f"A training step of a Llama with 1.5 billion parameters needs **{ours[PEAK] / 1024:.0f} "
        f"GiB instead of {plain[PEAK] / 1024:.0f} GiB** on an H200, and takes "
        f"{ours['time / none']:.2f} times as long.\n"
    )


def gains() -> str:
    """Return the table of the README: the savings of each part on a GPU."""
    lines = []
    for stem, shape, base, names in GAINS:
        plain, *others = on_gpu(stem, shape, base, *names)
        column = time_of(plain) or ""
        for row in others:
            ratio = row[column] / plain[column]
            peaks = [f"{peak / 1024:.1f}" for peak in (plain[PEAK], row[PEAK])]
            lines.append([names[row["case"]], *peaks, f"{ratio:.2f}"])
    titles = ["one training step on an H200, bfloat16", "plain peak (GiB)", "peak (GiB)",
              "time / plain"]  # fmt: skip
    return table(titles, lines)


def demo() -> str:
    """Return the two trainings side by side."""
    text = ""
    for result in results_of("demo"):
        plain, ours = list(shapes(result).values())[-1]
        saved = 100 * (1 - ours[PEAK] / plain[PEAK])
        difference, ratio = ours["losses apart by"], ours["time / plain"]
        lines = [
            ["final loss", plain["final loss"], ours["final loss"], f"{difference:.1e} at most"],
            ["peak memory of a step", f"{plain[PEAK]:.0f} MiB", f"{ours[PEAK]:.0f} MiB",
             f"{saved:.0f} % saved"],
            ["time of a step", f"{plain['ms']:.0f} ms", f"{ours['ms']:.0f} ms",
             f"x {ratio:.2f} ({ours['least - most']})"],
        ]  # fmt: skip
        text += source(result) + table(["", "plain PyTorch", "storage_ops", "difference"], lines)
    return text


def output_discard() -> str:
    """Return simulated peaks at the published size."""
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
    """Return time over the products, and memory, of peers and ours."""
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
        unit = unit_of(result["rows"])
        for shape, rows in shapes(result).items():
            name, *dtype = shape.split()
            if name in SIZES and len(dtype) == 1:  # without shapes that have only one peer
                cells = (point(at(rows, case), *unit) for case in columns.values())
                lines.append([spelled_out(shape), *cells])
        text += source(result) + table(["tokens x D x classes", *columns], lines) + "\n"
    return text.removesuffix("\n") + picture("linear_cross_entropy.png", TRADEOFF)


def train_gpt() -> str:
    """Return the gains of each part of the package in a training job."""
    text = ""
    for result in results_of("train_gpt"):
        for shape, rows in shapes(result).items():
            shown = ("case", PEAK, "peak / plain", "time / plain", "tokens / s", "loss apart")
            some = [{key: row[key] for key in shown if key in row} for row in rows]
            text += f"{shape}. " + source(result) + table_of_rows(in_readable_units(some)) + "\n"
    return text.removesuffix("\n") + picture("train_gpt-memory.png", "memory over one step")


def gradient_tolerance(part: str) -> str:
    """Return errors on real logits, or losses of training runs."""
    text = ""
    for result in results_of(f"gradient_tolerance_{part}"):
        lists = ("losses", "shares", "shape")
        text += source(result)
        for shape, rows in shapes(result).items():
            shown = [
                {k: f"{v:.1e}" if "error" in k else v for k, v in row.items() if k not in lists}
                for row in rows
            ]
            text += f"**{shape}**\n\n" + table_of_rows(shown) + "\n"
    shows = "losses of training runs, and the share of the classes that their gradients multiply"
    return text.removesuffix("\n") + picture(f"gradient_tolerance_{part}.png", shows)


PLANS = ("case", "budget (MiB)", "simulated (MiB)", PEAK, "predicted", "time / none")


def columns_of(stem: str, shown: tuple[str, ...]) -> str:
    """Return some columns of every row of a benchmark."""
    text = ""
    for result in results_of(stem):
        rows = [{key: row[key] for key in shown if key in row} for row in result["rows"]]
        text += source(result) + table_of_rows(in_readable_units(rows)) + "\n"
    return text.removesuffix("\n")


def published_peaks() -> str:
    """Return estimates against GPU peaks that others published."""
    shown = ("shape", "case", "on", "published (MiB)", "estimate (MiB)", "difference",
             "because of")  # fmt: skip
    text = ""
    for result in results_of("published_peaks"):  # simulated: the same on any hardware
        # Figures are from 40 MiB to 80 GiB, so each has its own unit.
        rows = [{"source": row["shape"],
                 **{key.removesuffix(f" {IN_MIB}"):
                    readable(round(row[key] * MIB)) if key.endswith(IN_MIB) else row.get(key, "")
                    for key in shown[1:]}}
                for row in result["rows"]]  # fmt: skip
        text = source(result) + table_of_rows(rows)
    return text


def model_types() -> str:
    """Return the answers of `will-it-fit` for types of models, a table for each family."""
    text = ""
    newest = max(results_of("model_types"), key=lambda result: result["day"])
    for family, rows in shapes(newest).items():
        lines = []
        names_differ = any(row["class"] != row["case"] for row in rows)
        for row in rows:
            parameters = row.get("parameters", 0) / 1e9
            peak = readable(round(row[PEAK] * MIB), up=True) if PEAK in row else ""
            size = f"{parameters:.3g}" if parameters else ""
            answer = f"{row['answer']}. {row.get('assumes', '')}".rstrip(". ")
            names = [row["case"], f"`{row['class']}`"] if names_differ else [row["case"]]
            lines.append([*names, size, row["batch"], peak, row.get("seconds", ""), answer])
        titles = ["type", "class"] if names_differ else ["type"]
        titles += ["10^9 parameters", "batch", "peak", "seconds", "answer"]
        text += f"### {family}\n\n{table(titles, lines)}\n"
    return source(newest) + text.removesuffix("\n")


def by_shape(stem: str) -> str:
    """Return all cases and shapes of a benchmark. The smaller group becomes the columns."""
    text = ""
    for result in results_of(stem):
        rows_by_shape = shapes(result)
        unit = unit_of(result["rows"])
        cases = list(dict.fromkeys(row["case"] for row in result["rows"]))
        lines = [[spelled_out(shape), *(point(at(rows, case), *unit) for case in cases)]
                 for shape, rows in rows_by_shape.items()]  # fmt: skip
        grid = [["", *cases], *lines]
        if len(cases) > len(rows_by_shape):
            grid = [list(column) for column in zip(*grid, strict=True)]
        text += source(result) + table(grid[0], grid[1:]) + "\n"
    return text.removesuffix("\n") + picture(f"{stem}.png", TRADEOFF)


def planned() -> str:
    """Return the output of the planner's example."""
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
    "headline": headline,
    "gains": gains,
    "demo": demo,
    "output_discard": output_discard,
    "linear_cross_entropy": linear_cross_entropy,
    "gradient_tolerance_logits": lambda: gradient_tolerance("logits"),
    "gradient_tolerance_training": lambda: gradient_tolerance("training"),
    "gradient_tolerance_sampling": lambda: gradient_tolerance("sampling"),
    "selective_checkpoint": lambda: by_shape("selective_checkpoint"),
    "autochunk": lambda: by_shape("autochunk"),
    "train_gpt": train_gpt,
    "carried_plans": lambda: (
        columns_of("carried_plans", PLANS) + picture("carried_plans.png", TRADEOFF)
    ),
    "fit_plans": lambda: by_shape("fit_plans"),
    "fit_compiled": lambda: by_shape("fit_compiled"),
    "published_peaks": published_peaks,
    "model_types": model_types,
    "plan": planned,
}


def filled(text: str) -> str:
    """Return a page with every section filled from the stored results.

    Raises:
        ValueError: a marker names no section.
    """

    def fill(marker: re.Match[str]) -> str:
        name = marker[2]
        if name not in SECTIONS:
            raise ValueError(f"`section` is {name!r}. Expected one of {', '.join(SECTIONS)}.")
        return f"{marker[1]}{SECTIONS[name]()}{marker[3]}"

    return SECTION.sub(fill, text)
