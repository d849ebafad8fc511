"""Runs a test with a native library and with the Python code that replaces it."""

from types import ModuleType
from typing import Any

import pytest

from storage_ops.checkpoint.region import plain_region


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
