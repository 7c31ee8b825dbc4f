"""Sizes and operations of models, against models that are really built and counted."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from greedysnake.models.skeleton import build_skeleton
from greedysnake.plan.activations import BatchShape
from greedysnake.plan.describe import describe_model
from greedysnake.plan.kept import kept_unit_bytes
from greedysnake.plan.placement import step_shape
from greedysnake.plan.presets import MODEL_PRESETS
from greedysnake.plan.workload import Workload

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "num_hidden_layers": 3}
MODELS = {
    "llama": {**HEADS, "intermediate_size": 160, "tie_word_embeddings": False},
    "qwen3": {**HEADS, "intermediate_size": 160, "head_dim": 32},
    "gemma2": {**HEADS, "intermediate_size": 160, "head_dim": 32},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2},
    "opt": {
        "hidden_size": 64,
        "ffn_dim": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 64,
    },
    "mixtral": {**HEADS, "intermediate_size": 160, "num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_parameters_and_operations_are_those_of_the_real_model(kind):
    config = AutoConfig.for_model(kind, vocab_size=300, **MODELS[kind])
    workload = describe_model(config, dtype="float32")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the counter knows no grouped products
    assert workload.parameters == sum(parameter.numel() for parameter in model.parameters())
    batch = BatchShape(micro_batches=1, rows=2, tokens=32)
    ids = torch.randint(0, 300, (batch.rows, batch.tokens))
    with FlopCounterMode(display=False) as forward:
        loss = model(input_ids=ids, labels=ids).loss
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    flops = workload.flops(batch)
    assert sum(unit.forward for unit in flops) == forward.get_total_flops()
    # beyond a backward there is the recompute of layers, and the head's own forward
    assert sum(unit.backward - unit.forward for unit in flops) == backward.get_total_flops()
    both = forward.get_total_flops() + backward.get_total_flops()
    assert workload.model_flops_per_token(batch.tokens) * batch.rows * batch.tokens == both


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("layers_per_unit", [1, 2])
def test_a_schedules_sizes_are_the_engines(dtype, layers_per_unit):
    config = AutoConfig.for_model("llama", vocab_size=5000, **MODELS["llama"])
    batch = BatchShape(micro_batches=3, rows=2, tokens=32)
    workload = describe_model(config, dtype=dtype)
    skeleton = build_skeleton(
        config, dtype=getattr(torch, dtype), layers_per_unit=layers_per_unit, chunk_elements=64 * 4096
    )
    engine = step_shape(skeleton, batch)
    planned = workload.step_shape(batch, layers_per_unit=layers_per_unit, chunks_per_unit=10**6)
    assert planned.boundary_bytes == engine.boundary_bytes
    assert planned.kept_bytes == kept_unit_bytes(skeleton, batch)
    assert (planned.tied, planned.micro_batches, len(planned.units)) == (False, 3, len(engine.units))
    for ours, theirs in zip(planned.units, engine.units, strict=True):
        padding = layers_per_unit * 4096 * 2  # a unit of several layers is padded once
        assert ours.weight_bytes == pytest.approx(theirs.weight_bytes, abs=4 * padding)
        assert ours.gradient_bytes == pytest.approx(theirs.gradient_bytes, abs=4 * padding)
        assert ours.backward_needs_weights == theirs.backward_needs_weights


def test_a_whole_master_is_two_bytes_more_a_parameter_and_moments_of_8_bits_six_less():
    config = AutoConfig.for_model("llama", vocab_size=300, **MODELS["llama"])
    workload, stored_whole = describe_model(config), describe_model(config, split_master=False)
    batch = BatchShape(micro_batches=1, rows=1, tokens=32)

    def state(split: bool, eight_bit: bool = False, model: Workload = workload) -> int:
        shape = model.step_shape(batch, split_master=split, eight_bit_moments=eight_bit)
        return sum(chunk.state_bytes for unit in shape.units for chunk in unit.chunks)

    padded = sum(part.gradient_bytes for part in workload.parts) // 4
    assert state(True) == 10 * padded
    assert state(False) == state(False, model=stored_whole) == state(True, model=stored_whole) == 12 * padded
    assert state(True, eight_bit=True) == pytest.approx((4 + 2 * 4 / 256) * padded, abs=len(workload.parts))


@pytest.mark.parametrize(("name", "billions"), [("gpt-30b", 30.0), ("gpt-65b", 64.9), ("gpt-175b", 174.6)])
def test_presets_have_the_published_size(name, billions):
    preset = MODEL_PRESETS[name]
    workload, built = preset.workload(), describe_model(preset.config(), name=name)
    assert workload == replace(built, saved_bytes=workload.saved_bytes), "python -m greedysnake.plan.presets"
    assert workload.saved_bytes(preset.tokens) == built.saved_bytes(preset.tokens)
    assert workload.parameters / 1e9 == pytest.approx(billions, abs=0.05)
    tokens = MODEL_PRESETS[name].tokens
    attention = 12 * workload.layers * workload.hidden * tokens
    matrices = workload.parameters  # tied: the embedding is multiplied with in the head
    assert workload.model_flops_per_token(tokens) == pytest.approx(6 * matrices + attention, rel=2e-3)
    # bundles of chunks change no totals
    batch = BatchShape(micro_batches=2, rows=1, tokens=tokens)
    few, many = (workload.step_shape(batch, chunks_per_unit=count) for count in (3, 50))
    assert [unit.weight_bytes for unit in few.units] == [unit.weight_bytes for unit in many.units]
    assert workload.largest_chunk.gradient_bytes == 4 * 4 * 2**20
