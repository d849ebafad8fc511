"""Runs a test with a native library and with the Python code that replaces it."""

from types import ModuleType
from typing import Any

import pytest

from storage_ops.checkpoint.region import plain_region
from storage_ops.checkpoint.region.region import Region
from storage_ops.checkpoint.state import known_walks
from storage_ops.checkpoint.state.reachable import Surroundings

CALLS = 3  # walks after which a call may find one known


def both_paths(module: ModuleType) -> Any:
    """Return a fixture that runs a test with the library that `module` calls, and without it.

    In between, "parts" is a region in Python with the library's parts.
    """

    @pytest.fixture(params=["C++", "parts", "Python"])
    def path(request, monkeypatch):
        if request.param != "Python" and module._native is None:
            pytest.skip("there is no library for this torch")
        if request.param != "C++":
            monkeypatch.setattr(plain_region, "_native", None)
        if request.param == "Python":
            monkeypatch.setattr(module, "_native", None)
        return request.param

    return path


def regions_in_python() -> Any:
    """Return a fixture: a list of the regions in Python that take over or run from the start."""

    @pytest.fixture
    def made(monkeypatch):
        regions, set_up = [], Region.set_up

        def noted(self, *args):
            regions.append(self)
            set_up(self, *args)

        monkeypatch.setattr(Region, "set_up", noted)
        return regions

    return made


def know_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first call of a function find what it reaches known, if it can become known."""
    plain = plain_region.snapshot_before

    def snapshot_before(fn: Any, *arguments: Any) -> Any:
        noted = plain(fn, *arguments)
        for _ in range(CALLS):
            if noted is not None or known_walks.start_of(fn, []) is None:
                break
            Surroundings.of(fn, [], [])
            noted = plain(fn, *arguments)
        return noted

    monkeypatch.setattr(plain_region, "snapshot_before", snapshot_before)
