"""The HTML page of `will-it-fit --html`."""

import re
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from storage_ops.cli import main
from storage_ops.measure import page
from storage_ops.memory import simulate_step, will_it_fit

FILE = """
import torch
from torch import nn

def f():
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*layers), torch.empty(512, 64)
"""


@pytest.fixture
def report():
    with torch.device("meta"):
        model, x = (
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)),
            torch.ones(8, 64),
        )
    return will_it_fit(model, x, "1GiB")


def test_the_page_is_one_file_with_light_and_dark_colours(report):
    text = page.of(report.step, report.budget_bytes, [report.__rich__()], "a < b")
    assert not re.search(r"<script|<link|src=|href=|url\(|https?:", text)
    assert "prefers-color-scheme: dark" in text and "<pre>a &lt; b</pre>" in text
    assert "optimizer state" in text and "<table>" in text
    assert "Step of Sequential on h100: peak" in text and "budget 1 GiB" in text


def test_the_areas_end_at_the_peak(report):
    """The picture's top is the budget."""
    budget = report.peak_bytes
    text = page.of(report.step, budget, [])
    svg = ElementTree.fromstring(re.search(r"<svg.*?</svg>", text, re.DOTALL)[0])
    heights = [
        float(point.split(",")[1])
        for polygon in svg.iter("polygon")
        for point in polygon.get("points").split()
    ]
    line = next(float(each.get("y1")) for each in svg.iter("line") if each.get("class") == "budget")
    assert min(heights) == pytest.approx(line, abs=0.11)
    assert max(heights) == page._HEIGHT - page._BOTTOM


def test_the_command_writes_the_page(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(FILE)
    out = tmp_path / "step.html"
    command = ["will-it-fit", "--model", f"{tmp_path}/mine.py:f", "--html", str(out)]
    assert main(command) == 0
    assert "<pre>" not in out.read_text()
    assert main([*command, "--budget", "1MiB"]) == 1
    assert "alone take" in capsys.readouterr().out and "alone take" in out.read_text()
    assert main([*command[:-1], str(tmp_path / "no" / "step.html")]) == 2
    assert "Expected a file in a folder that exists" in capsys.readouterr().err


def test_a_page_without_a_budget_or_with_a_distant_one():
    with torch.device("meta"):
        step = simulate_step(nn.Linear(8, 8), torch.ones(4, 8))
    assert 'class="budget"' not in page.of(step, 1 << 40, [])
