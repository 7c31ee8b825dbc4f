"""A small config of every causal language model type that transformers knows, made by rule where a rule does."""

from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

LAYERS = 4

_WIDTH, _INNER, _EXPERT = 64, 96, 48

SIZES: dict[str, Any] = {
    **dict.fromkeys(["vocab_size", "text_vocab_size", "vocab_size_per_layer_input"], 128),
    **dict.fromkeys(["hidden_size", "d_model", "n_embd", "emb_dim", "dim", "embedding_size", "dim_model"], _WIDTH),
    **dict.fromkeys(["intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "dim_ff", "dff"], _INNER),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"], _EXPERT),
    **dict.fromkeys(
        ["num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"], LAYERS
    ),
    **dict.fromkeys(
        ["num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads"],
        4,
    ),
    **dict.fromkeys(["num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"], 2),
    **dict.fromkeys(["head_dim", "global_head_dim", "swa_head_dim", "v_head_dim", "qk_nope_head_dim"], 16),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx"], 128),
    **dict.fromkeys(["max_target_positions", "max_source_positions"], 128),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 4),
    **dict.fromkeys(["num_experts_per_tok", "moe_topk", "moe_k"], 2),
    **dict.fromkeys(["n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"], 1),
    **dict.fromkeys(["linear_num_key_heads", "mamba_n_groups"], 2),
    **dict.fromkeys(["linear_num_value_heads"], 4),
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim"], 16),
    **dict.fromkeys(["state_size", "mamba_d_state", "ssm_state_size", "hidden_size_per_layer_input"], 8),
    **dict.fromkeys(["chunk_size", "mamba_chunk_size"], 8),
    "qk_rope_head_dim": 8,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "rotary_dim": 8,
    "query_pre_attn_scalar": 16,
    "sliding_window": 6,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
    "use_cache": False,
}
"""Values of settings that many configs have, where they have them."""

_TWO_KINDS = ["sliding_attention", "full_attention"] * 2

OWN: dict[str, dict[str, Any]] = {
    "gemma3_text": {"layer_types": _TWO_KINDS},
    "gemma3n_text": {
        "intermediate_size": [96] * 4,
        "layer_types": _TWO_KINDS,
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
        "pad_token_id": 2,  # no token of the batches: where its row of zeros comes in, plain gradients are not finite
        "activation_sparsity_pattern": [0.0] * 4,
        "altup_num_inputs": 2,
    },
    "gemma4_text": {"layer_types": _TWO_KINDS, "num_kv_shared_layers": 2},
    "cohere2": {"layer_types": _TWO_KINDS},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 6},
    "mpt": {"expansion_ratio": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gemma4_assistant": {
        "text_config": {
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": 4,
            "enable_moe_block": False,
            "use_double_wide_mlp": False,
        }
    },
    "mamba2": {"num_heads": 8},
    "reformer": {"axial_pos_embds_dim": (32, 32), "axial_pos_shape": (8, 16), "attn_layers": ["local", "lsh"] * 2},
    "inkling2_text": {"unpadded_vocab_size": 128},
    "inkling2_loop_text": {"unpadded_vocab_size": 128},
    "kimi_linear": {"linear_num_heads": 4, "linear_head_dim": 16},
    "bailing_hybrid": {"head_dim": 16},
    "bamba": {"mamba_n_heads": 8},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_ssm": 128},
    "granitemoehybrid": {"mamba_n_heads": 8},
    "zamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba2": {"layer_types": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"] * 2},
}
"""What some types need besides, or instead; ``...`` leaves a setting of the rule out."""


def small_settings(config_class: type[PretrainedConfig], own: dict[str, Any], layers: int = LAYERS) -> dict[str, Any]:
    """Settings of a small model."""
    default = config_class()
    known = {*vars(default), *getattr(config_class, "attribute_map", {})}
    settings = {name: value for name, value in SIZES.items() if name in known}
    settings |= {name: layers for name in ("num_hidden_layers", "num_layers") if name in settings}
    for name, sub in (getattr(config_class, "sub_configs", None) or {}).items():
        if name in own and not isinstance(own[name], dict):
            continue
        depth = LAYERS if "text" in name or "decoder" in name else LAYERS - 1  # others must not be taken for it
        sub_class = type(getattr(default, name, None))
        if issubclass(sub_class, PretrainedConfig):
            settings[name] = small_settings(sub_class, own.get(name, {}), depth)
        elif isinstance(sub, type) and issubclass(sub, PretrainedConfig) and sub is not AutoConfig:
            settings[name] = small_settings(sub, own.get(name, {}), depth)
    if "kv_lora_rank" in known and "num_key_value_heads" in known:  # each head has its own
        settings["num_key_value_heads"] = settings.get("num_attention_heads", 4)
    if "qk_rope_head_dim" in known:  # the part of a head that is turned, which is what head_dim means there
        settings.pop("head_dim", None)
    settings |= {name: value for name, value in own.items() if name not in settings or not isinstance(value, dict)}
    return {name: value for name, value in settings.items() if value is not ...}


def small_config_of(model_type: str) -> PretrainedConfig:
    """The config of a small model of a type."""
    return AutoConfig.for_model(model_type, **small_settings(CONFIG_MAPPING[model_type], OWN.get(model_type, {})))
