"""Every type of the installed transformers, with and without patch_causal_lm.

`python -m tests.integrations.sweep --write` runs all of them and writes a page of docs.

A type's default config is made small by the names of its numbers (`_SMALL`), in one of several
`_SETTINGS`, some by hand (`_HAND`).
A row says what became of the type:

    equal: loss and all gradients of the patched model are those of the plain one
    refused: patch_causal_lm raised, by name
    refused late: the first forward of the patched model raised, by name
    different: a defect
    not built: no small model with a finite loss was found, and why
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import re
import signal
import sys
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

import storage_ops

FAMILIES = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "sequence to sequence": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "image and text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
}
PAGE = Path(__file__).parents[2] / "docs" / "transformers-types.md"
V, MOST = 160, 100_000_000
_SECONDS = 120
# Of configs whose default is not made small by names alone the next settings are tried.
_FILLED = {
    "layers": 2, "num_key_value_heads": 4, "head_dim": 8, "num_experts_per_tok": 2,
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
}  # fmt: skip
_SETTINGS: tuple[dict[str, object], ...] = (
    {"layers": 2},
    {"layers": 2, "num_key_value_heads": 4},
    {"layers": 2, "mrope_section": [2, 1, 1]},
    {"layers": 2, "mrope_section": [1, 1, 0]},
    _FILLED,
    {**_FILLED, "mrope_section": [2, 1, 1]},
    {"layers": 8},
    {"layers": 8, "num_key_value_heads": 4, "num_heads": 8, "mamba_n_heads": 8, "mamba_d_head": 8},
)
# The first pattern that a name matches in full gives its number.
_SMALL = [
    (r"vocab_size", V), (r".*_vocab_size|vocab_size_.*", V),
    (r"num_hidden_layers|num_layers|n_layers?|(encoder|decoder)_layers|depth|encoder_depth", 0),
    (r"num_(encoder|decoder)_(layers|blocks)|num_blocks|text_num_hidden_layers", 0),
    (r"num_key_value_heads|num_kv_heads|multi_query_group_num|num_.*_key_value_heads", 2),
    (r"(num_)?(n_)?(encoder_|decoder_)?(attention_)?heads?|num_(linear_)?(key|value)_heads", 4),
    (r"num_.*_attention_heads|linear_num_(key|value)_heads|n_head|mamba_n_heads|num_.*_heads", 4),
    (r"qk_head_dim", 16), (r"q_lora_rank|kv_lora_rank|o_lora_rank|.*_lora_rank|index_head_dim", 16),
    (r"head_dim|.*_head_dim|d_kv|attention_head_size", 8),
    (r"hidden_size|d_model|n_embd|dim|embed_dim|embedding_size|model_dim|n_embed|d_embed", 32),
    (r"(text_|out_|projection_|vision_)?hidden_(size|dim)|out_dim|projection_dim|emb_dim", 32),
    (r".*intermediate_(size|dim)|.*ffn_dim|d_ff|n_inner|.*ffn_hidden_size|mlp_hidden_size", 48),
    (r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts|num_.*experts|n_experts", 4),
    (r"num_experts_per_tok(en)?|moe_k|.*top_?k(_experts)?|num_selected_experts|n_activated_.*", 2),
    (r"n_group|topk_group|n_shared_experts|num_shared_experts|num_nextn_predict_layers", 1),
    (r"max_(source_|target_)?(position_embeddings|positions)|n_positions|max_seq_len.*", 128),
    (r"sliding_window|attention_window|local_attention_window|chunk_size|mamba_chunk_size", 16),
    (r"rotary_dim|d_head", 8), (r".*_group_vocab|codebook_size|num_embeddings", 64),
    (r"image_size", 28), (r"patch_size", 14), (r"num_patches", 4),
]  # fmt: skip
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1}
_BLIP = {
    "image_token_index": 3, "num_query_tokens": 2, "text_config": {"word_embed_proj_dim": 32},
}  # fmt: skip
_FULL = {"rope_type": "default", "rope_theta": 1e4}
_COMPASS = {"layer_types": ["full_attention"] * 2, "rope_parameters": {"full_attention": _FULL}}
_WITHOUT_DROPOUT = {  # Reformer draws a seed from the system for it
    "hidden_dropout_prob": 0.0, "lsh_attention_probs_dropout_prob": 0.0,
    "local_attention_probs_dropout_prob": 0.0, "axial_pos_embds": False, "hash_seed": 1,
}  # fmt: skip
_QWEN4 = {
    "hc_lowrank": 8, "ple_embed_dim": 32, "num_key_value_heads": 2,
    "layer_types": ["linear_attention", "full_attention"], "indexer_n_heads": 2,
    "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 4,
}  # fmt: skip
# What names and settings do not make small, by model; also in the configs in a config.
_HAND: dict[str, dict[str, object]] = {
    "BailingHybridForCausalLM": {
        "num_key_value_heads": 4, "num_expert_group": 1, "topk_group": 1,
        "num_experts_per_token": 2,
    },
    "DbrxForCausalLM": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "DoryForCausalLM": {
        "n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1, "num_hidden_layers": 3,
        "layer_types": ["full_attention"] * 3, "rope_parameters": None,
    },
    "Blip2ForConditionalGeneration": _BLIP,
    "InstructBlipForConditionalGeneration": _BLIP,
    "InstructBlipVideoForConditionalGeneration": {**_BLIP, "video_token_index": 3},
    "BambaForCausalLM": {"attn_layer_indices": [1], **_MAMBA},
    "ChameleonForConditionalGeneration": {"vocabulary_map": {"<image>": 3}},
    "CohereCompassForCausalLM": _COMPASS,
    "CohereCompassForConditionalGeneration": {"text_config": _COMPASS},
    "DeepseekOcr2ForConditionalGeneration": {"text_config": {"mlp_layer_types": ["dense"] * 2}},
    "Dots3NoteForConditionalGeneration": {
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_output_size": 32},
    },
    "Emu3ForConditionalGeneration": {
        "vocabulary_map": {"<image>": 3, "<|extra_200|>": 4},
        "vq_config": {"base_channels": 32, "num_res_blocks": 1},
    },
    "FalconH1ForCausalLM": {"mamba_d_ssm": 64, **_MAMBA},
    "Glm5NextForConditionalGeneration": {"text_config": {"index_topk": 16}},
    "Granite4VisionForConditionalGeneration": {
        "deepstack_layer_map": [[-1, 0]], "downsample_rate": "1/2",
        "text_config": {"hidden_size": 64}, "vision_config": {"hidden_size": 64},
    },
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention"], **_MAMBA},
    "EsmForMaskedLM": {"vocab_size": V, "mask_token_id": 3, "pad_token_id": 0},
    "EsmcForMaskedLM": {"vocab_size": V},
    "Gemma4AssistantForCausalLM": {"text_config": {"hidden_size_per_layer_input": 0}},
    "Gemma3nForCausalLM": {"num_kv_shared_layers": 0},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Mistral4ForCausalLM": {"head_dim": 8, "qk_rope_head_dim": 8, "num_key_value_heads": 4,
                            "rope_parameters": {**_FULL, "llama_4_scaling_beta": 0.1,
                                                "original_max_position_embeddings": 8192}},
    "Molmo2ForConditionalGeneration": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "NeoMMEForMaskedLM": {"head_dim": 16},
    "PerceiverForMaskedLM": {"d_latents": 32, "num_latents": 8, "num_self_attends_per_block": 2,
                             "max_position_embeddings": 12},
    "Qwen4ExpForCausalLM": _QWEN4,
    "Qwen4ExpForConditionalGeneration": {"text_config": _QWEN4},
    "ReformerForMaskedLM": _WITHOUT_DROPOUT,
    "ReformerModelWithLMHead": {**_WITHOUT_DROPOUT, "is_decoder": True},
    "Step3p7ForConditionalGeneration": {"text_config": {"sliding_window": 16}},
    "UdopForConditionalGeneration": {"decoder_start_token_id": 1},
    "VisionEncoderDecoderModel": {"decoder_start_token_id": 1, "pad_token_id": 0},
    "XmodForCausalLM": {"default_language": "en_XX"},
    "XmodForMaskedLM": {"default_language": "en_XX"},
    "xLSTMForCausalLM": {"embedding_dim": 32, "num_heads": 4},
    "ZambaForCausalLM": {
        "attention_hidden_size": 64, "attention_head_dim": 16, "mamba_dt_rank": 2,
        "layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4,
        "num_key_value_heads": 4, "use_mamba_kernels": False,
    },
    "Zamba2ForCausalLM": {"mamba_headdim": 8, "n_mamba_heads": 8, "use_mamba_kernels": False,
                          "attention_hidden_size": 64, "attention_head_dim": 16,
                          "num_key_value_heads": 4},
}  # fmt: skip


def families() -> dict[str, dict[str, str]]:
    """The names of the models of each family, by their type."""
    names = importlib.import_module("transformers.models.auto.modeling_auto")
    return {family: dict(getattr(names, mapping)) for family, mapping in FAMILIES.items()}


def _number(name: str, value: int, setting: dict[str, object]) -> object:
    if name in _TOKENS:
        return _TOKENS[name]
    if re.fullmatch(r".*_(token_id|token_index|token)", name) and value >= V:
        return 3 + sum(map(ord, name)) % 40  # ids of the batch are larger
    for pattern, number in _SMALL:
        if re.fullmatch(pattern, name):
            return min(value, number or setting["layers"])
    return value


def _small(values: dict[str, object], setting: dict[str, object]) -> dict[str, object]:
    """The values of a config with small numbers, and those of the configs in it."""
    layers, deep = setting["layers"], values.get("num_hidden_layers")
    found: dict[str, object] = {}
    for name, value in values.items():
        if not isinstance(name, str):
            found[name] = value
        elif name in setting:
            found[name] = setting[name]
        elif name == "rope_parameters" and "mrope_section" in setting:
            given = (
                value if isinstance(value, dict) else {"rope_type": "default", "rope_theta": 1e4}
            )
            found[name] = {**given, "mrope_section": setting["mrope_section"]}
        elif name == "mrope_section" and value is not None:
            found[name] = [2, 1, 1]
        elif value is None or name in ("per_layer_config", "transformers_version"):
            continue
        elif isinstance(value, dict):
            found[name] = _small(value, setting)
        elif isinstance(value, int) and not isinstance(value, bool):
            found[name] = _number(name, value, setting)
        elif (
            isinstance(value, list)
            and len(value) > layers
            and (len(value) == deep or re.search(r"layer|block|pattern|attention_types", name))
        ):
            found[name] = _first_of_each(value) if layers == 2 else value[:layers]
        else:
            found[name] = value
    return found


def _first_of_each(values: list[object]) -> list[object]:
    """Two entries, of two kinds where there are so many."""
    kinds = [next(v for v in values if str(v) == kind) for kind in dict.fromkeys(map(str, values))]
    return (kinds[:2] * 2)[:2]


def _config(model: type, setting: dict[str, object]) -> object:
    cls = model.config_class
    values = cls().to_dict()
    for name in ("model_type", "architectures"):
        values.pop(name, None)
    return cls(**_merged(_small(values, setting), _HAND.get(model.__name__, {})))


def _merged(values: dict[str, object], hand: dict[str, object]) -> dict[str, object]:
    """The values with those by hand in their place, also in the configs in a config."""
    found = dict(values)
    for name, value in hand.items():
        inner = found.get(name)
        whole = name.endswith("_config") and isinstance(inner, dict)
        found[name] = _merged(inner, value) if whole else value
    return found


def build(name: str, setting: dict[str, object]) -> torch.nn.Module:
    """A small model, in training mode; its numbers lie far from those of a new one."""
    model_class = getattr(importlib.import_module("transformers"), name)
    config = _config(model_class, setting)
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(config).parameters())
    if size > MOST:
        raise ValueError(f"the small config has {size:,} parameters")
    torch.manual_seed(1)
    model = model_class(config).train().float()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    return model


def inputs(model: torch.nn.Module) -> list[dict[str, torch.Tensor]]:
    """Batches to try, the first one with text alone."""
    ids = torch.randint(60, V, (2, 12))
    labels = ids.clone()
    labels[0, :3] = -100
    text = {"input_ids": ids, "labels": labels}
    vision = getattr(model.config, "vision_config", None)
    size = getattr(vision, "image_size", 28)
    image = torch.rand(2, 3, *(size if isinstance(size, (tuple, list)) else (size, size)))
    masked = {**text, "attention_mask": torch.ones_like(ids)}
    pictured = {**masked, "pixel_values": image}
    marked = {**pictured, "input_ids": ids.clone()}
    marked["input_ids"][:, :2] = 3  # of an image in two tokens
    return [
        text, {**text, "use_cache": False}, masked, pictured,
        {"pixel_values": image, "labels": labels}, {**text, "decoder_input_ids": ids},
        {"flattened_patches": torch.rand(2, 4, 770), "labels": labels},
        {"input_ids": ids.repeat(4, 1), "labels": ids.unsqueeze(-1).repeat(1, 1, 4)},
        {**text, "mm_token_type_ids": torch.zeros_like(ids)},
        {**masked, "bbox": torch.randint(100, (2, 12, 4)).sort(-1).values},
        marked, {**marked, "qformer_input_ids": ids},
        {**marked, "qformer_input_ids": ids, "pixel_values": image[:, None]},
        {**text, "image_embeds": torch.rand(2, 2, 32),
         "image_embeds_position_mask": marked["input_ids"] == 3},
        {**masked, "pixel_values": image[:, None],
         "image_attention_mask": torch.ones(2, 12, 1, dtype=torch.long)},
    ]  # fmt: skip


def loss_and_gradients(model: torch.nn.Module, batch: dict[str, torch.Tensor]):
    """Under one seed, so that dropout is the same."""
    model.zero_grad()
    torch.manual_seed(2)
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _close(found, right) -> bool:
    if found[1].keys() != right[1].keys():
        return False
    pairs = [(found[0], right[0]), *((found[1][n], right[1][n]) for n in right[1])]
    scale = max(float(r.abs().max()) for _, r in pairs[1:] if r.numel())
    return all(
        torch.allclose(f.float(), r.float(), rtol=2e-3, atol=1e-5 * max(scale, 1)) for f, r in pairs
    )


def _runnable(model: torch.nn.Module):
    """A batch, loss and gradients of it; two runs are equal."""
    reasons = []
    for batch in inputs(model):
        try:
            right = loss_and_gradients(model, batch)
        except Exception as error:
            reasons.append(error)
            continue
        if not right[0].isfinite():
            reasons.append(ValueError("its loss is not finite"))
        elif not _close(loss_and_gradients(model, batch), right):
            reasons.append(ValueError("two runs of it differ"))
        else:
            return batch, right
    raise reasons[0]


def _words(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()] or [""]
    text = f"{type(error).__name__}: {lines[-1].strip()}" if lines else type(error).__name__
    return text.replace("|", "/").replace("`", "'")[:110]


def _built(name: str):
    """A model, with a batch, its loss and its gradients, or with why it has none."""
    errors, model = [], None
    for setting in _SETTINGS:
        try:
            model = build(name, setting)
            return model, _runnable(model)
        except Exception as error:
            errors.append(error)
    if model is None:
        raise errors[0]
    return model, errors[0]


def judge(name: str) -> tuple[str, str]:
    """What becomes of a type, and why if not equal."""
    try:
        model, ran = _built(name)
    except Exception as error:
        return "not built", _words(error)
    try:
        storage_ops.patch_causal_lm(model, logits="never")
    except (NotImplementedError, TypeError, RuntimeError) as error:
        named = "patch_causal_lm" in str(error) and type(model).__name__ in str(error)
        return ("refused" if named else "different"), _reason(error)
    if isinstance(ran, Exception):
        return "not built", _words(ran)
    batch, right = ran
    try:
        found = loss_and_gradients(model, batch)
    except NotImplementedError as error:
        return "refused late", _reason(error)
    except Exception as error:
        return "different", _words(error)
    return ("equal", "") if _close(found, right) else ("different", "loss or gradients")


def _reason(error: BaseException) -> str:
    text = str(error).removeprefix("patch_causal_lm: ").split(";")[0].split(", which")[0]
    return text.replace("|", "/")[:160]


class _Late(Exception):
    """A type took too long."""


def sweep(wanted: list[str] | None = None, log=None) -> list[tuple[str, str, str, str]]:
    """(family, type, verdict, reason) of every type, or of those wanted."""

    def late(*_):
        raise _Late

    signal.signal(signal.SIGALRM, late)
    rows, judged = [], {}
    for family, types in families().items():
        for kind, names in types.items():
            if wanted and kind not in wanted:
                continue
            name = names if isinstance(names, str) else names[0]
            if name not in judged:
                signal.alarm(_SECONDS)
                try:
                    with (
                        warnings.catch_warnings(),
                        contextlib.redirect_stderr(io.StringIO()),
                        contextlib.redirect_stdout(io.StringIO()),
                    ):
                        warnings.simplefilter("ignore")
                        judged[name] = judge(name)
                except _Late:
                    judged[name] = "not built", f"longer than {_SECONDS} s"
                finally:
                    signal.alarm(0)
            rows.append((family, kind, *judged[name]))
            if log is not None:
                print(*rows[-1], sep=" | ", file=log, flush=True)
    return rows


def page(rows: list[tuple[str, str, str, str]]) -> str:
    """The page of docs."""
    import transformers

    verdicts = ("equal", "refused", "refused late", "different", "not built")
    text = [
        "# Types of transformers under `patch_causal_lm`",
        "",
        "Written by `python -m tests.integrations.sweep --write`, with transformers "
        f"{transformers.__version__} and torch {torch.__version__.split('+')[0]}, on a CPU,",
        "in float32: small models with random weights, in training mode.",
        "",
        "* *Equal*: the patched loss and all gradients are those of the plain model, to 0.2 %.",
        "* *Refused*: `patch_causal_lm` raises and names the type; *refused late*: its first "
        "forward with labels does.",
        "* *Not built*: no small model with a finite loss came of its default config, which says "
        "nothing about the patch.",
        "",
        "A type may be in two families. Most image-text types are given text alone.",
        "",
        "| family | types | " + " | ".join(verdicts) + " |",
        "|---|" + "---|" * (len(verdicts) + 1),
    ]
    for family in FAMILIES:
        own = [row[2] for row in rows if row[0] == family]
        counts = " | ".join(str(own.count(verdict)) for verdict in verdicts)
        text.append(f"| {family} | {len(own)} | {counts} |")
    for verdict in verdicts:
        found = [row for row in rows if row[2] == verdict]
        if not found:
            continue
        text += ["", f"## {verdict.capitalize()}", ""]
        if verdict == "equal":
            for family in FAMILIES:
                kinds = [row[1] for row in found if row[0] == family]
                text += [f"{family.capitalize()}: {', '.join(kinds)}.", ""] if kinds else []
            text.pop()
        else:
            text += ["| family | type | reason |", "|---|---|---|"]
            text += [f"| {row[0]} | {row[1]} | {row[3]} |" for row in found]
    return "\n".join(text) + "\n"


def main() -> None:
    """Run the sweep, of all types or of those named."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    args = parser.parse_args()
    rows = sweep(args.types, sys.stdout)
    if args.write:
        PAGE.write_text(page(rows))
    sys.exit(any(row[2] == "different" for row in rows))


if __name__ == "__main__":
    main()
