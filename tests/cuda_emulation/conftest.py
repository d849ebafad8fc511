import os

import pytest
import torch

from . import build
from .ops import emulated


def pytest_collection_modifyitems(config, items):
    """Leave out the tests that need a GPU."""
    own = {item for item in items if os.path.dirname(item.path) == os.path.dirname(__file__)}
    left_out = [item for item in items if item in own and item.get_closest_marker("cuda")]
    items[:] = [item for item in items if item not in own or not item.get_closest_marker("cuda")]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session", autouse=True)
def compiled():
    """Return the emulated ops, or skip all tests here if kernels cannot be emulated."""
    if reason := build.why_not():
        pytest.skip(reason)
    return emulated()


@pytest.fixture(autouse=True)
def order_of_threads(compiled):
    """Draw the order of threads from the test's seed."""
    compiled.seed(torch.initial_seed() % 2**32)
