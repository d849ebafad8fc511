"""Half of the tests, drawn by the seed, know what a region reaches at its first call.

Usually that is known after some calls of the same function. Only then does a region run in C++.
"""

import hashlib
import os

import pytest

from .paths import know_at_once


@pytest.fixture(autouse=True)
def known_walks_or_not(request, monkeypatch):
    """Know walks at once in this test, or not."""
    name = f"{os.environ['STORAGE_OPS_TEST_SEED']} {request.node.nodeid}"
    drawn = hashlib.sha256(name.encode()).digest()[0] % 2 == 0
    if drawn and request.node.get_closest_marker("walks_twice") is None:
        know_at_once(monkeypatch)
