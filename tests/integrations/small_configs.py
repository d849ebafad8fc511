"""Small configs for the model types of transformers.

Numbers of a type's default config are replaced by small ones according to their names (`_SMALL`),
in one of several `SETTINGS`. `_HAND` has numbers for single models.
"""

from __future__ import annotations

import re

V = 160  # classes
# If a config fails with the first of the settings, the next one is tried.
_FILLED = {
    "layers": 2, "num_key_value_heads": 4, "head_dim": 8, "num_experts_per_tok": 2,
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
}  # fmt: skip
SETTINGS: tuple[dict[str, object], ...] = (
    {"layers": 2},
    {"layers": 2, "num_key_value_heads": 4},
    {"layers": 2, "mrope_section": [2, 1, 1]},
    {"layers": 2, "mrope_section": [1, 1, 0]},
    _FILLED,
    {**_FILLED, "mrope_section": [2, 1, 1]},
    {"layers": 8},
    {"layers": 8, "num_key_value_heads": 4, "num_heads": 8, "mamba_n_heads": 8, "mamba_d_head": 8},
)
# The first pattern that matches the whole name gives the number.
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
_FILTERS = {"num_filters": 2, "depths": [1] * 7}
_QWEN4 = {
    "hc_lowrank": 8, "ple_embed_dim": 32, "num_key_value_heads": 2,
    "layer_types": ["linear_attention", "full_attention"], "indexer_n_heads": 2,
    "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 4,
}  # fmt: skip
# Values for single models, also for nested configs.
_HAND: dict[str, dict[str, object]] = {
    "Apertus1p5ForConditionalGeneration": {
        "image_token_offset": 8, "audio_token_offset": 72, "audio_config": {"codebook_dim": 32},
        "vision_config": {"base_channels": 32, "num_res_blocks": 1},
    },
    "BailingHybridForCausalLM": {
        "num_key_value_heads": 4, "num_expert_group": 1, "topk_group": 1,
        "num_experts_per_token": 2,
    },
    "DbrxForCausalLM": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "BltForCausalLM": {
        "encoder_config": {"hidden_size_global": 64}, "decoder_config": {"hidden_size_global": 64},
        "global_config": {"hidden_size": 64, "head_dim": 16}, "encoder_hash_byte_group_vocab": 64,
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
    "Ernie4_5_VLMoeForConditionalGeneration": {
        "text_config": {"rope_parameters": {**_FULL, "mrope_section": [1, 1, 2]}},
    },
    "FastVlmForConditionalGeneration": {"vision_config": {"architecture": "fastvit_t8"}},
    "FalconH1ForCausalLM": {"mamba_d_ssm": 64, **_MAMBA},
    "Glm5NextForConditionalGeneration": {"text_config": {"index_topk": 16}},
    "Granite4VisionForConditionalGeneration": {
        "deepstack_layer_map": [[-1, 0]], "downsample_rate": "1/2",
        "text_config": {"hidden_size": 64}, "vision_config": {"hidden_size": 64},
    },
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention"], **_MAMBA},
    "EsmForMaskedLM": {"vocab_size": V, "mask_token_id": 3, "pad_token_id": 0},
    "EsmcForMaskedLM": {"vocab_size": V},
    "Gemma3nForCausalLM": {"num_kv_shared_layers": 0},
    "Gemma3nForConditionalGeneration": {
        "text_config": {"num_kv_shared_layers": 0}, "vision_config": {"architecture": "resnet10t"},
    },
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Mistral4ForCausalLM": {"head_dim": 8, "qk_rope_head_dim": 8, "num_key_value_heads": 4,
                            "rope_parameters": {**_FULL, "llama_4_scaling_beta": 0.1,
                                                "original_max_position_embeddings": 8192}},
    "Molmo2ForConditionalGeneration": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "NeoMMEForMaskedLM": {"head_dim": 16},
    "Nemotron3_5TranscribeForConditionalGeneration": {
        "audio_config": {"diarization_config": {"head_config": {"audio_hidden_size": 32}}},
    },
    "PPFormulaNetForConditionalGeneration": {
        "vision_config": {"decoder_hidden_size": 32, "post_conv_out_channels": 32},
    },
    "PerceiverForMaskedLM": {"d_latents": 32, "num_latents": 8, "num_self_attends_per_block": 2,
                             "max_position_embeddings": 12},
    "PerceptionLMForConditionalGeneration": {
        "vision_config": {
            "architecture": "vit_tiny_patch16_224",
            "model_args": {"embed_dim": 192, "img_size": [28, 28], "depth": 2},
        },
    },
    "Qwen4ExpForCausalLM": _QWEN4,
    "Qwen4ExpForConditionalGeneration": {"text_config": _QWEN4},
    "ReformerForMaskedLM": _WITHOUT_DROPOUT,
    "ReformerModelWithLMHead": {**_WITHOUT_DROPOUT, "is_decoder": True},
    "Step3p7ForConditionalGeneration": {"text_config": {"sliding_window": 16}},
    "UdopForConditionalGeneration": {"decoder_start_token_id": 1},
    "VibeVoiceAsrForConditionalGeneration": {
        "acoustic_tokenizer_encoder_config": _FILTERS,
        "semantic_tokenizer_encoder_config": _FILTERS,
    },
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


def _number(name: str, value: int, setting: dict[str, object]) -> object:
    if name in _TOKENS:
        return _TOKENS[name]
    if re.fullmatch(r".*_(token_id|token_index|token)", name) and value >= V:
        return 3 + sum(map(ord, name)) % 40  # smaller than the ids in the batch
    for pattern, number in _SMALL:
        if re.fullmatch(pattern, name):
            return min(value, number or setting["layers"])
    return value


def _small(values: dict[str, object], setting: dict[str, object]) -> dict[str, object]:
    """Return the values of a config and its nested configs, with small numbers."""
    layers, deep = setting["layers"], values.get("num_hidden_layers")
    result: dict[str, object] = {}
    for name, value in values.items():
        if not isinstance(name, str):
            result[name] = value
        elif name in setting:
            result[name] = setting[name]
        elif name == "rope_parameters" and "mrope_section" in setting:
            rope = value if isinstance(value, dict) else {"rope_type": "default", "rope_theta": 1e4}
            result[name] = {**rope, "mrope_section": setting["mrope_section"]}
        elif name == "mrope_section" and value is not None:
            result[name] = [2, 1, 1]
        elif value is None or name in ("per_layer_config", "transformers_version"):
            continue
        elif isinstance(value, dict):
            result[name] = _small(value, setting)
        elif isinstance(value, int) and not isinstance(value, bool):
            result[name] = _number(name, value, setting)
        elif (
            isinstance(value, list)
            and len(value) > layers
            and (len(value) == deep or re.search(r"layer|block|pattern|attention_types", name))
        ):
            result[name] = _first_of_each(value) if layers == 2 else value[:layers]
        else:
            result[name] = value
    return result


def _first_of_each(values: list[object]) -> list[object]:
    """Return two entries, of different kinds if possible."""
    kinds = [next(v for v in values if str(v) == kind) for kind in dict.fromkeys(map(str, values))]
    return (kinds[:2] * 2)[:2]


def small_config(model: type, setting: dict[str, object]) -> object:
    """Return the small config of a model, with one of SETTINGS."""
    cls = model.config_class
    values = cls().to_dict()
    for name in ("model_type", "architectures"):
        values.pop(name, None)
    return cls(**_merged(_small(values, setting), _HAND.get(model.__name__, {})))


def _merged(values: dict[str, object], hand: dict[str, object]) -> dict[str, object]:
    """Return `values` updated by `hand`, also in nested configs."""
    result = dict(values)
    for name, value in hand.items():
        inner = result.get(name)
        whole = name.endswith("_config") and isinstance(inner, dict)
        result[name] = _merged(inner, value) if whole else value
    return result
