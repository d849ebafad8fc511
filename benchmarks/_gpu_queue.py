"""The queue of calls for a machine with a GPU, and their results.

A call fits into nine minutes, so that a machine with a limit of ten per command can run it.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Stage:
    """One benchmark of a call.

    Attributes:
        name: name of its results file and log.
        seconds: its share of the call. It may also use time that earlier stages left.
        part: the benchmark, as `python -m storage_ops bench` names it.
        arguments: arguments of the benchmark.
        rehearsed: arguments for a rehearsal on a CPU.
    """

    name: str
    seconds: int
    part: str
    arguments: tuple[str, ...] = ()
    rehearsed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Call:
    """Stages for one question.

    Attributes:
        decides: the decision that needs the numbers.
        paths: the code whose change makes the results stale, besides the benchmarks of the stages.
    """

    name: str
    decides: str
    paths: tuple[str, ...]
    stages: tuple[Stage, ...]

    @property
    def code(self) -> list[str]:
        """Return all paths that the results depend on."""
        parts = dict.fromkeys(stage.part.partition(":")[0] for stage in self.stages)
        files = (f"benchmarks/{part}.py" for part in parts)
        return [*self.paths, *(f if (ROOT / f).is_file() else f[:-3] for f in files)]


LOSS = ("storage_ops/loss", "storage_ops/matmul", "csrc/rows", "cuda")
CHUNKER = ("storage_ops/autochunk", "storage_ops/graph", *LOSS)
CHECKPOINTS = ("storage_ops/checkpoint", "storage_ops/storage")
PLANS = ("storage_ops/fitting", "storage_ops/simulate", *CHECKPOINTS)
WAYS = ("plain", "compile", "compile+linear_cross_entropy", "compile+all", "autochunk")
EAGER = ("plain", "full_checkpoint", "selective_checkpoint", "output_discard", "checkpoint",
         "torch_selective")  # fmt: skip
FILE = "FILE"  # placeholder for the file of --real-logits
REAL = ("--real-logits", FILE)
SANITIZED = ("tests/cuda/test_row_kernel.py", "tests/cuda/test_divergence_rows.py",
             "-k", "(plain or all) and not 50257 and not 128256")  # fmt: skip


def shapes(name: str, seconds: int, part: str, *shapes: str, more: tuple[str, ...] = ()) -> Stage:
    """Return a stage for some shapes of a benchmark."""
    return Stage(name, seconds, part, ("--shapes", *shapes, *more), ("--shapes", "least", *more))


def tests(name: str, seconds: int, *arguments: str, tool: str = "") -> Stage:
    """Return a stage that runs the tests of a GPU, under a tool of compute-sanitizer if named."""
    command_line = (*(("--tool", tool) if tool else ()), "--", *arguments)
    return Stage(name, seconds, "_gpu_tests", command_line, command_line)


QUEUE = (
    Call(
        "compiled",
        "whether each part has a benefit under torch.compile, and so what the README recommends",
        (*CHUNKER, *CHECKPOINTS),
        tuple(
            Stage(size, 240, "train_gpt", ("--size", size, "--cases", *WAYS), ("--cases", *WAYS))
            for size in ("gpt2-small", "llama-1b")
        ),
    ),
    *(
        Call(
            f"compiled-{kind.lower()}",
            f"whether plans of a compiled {kind} beat activation_memory_budget at the same peaks",
            PLANS,
            (
                Stage("fit", 480, "fit:compiled",
                      ("--models", kind, "--shares", "0.7", "0.5", "0.3", "--looks", "2"),
                      ("--models", kind, "--looks", "1")),
            ),
        )
        for kind in ("GPT", "Llama")
    ),
    Call(
        "predictions",
        "whether a calibration predicts steps of all six models within 3 points, and which ops of "
        "this GPU to keep beside the table of devices",
        PLANS,
        tuple(
            Stage(f"predictions_{number}", 235, "fit:predictions",
                  ("--models", *kinds, "--repeats", "7"), ("--models", kinds[0]))
            for number, kinds in enumerate((("GPT", "Llama", "Mixtral"), ("ViT", "T5", "UNet")))
        ),
    ),
    Call(
        "chunker",
        "whether the general rewrite is faster than Inductor's chunker, and whether recognising "
        "losses pays",
        CHUNKER,
        tuple(
            shapes(shape, 160, "autochunk", shape, more=("--losses", "focal", "dpo", "jsd"))
            for shape in ("S1", "S2", "S3")
        ),
    ),
    Call(
        "loss",
        "whether a page may say 'fastest': quack and Liger, whose wheels travel along, against "
        "ours; below 0.97 of our time, try the search of cuBLASLt's algorithms",
        LOSS,
        (
            *(shapes(shape, 100, "linear_cross_entropy", shape) for shape in ("R2", "R7", "R8")),
            shapes("R9", 100, "linear_cross_entropy", "R9, 1024", "R9, 512", "R9, 128"),
            Stage("real", 75, "linear_cross_entropy",
                  (*REAL, "--hidden", "4096"), REAL),
        ),
    ),
    Call(
        "tolerance",
        "whether leaving negligible classes out of the gradient takes at most 0.65 of the loss",
        LOSS,
        tuple(
            Stage(f"tolerance_{hidden}", 220, "gradient_tolerance",
                  ("logits", "--real-logits", FILE, "--hidden", hidden),
                  ("logits", "--real-logits", FILE))
            for hidden in ("4096", "2048")
        ),
    ),
    Call(
        "heads",
        "which goal is missed: DPO 1.00 of plain compiled, top-K 1.15 of the nll, KL 1.06 and kd "
        "1.10 of their products",
        ("storage_ops/divergence", "storage_ops/losses", *LOSS),
        (
            Stage("divergence", 200, "head", ("--parts", "divergence"),
                  ("--parts", "divergence", "--shapes", "least")),
            Stage("head", 200, "head", ("--parts", "selected", "dpo"),
                  ("--parts", "selected", "dpo", "--shapes", "least")),
            Stage("real", 75, "head",
                  (*REAL, "--hidden", "4096", "--parts", "selected", "dpo"), REAL),
        ),
    ),
    Call(
        "rows",
        "whether the row kernel reaches its goal: 1.18 of a copy at (4096, 128256) in bfloat16, "
        "1.25 at 32000 and 256000 classes; and which of its forms to keep at each shape",
        ("csrc/rows", "cuda", "storage_ops/loss"),
        (
            tests("streamed_rows", 70, "tests/cuda/test_streamed_rows.py"),
            Stage("row_kernel", 150, "row_kernel"),
            Stage("op_peaks", 90, "op_peaks"),
            tests("streamed_races", 90, "tests/cuda/test_streamed_rows.py", "-k",
                  "any_length or ignored", tool="racecheck"),
        ),
    ),
    Call(
        "host",
        "where the host is slower than the GPU: storage ops, traced steps, and checkpoints; "
        "selective ones should take at most 1.20 of plain, discarding 1.12",
        (*CHECKPOINTS, "storage_ops/graph"),
        (
            Stage("storage", 50, "storage"),
            Stage("gpt2-small", 150, "train_gpt",
                  ("--size", "gpt2-small", "--cases", *EAGER), ("--cases", *EAGER)),
            # Compilation takes longest and decides nothing here, so it comes last.
            Stage("selective_checkpoint", 140, "selective_checkpoint",
                  ("--modes", "eager", "traced", "compiled")),
            Stage("traced_step", 140, "traced_step"),
        ),
    ),
    Call(
        "offload",
        "whether offloading hides behind the layers as plans predict",
        PLANS,
        (Stage("carried", 480, "fit:carried"),),
    ),
    Call(
        "graphs",
        "whether whole steps can be captured as CUDA graphs",
        ("storage_ops", "csrc", "cuda"),
        (tests("captures", 300, "tests/graph/test_capture.py", "tests/cuda", "-k",
               "captur or cuda_graph"),),
    ),
    Call(
        "tests",
        "whether a release may say that it is tested on this GPU",
        ("storage_ops", "csrc", "cuda"),
        (
            tests("cuda", 280, "tests"),
            *(tests(tool, 65, *SANITIZED, tool=tool)
              for tool in ("memcheck", "racecheck", "initcheck")),
        ),
    ),
)  # fmt: skip


def git(*arguments: str) -> str | None:
    """Return the output of git, or None if it fails or is missing."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def commits_since(commit: str, paths: list[str]) -> int | None:
    """Return how many commits have changed these paths since one, or None if git cannot say."""
    base = commit.removesuffix("-dirty")
    changes = git("log", "--oneline", f"{base}..HEAD", "--", *paths) if base else None
    return None if changes is None else len(changes.splitlines())


# The code that results depend on, if it is less than the package.
CODE = {
    "linear_cross_entropy": LOSS, "linear_cross_entropy_plans": LOSS, "row_kernel": LOSS,
    "gradient_tolerance_logits": LOSS, "gradient_tolerance_training": LOSS,
    "gradient_tolerance_sampling": ("storage_ops/loss/engine/selection.py",),
    "head": ("storage_ops/divergence", "storage_ops/losses", *LOSS),
    "autochunk": CHUNKER, "autochunk_model": CHUNKER, "autochunk_memory": CHUNKER,
    "autochunk_compilation": CHUNKER, "storage": ("storage_ops/storage", "csrc/storage"),
    "output_discard": CHECKPOINTS, "selective_checkpoint": CHECKPOINTS,
    "fit": PLANS, "fit_plans": PLANS, "fit_budgets": PLANS, "fit_compiled": PLANS,
    "carried_plans": PLANS, "fit_predictions": PLANS,
    # Simulations, which run no C++ code.
    "published_peaks": ("storage_ops",), "model_types": ("storage_ops",),
}  # fmt: skip


def is_stale(result: dict[str, Any]) -> bool:
    """Return True if code that a result depends on has changed since its oldest commit."""
    paths = CODE.get(result["stem"], ("storage_ops", "csrc", "cuda"))
    return commits_since(result["commit"].split(", ")[0], list(paths)) != 0


def measured_at(call: Call) -> str | None:
    """Return the commit of the stored results of a call, the oldest if they have several."""
    commits: list[str] = []
    for path in sorted(RESULTS.glob("nvidia-*/*.json")):
        commit = json.loads(path.read_text()).get("calls", {}).get(call.name)
        commits += [commit] if commit else []
    return max(commits, key=lambda commit: commits_since(commit, ["."]) or 0, default=None)


def listed() -> Iterator[str]:
    """Yield a line for each call: those without results in their order, then the others."""
    fresh = []
    for call in QUEUE:
        commit = measured_at(call)
        if commit is None:
            yield f"{call.name:13} no results; decides {call.decides}"
            continue
        since = commits_since(commit, call.code)
        text = f"{call.name:13} results at {commit}"
        if since == 0:
            fresh.append(text)
        else:
            changed = "by unknown commits" if since is None else f"in {since} commits"
            yield f"{text}, stale: its code changed {changed} since"
    yield from fresh
