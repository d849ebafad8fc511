"""On a device that is neither a CPU nor a GPU, every function falls back and works."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
PARTS = ["storage", "discarding", "checkpoints", "losses", "tiles"]


@pytest.mark.slow
@pytest.mark.parametrize("native", ["0", "1"], ids=["pure Python", "native"])
def test_every_part_runs(native, tmp_path):
    gxx = pytest.importorskip("build_tools.toolchain").compiler()
    torch_ = Path(torch.__file__).parent
    include = [f"-I{torch_ / 'include'}", f"-I{torch_ / 'include/torch/csrc/api/include'}"]
    linked = [f"-L{torch_ / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch_ / 'lib'}"]
    library = tmp_path / "device.so"
    command = [gxx, "-std=c++20", "-fPIC", "-shared", *include, HERE / "device.cpp", *linked]
    subprocess.run([*command, "-o", library], check=True, capture_output=True, timeout=600)
    environment = {"STORAGE_OPS_DISABLE_NATIVE": "1"} if native == "0" else {}
    done = subprocess.run(
        [sys.executable, HERE / "run.py", library, str(torch.initial_seed())],
        capture_output=True, text=True, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == PARTS
