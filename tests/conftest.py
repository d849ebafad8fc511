import contextlib
import gc
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

import storage_ops
from storage_ops.checkpoint.state import effects
from storage_ops.storage.kernels import storage_path

INFO = storage_ops.info()
NATIVE_PATH = INFO["storage_path"]
CAN_SWAP = hasattr(torch.UntypedStorage, "_swap_data_ptr_")
# CI runs one in this many of the tests with a mark.
ONE_IN = {"slow": 16, "in_turn": 6}
# The summary names each test without a mark that takes more processor seconds than this.
NAMED_ABOVE = 3
LONG = "{:.1f} processor seconds without the mark in_turn or slow: {}"
# CI draws the same examples in every run. Elsewhere, each run draws new ones.
# No example has a deadline: the first one imports, and other work on the machine slows the rest.
settings.register_profile("ci", derandomize=True, print_blob=True, deadline=None)
settings.register_profile("anywhere", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "anywhere")

# The native path if it exists, and every Python path that this torch can run.
PATHS = [
    *(["binding"] if NATIVE_PATH == "binding" else []),
    *(["alias"] if CAN_SWAP and any("alias" in name for name in INFO["loaded"]) else []),
    "copy",
]


def pytest_configure():
    """Choose the seed of the run: the requested one, in CI a hash of the commit, else a new one.

    A failure in CI is therefore reproducible from the commit, and each commit draws other inputs.
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
    for report in terminalreporter.stats.get("passed", ()):
        for name, seconds in report.user_properties:
            if name == "processor_seconds" and seconds > NAMED_ABOVE:
                terminalreporter.write_line(LONG.format(seconds, report.nodeid))


def _processor_seconds():
    return sum(os.times()[:4])  # of this process and its finished children


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Measure a test that every commit runs, and fail one that takes too long.

    STORAGE_OPS_LONGEST_TEST is the limit in processor seconds, which other work on the machine
    changes little. Shared fixtures do not count.
    """
    start = _processor_seconds()
    result = yield
    if _one_in(item) == 1:
        seconds = _processor_seconds() - start
        item.user_properties.append(("processor_seconds", seconds))
        if seconds > float(os.environ.get("STORAGE_OPS_LONGEST_TEST", "inf")):
            pytest.fail(LONG.format(seconds, item.nodeid))
    return result


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Freeze the imported objects, so that garbage collections do not visit them.

    Collect less often than every 700 objects: a trace creates millions that live until its end.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(50_000, 20, 100)


def pytest_collection_modifyitems(config, items):
    """Skip tests without their GPU or kernels. In CI, also leave out most tests that take long.

    With STORAGE_OPS_REQUIRE_CUDA=1, a missing GPU is a failure. The run's seed chooses which
    tests with the mark in_turn CI runs, so each commit runs others. `make test-all` runs all tests.
    """
    if os.environ.get("CI"):
        left_out = [item for item in items if not _is_drawn(item)]
        items[:] = [item for item in items if _is_drawn(item)]
        config.hook.pytest_deselected(items=left_out)
    lacking = {}
    if not (torch.cuda.is_available() or os.environ.get("STORAGE_OPS_REQUIRE_CUDA") == "1"):
        lacking["cuda"] = "needs an NVIDIA GPU"
    if INFO["row_kernel"] == "plain torch":
        lacking["kernels"] = "a simulation is of a device with native kernels"
    for name, reason in lacking.items():
        for item in items:
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))


def _is_drawn(item):
    # Some slow tests fail on some processors, so the same ones run at every commit.
    seed = "" if item.get_closest_marker("slow") else os.environ["STORAGE_OPS_TEST_SEED"]
    name = f"{seed} {item.nodeid}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little") % _one_in(item) == 0


def _one_in(item):
    return max((ONE_IN.get(mark.name, 1) for mark in item.iter_markers()), default=1)


@pytest.fixture
def copied(monkeypatch):
    """Return a list of the tensors that regions copy before they run."""
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
    """Run a test once with each storage path. Return the name of the path."""
    native = request.param == NATIVE_PATH == "binding"
    with contextlib.nullcontext() if native else storage_path(request.param):
        yield request.param


@pytest.fixture
def zero_copy(path):
    return path != "copy"


@pytest.fixture(autouse=True, scope="module")
def earlier_objects_are_frozen():
    """Freeze old objects, because each `measure` and `estimate` collects garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def no_calibration_of_the_user(tmp_path_factory):
    """Predict times by the table of devices, and keep calibrations of tests out of the cache."""
    folder = tmp_path_factory.mktemp("calibrations")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("storage_ops.fitting.calibration.folder", lambda: folder)
        yield


@pytest.fixture(autouse=True, scope="module")
def guards_are_not_timed():
    """Keep Dynamo from timing guards, for which it empties the caches of the processor."""
    guards = sys.modules.get("torch._dynamo.guards")
    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = lambda *_: 0.0


@pytest.fixture(autouse=True)
def fresh_random_numbers(request):
    """Seed each test by its name and the seed of the run, so that inputs differ."""
    _draw_for(request.node.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    """Seed shared fixtures, so that they do not depend on the test that comes first."""
    if fixturedef.scope == "function":
        return (yield)
    with torch.random.fork_rng(devices=[]):
        _draw_for(f"{fixturedef.baseid} {fixturedef.argname} {request.param_index}")
        return (yield)


def _draw_for(name):
    name = f"{os.environ['STORAGE_OPS_TEST_SEED']} {name}"
    torch.manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little"))
