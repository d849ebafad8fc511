"""Every example runs, and saves memory."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SCRIPTS = sorted(p.name for p in EXAMPLES.glob("*.py") if p.name != "report.py")
NEEDS = {"finetune_transformers.py": "accelerate", "lightning_module.py": "lightning"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_runs_and_saves_memory(script):
    pytest.importorskip(NEEDS.get(script, "torch"))
    command = [sys.executable, str(EXAMPLES / script)]
    if script.startswith("fsdp"):
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command[1:1] = torchrun
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    shares = [float(n) for n in re.findall(r"MiB\s*│\s*([\d.]+)\s*│", done.stdout)]
    assert shares[0] == 1 and max(shares[1:]) < 0.8
