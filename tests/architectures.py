"""Small real models of many architectures, by transformers config."""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

_COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WINDOW = {"sliding_window": 6}
_TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"] * 2}


def _decoder(model_type: str, *without: str, **settings: Any) -> tuple[str, dict[str, Any]]:
    return model_type, {k: v for k, v in {**_COMMON, **settings}.items() if k not in without}


_GPT2 = {
    "vocab_size": 128,
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", _GPT2 | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "gpt2_dropout": ("gpt2", _GPT2),
    "opt": _decoder("opt", "num_key_value_heads", "intermediate_size", ffn_dim=96, word_embed_proj_dim=64, dropout=0.0),
    "opt_projected": _decoder(
        "opt",
        "num_key_value_heads",
        "intermediate_size",
        ffn_dim=96,
        word_embed_proj_dim=32,
        do_layer_norm_before=False,
        dropout=0.1,
    ),
    "gpt_neox": _decoder("gpt_neox", "num_key_value_heads"),
    "bloom": ("bloom", {"vocab_size": 128, "hidden_size": 64, "n_layer": 4, "n_head": 4}),
    "llama": _decoder("llama"),
    "llama_tied": _decoder("llama", tie_word_embeddings=True),
    "qwen3": _decoder("qwen3", head_dim=16),
    "gemma2": _decoder("gemma2", head_dim=16, query_pre_attn_scalar=16, **_WINDOW),
    "gemma3_text": _decoder("gemma3_text", head_dim=16, query_pre_attn_scalar=16, **_TWO_KINDS, **_WINDOW),
    "gemma4_shared": _decoder(
        "gemma4_text",
        head_dim=16,
        global_head_dim=16,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=128,
        hidden_size_per_layer_input=16,
        **_TWO_KINDS,
        **_WINDOW,
    ),
    "phi3": _decoder("phi3", **_WINDOW),
    "olmo2": _decoder("olmo2"),
    "mixtral": _decoder("mixtral", num_local_experts=4, num_experts_per_tok=2, output_router_logits=True),
    "deepseek_v3": _decoder(
        "deepseek_v3",
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=48,
        first_k_dense_replace=1,
        num_key_value_heads=4,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
    ),
    "ernie4_5_moe": _decoder(  # it has parameters that are not trained
        "ernie4_5_moe", moe_num_experts=4, moe_k=2, moe_num_shared_experts=1, moe_intermediate_size=48
    ),
}


def small_config(name: str, **settings: Any) -> PretrainedConfig:
    """The config of a small model."""
    model_type, values = ARCHITECTURES[name]
    return AutoConfig.for_model(model_type, **{**values, **settings})


def random_batches(
    steps: int, micro_batches: int = 4, *, seed: int = 0, padding: bool = True
) -> list[list[dict[str, Tensor]]]:
    """Micro-batches of uneven lengths, some rows padded on the left or right."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(steps):
        step = []
        for index in range(micro_batches):
            length = 12 - index % 3
            ids = torch.randint(3, 128, (2, length), generator=generator)
            mask = torch.ones_like(ids)
            if padding and index % 2:
                mask[0, : 2 + index] = 0
                mask[1, length - 1 - index :] = 0
            ids = torch.where(mask.bool(), ids, 0)
            step.append({"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask.bool(), ids, -100)})
        made.append(step)
    return made
