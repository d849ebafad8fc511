import json
import subprocess
import sys

import pytest

import storage_ops
from storage_ops import cli


def test_info_as_json(capsys):
    assert cli.main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(storage_ops.info()))


def test_info_as_a_table(capsys):
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    assert "storage_path" in printed and storage_ops.info()["torch"] in printed


@pytest.mark.parametrize(
    "options, complaint",
    [
        (["--preset", "huge"], "--preset is huge; expected one of tiny"),
        (["--text", "/no/such/file"], "--text is /no/such/file; expected a file"),
        (["--steps", "1"], "--steps is 1; expected at least 2"),
    ],
)
def test_demo_complains(options, complaint, capsys):
    assert cli.main(["demo", *options]) == 2
    assert complaint in capsys.readouterr().out


def test_demo_end_to_end(tmp_path):
    """The demo on a small text: losses agree, memory is saved, the picture is drawn."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i} of {i * i} words, {i % 7} " for i in range(4000)))
    picture = tmp_path / "demo.png"
    command = [sys.executable, "-m", "storage_ops", "demo", "--text", str(text), "--steps", "3"]
    result = subprocess.run(
        [*command, "--plot", str(picture)], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert "USDT" not in result.stderr
    rows = {line.split("│")[1].strip(): line.split("│")[2:-1] for line in result.stdout.splitlines()
            if line.startswith("│")}  # fmt: skip
    plain, ours = (int(cell.split()[0]) for cell in rows["peak memory of a step"][:2])
    assert ours < plain
    assert float(rows["final loss"][2].split()[0]) < 1e-3
    assert picture.read_bytes().startswith(b"\x89PNG")
