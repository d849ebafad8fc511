"""csrc/products can be deleted. Without it, a CPU lacks only speed and sums in fp32."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from storage_ops import _library

ROOT = Path(__file__).parents[2]
SOURCE = ["setup.py", "pyproject.toml", "README.md", "LICENSE", "build_tools", "csrc", "cuda",
          "storage_ops", "storage_ops_plan.py", "tests"]  # fmt: skip
# Objects of a build of this tree, if there is one, so that unchanged files are not compiled again.
BUILT = f"build/native-{sys.implementation.cache_tag}{sys.abiflags}"
TESTS = ["tests/loss", "tests/matmul"]
LOADED = """
import storage_ops
from storage_ops.matmul import scratch
info = storage_ops.info()
assert info["row_kernel"].startswith("C++") and info["problems"] == [], info
assert info["cpu_products"] == "those of torch" and scratch.kind() == "", info
import sys, pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not (ROOT / "csrc/products").is_dir() or not (_library.FOLDER / _library.CPU).exists(),
    reason="no native library is built here",
)
def test_the_package_without_products_passes_the_tests_of_the_loss(tmp_path):
    ignore = shutil.ignore_patterns("*.so", "__pycache__", "lib", "products")
    for name in SOURCE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, ignore=ignore)
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    if (ROOT / BUILT).is_dir():
        of_a_gpu = shutil.ignore_patterns("*_cu1*")
        shutil.copytree(ROOT / BUILT, tmp_path / BUILT, ignore=of_a_gpu)
    env = {**os.environ, "FORCE_CUDA": "0", "PYTHONPATH": str(tmp_path)}
    for command in (
        ["setup.py", "-q", "build_ext", "--inplace"],
        ["-c", LOADED, "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *TESTS],
    ):
        result = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-5000:]
