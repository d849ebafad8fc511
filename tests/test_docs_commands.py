"""Every command in the docs runs on a small model, and every option is in one of the commands."""

import argparse
import itertools
import json
import re
import shlex
from pathlib import Path

import pytest

from storage_ops.cli import fit, main, will_it_fit

pytest.importorskip("transformers")
DOCS = Path(__file__).parents[1] / "docs"
NAMES = ("will-it-fit", "make-it-fit", "largest-that-fits", "calibrate")
PAGES = [(DOCS / f"{name}.md").read_text() for name in NAMES]
PROGRAM = ["python", "-m", "storage_ops"]
SMALL_BUDGET = "600MiB"  # for --find, which simulates many steps with the budgets of the pages
HEADS = {"num_attention_heads": 2, "num_hidden_layers": 2}
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128,
    "intermediate_size": 256, "vocab_size": 128, **HEADS,
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
        "hidden_size": 32, "num_key_value_heads": 2,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    },
    "vision_config": VISION | {"out_hidden_size": 32},
}  # fmt: skip
BERT = {
    "model_type": "bert",
    "hidden_size": 32,
    "intermediate_size": 64,
    "vocab_size": 128,
    **HEADS,
}
WAV2VEC2 = {
    "model_type": "wav2vec2", "architectures": ["Wav2Vec2ForSequenceClassification"],
    "hidden_size": 32, "intermediate_size": 64, **HEADS,
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_size": 64,
    "intermediate_size": 64, "vocab_size": 128, "num_local_experts": 4, "head_dim": 32,
    "num_key_value_heads": 2, **HEADS,
}  # fmt: skip
CONFIGS = {
    "config.json": CONFIG, "small.json": CONFIG, "t5.json": T5, "qwen_vl.json": QWEN_VL,
    "bert_base.json": BERT | {"architectures": ["BertModel"]},
    "bert.json": BERT | {"architectures": ["BertForMaskedLM"]},
    "bert_classifier.json": BERT | {"architectures": ["BertForSequenceClassification"]},
    "wav2vec2.json": WAV2VEC2, "gpt_oss.json": GPT_OSS,
}  # fmt: skip


def blocks(language):
    texts = [re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL) for page in PAGES]
    return list(itertools.chain(*texts))


def commands():
    lines = [text.replace("\\\n", " ").splitlines() for text in blocks("sh")]
    words_of_lines = [shlex.split(line) for line in itertools.chain(*lines)]
    return [words[3:] for words in words_of_lines if words[:3] == PROGRAM]


def options_of(command):
    """Yield the options of a command, with each of their choices: `--shard ddp`."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    for action in parser._actions:
        for value in action.choices or ("",):
            yield f"{action.option_strings[-1]} {value}".strip()


def test_every_option_is_in_a_command():
    """If both commands have an option, an example of one command is enough."""
    texts = [" ".join(words) + " " for words in commands()]
    options = {*options_of(will_it_fit), *options_of(fit)} - {"--help"}
    missing = {option for option in options if not any(f"{option} " in text for text in texts)}
    assert not missing


@pytest.mark.in_turn
@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands(words, tmp_path, monkeypatch, capsys):
    """A Python block whose first line names a file is that file."""
    monkeypatch.chdir(tmp_path)
    for name, config in CONFIGS.items():
        (tmp_path / name).write_text(json.dumps(config))
    for text in blocks("python"):
        if named := re.match(r"# (\w+\.py)\n", text):
            (tmp_path / named[1]).write_text(text)
    if "--plot" in words:
        pytest.importorskip("matplotlib")
    if "--find" in words and "--budget" in words:
        words = [*words, "--budget", SMALL_BUDGET]
    assert main(words) in (0, 1), capsys.readouterr().err
