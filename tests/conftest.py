import contextlib
import gc
import hashlib
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import settings

import storage_ops
from storage_ops.checkpoint import effects
from storage_ops.storage.kernels import storage_path

INFO = storage_ops.info()
NATIVE_PATH = INFO["storage_path"]
CAN_SWAP = hasattr(torch.UntypedStorage, "_swap_data_ptr_")
# CI draws the same examples at every run; elsewhere they are new ones each time.
settings.register_profile("ci", derandomize=True, print_blob=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

# The native path when there is one, and every Python path that this torch can run.
PATHS = [
    *(["binding"] if NATIVE_PATH == "binding" else []),
    *(["alias"] if CAN_SWAP and any("alias" in name for name in INFO["loaded"]) else []),
    "copy",
]


def pytest_configure():
    """One seed for the run: what is asked for, in CI the commit's, and else a fresh one.

    So a failure in CI comes up again where that commit is checked out, and each commit draws anew.
    """
    drawn = _hash_of_the_tree() if os.environ.get("CI") else ""
    os.environ.setdefault("STORAGE_OPS_TEST_SEED", drawn or os.urandom(4).hex())


def _hash_of_the_tree():
    owned_by_anyone = ["-c", "safe.directory=*"]
    asked = ["git", *owned_by_anyone, "rev-parse", "--short=8", "HEAD^{tree}"]
    done = subprocess.run(asked, cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stdout.strip()


def pytest_terminal_summary(terminalreporter):
    if terminalreporter.stats.get("failed"):
        seed = os.environ["STORAGE_OPS_TEST_SEED"]
        terminalreporter.write_line(f"STORAGE_OPS_TEST_SEED={seed} draws the same random numbers")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported and collected stays: nobody looks for garbage in it, again and again.

    Nor as often as every 700 objects: a trace makes millions that live until it ends.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(50_000, 20, 100)


def pytest_collection_modifyitems(items):
    """What is not run here: tests without their GPU or kernels, and in CI most slow ones.

    STORAGE_OPS_REQUIRE_CUDA=1 makes the first a failure. Of a slow test CI runs one case of 16,
    the first, the fourth of the next 16 and so on, so that many values of each parameter have
    their turn, and nothing of one without parameters. Tests that take turns are drawn by the seed,
    which is the commit's. `make test-all` and the weekly workflow run all.
    """
    if os.environ.get("CI"):
        _some_cases_of_slow_tests(items)
        _some_tests_in_turn(items)
    lacking = {}
    if not (torch.cuda.is_available() or os.environ.get("STORAGE_OPS_REQUIRE_CUDA") == "1"):
        lacking["cuda"] = "needs an NVIDIA GPU"
    if INFO["row_kernel"] == "plain torch":
        lacking["kernels"] = "a simulation is of a device with native kernels"
    for name, reason in lacking.items():
        for item in items:
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))


def _some_cases_of_slow_tests(items):
    skip = pytest.mark.skip(reason="one case in sixteen in CI; `make test-all` runs all")
    seen = Counter()
    for item in items:
        name, has_cases, _ = item.nodeid.partition("[")
        left_out = not has_cases or (seen[name] - 3 * (seen[name] // 16)) % 16
        if item.get_closest_marker("slow") and left_out:
            item.add_marker(skip)
        seen[name] += 1


def _some_tests_in_turn(items):
    skip = pytest.mark.skip(reason="not its turn at this commit; `make test-all` runs all")
    seed = os.environ["STORAGE_OPS_TEST_SEED"]
    for item in items:
        if item.get_closest_marker("in_turn"):
            drawn = hashlib.sha256(f"{seed} {item.nodeid}".encode()).digest()[0]
            if drawn % 3:
                item.add_marker(skip)


@pytest.fixture
def copied(monkeypatch):
    """The tensors that regions copy before they run."""
    tensors = []

    class Counted(effects.Contents):
        __slots__ = ()

        def __init__(self, t, *args):
            tensors.append(t)
            super().__init__(t, *args)

    monkeypatch.setattr(effects, "Contents", Counted)
    return tensors


@pytest.fixture(params=PATHS)
def path(request):
    """Run a test once by each storage path; the name of the path."""
    native = request.param == NATIVE_PATH == "binding"
    with contextlib.nullcontext() if native else storage_path(request.param):
        yield request.param


@pytest.fixture
def zero_copy(path):
    return path != "copy"


@pytest.fixture(autouse=True, scope="module")
def what_was_there_before_is_no_garbage():
    """Each `measure` and `estimate` collects garbage: not again among millions of old objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def guards_are_not_timed():
    """Dynamo empties the caches of the processor to log how long the guards of a graph take."""
    guards = sys.modules.get("torch._dynamo.guards")
    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = lambda *_: 0.0


@pytest.fixture(autouse=True)
def fresh_random_numbers(request):
    """Inputs that differ from test to test, and from run to run where the seed of the run does."""
    _draw_for(request.node.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    """What several tests share does not depend on which of them comes first."""
    if fixturedef.scope == "function":
        return (yield)
    with torch.random.fork_rng(devices=[]):
        _draw_for(f"{fixturedef.baseid} {fixturedef.argname} {request.param_index}")
        return (yield)


def _draw_for(name):
    name = f"{os.environ['STORAGE_OPS_TEST_SEED']} {name}"
    torch.manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little"))
