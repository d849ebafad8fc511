"""A pytest plugin that prints each failure when it happens, so that a run that is stopped tells it.

`python -m pytest -p benchmarks._failures_at_once --no-summary`
"""

from __future__ import annotations

from typing import Any

import pytest


class FailuresAtOnce:
    """Prints what pytest prints of a failure at its end."""

    def __init__(self, terminal: Any) -> None:
        self.terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test, or what is around it."""
        self._print(report, "FAILED")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that does not import, for one."""
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


@pytest.hookimpl(trylast=True)  # after the one that makes the reporter; workers of xdist have none
def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin where there is a terminal."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:
        config.pluginmanager.register(FailuresAtOnce(terminal))
