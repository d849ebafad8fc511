"""Calls inside of context managers, in C++ and in Python, are like nested `with` statements."""

import contextlib
import sys

import pytest

from storage_ops.checkpoint.region import call_in as module

WAYS = {"Python": module._call_in}
if module._native is not None:
    WAYS["C++"] = module._native.call_in
pytestmark = pytest.mark.parametrize("call_in", WAYS.values(), ids=WAYS)


class Manager:
    """Notes its calls in `seen`. Raises or suppresses what the arguments say."""

    def __init__(self, name, seen, at_enter=None, at_exit=None, suppresses=False):
        self.name, self.seen, self.suppresses = name, seen, suppresses
        self.at_enter, self.at_exit = at_enter, at_exit

    def __enter__(self):
        self.seen.append(f"enter {self.name}")
        if self.at_enter is not None:
            raise self.at_enter

    def __exit__(self, kind, value, trace):
        handled = sys.exc_info()[1]
        assert handled is value and (kind is None) == (value is None)
        self.seen.append(f"exit {self.name} {kind.__name__ if kind else None}")
        if self.at_exit is not None:
            raise self.at_exit
        return self.suppresses


def fail(error):
    raise error


def test_the_result_and_the_order(call_in):
    seen = []
    managers = Manager("a", seen), Manager("b", seen)
    assert call_in(managers, lambda x, y: (seen.append("call"), x - y)[1], (5,), {"y": 3}) == 2
    assert seen == ["enter a", "enter b", "call", "exit b None", "exit a None"]


def test_an_error_passes_through_all_of_them(call_in):
    seen, error = [], KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt) as caught:
        call_in((Manager("a", seen), Manager("b", seen)), fail, (error,), {})
    assert caught.value is error and "fail" in [entry.name for entry in caught.traceback]
    assert seen[2:] == ["exit b KeyboardInterrupt", "exit a KeyboardInterrupt"]


def test_an_error_is_suppressed(call_in):
    seen = []
    managers = Manager("a", seen), Manager("b", seen, suppresses=True)
    assert call_in(managers, fail, (ValueError(),), {}) is None
    assert seen[2:] == ["exit b ValueError", "exit a None"]
    assert call_in((contextlib.suppress(ValueError),), fail, (ValueError(),), {}) is None


def test_an_error_at_the_end_replaces_the_first(call_in):
    seen, first, second = [], ValueError(), OSError()
    managers = Manager("a", seen), Manager("b", seen, at_exit=second)
    with pytest.raises(OSError) as caught:
        call_in(managers, fail, (first,), {})
    assert caught.value is second and second.__context__ is first
    assert seen[2:] == ["exit b ValueError", "exit a OSError"]
    third = OSError()
    with pytest.raises(OSError) as caught:
        call_in((Manager("a", seen), Manager("b", seen, at_exit=third)), int, (), {})
    assert caught.value is third and seen[-1] == "exit a OSError"


def test_an_error_at_the_begin_ends_the_outer_ones(call_in):
    seen, error = [], ValueError()
    with pytest.raises(ValueError) as caught:
        call_in((Manager("a", seen), Manager("b", seen, at_enter=error)), int, (), {})
    assert caught.value is error
    assert seen == ["enter a", "enter b", "exit a ValueError"]


def test_a_generator_gets_the_error(call_in):
    seen = []

    @contextlib.contextmanager
    def manager():
        try:
            yield
        except ValueError as error:
            seen.append(error)
            raise RuntimeError("other") from error

    error = ValueError()
    with pytest.raises(RuntimeError, match="other") as caught:
        call_in((manager(),), fail, (error,), {})
    assert seen == [error] and caught.value.__cause__ is error
    assert sys.exc_info() == (None, None, None)


def test_not_a_context_manager(call_in):
    seen = []
    with pytest.raises((AttributeError, TypeError)):
        call_in((Manager("a", seen), object()), int, (), {})
    assert len(seen) == 2
