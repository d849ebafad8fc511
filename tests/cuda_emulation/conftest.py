import os

import pytest

from . import build
from .ops import emulated

SHARE = 12  # of the tests that were written for other devices, CI runs one in so many


def pytest_collection_modifyitems(config, items):
    """Leave out what is for a GPU, and in CI most of what other files' tests are run on here."""
    every = SHARE if os.environ.get("CI") else 1
    left_out, borrowed = [], 0
    for item in items:
        if os.path.dirname(item.path) != os.path.dirname(__file__):
            continue
        borrowed += (is_borrowed := item.function.__module__ != item.module.__name__)
        if item.get_closest_marker("cuda") or (is_borrowed and borrowed % every):
            left_out.append(item)
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session", autouse=True)
def compiled():
    """The emulated ops; every test here is skipped where there can be none."""
    if reason := build.why_not():
        pytest.skip(reason)
    return emulated()


@pytest.fixture(autouse=True)
def order_of_threads(compiled):
    """Fresh at every run, or what is asked for; pytest prints that of a failing test."""
    asked = os.environ.get("STORAGE_OPS_EMULATION_SEED")
    seed = int.from_bytes(os.urandom(4), "little") if asked is None else int(asked)
    print("emulation seed", seed)
    compiled.seed(seed)
