"""Head and loss for a few positions at a time: the same numbers, less memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES, random_batches, small_config
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig

from greedysnake import AdamW, Trainer
from greedysnake.models.head_chunks import agrees, slices
from greedysnake.models.skeleton import build_skeleton
from greedysnake.plan.activations import BatchShape, head_activation_bytes, planned_head_tokens
from greedysnake.plan.model_sizes import activation_sizes

CHUNK_TOKENS = 8  # of micro-batches of 2 x 12 tokens


def config_of(name: str) -> PretrainedConfig:
    if name == "cohere":  # multiplies its logits with a constant
        return AutoConfig.for_model("cohere", **ARCHITECTURES["llama"][1])
    return small_config(name)


def trained(config: PretrainedConfig, folder: Path, **settings) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of three steps and of an evaluation, and the weights after them."""
    with Trainer(config, folder, optimizer=AdamW(lr=2e-3), dtype="float32", **settings) as trainer:
        batches = random_batches(3)
        losses = [trainer.step(batch).loss for batch in batches]
        losses.append(trainer.evaluate(batches[0]))
        trainer.save_pretrained(folder.with_name(f"{folder.name}_out"))
    from transformers import AutoModelForCausalLM

    return losses, AutoModelForCausalLM.from_pretrained(folder.with_name(f"{folder.name}_out")).state_dict()


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gemma2", "cohere", "opt", "gpt2"])
def test_parts_give_the_same_numbers_but_for_the_order_of_additions(name, tmp_path):
    whole_losses, whole = trained(config_of(name), tmp_path / "whole")
    losses, parts = trained(config_of(name), tmp_path / "parts", head_chunk_tokens=CHUNK_TOKENS)
    assert losses == pytest.approx(whole_losses, rel=1e-5)
    assert any(not torch.equal(whole[key], parts[key]) for key in whole), "the head did not work in parts"
    for key, value in whole.items():
        assert torch.allclose(value, parts[key], rtol=1e-4, atol=1e-5), key


def test_a_micro_batch_that_fits_in_one_part_is_bitwise_the_same(tmp_path):
    whole_losses, whole = trained(config_of("llama"), tmp_path / "whole")
    losses, parts = trained(config_of("llama"), tmp_path / "parts", head_chunk_tokens=24)
    assert losses == whole_losses
    assert all(torch.equal(whole[key], parts[key]) for key in whole)


def test_a_router_s_loss_keeps_the_head_whole_and_the_plan_says_so(tmp_path):
    whole_losses, whole = trained(config_of("mixtral"), tmp_path / "whole")
    losses, parts = trained(config_of("mixtral"), tmp_path / "parts", head_chunk_tokens=CHUNK_TOKENS)
    assert losses == whole_losses
    assert all(torch.equal(whole[key], parts[key]) for key in whole)
    with Trainer(config_of("mixtral"), tmp_path / "other", head_chunk_tokens=CHUNK_TOKENS) as trainer:
        trainer.reserve(BatchShape(micro_batches=1, rows=2, tokens=12))
        assert trainer.plan.head_chunk_tokens is None
        assert any("router" in reason for reason in trainer.plan.reasons)


def test_a_loss_that_is_no_sum_over_positions_is_found_out(tmp_path, caplog):
    config = config_of("llama")
    with Trainer(config, tmp_path / "store", dtype="float32", head_chunk_tokens=CHUNK_TOKENS) as trainer:
        model, own = trainer.skeleton.model, trainer.skeleton.model.loss_function
        model.loss_function = lambda logits, *args, **kwargs: own(logits, *args, **kwargs) + logits.mean() ** 2
        first = trainer.step(random_batches(1)[0]).loss
        assert "computed at once" in caplog.text
    with Trainer(config, tmp_path / "whole", dtype="float32") as trainer:
        model = trainer.skeleton.model
        model.loss_function = lambda logits, *args, **kwargs: own(logits, *args, **kwargs) + logits.mean() ** 2
        assert trainer.step(random_batches(1)[0]).loss == first


class Head(nn.Module):
    """A head whose loss can look at more than one position, or have a part of its own."""

    def __init__(self, mixing: float = 0.0, constant: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 50)
        self.mixing, self.constant = mixing, constant

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        hidden = hidden + self.mixing * hidden.cumsum(1)
        logits = self.linear(hidden)[:, :-1].flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / 30 + self.constant


@pytest.mark.parametrize("head", [Head(mixing=0.1), Head(constant=0.1)], ids=["mixing", "constant"])
def test_heads_that_cannot_be_parted_do_not_agree(head):
    hidden, labels = torch.randn(2, 12, 16), torch.randint(50, (2, 12))
    assert agrees(hidden, labels, 4, Head())
    assert not agrees(hidden, labels, 4, head)
    assert head.linear.weight.grad is None


@given(length=st.integers(1, 200), positions=st.integers(1, 200))
def test_every_position_predicts_its_next_label_in_one_slice(length, positions):
    predicting = [t for part in slices(length, positions) for t in range(part.start, part.stop - 1)]
    assert predicting == list(range(length - 1))


def large_vocabulary(vocabulary: int = 128 * 1024) -> PretrainedConfig:
    values = {**ARCHITECTURES["llama"][1], "vocab_size": vocabulary, "max_position_embeddings": 4096}
    return AutoConfig.for_model("llama", **values)


def test_logits_are_parted_where_they_are_large_and_not_where_they_are_small():
    small = activation_sizes(build_skeleton(small_config("llama"), dtype=torch.float32))
    large = activation_sizes(build_skeleton(large_vocabulary(), dtype=torch.float32))
    batch = BatchShape(micro_batches=2, rows=1, tokens=2048)
    assert planned_head_tokens(small, batch) is None
    planned = planned_head_tokens(large, batch)
    assert planned == 640  # of 12 x 128 Ki bytes each, in 1 GiB
    assert planned_head_tokens(large, batch, budget=2 * 2**30) == 128  # an eighth
    whole, parted = head_activation_bytes(large, batch), head_activation_bytes(large, batch, planned)
    assert parted < whole / 2.5


ONE_STEP = """
import json, sys, torch
from greedysnake import Trainer
from greedysnake.plan.host import process_peak_bytes, process_bytes
from test_head_chunks import large_vocabulary
chunk, folder, tokens = json.loads(sys.argv[1])
ids = torch.randint(1000, (1, tokens), generator=torch.Generator().manual_seed(0))
with Trainer(large_vocabulary(), folder, dtype="float32", head_chunk_tokens=chunk) as trainer:
    result = trainer.step([{"input_ids": ids, "labels": ids}])
    planned = sum(trainer.plan.host_bytes.values())
print(json.dumps({"loss": result.loss, "norm": result.grad_norm, "peak": process_peak_bytes(), "planned": planned}))
"""


def one_step(chunk: int, folder: Path, tokens: int) -> dict[str, float]:
    """Loss and peak memory of a process that makes one step."""
    arguments = [sys.executable, "-c", ONE_STEP, json.dumps([chunk, str(folder), tokens])]
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=Path(__file__).parent, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_a_process_takes_less_memory_with_parts(tmp_path):
    tokens = 512
    whole, parts = one_step(tokens, tmp_path / "whole", tokens), one_step(64, tmp_path / "parts", tokens)
    logits = 4 * tokens * 128 * 1024
    assert parts["peak"] < whole["peak"] - 1.5 * logits
    assert parts["planned"] < whole["planned"] - 1.5 * logits
    assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    assert parts["norm"] == pytest.approx(whole["norm"], rel=1e-5)
