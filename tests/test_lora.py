"""LoRA: adapters trained over a model whose own weights are only read, as peft and plain PyTorch do."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from architectures import random_batches, small_config
from committed import weights_in
from plain import PlainTrainer
from small_run import run_well, write_config
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from greedysnake import AdamW, Lora, Trainer
from greedysnake.errors import ConfigError

peft = pytest.importorskip("peft")

RATE = 1e-2


@dataclass(frozen=True)
class Case:
    name: str = "llama"
    lora: Lora = field(default_factory=lambda: Lora(r=4, alpha=8))
    schedule: str = "vertical"
    delayed_share: float = 0.5
    micro_batches: int = 3
    max_grad_norm: float | None = 0.05
    layers_per_unit: int = 1
    device: str = "cpu"

    def __str__(self) -> str:
        return "-".join(str(value) for value in vars(self).values())


ATTENTION = ("q_proj", "v_proj")
CASES = [
    *(Case(micro_batches=m, delayed_share=share) for m in (1, 3) for share in (0.0, 0.5, 1.0)),
    Case(schedule="horizontal", max_grad_norm=None, device="emulated"),
    Case(lora=Lora(r=3, alpha=5, target_modules=ATTENTION, use_rslora=True, init="gaussian"), layers_per_unit=3),
    Case(lora=Lora(r=4, alpha=8, dropout=0.3), name="llama_tied"),
    Case(lora=Lora(r=4, alpha=8, target_modules=("c_attn", "c_proj"), bias="all"), name="gpt2"),
    Case(lora=Lora(r=4, alpha=8, target_modules=("fc1", "q_proj"), bias="lora_only"), name="opt"),
    Case(lora=Lora(r=4, alpha=8, target_modules=("lm_head", "embed_tokens", "o_proj"))),
    Case(name="qwen3", delayed_share=1.0),
    Case(name="mixtral", lora=Lora(r=4, alpha=8, target_modules=ATTENTION)),
    Case(name="gemma3_text"),
]


def base_folder(name: str, folder: Path) -> Path:
    """A model on disk."""
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(small_config(name)).float().save_pretrained(folder)
    return folder


def make_trainer(case: Case, base: Path, folder: Path, **settings) -> Trainer:
    return Trainer(
        base,
        folder,
        optimizer=AdamW(lr=RATE, weight_decay=0.1, max_grad_norm=case.max_grad_norm),
        dtype="float32",
        delayed_share=case.delayed_share,
        schedule=case.schedule,
        layers_per_unit=case.layers_per_unit,
        device=case.device,
        chunk_elements=4096,
        lora=case.lora,
        seed=3,
        **settings,
    )


def load_base(base: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


def load_adapter(base: Path, adapter: Path, **settings) -> PreTrainedModel:
    """The base model with adapters in it, as peft loads them."""
    return peft.PeftModel.from_pretrained(load_base(base), adapter, **settings).get_base_model()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_adapters_are_bitwise_those_of_peft_in_plain_pytorch(case, tmp_path):
    base = base_folder(case.name, tmp_path / "base")
    trainer = make_trainer(case, base, tmp_path / "store")
    trainer.save_pretrained(tmp_path / "before")
    model = load_adapter(base, tmp_path / "before", is_trainable=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain = PlainTrainer(model, trainer.settings.optimizer, seed=3, lr=lambda step: RATE)
    clipped = plain.train_beside(trainer, [batch[: case.micro_batches] for batch in random_batches(3)])
    assert clipped or case.max_grad_norm is None
    trainer.save_pretrained(tmp_path / "after")
    trainer.save_pretrained(tmp_path / "merged", merge=True)
    trainer.close()
    ours, theirs = load_adapter(base, tmp_path / "after").state_dict(), model.state_dict()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name for name in theirs if not torch.equal(before[name], theirs[name])} >= trained
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    whole = peft.PeftModel.from_pretrained(load_base(base), tmp_path / "after").merge_and_unload().eval()
    assert [n for n, tensor in whole.state_dict().items() if not torch.equal(merged.state_dict()[n], tensor)] == []
    ids = random_batches(1)[0][0]["input_ids"]
    with torch.no_grad():
        assert torch.equal(merged(ids).logits, whole(ids).logits)
        assert torch.allclose(merged(ids).logits, load_adapter(base, tmp_path / "after").eval()(ids).logits, atol=1e-5)


def test_only_adapters_have_state_and_the_base_is_read_only(tmp_path):
    base = base_folder("llama", tmp_path / "base")
    with make_trainer(Case(), base, tmp_path / "store") as trainer:
        result = trainer.step(random_batches(1)[0])
        assert result.ssd_write_bytes < result.ssd_read_bytes / 3
        layouts = trainer.skeleton.layouts
        assert all("lora_" in slot.name for layout in layouts for slot in layout.parameters if slot.trainable)
        trained, parameters = trainer.skeleton.trained_count, trainer.skeleton.parameter_count
    assert 0 < trained < parameters / 5
    plain = load_base(base)
    found = weights_in(tmp_path / "store")
    for name, parameter in plain.named_parameters():
        layer, dot, last = name.rpartition(".")
        held = found[name] if name in found else found[f"{layer}.base_layer{dot}{last}"]
        assert torch.equal(held, parameter)
    assert parameters == trained + sum(parameter.numel() for parameter in plain.parameters())


def test_first_values_depend_on_the_seed_alone(tmp_path):
    base = base_folder("llama", tmp_path / "base")

    def first(name: str, model=base, **settings) -> dict[str, torch.Tensor]:
        chosen = {"dtype": "float32", "lora": Lora(r=4, alpha=8), "seed": 3} | settings
        torch.manual_seed(hash(name))
        with Trainer(model, tmp_path / name, **chosen) as trainer:
            trainer.save_pretrained(tmp_path / f"{name}-adapter")
        found = weights_in(tmp_path / name)
        return {key: value for key, value in found.items() if "lora_" in key}

    one = first("one")
    assert all(torch.equal(one[name], value) for name, value in first("grouped", layers_per_unit=3).items())
    assert all(torch.equal(one[name], value) for name, value in first("random", model=small_config("llama")).items())
    other = first("other", seed=4)
    assert all(torch.equal(one[name], other[name]) == ("lora_B" in name) for name in one)
    assert not any(value.any() for name, value in one.items() if "lora_B" in name)
    gaussian = first("gaussian", lora=Lora(r=4, alpha=8, init="gaussian"))
    values = torch.cat([value.flatten() for name, value in gaussian.items() if "lora_A" in name])
    assert values.std().item() == pytest.approx(1 / 4, rel=0.05)
    values = [value for name, value in one.items() if "lora_A" in name]
    assert all(value.abs().max() <= value.shape[1] ** -0.5 for value in values), "uniform, as of a linear layer"
    assert len({tuple(value.flatten()[:3].tolist()) for value in values}) == len(values)


def test_the_weights_of_a_random_base_are_those_without_adapters(tmp_path):
    for name, lora in [("plain", None), ("adapted", Lora(r=4, alpha=8))]:
        with Trainer(small_config("llama"), tmp_path / name, dtype="float32", lora=lora, seed=5) as trainer:
            trainer.save_pretrained(tmp_path / f"{name}-out", merge=lora is not None)
    plain, adapted = (load_base(tmp_path / f"{name}-out").state_dict() for name in ("plain", "adapted"))
    assert all(torch.equal(adapted[name], value) for name, value in plain.items())  # new adapters add nothing


def test_a_resumed_run_is_bitwise_one_that_went_through(tmp_path):
    base = base_folder("llama", tmp_path / "base")
    case, batches = Case(lora=Lora(r=4, alpha=8, dropout=0.2, target_modules=ATTENTION)), random_batches(3)
    with make_trainer(case, base, tmp_path / "whole") as trainer:
        for batch in batches:
            trainer.step(batch)
    with make_trainer(case, base, tmp_path / "parts") as trainer:
        trainer.step(batches[0])
    same = replace(case.lora, target_modules=list(ATTENTION))
    for batch in batches[1:]:
        with Trainer.resume(tmp_path / "parts", lora=same) as trainer:
            assert trainer.settings.lora == case.lora
            trainer.step(batch)
            trainer.save_pretrained(tmp_path / f"out{trainer.steps_done}")
    ours, theirs = weights_in(tmp_path / "parts"), weights_in(tmp_path / "whole")
    assert [key for key in theirs if not torch.equal(ours[key], theirs[key])] == []
    written = json.loads((tmp_path / "out3" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(base)
    with pytest.raises(ConfigError, match="lora was"):
        Trainer.resume(tmp_path / "parts", lora=None)


def test_half_precision_trains_adapters_over_half_a_base(tmp_path):
    base = base_folder("llama", tmp_path / "base")
    with Trainer(base, tmp_path / "store", lora=Lora(r=4, alpha=8), optimizer=AdamW(lr=RATE)) as trainer:
        losses = [trainer.step(random_batches(1)[0]).loss for _ in range(6)]
        trainer.save_pretrained(tmp_path / "adapter")
    assert losses[-1] < losses[0] - 0.1
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    found = peft.PeftModel.from_pretrained(model, tmp_path / "adapter", autocast_adapter_dtype=False)
    assert {p.dtype for p in found.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("name", "lora", "message"),
    [
        (
            "llama",
            {"target_modules": ("q_prj",)},
            "no modules named q_prj; its linear modules are down_proj, ",
        ),
        ("llama_tied", {"target_modules": ("lm_head",)}, "lm_head shares its weight"),
        ("llama", {"target_modules": ("input_layernorm",)}, "lora: Target module .* is not supported"),
        ("llama", {"r": 0, "dropout": 1.0, "bias": "some"}, r"lora\.r: must be .*\nlora\.dropout: .*\nlora\.bias: "),
        ("llama", {"target_modules": "q_proj"}, r"write \['q_proj'\]"),
    ],
)
def test_adapters_that_cannot_be(name, lora, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        Trainer(small_config(name), tmp_path / "store", lora=Lora(**lora))
    assert not (tmp_path / "store").exists()


def test_adapters_and_patterns_do_not_go_together(tmp_path):
    with pytest.raises(ConfigError, match="freeze, lora: give one of them"):
        Trainer(small_config("llama"), tmp_path / "store", lora=Lora(), freeze=["lm_head.*"])


def test_an_embedding_with_adapters_can_be_given_more_rows(tmp_path):
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(small_config("llama"))
    base.save_pretrained(tmp_path / "base")
    rows = base.config.vocab_size + 3
    lora = Lora(r=2, alpha=4, target_modules=("embed_tokens", "lm_head", "q_proj"))
    settings = {"vocab_size": rows, "lora": lora, "dtype": "float32", "optimizer": AdamW(lr=RATE)}
    with Trainer(tmp_path / "base", tmp_path / "store", **settings) as trainer:
        trainer.save_pretrained(tmp_path / "before", merge=True)
        trainer.step(random_batches(1)[0])
        trainer.save_pretrained(tmp_path / "after", merge=True)
    before, after = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("before", "after"))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        found = before.get_parameter(name)
        assert found.shape[0] == rows
        assert torch.equal(found[: rows - 3], base.get_parameter(name))
        assert not torch.equal(after.get_parameter(name), found)


def test_from_the_command_line(tmp_path, capsys):
    path = write_config(tmp_path, lora={"r": 2, "alpha": 4, "target_modules": ["q_proj", "v_proj"]})
    run = tmp_path / "run"
    run_well("train", path)
    said = " ".join(capsys.readouterr().out.split())
    assert "(512 of them trained, " in said
    assert "LoRA adapters of rank 2" in said
    summary = json.loads((run / "summary.json").read_text())
    assert summary["trained_parameters"] == 512 < summary["parameters"]
    run_well("report", run)
    page = (run / "report.html").read_text()
    assert f"512 of {summary['parameters']:,}" in page
    assert "weights that are not trained, on SSD" in page
    run_well("resume", run, "training.steps=6")
    run_well("export", run, tmp_path / "adapter")
    run_well("export", run, tmp_path / "merged", "--merge")
    said = " ".join(capsys.readouterr().out.split())
    assert "Wrote the adapters after step 6" in said
    assert "Wrote the model after step 6" in said
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 2
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert AutoTokenizer.from_pretrained(tmp_path / "merged") is not None
    assert sum(p.numel() for p in merged.parameters()) == summary["parameters"] - 512
