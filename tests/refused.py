"""Rows for tables of refused arguments."""

import pytest
from _pytest.mark.structures import ParameterSet


def refused(
    error: type[Exception], message: str, *first: object, **changes: object
) -> ParameterSet:
    """Return a row of the values `first`, the changed arguments, the error and its message.

    Its name is the first part of the message, after the values of `first` that are text.
    """
    text = message.replace("\\", "").split(";")[0]
    names = [value for value in first if isinstance(value, str)]
    return pytest.param(*first, changes, error, message, id=" ".join([*names, text]))
