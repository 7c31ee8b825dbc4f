"""Documents that share a row do not see each other, in any model, and a model that cannot do that is refused."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, small_config
from plain import PlainTrainer
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from greedysnake import AdamW, LearningRate, Trainer
from greedysnake.data import TokenWriter, document_rows
from greedysnake.data.rows import Row, collate, position_inputs
from greedysnake.errors import ModelError
from greedysnake.models.document_attention import DocumentAttention, find_document_attention, mask_bytes
from greedysnake.models.skeleton import build_skeleton
from greedysnake.plan.activations import BatchShape, paused_bytes
from greedysnake.plan.model_sizes import activation_sizes

LENGTHS = [9, 14, 5, 11, 7, 3, 12, 8, 10, 4, 6, 13]
BY_POSITIONS = [name for name in ARCHITECTURES if name not in ("bloom", "opt", "opt_projected", "gpt2_dropout")]


def config_of(name: str) -> PretrainedConfig:
    if name == "gpt_oss":  # heads on its own masks' mapping, and never looks at positions for them
        return AutoConfig.for_model(
            "gpt_oss",
            vocab_size=128,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=6,
            layer_types=["sliding_attention", "full_attention"] * 2,
            max_position_embeddings=128,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            pad_token_id=0,
        )
    if name == "mpt":
        return AutoConfig.for_model("mpt", vocab_size=128, d_model=64, n_layers=2, n_heads=4, max_seq_len=128)
    if name == "mamba":
        return AutoConfig.for_model("mamba", vocab_size=128, hidden_size=64, num_hidden_layers=2, state_size=8)
    if name == "mixtral":
        return small_config(name, output_router_logits=False)  # its loss looks at all tokens of a row at once
    return small_config(name)


@pytest.mark.parametrize("name", BY_POSITIONS)
def test_most_models_keep_documents_apart_by_their_positions(name):
    assert find_document_attention(config_of(name), torch.float32).form == "positions"


@pytest.mark.parametrize(
    ("name", "form"), [("opt", "mask"), ("opt_projected", "mask"), ("mpt", "mask"), ("gpt_oss", "masks")]
)
def test_some_need_masks(name, form):
    attention = find_document_attention(config_of(name), torch.bfloat16)
    assert (attention.form, attention.dtype) == (form, torch.bfloat16)
    if form == "masks":
        assert attention.windows == {"sliding_attention": 6, "full_attention": None}


@pytest.mark.parametrize("name", ["bloom", "mamba"])
def test_a_model_that_cannot_is_refused(name):
    with pytest.raises(ModelError) as caught:
        find_document_attention(config_of(name), torch.float32)
    assert str(caught.value).startswith(f"models of type '{name}' cannot keep the documents of a packed row apart")
    assert "Set data.packing to none" in str(caught.value)


def test_the_trial_takes_little_of_a_large_model_and_leaves_its_config_alone():
    config = AutoConfig.for_model(
        "qwen2",
        hidden_size=1024,
        intermediate_size=100_000,
        num_hidden_layers=80,
        vocab_size=500_000,
        pad_token_id=499_999,
    )
    before = config.to_dict()
    assert find_document_attention(config, torch.bfloat16).form == "positions"
    assert config.to_dict() == before


def test_a_model_whose_small_copy_cannot_be_built_is_tried_as_it_is(monkeypatch):
    from greedysnake.models import document_attention

    def broken(config):
        small = AutoConfig.for_model("llama", hidden_size=7, num_attention_heads=2)
        small.num_hidden_layers = 0
        return small

    monkeypatch.setattr(document_attention, "_small", broken)
    assert find_document_attention(config_of("llama"), torch.float32).form == "positions"


def packed_rows(folder, capacity: int = 40) -> tuple[list[Row], list[np.ndarray]]:
    """Rows of several documents, and the documents."""
    generator = np.random.default_rng(0)
    documents = [generator.integers(3, 128, length) for length in LENGTHS]
    with TokenWriter(folder / "tokens.bin", np.dtype("<u2")) as writer:
        for document in documents:
            writer.begin_document()
            writer.write(document)
        file = writer.finish()
    rows = document_rows(file, capacity, packed=True, long_documents="truncate", source="test")
    assert len(rows) < len(documents) / 2
    return [rows.row(number) for number in range(len(rows))], documents


@pytest.mark.parametrize("name", [*BY_POSITIONS, "opt", "mpt", "gpt_oss"])
def test_a_document_in_a_packed_row_has_the_logits_that_it_has_alone(name, tmp_path):
    config = config_of(name)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)  # so that a document that was seen would show
    attention = find_document_attention(config, torch.float32)
    rows, documents = packed_rows(tmp_path)
    seen, worst, leak = set(), 0.0, 0.0
    for start in range(0, len(rows), 2):
        part = rows[start : start + 2]
        batch = collate(part, pad_token=0, attention=attention.inputs)
        batch.pop("labels")
        with torch.no_grad():
            packed = model(**batch, use_cache=False).logits
            crossed = model(input_ids=batch["input_ids"], use_cache=False).logits
            for number, row in enumerate(part):
                for begin, end in pairwise([*np.flatnonzero(row.positions == 0).tolist(), len(row.ids)]):
                    seen.add(tuple(row.ids[begin:end].tolist()))
                    alone = model(input_ids=torch.from_numpy(row.ids[begin:end])[None], use_cache=False).logits[0]
                    worst = max(worst, float((packed[number, begin:end] - alone).abs().max() / alone.std()))
                    leak = max(leak, float((crossed[number, begin:end] - alone).abs().max() / alone.std()))
    assert seen == {tuple(document.tolist()) for document in documents}
    assert worst < 1e-4
    assert leak > 0.1, "the test must be able to see what is not kept apart"


def unpacked_batches(documents: list[np.ndarray], size: int) -> list[dict]:
    rows = [Row(ids=ids, labels=np.where(np.arange(len(ids)) == 0, -100, ids)) for ids in documents]
    parts = [rows[at : at + size] for at in range(0, len(rows), size)]
    return [collate(part, pad_token=0, attention=position_inputs) for part in parts]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text", "opt", "gpt_oss"])
def test_training_on_packed_rows_is_bitwise_plain_pytorch_and_learns_what_padded_rows_do(name, tmp_path):
    config = config_of(name)
    attention = find_document_attention(config, torch.float32)
    rows, documents = packed_rows(tmp_path)
    size = len(rows) // 2
    batches = [
        collate(rows[:size], pad_token=0, attention=attention.inputs),
        collate(rows[size:], pad_token=0, attention=attention.inputs),
    ]
    settings = AdamW(lr=1e-3, max_grad_norm=0.5)
    rate = LearningRate(peak=1e-3)
    trainer = Trainer(
        config, tmp_path / "store", optimizer=settings, dtype="float32", delayed_share=0.3, chunk_elements=8192, seed=3
    )
    with trainer:
        trainer.save_pretrained(tmp_path / "before")
        plain = PlainTrainer(
            AutoModelForCausalLM.from_pretrained(tmp_path / "before", dtype=torch.float32),
            settings,
            seed=3,
            lr=rate.at,
        )
        padded = unpacked_batches(documents, 4)
        assert trainer.evaluate(batches) == pytest.approx(trainer.evaluate(padded), rel=1e-5)
        for _ in range(3):
            result = trainer.step(batches)
            loss = plain.step_as(trainer, batches)
            assert result.loss == pytest.approx(loss, rel=1e-6)
        assert trainer.evaluate(batches) == pytest.approx(trainer.evaluate(padded), rel=1e-5)
        trainer.save_pretrained(tmp_path / "after")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "after", dtype=torch.float32).state_dict()
    theirs = plain.model.state_dict()
    assert not [key for key in theirs if not torch.equal(ours[key], theirs[key])]


def test_masks_are_counted():
    plain = DocumentAttention()
    assert mask_bytes(config_of("llama"), plain, 1, 64) == 64 * 64
    assert mask_bytes(config_of("gemma3_text"), plain, 2, 100) == 2 * 2 * 100 * 100
    assert mask_bytes(config_of("gemma2"), plain, 1, 64) == 2 * 4 * 64 * 64, "eager attention adds its masks"
    masks = DocumentAttention(form="mask", dtype=torch.bfloat16)
    assert mask_bytes(config_of("opt"), masks, 1, 64) == 2 * 64 * 64


def test_the_plan_has_memory_for_masks():
    skeleton = build_skeleton(config_of("llama"), dtype=torch.float32)
    batch = BatchShape(micro_batches=3, rows=1, tokens=16)
    sizes = activation_sizes(skeleton)
    masked = paused_bytes(sizes, replace(batch, mask_bytes=5 * 2**20))
    assert masked == paused_bytes(sizes, batch) + 3 * 5 * 2**20
