"""`will-it-fit` of models for other tasks than causal language modelling, and its errors."""

import json

import pytest

from storage_ops.cli import main
from tests.commands import refused

tf = pytest.importorskip("transformers")

TEXT = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
    "vocab_size": 128, "max_position_embeddings": 64,
}  # fmt: skip
SIDES = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 128,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
CONFIGS = {
    "BertForMaskedLM": {"model_type": "bert", **TEXT},
    "BertForSequenceClassification": {"model_type": "bert", **TEXT},
    "BertForQuestionAnswering": {"model_type": "bert", **TEXT},
    "T5ForConditionalGeneration": {
        "model_type": "t5", "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2,
        "vocab_size": 128,
    },
    "BartForConditionalGeneration": {
        "model_type": "bart", **SIDES, "max_position_embeddings": 64,
    },
    "WhisperForConditionalGeneration": {
        "model_type": "whisper", **SIDES, "num_mel_bins": 8, "max_source_positions": 20,
        "max_target_positions": 64,
    },
    "ViTForImageClassification": {
        "model_type": "vit", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 64, "image_size": 32, "patch_size": 8,
    },
}  # fmt: skip


def command_for(folder, name, **other):
    """Write a config. Return a command that reads it."""
    config = CONFIGS.get(name, {}) | {"architectures": [name]} | other
    (folder / "config.json").write_text(json.dumps(config))
    return ["will-it-fit", "--hf-config", str(folder), "--batch", "2"]


@pytest.mark.in_turn
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_architecture_decides_inputs_and_labels(name, dtype, tmp_path, capsys):
    tokens = [] if name.startswith("ViT") else ["--seq", "32"]
    code = main([*command_for(tmp_path, name), *tokens, "--dtype", dtype, "--json"])
    assert code == 0, capsys.readouterr().err
    report = json.loads(capsys.readouterr().out)
    assert report["by_owner"]["optimizer state"] > 0


def test_more_tokens_than_learned_positions(tmp_path, capsys):
    command = [*command_for(tmp_path, "BertForMaskedLM"), "--seq", "65"]
    assert "Expected at most 64, the config's max_position_embeddings" in refused(command, capsys)


@pytest.mark.parametrize("name", ["optimizer", "lbfgs", "sparseadam", "lion4bit"])
def test_optimizers_that_cannot_be_simulated(name, tmp_path, capsys):
    command = [*command_for(tmp_path, "BertForMaskedLM"), "--seq", "8", "--optimizer", name]
    error = refused(command, capsys)
    assert error.startswith(f"--optimizer is {name}. Expected none or one of adamw,")
    assert " optimizer," not in error and " lbfgs," not in error


def test_an_error_asks_for_the_number_of_tokens(tmp_path, capsys):
    assert "--seq is missing" in refused(command_for(tmp_path, "BertForMaskedLM"), capsys)


def test_models_whose_labels_are_unknown(tmp_path, capsys):
    wav2vec = {"model_type": "wav2vec2", "hidden_size": 32, "num_hidden_layers": 1}
    command = command_for(tmp_path, "Wav2Vec2ForCTC", **wav2vec, num_attention_heads=2)
    assert "whose labels the command does not know" in refused([*command, "--seq", "99"], capsys)
    command = command_for(tmp_path, "BertModel", **CONFIGS["BertForMaskedLM"])
    error = refused([*command, "--seq", "8"], capsys)
    assert "whose labels the command does not know" in error and "Pass --labels tokens," in error


def peak_of(command, capsys):
    code = main([*command, "--json"])
    assert code == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)["peak_bytes"]


def test_labels_by_name(tmp_path, capsys):
    command = command_for(tmp_path, "BertModel", **CONFIGS["BertForMaskedLM"])
    assert peak_of([*command, "--seq", "8", "--labels", "none"], capsys) > 0
    command = command_for(tmp_path, "BertForMaskedLM")
    known = peak_of([*command, "--seq", "8"], capsys)
    assert peak_of([*command, "--seq", "8", "--labels", "tokens"], capsys) == known
    command = command_for(tmp_path, "BertForSequenceClassification")
    known = peak_of([*command, "--seq", "8"], capsys)
    assert peak_of([*command, "--seq", "8", "--labels", "sequences"], capsys) == known


def test_a_decoder_has_its_own_length(tmp_path, capsys):
    command = [*command_for(tmp_path, "T5ForConditionalGeneration"), "--optimizer", "none"]
    long = peak_of([*command, "--seq", "512"], capsys)
    short = peak_of([*command, "--seq", "512", "--decoder-seq", "16"], capsys)
    assert short < long - (1 << 20)
    assert peak_of([*command, "--seq", "512", "--decoder-seq", "512"], capsys) == long
    command = [*command_for(tmp_path, "BertForMaskedLM"), "--seq", "8", "--decoder-seq"]
    assert "BertForMaskedLM has no decoder_input_ids" in refused([*command, "8"], capsys)
    assert "--decoder-seq is 0. Expected 1 or more" in refused([*command, "0"], capsys)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"num_attention_heads": 0}, "which transformers cannot read"),  # ZeroDivisionError
        # Transformers checks types from version 5 on.
        ({"hidden_size": "x"}, "hidden_size" if tf.__version__ >= "5" else "TypeError"),
        ({"model_type": "nosuch"}, "nosuch"),
        ({"architectures": ["pipeline"]}, "names 'pipeline', which is not the class of a model"),
        ({"architectures": ["LlamaConfig"]}, "names 'LlamaConfig', which is not the class"),
        ({"architectures": "LlamaForCausalLM"}, "names 'LlamaForCausalLM', which is not"),
        ({"architectures": [3]}, "which is not the class of a model"),
    ],
)
def test_configs_that_transformers_refuses(wrong, said, tmp_path, capsys):
    command = command_for(tmp_path, "LlamaForCausalLM", **{"model_type": "llama", **TEXT, **wrong})
    assert said in refused([*command, "--seq", "8"], capsys)


def test_an_architecture_that_transformers_does_not_have(tmp_path, capsys):
    command = command_for(tmp_path, "MyLlama", **{"model_type": "llama", **TEXT})
    assert main([*command, "--seq", "8"]) == 0
    note = "MyLlama, which transformers does not have. LlamaForCausalLM is simulated instead."
    assert note in " ".join(capsys.readouterr().err.split())


LLAVA = {
    "model_type": "llava", "image_token_index": 9, "text_config": {"model_type": "llama", **TEXT},
    "vision_config": {
        "model_type": "clip_vision_model", "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "intermediate_size": 64, "image_size": 16, "patch_size": 4,
        "projection_dim": 32,
    },
}  # fmt: skip


def test_images_among_tokens(tmp_path, capsys):
    command = [*command_for(tmp_path, "LlavaForConditionalGeneration", **LLAVA), "--seq", "40"]
    pixels = 2 * 3 * 16 * 16 * 2  # a batch of two in bf16
    batches = []
    for images in ([], ["--images", "1"], ["--images", "2x16x16"]):
        assert main([*command, *images, "--json"]) == 0
        out, err = capsys.readouterr()
        assert ("without --images" in err) == (not images)
        batches.append(json.loads(out)["by_owner"]["batch"])
    text, one, two = batches
    assert two - one == pixels and one - text >= pixels
    error = refused([*command, "--images", "3"], capsys)
    assert "Pass at least 51." in error


def test_images_whose_size_is_not_in_the_config(tmp_path, capsys):
    resnet = {
        "model_type": "resnet",
        "embedding_size": 8,
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
    }
    command = command_for(tmp_path, "ResNetForImageClassification", **resnet)
    assert "Pass a height and a width, such as 1x224x224." in refused(command, capsys)
    assert peak_of([*command, "--images", "1x64x64"], capsys) > 0
    assert "a sample of ResNetFor" in refused([*command, "--images", "2x64x64"], capsys)


@pytest.mark.parametrize("spelled", ["0", "2x64", "x", "2x64x0", "-1", "2x64x64x3"])
def test_wrong_numbers_and_sizes_of_images(spelled, tmp_path, capsys):
    command = [*command_for(tmp_path, "ViTForImageClassification"), f"--images={spelled}"]
    assert f"--images is {spelled}. Pass a number" in refused(command, capsys)


def test_images_for_models_without_images(tmp_path, capsys):
    command = [*command_for(tmp_path, "BertForMaskedLM"), "--seq", "8", "--images", "1"]
    assert "--images is 1, but BertForMaskedLM takes no images." in refused(command, capsys)
    whisper = [*command_for(tmp_path, "WhisperForConditionalGeneration"), "--seq", "8"]
    assert "takes no images" in refused([*whisper, "--images", "1"], capsys)


def test_numbers_that_json_cannot_express(tmp_path, capsys):
    """Transformers writes infinity as the limit of a state space's time steps."""
    mamba = {"model_type": "mamba2", "hidden_size": 32, "num_heads": 4, "head_dim": 16}
    config = tf.AutoConfig.for_model(**mamba, n_groups=1, num_hidden_layers=1, vocab_size=128)
    assert config.time_step_limit[1] == float("inf")
    config.architectures = ["Mamba2ForCausalLM"]
    config.save_pretrained(tmp_path)
    command = ["will-it-fit", "--hf-config", str(tmp_path), "--seq", "32"]
    assert peak_of(command, capsys) > 0


def test_samples_of_audio(tmp_path, capsys):
    """The model creates a parameter on the CPU, because torch ignores the meta device there."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = {"model_type": "wav2vec2", "intermediate_size": 64, **sizes}
    command = command_for(tmp_path, "Wav2Vec2ForSequenceClassification", **model)
    assert "Pass the seconds of a recording." in refused(command, capsys)
    peaks = [peak_of([*command, "--audio", seconds], capsys) for seconds in ("0.5", "4")]
    assert peaks[1] > peaks[0]
    assert peak_of([*command, "--seq", "8000"], capsys) == peaks[0]
    both = refused([*command, "--audio", "4", "--seq", "8"], capsys)
    assert "takes audio alone. Leave out --seq." in both
    for wrong in ("0", "-1", "nan", "inf"):
        said = refused([*command, f"--audio={wrong}"], capsys)
        assert f"--audio is {wrong}. Pass a number of seconds above 0." in said


def test_audio_with_text(tmp_path, capsys):
    """Whisper's processor pads each recording, so the memory does not depend on its length."""
    sides = {**SIDES, "max_source_positions": 200, "conv_channels": 32, "input_feat_per_channel": 8}
    command = command_for(tmp_path, "Speech2TextForConditionalGeneration", **sides,
                      model_type="speech_to_text")  # fmt: skip
    command += ["--seq", "8", "--optimizer", "none"]
    peaks = [peak_of([*command, *more], capsys) for more in ([], ["--audio", "2"])]
    assert peaks[0] == peaks[1] > peak_of([*command, "--audio", "0.5"], capsys)
    assert "Expected at most 2 seconds: max_source_positions" in refused(
        [*command, "--audio", "2.1"], capsys
    )
    whisper = [*command_for(tmp_path, "WhisperForConditionalGeneration"), "--seq", "8"]
    assert peak_of([*whisper, "--audio", "0.2"], capsys) == peak_of(whisper, capsys)
    assert "Expected at most 0.4 seconds, to which" in refused([*whisper, "--audio", "1"], capsys)


def test_audio_for_models_that_take_none(tmp_path, capsys):
    command = [*command_for(tmp_path, "BertForMaskedLM"), "--seq", "8", "--audio", "5"]
    assert "--audio is 5, but BertForMaskedLM takes no audio. Leave out" in refused(command, capsys)


def test_models_that_read_token_ids_to_warn_about_padding(tmp_path, capsys):
    sizes = {**TEXT, "pad_token_id": 0}
    command = command_for(tmp_path, "DebertaV2ForMaskedLM", model_type="deberta-v2", **sizes)
    assert peak_of([*command, "--seq", "32"], capsys) > 0


@pytest.mark.in_turn
def test_an_error_in_a_models_code_names_its_line(tmp_path, capsys):
    sizes = {"d_model": 32, "n_heads": 2, "n_layers": 1, "vocab_size": 128, "max_seq_len": 16}
    command = command_for(tmp_path, "MptForCausalLM", model_type="mpt", **sizes)
    for name in (["will-it-fit"], ["will-it-fit", "--serve"], ["fit"]):
        error = refused([*name, *command[1:], "--seq", "32"], capsys)
        assert "A step of MptForCausalLM raised RuntimeError: " in error
        assert "modeling_mpt.py:" in error
        assert error.endswith(
            "Expected --seq of at most 16, the config's max_seq_len, and not 32.\n"
        )
    experts = {"model_type": "deepseek_v2", **TEXT, "n_routed_experts": 4, "q_lora_rank": None}
    command = command_for(tmp_path, "DeepseekV2ForCausalLM", **experts)
    error = refused([*command, "--seq", "32"], capsys)
    assert "raised TypeError: topk(): argument 'k' must be int" in error
    assert error.endswith("Expected a model that runs a training step with this batch.\n")
