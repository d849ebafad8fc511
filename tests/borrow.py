"""Tests of one file that another runs too, under fixtures of its own."""

from types import ModuleType


def borrowed(module: ModuleType, without: frozenset[str] = frozenset()) -> dict[str, object]:
    """The test functions of a module by name, but for those of `without`, which must be there."""
    tests = {name: thing for name, thing in vars(module).items() if name.startswith("test_")}
    for name in without:
        del tests[name]
    return tests
