import os

import pytest

from . import build
from .ops import emulated


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
