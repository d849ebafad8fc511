"""Undo the patches of `losses.interpreted` after every test."""

from unittest.mock import patch

import pytest


@pytest.fixture(autouse=True)
def restored():
    yield
    patch.stopall()
