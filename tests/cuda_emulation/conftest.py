import os

import pytest
import torch

from . import build
from .ops import emulated

# Of the tests that a file here has from others, CI runs one in so many.
SHARES = {"test_row_kernel.py": 6, "test_loss.py": 6, "test_peaks.py": 24}


def pytest_collection_modifyitems(config, items):
    """Leave out what is for a GPU, and in CI most of what other files' tests are run on here."""
    here = [item for item in items if os.path.dirname(item.path) == os.path.dirname(__file__)]
    kept = {item for item in here if not item.get_closest_marker("cuda")}
    if os.environ.get("CI"):
        for name, share in SHARES.items():
            borrowed = [item for item in here if item in kept and item.path.name == name]
            kept -= set(borrowed) - set(borrowed[::share])
    left_out = {item for item in here if item not in kept}
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


@pytest.fixture(scope="session", autouse=True)
def compiled():
    """The emulated ops; every test here is skipped where there can be none."""
    if reason := build.why_not():
        pytest.skip(reason)
    return emulated()


@pytest.fixture(autouse=True)
def order_of_threads(compiled):
    """Drawn like the inputs."""
    compiled.seed(torch.initial_seed() % 2**32)
