"""Let a test file run the tests of another file under its own fixtures."""

from types import ModuleType


def borrowed(module: ModuleType, without: frozenset[str] = frozenset()) -> dict[str, object]:
    """Return a module's test functions by name, except those in `without`, which must exist."""
    tests = {name: thing for name, thing in vars(module).items() if name.startswith("test_")}
    for name in without:
        del tests[name]
    return tests
