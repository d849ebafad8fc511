"""Every command of a page runs, on a small model."""

import json
import re
import shlex
from pathlib import Path

import pytest

from storage_ops.cli import main

pytest.importorskip("transformers")
PAGE = Path(__file__).parents[1] / "docs" / "will-it-fit.md"
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32,
    "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 128,
}  # fmt: skip
T5 = {
    "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 32, "d_kv": 16,
    "d_ff": 64, "num_layers": 1, "num_heads": 2, "vocab_size": 128,
}  # fmt: skip
VISION = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64}
QWEN_VL = {
    "model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "image_token_id": 9, "video_token_id": 8, "vision_start_token_id": 7,
    "text_config": CONFIG | {
        "num_key_value_heads": 2, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}
    },
    "vision_config": VISION | {"out_hidden_size": 32},
}  # fmt: skip
CONFIGS = {"config.json": CONFIG, "t5.json": T5, "qwen_vl.json": QWEN_VL}


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def commands():
    return [text.replace("\\\n", " ").strip() for text in blocks("sh")]


@pytest.mark.in_turn
@pytest.mark.parametrize("command", commands())
def test_commands_of_will_it_fit(command, tmp_path, monkeypatch, capsys):
    """Blocks of Python name their file in the first line."""
    monkeypatch.chdir(tmp_path)
    for name, config in CONFIGS.items():
        (tmp_path / name).write_text(json.dumps(config))
    for text in blocks("python"):
        if named := re.match(r"# (\w+\.py)\n", text):
            (tmp_path / named[1]).write_text(text)
    program, arguments = (words := shlex.split(command))[:3], words[3:]
    assert program == ["python", "-m", "storage_ops"]
    assert main(arguments) in (0, 1), capsys.readouterr().err
