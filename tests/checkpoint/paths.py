"""Runs a test with a native library and with the Python code that replaces it."""

from types import ModuleType
from typing import Any

import pytest


def both_paths(module: ModuleType) -> Any:
    """Return a fixture that runs a test with the library that `module` calls, and without it."""

    @pytest.fixture(params=["C++", "Python"])
    def path(request, monkeypatch):
        if request.param == "Python":
            monkeypatch.setattr(module, "_native", None)
        elif module._native is None:
            pytest.skip("there is no library for this torch")
        return request.param

    return path
