"""Types of models for `will-it-fit`, as data: tasks, default configs, batches.

A type of transformers is passed by the config.json of its default config, with `--hf-config`. A
model of diffusers, torchvision or timm is passed with `--model`. For it, this file has a function
with the model's name that returns the model and a batch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

LONG, SHORT = 4096, 512  # tokens of a sequence


class Task(NamedTuple):
    """Types of one task of transformers, with the table of their classes, and their batch."""

    table: str
    batch: int
    seq: int | None
    types: str


TASKS = {
    "causal language models": Task(
        "CAUSAL_LM", 1, LONG,
        "llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi phi3 falcon bloom gpt_neox "
        "olmo2 granite stablelm starcoder2 cohere2 glm4 smollm3",
    ),
    "causal language models of short texts": Task("CAUSAL_LM", 8, 1024, "gpt2 opt mpt"),
    "mixtures of experts": Task(
        "CAUSAL_LM", 1, LONG, "mixtral qwen2_moe qwen3_moe gpt_oss olmoe llama4_text",
    ),
    "multi-head latent attention": Task(
        "CAUSAL_LM", 1, LONG, "deepseek_v2 deepseek_v3 minicpm3 glm4_moe_lite"
    ),
    "state spaces and linear attention": Task(
        "CAUSAL_LM", 1, LONG, "mamba2 bamba falcon_h1 qwen3_next"
    ),
    # Without the package of their kernels, transformers runs a loop over tokens.
    "state spaces, one token after the other": Task(
        "CAUSAL_LM", 8, 128, "mamba jamba recurrent_gemma"
    ),
    "sequence to sequence": Task(
        "SEQ_TO_SEQ_CAUSAL_LM", 16, SHORT, "t5 mt5 bart mbart pegasus m2m_100 switch_transformers"
    ),
    "masked language models": Task(
        "MASKED_LM", 32, SHORT, "bert distilbert albert electra deberta-v2 modernbert"
    ),
    "classifiers of sequences": Task("SEQUENCE_CLASSIFICATION", 32, SHORT, "roberta xlm-roberta"),
    "classifiers of images": Task(
        "IMAGE_CLASSIFICATION", 64, None, "vit deit beit swin convnext dinov2 resnet segformer"
    ),
    "audio": Task("SPEECH_SEQ_2_SEQ", 8, 128, "whisper"),
    "classifiers of samples of audio": Task("AUDIO_CLASSIFICATION", 8, 160000, "wav2vec2 hubert"),
    "classifiers of spectrograms": Task(
        "AUDIO_CLASSIFICATION", 8, None, "audio-spectrogram-transformer"
    ),
    "text and images": Task(
        "IMAGE_TEXT_TO_TEXT", 1, LONG, "llava qwen2_vl qwen2_5_vl gemma3 paligemma idefics3 mllama"
    ),
}  # fmt: skip
# Changes of the default config, by type.
CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6, "moe_intermediate_size": 1408},  # defaults raise
}
# Options for values that the default config lacks.
OPTIONS = {name: ["--images", "1x224x224"] for name in ("resnet", "segformer")}


class Case(NamedTuple):
    """A question to `will-it-fit`: the package, family and name of the model, and its batch."""

    family: str
    name: str
    model_class: str
    batch: str
    options: Callable[[Path], list[str]]  # may write files into a folder for the command


def _transformers() -> Iterator[Case]:
    tables: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    for task, (table, batch, seq, types) in TASKS.items():
        classes = getattr(tables, f"MODEL_FOR_{table}_MAPPING_NAMES")
        tokens = [] if seq is None else ["--seq", str(seq)]
        said = "x".join(map(str, (batch, *([] if seq is None else [seq]))))
        for name in types.split():
            classes_of_type = classes[name]
            cls = classes_of_type if isinstance(classes_of_type, str) else classes_of_type[0]
            options = lambda folder, n=name, c=cls, b=batch, t=tokens: [  # noqa: E731
                "--hf-config", _config(n, c, folder), "--batch", str(b), *t, *OPTIONS.get(n, ()),
            ]  # fmt: skip
            yield Case(f"transformers: {task}", name, cls, said, options)


def _config(name: str, cls: str, folder: Path) -> str:
    """Write the config.json of a type with its class. Return the path of the folder."""
    transformers: Any = importlib.import_module("transformers")
    config = transformers.AutoConfig.for_model(name, **CHANGES.get(name, {}))
    config.architectures = [cls]
    config.save_pretrained(folder)
    return str(folder)


# Models of diffusers with arguments that differ from their defaults, and the shapes of inputs.
# Without a size of images or frames in the config, inputs have those of the published models.
DIFFUSERS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "UNet2DModel": ({"sample_size": 64}, {"sample": (16, 3, 64, 64), "timestep": (16,)}),
    "UNet2DConditionModel": ({}, {
        "sample": (8, 4, 64, 64), "timestep": (8,), "encoder_hidden_states": (8, 77, 1280),
    }),
    "UNetSpatioTemporalConditionModel": ({}, {
        "sample": (1, 25, 8, 40, 64), "timestep": (1,), "encoder_hidden_states": (1, 1, 1024),
        "added_time_ids": (1, 3),
    }),
    "ControlNetModel": ({}, {
        "sample": (8, 4, 64, 64), "timestep": (8,), "encoder_hidden_states": (8, 77, 1280),
        "controlnet_cond": (8, 3, 512, 512),
    }),
    "AutoencoderKL": ({}, {"sample": (8, 3, 256, 256)}),
    "AutoencoderDC": ({}, {"sample": (2, 3, 256, 256)}),
    "AutoencoderKLWan": ({}, {"sample": (1, 3, 9, 256, 256)}),
    "DiTTransformer2DModel": ({}, {
        "hidden_states": (32, 4, 32, 32), "timestep": (32,), "class_labels": (32,),
    }),
    "PixArtTransformer2DModel": ({"caption_channels": 4096, "use_additional_conditions": False}, {
        "hidden_states": (4, 4, 128, 128), "timestep": (4,),
        "encoder_hidden_states": (4, 300, 4096),
    }),
    "SD3Transformer2DModel": ({}, {
        "hidden_states": (4, 16, 128, 128), "timestep": (4,),
        "encoder_hidden_states": (4, 333, 4096), "pooled_projections": (4, 2048),
    }),
    "FluxTransformer2DModel": ({}, {
        "hidden_states": (1, 4096, 64), "timestep": (1,), "encoder_hidden_states": (1, 512, 4096),
        "pooled_projections": (1, 768), "img_ids": (4096, 3), "txt_ids": (512, 3),
    }),
    "SanaTransformer2DModel": ({}, {
        "hidden_states": (16, 32, 32, 32), "timestep": (16,),
        "encoder_hidden_states": (16, 300, 2304),
    }),
    "CogVideoXTransformer3DModel": ({}, {
        "hidden_states": (1, 13, 16, 60, 90), "timestep": (1,),
        "encoder_hidden_states": (1, 226, 4096),
    }),
    "LTXVideoTransformer3DModel": ({}, {
        "hidden_states": (1, 4992, 128), "timestep": (1,), "encoder_hidden_states": (1, 128, 4096),
        "encoder_attention_mask": (1, 128),
    }),
    "WanTransformer3DModel": ({}, {
        "hidden_states": (1, 16, 21, 60, 104), "timestep": (1,),
        "encoder_hidden_states": (1, 512, 4096),
    }),
}  # fmt: skip
# Arguments of forwards that are sizes.
SIZES: dict[str, dict[str, int]] = {
    "LTXVideoTransformer3DModel": {"num_frames": 13, "height": 16, "width": 24},
}
# Inputs with numbers of steps, classes or positions instead of activations.
INTEGERS = {"timestep", "class_labels"}
TORCHVISION = "resnet50", "efficientnet_v2_s", "vit_b_16"
TIMM = "vit_base_patch16_224", "convnext_base", "swin_base_patch4_window7_224"
IMAGES = 64, 3, 224, 224


def _mean_square(output: Any) -> Tensor:
    """Return a loss of the first tensor of an output, of the size of a loss with a target."""
    tensor: Tensor = output if isinstance(output, Tensor) else output[0]
    return (tensor if isinstance(tensor, Tensor) else tensor[0]).float().square().mean()


def _step_of(name: str) -> tuple[nn.Module, Any, Callable[[Any], Tensor]]:
    """Return a model, its batch and its loss, as `--model` requires."""
    if name in TORCHVISION:
        model = getattr(importlib.import_module("torchvision.models"), name)()
    elif name in TIMM:
        model = importlib.import_module("timm").create_model(name)
    else:
        arguments, shapes = DIFFUSERS[name]
        model = getattr(importlib.import_module("diffusers"), name)(**arguments)
        batch = {
            key: torch.zeros(shape, dtype=torch.int64 if key in INTEGERS else None)
            for key, shape in shapes.items()
        }
        return model.train(), batch | SIZES.get(name, {}) | {"return_dict": False}, _mean_square
    return model.train(), torch.empty(IMAGES), _mean_square


def __getattr__(name: str) -> Callable[[], Any]:
    if name not in (*DIFFUSERS, *TORCHVISION, *TIMM):
        raise AttributeError(name)
    return lambda: _step_of(name)


def _functions() -> Iterator[Case]:
    for package, names in (("diffusers", DIFFUSERS), ("torchvision", TORCHVISION), ("timm", TIMM)):
        for name in names:
            shape = next(iter(DIFFUSERS[name][1].values())) if name in DIFFUSERS else IMAGES
            options = lambda folder, n=name: [  # noqa: E731
                "--model", f"{__file__}:{n}", "--dtype", "bf16",
            ]  # fmt: skip
            yield Case(package, name, name, "x".join(map(str, shape)), options)


def cases() -> list[Case]:
    """Return all cases, in the order of the page."""
    return [*_transformers(), *_functions()]
