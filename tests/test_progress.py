"""Calls that take seconds say so on a terminal, and nowhere else."""

import os
import pty
import subprocess
import sys
import threading

import pytest
import torch

from storage_ops import progress

MODEL = """
import torch, storage_ops as so
from storage_ops import progress
progress._DELAY = 0.0
layer = lambda: torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
model = torch.nn.Sequential(*(layer() for _ in range(3)))
x = torch.randn(4, 32, 64)
"""
CALLS = {
    "fit": "so.fit(model, x, budget='1GiB')",
    "estimate": "so.memory.estimate(lambda: model(x).sum().backward())",
    "simulating a step": "so.memory.will_it_fit(model, x, '1GiB')",
}


def on_a_terminal(script, **variables):
    """What an interpreter writes to a terminal that is its standard error."""
    here, there = pty.openpty()
    env = {**os.environ, "TERM": "xterm", **variables}
    process = subprocess.Popen([sys.executable, "-c", script], stderr=there, env=env)
    os.close(there)
    shown = b""
    try:
        while part := os.read(here, 4096):
            shown += part
    except OSError:
        pass  # the end, on Linux
    os.close(here)
    assert process.wait() == 0, shown
    return shown.decode()


@pytest.mark.parametrize("what", CALLS)
def test_long_calls_say_on_a_terminal_what_they_do(what):
    shown = on_a_terminal(MODEL + CALLS[what])
    assert f"{what}: " in shown and "0:00:0" in shown
    assert "Traceback" not in shown


def test_short_calls_and_other_ranks_show_nothing():
    script = MODEL.replace("progress._DELAY = 0.0", "progress._DELAY = 600.0")
    assert on_a_terminal(script + CALLS["estimate"]) == ""
    assert on_a_terminal(MODEL + CALLS["fit"], RANK="1") == ""


def test_nothing_is_shown_where_nobody_looks(monkeypatch, capfd):
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


def test_a_block_within_another_is_a_part_of_it_and_errors_end_both(monkeypatch):
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
