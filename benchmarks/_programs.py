"""Small training programs of public packages as data: classes, their sizes and batches.

Sizes are small, so that a step takes a second on a CPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

VOCABULARY, TOKENS = 512, (4, 64)
TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = TEXT | {"num_key_value_heads": 2, "head_dim": 16}
EXPERTS = GROUPED | {
    "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 128, "output_router_logits": True,
}  # fmt: skip
IMAGE = {
    "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "image_size": 64, "patch_size": 8, "num_labels": 10,
}  # fmt: skip
# Classes of transformers for text, with their config and its arguments.
TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", GROUPED),
    "MistralForCausalLM": ("MistralConfig", GROUPED),
    "Qwen2ForCausalLM": ("Qwen2Config", GROUPED),
    "Qwen3ForCausalLM": ("Qwen3Config", GROUPED),
    "GemmaForCausalLM": ("GemmaConfig", GROUPED),
    "Gemma2ForCausalLM": ("Gemma2Config", GROUPED),
    "Olmo2ForCausalLM": ("Olmo2Config", GROUPED),
    "GraniteForCausalLM": ("GraniteConfig", GROUPED),
    "StableLmForCausalLM": ("StableLmConfig", GROUPED),
    "PhiForCausalLM": ("PhiConfig", TEXT),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", TEXT),
    "GPT2LMHeadModel": ("GPT2Config", TEXT),
    "BloomForCausalLM": ("BloomConfig", TEXT),
    "OPTForCausalLM": ("OPTConfig", TEXT | {"ffn_dim": 256, "word_embed_proj_dim": 64}),
    "MixtralForCausalLM": ("MixtralConfig", EXPERTS),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", EXPERTS),
    "BertForMaskedLM": ("BertConfig", TEXT),
    "RobertaForMaskedLM": ("RobertaConfig", TEXT),
    "AlbertForMaskedLM": ("AlbertConfig", TEXT | {"embedding_size": 32}),
    "T5ForConditionalGeneration": (
        "T5Config", TEXT | {"d_kv": 16, "d_ff": 256, "decoder_start_token_id": 0},
    ),
}  # fmt: skip
IMAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "ViTForImageClassification": ("ViTConfig", IMAGE),
    "DeiTForImageClassification": ("DeiTConfig", IMAGE),
    "ConvNextForImageClassification": (
        "ConvNextConfig",
        {"hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 2, 1], "num_labels": 10},
    ),
}
TIMM = ("resnet18", "convnext_atto", "vit_tiny_patch16_224", "mixer_s32_224", "efficientnet_b0")
TORCHVISION = ("resnet18", "mobilenet_v3_small", "swin_t", "densenet121")
# Classes of diffusers with arguments. Inputs are an image and a time.
DIFFUSERS: dict[str, dict[str, Any]] = {
    "UNet2DModel": {
        "sample_size": 32, "block_out_channels": (32, 64), "norm_num_groups": 8,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    },
}  # fmt: skip
# Classes of torch_geometric.nn with the arguments after the number of channels.
GRAPHS: dict[str, dict[str, Any]] = {
    name: {"hidden_channels": 64, "num_layers": 4, "out_channels": 8}
    for name in ("GCN", "GraphSAGE", "GIN", "GAT")
}


class Program(NamedTuple):
    """A model, a batch as keyword arguments, and the loss of the model's output."""

    package: str
    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Tensor]]
    loss: Callable[[Any], Tensor]


def _of_config(name: str, config: str, sizes: dict[str, Any]) -> nn.Module:
    transformers: Any = importlib.import_module("transformers")
    model: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**sizes))
    return model


def _called(package: str, name: str, *args: object, **kwargs: object) -> nn.Module:
    model: nn.Module = getattr(importlib.import_module(package), name)(*args, **kwargs)
    return model


def _text() -> dict[str, Tensor]:
    ids = torch.randint(5, VOCABULARY, TOKENS)
    return {"input_ids": ids, "labels": ids.clone()}


def _pictures(size: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(4, 3, size, size), "labels": torch.randint(10, (4,))}


def _noisy() -> dict[str, Tensor]:
    return {"sample": torch.randn(2, 3, 32, 32), "timestep": torch.tensor([3, 5])}


def _graph() -> dict[str, Tensor]:
    return {"x": torch.randn(512, 32), "edge_index": torch.randint(512, (2, 2048))}


def _own_loss(output: Any) -> Tensor:
    loss: Tensor = output.loss
    return loss


def _square(output: Any) -> Tensor:
    tensor: Tensor = output if isinstance(output, Tensor) else output.sample
    return tensor.square().mean()


def programs() -> list[Program]:
    """Return all programs, in the order of the page."""
    all_programs = [
        Program(
            "transformers", name, lambda n=name, c=c, s=s: _of_config(n, c, s), _text, _own_loss
        )
        for name, (c, s) in TRANSFORMERS.items()
    ]
    for name, (config, sizes) in IMAGES.items():
        make = lambda n=name, c=config, s=sizes: _of_config(n, c, s)  # noqa: E731
        all_programs.append(Program("transformers", name, make, lambda: _pictures(64), _own_loss))
    images = lambda: {"x": torch.randn(2, 3, 224, 224)}  # noqa: E731
    for name in TIMM:
        make = lambda n=name: _called("timm", "create_model", n, num_classes=10)  # noqa: E731
        all_programs.append(Program("timm", name, make, images, _square))
    for name in TORCHVISION:
        make = lambda n=name: _called("torchvision.models", n, num_classes=10)  # noqa: E731
        all_programs.append(Program("torchvision", name, make, images, _square))
    for name, sizes in DIFFUSERS.items():
        make = lambda n=name, s=sizes: _called("diffusers", n, **s)  # noqa: E731
        all_programs.append(Program("diffusers", name, make, _noisy, _square))
    for name, sizes in GRAPHS.items():
        make = lambda n=name, s=sizes: _called("torch_geometric.nn", n, 32, **s)  # noqa: E731
        all_programs.append(Program("torch_geometric", name, make, _graph, _square))
    return all_programs
