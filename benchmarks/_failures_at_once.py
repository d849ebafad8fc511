"""A pytest plugin that prints each failure when it happens, also if the run is stopped later.

`python -m pytest -p benchmarks._failures_at_once --no-summary`
"""

from __future__ import annotations

from typing import Any

import pytest


class FailuresAtOnce:
    """Prints each failure at once, in the form that pytest prints at its end."""

    def __init__(self, terminal: Any) -> None:
        self.terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print a failure of a test, or of its setup or teardown."""
        self._print(report, "FAILED")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Print a failure of a collection, such as a file that does not import."""
        self._print(report, "ERROR")

    def _print(self, report: Any, word: str) -> None:
        if not report.failed:
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        text = crash.message if crash else report.longreprtext
        reason = (text.strip().splitlines() or [""])[0]
        sections = [f"--- {title}\n{content}" for title, content in report.sections]
        self.terminal.write("\n")
        self.terminal.write_line(f"{word} {report.nodeid} - {reason}")
        self.terminal.write_line("\n".join([report.longreprtext, *sections]))
        self.terminal.flush()


@pytest.hookimpl(trylast=True)  # after the one that creates the reporter, which xdist workers lack
def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin if there is a terminal."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:
        config.pluginmanager.register(FailuresAtOnce(terminal))
