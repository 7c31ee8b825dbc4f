"""Frozen parameters: no gradient, no state, never written, and the rest as in plain PyTorch."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from architectures import random_batches, small_config
from committed import weights_in
from plain import PlainTrainer
from small_run import run_well, write_config
from transformers import AutoModelForCausalLM

from greedysnake import AdamW, Trainer
from greedysnake.errors import ConfigError, StorageError
from greedysnake.models.skeleton import build_skeleton
from greedysnake.plan.activations import BatchShape
from greedysnake.plan.describe import describe_model
from greedysnake.plan.phases import step_totals
from greedysnake.plan.placement import step_shape
from greedysnake.schedule import Kind
from greedysnake.storage import Store

LAYERS = "model.layers."
EMBEDDING, HEAD = "model.embed_tokens.*", "lm_head.*"


@dataclass(frozen=True)
class Case:
    freeze: tuple[str, ...]
    name: str = "llama"
    schedule: str = "vertical"
    delayed_share: float = 0.5
    layers_per_unit: int = 1
    max_grad_norm: float | None = 0.2
    device: str = "cpu"
    on_ssd: float | None = None
    gradients: str | None = None
    resident_weights: float = 0.0
    micro_batches: int = 3

    def __str__(self) -> str:
        return "-".join(str(value) for value in vars(self).values())


CASES = [
    Case((EMBEDDING,)),
    Case((EMBEDDING,), schedule="horizontal", delayed_share=1.0),
    Case((EMBEDDING,), name="llama_tied", max_grad_norm=None, delayed_share=0.0),
    Case((EMBEDDING,), name="llama_tied", device="emulated", on_ssd=0.5),
    Case(("*norm*", "*.q_proj.weight"), name="llama_tied", gradients="ssd"),
    Case(("*norm*", HEAD), layers_per_unit=3),
    Case((f"{LAYERS}*",)),
    Case((f"{LAYERS}*",), schedule="horizontal", device="emulated"),
    Case((EMBEDDING, f"{LAYERS}[01].*"), on_ssd=1.0),
    Case((EMBEDDING, f"{LAYERS}[01].*"), device="emulated", on_ssd=0.5, resident_weights=0.5),
    Case((EMBEDDING, f"{LAYERS}[01].*"), schedule="horizontal", layers_per_unit=2, gradients="ssd"),
    Case((EMBEDDING, f"{LAYERS}[013].*", HEAD), micro_batches=1),
    Case((EMBEDDING, f"{LAYERS}[0-2].*"), layers_per_unit=3),  # one of the layers of a unit is trained
    Case(
        (EMBEDDING, f"{LAYERS}*"), name="gemma3_text", delayed_share=1.0, max_grad_norm=0.01
    ),  # only a tied head's norm
    Case((EMBEDDING, f"{LAYERS}*"), delayed_share=0.0, on_ssd=1.0),  # only the head
    Case((EMBEDDING, f"{LAYERS}*"), schedule="horizontal", device="emulated", on_ssd=0.5),
    Case(("transformer.wte.*",), name="gpt2"),  # half of what is before the first layer
    Case(("*experts*",), name="mixtral", delayed_share=1.0),
    Case((f"{LAYERS}[01].*", EMBEDDING), name="gemma4_shared"),  # later layers use the states of frozen ones
]


def make_trainer(case: Case, folder: Path, **settings) -> Trainer:
    return Trainer(
        small_config(case.name),
        folder,
        optimizer=AdamW(lr=2e-3, weight_decay=0.1, max_grad_norm=case.max_grad_norm),
        dtype="float32",
        delayed_share=case.delayed_share,
        schedule=case.schedule,
        layers_per_unit=case.layers_per_unit,
        boundaries_on_ssd=case.on_ssd,
        boundaries_on_device=0.25 if case.device == "emulated" else None,
        gradients=case.gradients,
        resident_weights=case.resident_weights,
        device=case.device,
        chunk_elements=8192,
        freeze=case.freeze,
        seed=3,
        **settings,
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_trained_is_bitwise_plain_pytorch(case, tmp_path):
    trainer = make_trainer(case, tmp_path / "store")
    trainer.save_pretrained(tmp_path / "before")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "before", dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    slots = {slot.name: slot for layout in trainer.skeleton.layouts for slot in layout.parameters}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(slots[name].trainable)
    plain = PlainTrainer(model, trainer.settings.optimizer, seed=3, lr=lambda step: 2e-3)
    clipped = plain.train_beside(trainer, [batch[: case.micro_batches] for batch in random_batches(3)])
    assert clipped or case.max_grad_norm is None
    trainer.save_pretrained(tmp_path / "after")
    trainer.close()
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "after", dtype=torch.float32).state_dict()
    theirs = model.state_dict()
    assert [key for key in theirs if not torch.equal(ours[key], theirs[key])] == []
    moved = {name for name, slot in slots.items() if not torch.equal(ours[name], before[name])}
    assert moved == {name for name, slot in slots.items() if slot.trainable}
    frozen = {name for name, slot in slots.items() if not slot.trainable}
    assert frozen, "the case freezes something"


def test_frozen_parameters_have_no_state_and_are_written_once(tmp_path, monkeypatch):
    written = []
    write = Store.write
    monkeypatch.setattr(Store, "write", lambda self, key, parts: written.append(key) or write(self, key, parts))
    case = Case((EMBEDDING, f"{LAYERS}[01].*"), resident_weights=0.5)
    with make_trainer(case, tmp_path / "store") as trainer:
        first, written[:] = list(written), []
        for batch in random_batches(3):
            trainer.step(batch)
        elements = 4 * sum(chunk.elements for layout in trainer.skeleton.layouts for chunk in layout.frozen)
    assert any(".frozen" in key for key in first)
    assert written, "weights and state of the others"
    assert not any(".frozen" in key for key in written)
    manifest = json.loads((tmp_path / "store" / "manifest.json").read_text())
    assert {key.partition(".")[0] for key, _ in manifest["extents"]} == {"unit3", "unit4", "unit5"}
    assert (tmp_path / "store" / "fixed.bin").stat().st_size == sum(size for _, size in manifest["fixed"]) == elements


def test_the_backward_ends_where_nothing_before_it_is_trained(tmp_path):
    with make_trainer(Case((EMBEDDING, f"{LAYERS}[01].*"), on_ssd=1.0), tmp_path / "store") as trainer:
        result = trainer.step(random_batches(1)[0])
        operations = result.schedule.operations
        assert {o.unit for o in operations if o.kind == Kind.BACKWARD} == {3, 4}
        assert {o.unit for o in operations if o.kind == Kind.STORE_BOUNDARY} == {2, 3}
        assert trainer.plan.as_json()["ssd"]["frozen_bytes"] > 0
        assert trainer.skeleton.trained_count < trainer.skeleton.parameter_count


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_keeps_what_is_frozen(dtype, tmp_path):
    source = AutoModelForCausalLM.from_config(small_config("llama"), dtype=torch.float32)
    frozen = [name for name, _ in source.named_parameters() if "embed_tokens" in name or ".layers.1." in name]
    freeze = [EMBEDDING, f"{LAYERS}1.*"]
    with Trainer(source, tmp_path / "store", dtype=dtype, freeze=freeze, optimizer=AdamW(lr=1e-2)) as trainer:
        for batch in random_batches(2):
            trainer.step(batch)
    found = weights_in(tmp_path / "store")
    for name, parameter in source.named_parameters():
        assert torch.equal(found[name], parameter.to(getattr(torch, dtype))) == (name in frozen)


@pytest.mark.parametrize("second_slot", [True, False])
def test_a_resumed_run_is_bitwise_one_that_went_through(second_slot, tmp_path):
    case, batches = Case((EMBEDDING, f"{LAYERS}[02].*")), random_batches(3)
    with make_trainer(case, tmp_path / "whole", second_slot=second_slot) as trainer:
        for batch in batches:
            trainer.step(batch)
    with make_trainer(case, tmp_path / "parts", second_slot=second_slot) as trainer:
        trainer.step(batches[0])
    for batch in batches[1:]:
        with Trainer.resume(tmp_path / "parts", freeze=list(case.freeze)) as trainer:
            assert trainer.settings.freeze == case.freeze
            trainer.step(batch)
    ours, theirs = weights_in(tmp_path / "parts"), weights_in(tmp_path / "whole")
    assert [key for key in theirs if not torch.equal(ours[key], theirs[key])] == []
    with pytest.raises(ConfigError, match="freeze was"):
        Trainer.resume(tmp_path / "parts", freeze=())


def test_damage_in_frozen_weights_is_found(tmp_path):
    with make_trainer(Case((EMBEDDING,)), tmp_path / "store") as trainer:
        trainer.step(random_batches(1)[0])
    path = tmp_path / "store" / "fixed.bin"
    content = bytearray(path.read_bytes())
    content[1234] ^= 1
    path.write_bytes(content)
    with pytest.raises(StorageError, match=r"fixed\.bin, bytes 0 to .*, part of unit0\.frozen0"):
        Trainer.resume(tmp_path / "store")


@pytest.mark.parametrize(
    ("freeze", "message"),
    [
        (["model.embed_token.*", "lm_head.*"], r"'model\.embed_token\.\*' matches none .* model\.embed_tokens\.weight"),
        (["model.layers.0"], r"'model\.layers\.0' matches none of the model's"),
        (["*"], "all 39 parameters of the model are frozen, so there is nothing to train"),
        ("lm_head.*", r"'lm_head\.\*' is not a list of patterns"),
    ],
)
def test_patterns_that_make_no_sense(freeze, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        Trainer(small_config("llama"), tmp_path / "store", dtype="float32", freeze=freeze)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("freeze", [(EMBEDDING, f"{LAYERS}[01].*"), (f"{LAYERS}*",), ("*norm*",)])
def test_the_planner_counts_what_is_frozen_as_the_engine_does(freeze):
    config, batch = small_config("llama"), BatchShape(micro_batches=2, rows=1, tokens=32)
    workload = describe_model(config, freeze=freeze)
    planned = workload.step_shape(batch, chunks_per_unit=10**6)
    engine = step_shape(build_skeleton(config, dtype=torch.bfloat16, freeze=freeze), batch)
    for ours, theirs in zip(planned.units, engine.units, strict=True):
        assert ours.frozen_weight_bytes == theirs.frozen_weight_bytes
        assert (ours.weight_bytes, ours.gradient_bytes) == (theirs.weight_bytes, theirs.gradient_bytes)
    assert planned.first_trained == engine.first_trained
    everything = step_totals(describe_model(config).step_shape(batch), updates_in_backward=True)
    sizes = step_totals(planned, updates_in_backward=True)
    assert sizes.weights + sum(unit.frozen_weight_bytes for unit in planned.units) == sizes.all_weights
    assert sizes.weights < everything.weights
    assert sizes.state == 5 * sizes.weights
    whole = describe_model(config).flops(batch)
    for frozen, full in zip(workload.flops(batch), whole, strict=True):
        assert frozen.forward == full.forward
        assert frozen.backward <= full.backward


def test_a_simulated_step_moves_less_where_much_is_frozen(tmp_path, capsys):
    path, found = write_config(tmp_path), []
    for override in ["training.freeze=null", "training.freeze=[model.*]"]:
        run_well("simulate", path, override, "--hardware", "laptop-cpu-24gb", "--json")
        found.append(json.loads(capsys.readouterr().out))
    whole, head = found
    assert head["ssd_written_bytes"] < whole["ssd_written_bytes"] / 2
    assert head["ssd_read_bytes"] < whole["ssd_read_bytes"] / 2
    assert head["step_seconds"] < whole["step_seconds"]


def test_a_tied_embedding_is_frozen_by_either_name(tmp_path):
    trained = []
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        with Trainer(small_config("llama_tied"), tmp_path / name, dtype="float32", freeze=[name]) as trainer:
            trained.append(trainer.skeleton.trained_count)
    assert trained[0] == trained[1] < trainer.skeleton.parameter_count
