"""Tables break no word at any usual width, and notebooks show them as escaped HTML."""

import functools
import re

import pytest
import torch
from rich.console import Console
from rich.text import Text
from torch import nn

import storage_ops as so
from storage_ops import cli, tables
from storage_ops.oom.explain_oom import OomReport
from storage_ops.tables import Grid

NAMES = ("7 x model.layers.0-7,13,15,17,19,21", "recompute all but 2 add.Tensor, attention")
GRID = Grid(
    "Title",
    ("layers", "action", "bytes kept", "at the peak", "seconds added"),
    [(*NAMES, "102.1 MiB", "102.1 MiB", "392.8 µs")],
    "caption",
    words=("layers", "action"),
    optional=("bytes kept", "at the peak"),
)


def printed(shown, width):
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(shown)
    return capture.get()


def check_whole(grid, width):
    """Check that every part of every cell is in one piece."""
    shown = printed(grid, width)
    assert all(len(line) <= width for line in shown.splitlines()) and "…" not in shown
    left_out = " ".join(shown.split()).partition("no room for: ")[2].split(", ")
    for column, name in enumerate(grid.columns):
        for row in () if name in left_out else grid.rows:
            cell = tables._plain(row[column])
            for piece in tables._pieces(cell) if name in grid.words else cell.split():
                assert re.search(rf"(?<!\w){re.escape(piece)}", shown), (piece, shown)
                assert piece[-1] in ".,;/" or re.search(rf"{re.escape(piece)}(?!\w)", shown)
    return left_out


@pytest.mark.parametrize("width", [40, 46, 60, 80, 110, 160])
def test_words_are_whole(width):
    check_whole(GRID, width)


def test_a_column_is_omitted_before_a_word_is_broken():
    assert check_whole(GRID, 80) == [""]
    assert check_whole(GRID, 46) == ["bytes kept"]
    assert check_whole(GRID, 40) == ["bytes kept", "at the peak"]
    assert "392.8 µs" in printed(GRID, 40) and "102.1" not in printed(GRID, 40)


def test_a_terminal_narrower_than_a_word_shows_all_letters():
    shown = re.sub(r"[^\w]", "", printed(Grid("", ("a",), [("x" * 50,)], words="a"), 20))
    assert shown.count("x") == 50


def step(**options):
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    return so.memory.simulate_step(model, torch.ones(4, 8), **options)


def policy():
    layer = nn.TransformerEncoderLayer(16, 2)
    return so.explain_policy(layer, torch.randn(4, 2, 16), policy="matmuls")


@functools.cache
def plan():
    layers = (nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(2))
    return so.fit(nn.Sequential(*layers), torch.randn(4, 2, 16), budget="1GiB")


def loss_plan():
    return so.plan(64, 16, 1000, "fp32", device="h100")


def explained():
    return so.autochunk.explain(lambda x: x * 2, torch.randn(4))


def out_of_memory():
    owners = {"parameters of <b>": 3 << 20, "activations of a.b": 1 << 20}
    return OomReport(owners, 4 << 20, 1.0, "mm of <b>", plan(), "call fit, or <i>")


SHOWN = {
    "fit": (plan, "layers"),
    "report": (lambda: so.checkpoint_report(nn.Linear(2, 2)), "mode"),
    "policy": (policy, "aten.addmm"),
    "will_it_fit": (lambda: so.memory.will_it_fit(nn.Linear(2, 2), torch.ones(1, 2)), "parameters"),
    "step": (step, "of peak"),
    "estimate": (lambda: so.memory.estimate(torch.relu, torch.ones(1 << 20)), "4.0 MiB"),
    "loss plan": (loss_plan, "matrix products"),
    "autochunk": (explained, "not chunked"),
    "oom": (out_of_memory, "parameters of &lt;b&gt;"),
}


@pytest.mark.parametrize("name", SHOWN)
def test_notebooks_get_html(name):
    make, word = SHOWN[name]
    html = make()._repr_html_()
    assert html.startswith("<table>") and html.count("<table>") == html.count("</table>")
    assert word in html and "<b>" not in html and "<i>" not in html


@pytest.mark.parametrize("name", ["fit", "report", "policy", "will_it_fit", "step"])
@pytest.mark.parametrize("width", [60, 80])
def test_no_table_of_the_package_breaks_words(name, width):
    check_whole(SHOWN[name][0]().__rich__(), width)


def test_html_is_escaped_and_emphasized():
    grid = Grid("<t>", ("a&b",), [(Text("<x>", "red"),), ("1 < 2",)], "c > d", bold={1})
    html = grid.html()
    assert "&lt;t&gt;" in html and "a&amp;b" in html and "&lt;x&gt;" in html and "c &gt; d" in html
    assert "<b>1 &lt; 2</b>" in html


def test_a_plan_has_a_repr_of_one_line():
    fitted = plan()
    text = repr(fitted)
    assert text.startswith("FitPlan(Sequential: peak ") and "of 1 GiB, 0 s added" in text
    assert text.endswith("on cpu, not applied)") and "\n" not in text
    fitted.apply()
    assert repr(fitted).endswith("on cpu, applied)")
    fitted.undo()


@pytest.mark.parametrize("columns", ["60", "80"])
def test_commands_print_whole_words(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    sizes = ["--tokens", "8192", "--hidden", "4096", "--vocab", "128256"]
    assert cli.main(["plan", *sizes]) == 0
    assert cli.main(["info"]) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown and "token-chunked" in shown and "17.4 MiB" in shown
