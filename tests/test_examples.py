"""Every example runs and saves memory."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.in_turn

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SCRIPTS = {p.name for p in EXAMPLES.glob("*.py")} - {"report.py"}
NEEDS = {"finetune_transformers.py": "accelerate", "lightning_module.py": "lightning"}
ON_RANKS = "fsdp_vocab_parallel.py"
# Run the examples in one process, since imports take most of their time. Each runs if others fail.
IN_TURN = """
import runpy, sys, traceback
for script in sys.argv[1:]:
    print("example", script)
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException:
        traceback.print_exc(file=sys.stdout)
"""


def output(*command):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, *command], cwd=EXAMPLES, capture_output=True, text=True, env=environment,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def saves_memory(printed):
    shares = [float(n) for n in re.findall(r"MiB\s*│\s*([\d.]+)\s*│", printed)]
    return shares[:1] == [1] and max(shares[1:], default=1) < 0.8


def test_examples_run_and_save_memory():
    missing = {s for s, package in NEEDS.items() if importlib.util.find_spec(package) is None}
    scripts = sorted(SCRIPTS - {ON_RANKS} - missing)
    _, *parts = output("-c", IN_TURN, *scripts).split("example ")
    printed = dict(part.split("\n", 1) for part in parts)
    assert list(printed) == scripts
    wrong = {script: text for script, text in printed.items() if not saves_memory(text)}
    assert not wrong, "\n".join(f"{script}:\n{text[-3000:]}" for script, text in wrong.items())
    if missing:
        pytest.skip(f"without what they need: {sorted(missing)}")


def test_an_example_on_two_ranks_runs_and_saves_memory():
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert saves_memory(output(*run, ON_RANKS))
