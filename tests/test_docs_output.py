"""The tables in the docs are those that the shown code and commands print.

Plans change with the simulation and with the prediction of times, so a shown table gets old
unnoticed. Tables are compared without spaces, and for the pinned torch only: another one may choose
other kernels.
"""

import contextlib
import io
import json
import re
from pathlib import Path

import pytest
import torch

from storage_ops.cli import main
from storage_ops.loss.planning.devices import named
from storage_ops.quantities import WIDTH

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[1]
PINNED = re.findall("torch==(.*)", (ROOT / "requirements/torch.txt").read_text())
pytestmark = pytest.mark.skipif(
    torch.__version__.partition("+")[0] not in PINNED, reason="tables are those of the pinned torch"
)
THREADS = 2  # of the shown plans for a CPU
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256}
LLAMA_8B = LLAMA | {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
}  # fmt: skip
LLAMA_1B = LLAMA | {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}  # fmt: skip
# For each page: the words that a table begins with, the words of its command, and the config. None:
# the page has the config.
TABLES = [
    pytest.param("will-it-fit", "does not fit", "--batch 4 --seq 8192", LLAMA_8B, id="Llama"),
    pytest.param(
        "will-it-fit", "Peak of the step by what it", "--gradient-checkpointing", LLAMA_8B,
        id="gradient checkpointing",
    ),
    pytest.param("make-it-fit", "layers action", "--save fit.json", LLAMA_8B, id="plan of a Llama",
                 marks=pytest.mark.slow),
    pytest.param("largest-that-fits", "Fits into 79 GiB", "--find batch", LLAMA_1B,
                 id="largest batch", marks=pytest.mark.slow),
    pytest.param("make-it-fit", "layers action", "--hf-config small.json", None, id="small Llama"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def like_the_shown_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    # Other tests of the run may have calibrated the CPU.
    monkeypatch.setattr("storage_ops.fitting.calibration.folder", lambda: tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(threads)


def text_of(page):
    return (ROOT / "docs" / f"{page}.md").read_text()


def words(printed):
    """Return the words of a table, without the title "Fit" of a plan."""
    lines = [line for line in printed.splitlines() if line.strip() != "Fit"]
    return " ".join(" ".join(lines).split())


SHOWN = "shown plans are for a CPU with AVX-512 and without AMX"


def runs_on_the_shown_cpu():
    return named("cpu").name == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX512"


def blocks_of(page):
    """Return the language and the text of each block of a page."""
    return re.findall(r"^```(\w*)\n(.*?)^```", text_of(page), re.MULTILINE | re.DOTALL)


@pytest.mark.in_turn
@pytest.mark.skipif(not runs_on_the_shown_cpu(), reason=SHOWN)
@pytest.mark.parametrize("page", ["make-it-fit", "who-held-the-memory"])
def test_python_prints_the_shown_text(page):
    names: dict[str, object] = {}
    compared, printed = 0, None
    for language, text in blocks_of(page):
        if language == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(text, page, "exec"), names)
        elif language in ("", "text") and printed is not None:
            assert words(printed.getvalue()) == words(text)
            compared, printed = compared + 1, None
        else:
            printed = None
    assert compared >= 2


@pytest.mark.in_turn
@pytest.mark.parametrize(("page", "begin", "option", "config"), TABLES)
def test_a_command_prints_the_shown_table(page, begin, option, config, tmp_path, capsys):
    """The table is the first after the command that begins with these words."""
    if config is None and not runs_on_the_shown_cpu():
        pytest.skip(SHOWN)
    blocks = iter(blocks_of(page))
    lines = (
        " ".join(line.split())
        for language, text in blocks
        if language == "sh"
        for line in text.replace("\\\n", " ").splitlines()
    )
    command = next(line for line in lines if option in line).split()
    if config is None:
        config = json.loads(re.search(r"`(\{\"model_type.*?\})`", text_of(page))[1])
    (tmp_path / command[command.index("--hf-config") + 1]).write_text(json.dumps(config))
    if "--plot" in command:
        pytest.importorskip("matplotlib")
    assert main(command[3:]) in (0, 1)
    shown = next(t for lang, t in blocks if lang in ("", "text") and words(t).startswith(begin))
    assert words(shown) in words(capsys.readouterr().out)
