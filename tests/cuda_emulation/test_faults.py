"""The emulation detects each fault that is planted in the kernel."""

import os
import re
import subprocess
import sys

import pytest
import torch

from . import build
from .faults import FAULTS, NAMESPACE, RACE, compile_planted, effect_of_fault, plant
from .ops import SANITIZER, Emulated

RACES = [fault for fault, (*_, shows) in FAULTS.items() if shows == RACE]


@pytest.fixture(scope="module")
def kernel(compiled, tmp_path_factory):
    return Emulated(compile_planted(tmp_path_factory.mktemp("faults")), NAMESPACE)


@pytest.mark.slow
@pytest.mark.skipif(SANITIZER != "", reason="the sanitizer ends the run first")
@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_planted_faults_are_detected(kernel, fault):
    kernel.seed(torch.initial_seed() % 2**32)
    plant(kernel, fault)
    says = effect_of_fault(kernel)
    if fault:
        assert re.search(FAULTS[fault][-1], says)
    else:
        assert says == ""


def runtime(name):
    """Return the library of a sanitizer, which must be loaded before Python, or an empty string."""
    asked = ["g++", f"-print-file-name=lib{name}.so"]
    path = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    return path if os.path.isabs(path) else ""


@pytest.fixture(scope="module")
def watched(compiled, tmp_path_factory):
    """Return the kernel, compiled with the thread sanitizer."""
    if not runtime("tsan"):
        pytest.skip("there is no thread sanitizer")
    return compile_planted(tmp_path_factory.mktemp("watched"), "thread")


@pytest.mark.in_turn
@pytest.mark.skipif(
    bool(os.environ.get("CI")), reason="`make sanitize` watches the kernels themselves"
)
@pytest.mark.parametrize("fault", ["", *RACES])
def test_the_thread_sanitizer_detects_races(watched, fault):
    settings = {
        "LD_PRELOAD": runtime("tsan"),
        "TSAN_OPTIONS": "ignore_noninstrumented_modules=1 halt_on_error=1 exitcode=66",
        "OMP_NUM_THREADS": "1",
    }
    program = [sys.executable, "-m", "tests.cuda_emulation.faults"]
    command = [*program, str(watched), fault, str(torch.initial_seed())]
    result = subprocess.run(
        command, env=os.environ | settings, cwd=build.ROOT, capture_output=True, text=True
    )
    if fault:
        assert result.returncode == 66 and "data race" in result.stderr, result.stderr
    else:
        assert result.returncode == 0 and "no fault" in result.stdout, result.stderr
