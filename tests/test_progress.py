"""Calls that take seconds report progress on a terminal, and only there."""

import os
import pty
import subprocess
import sys
import threading

import pytest
import torch

from storage_ops import progress

CALLS = {
    "fit": "so.fit(model, x, budget='1GiB')",
    "estimate": "so.memory.estimate(lambda: model(x).sum().backward())",
    "simulating a step": "so.memory.will_it_fit(model, x, '1GiB')",
}
# All calls run in one process, as imports take most of the time. A line follows each call.
SCRIPT = """
import os, sys, torch, storage_ops as so
from storage_ops import progress
layer = lambda: torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())
model = torch.nn.Sequential(*(layer() for _ in range(3)))
x = torch.randn(4, 32, 64)

def call(what, delay):
    progress._DELAY = delay
    eval(what)
    print("<end>", end="", file=sys.stderr, flush=True)
"""
SHORT = f"call({CALLS['estimate']!r}, 600.0)\n"
OTHER_RANK = f"os.environ['RANK'] = '1'\ncall({CALLS['fit']!r}, 0.0)\n"


def written_during_calls():
    """Return what an interpreter writes to its standard error, a terminal, during each call."""
    script = SCRIPT + SHORT + "".join(f"call({call!r}, 0.0)\n" for call in CALLS.values())
    terminal, other_end = pty.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    command = [sys.executable, "-c", script + OTHER_RANK]
    process = subprocess.Popen(command, stderr=other_end, env=environment)
    os.close(other_end)
    output = b""
    try:
        while part := os.read(terminal, 4096):
            output += part
    except OSError:
        pass  # the end, on Linux
    os.close(terminal)
    assert process.wait() == 0, output
    return dict(zip(["short", *CALLS, "rank"], output.decode().split("<end>"), strict=False))


@pytest.mark.in_turn
def test_long_calls_report_their_work_on_a_terminal():
    shown = written_during_calls()
    for what in CALLS:
        assert f"{what}: " in shown[what] and "0:00:0" in shown[what]
        assert "Traceback" not in shown[what]
    assert shown["short"] == shown["rank"] == ""  # short calls and other ranks show nothing


def test_nothing_is_shown_without_a_terminal(monkeypatch, capfd):
    assert not progress._is_seen()  # pytest's standard error is a file
    monkeypatch.setattr(sys, "stderr", type("Terminal", (), {"isatty": lambda self: True})())
    assert progress._is_seen()
    seen = []
    thread = threading.Thread(target=lambda: seen.append(progress._is_seen()))
    thread.start()
    thread.join()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    seen.append(progress._is_seen())
    assert seen == [False, False]


def test_a_nested_block_belongs_to_the_outer_one_and_errors_end_both(monkeypatch):
    said = []
    monkeypatch.setattr(progress, "_is_seen", lambda: True)
    monkeypatch.setattr(progress, "_DELAY", -1.0)

    def on_terminal(what, began):
        said.append(what)
        return progress.contextlib.nullcontext(said.append)

    monkeypatch.setattr(progress, "_on_terminal", on_terminal)
    with pytest.raises(KeyboardInterrupt), progress.showing("outer"):
        with progress.showing("inner"):
            progress.say("first")
        progress.say("second")
        raise KeyboardInterrupt
    assert progress._say is None
    progress.say("nobody listens")
    assert said == ["outer", "first", "second"]
