"""Gradients on their way between the head, the layers and the embedding."""

import pytest
import torch
from architectures import random_batches
from greenlet import greenlet
from one_type import BITWISE, CLOSE, try_type
from plain import PlainTrainer
from small_types import small_config_of
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from greedysnake import AdamW, Trainer
from greedysnake.models.calls import LayerCall, UnsupportedCallError
from greedysnake.models.gradient_sums import GradientSums
from greedysnake.models.passing import Pass


def passed(given: list[Tensor]) -> Pass:
    """A micro-batch whose layers were given these."""
    work = Pass(0, len(given), greenlet(lambda: None))
    for index, tensor in enumerate(given):
        work.calls[index] = LayerCall.record((tensor,), {}, None)
    return work


def test_a_model_whose_head_reads_the_embeddings_output_trains(tmp_path):
    row = try_type("inkling2_text", tmp_path)
    assert row.result in (BITWISE, CLOSE), row.reason


def test_a_head_that_reads_a_frozen_embeddings_output_leaves_it_alone(tmp_path):
    config, frozen = small_config_of("inkling2_text"), "model.embed_tokens."
    optimizer = AdamW(lr=2e-3, max_grad_norm=None)
    with Trainer(config, tmp_path / "store", optimizer=optimizer, dtype="float32", freeze=[f"{frozen}*"]) as trainer:
        trainer.save_pretrained(tmp_path / "before")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "before").float()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
        plain = PlainTrainer(model, optimizer, seed=0, lr=lambda _: optimizer.lr)
        for batch in random_batches(2):
            plain.step(batch, lambda _: range(4))
            trainer.step(batch)
        trainer.save_pretrained(tmp_path / "after")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "after").state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_embeddings_part_of_the_heads_gradient_waits_for_its_backward(dtype):
    weight, scale = (nn.Parameter(torch.randn(4, dtype=dtype)) for _ in range(2))
    embedded = weight.sin()
    work = passed([embedded])
    output = torch.randn(4, dtype=dtype, requires_grad=True)
    loss = (embedded * output * scale).sum()
    expected = torch.autograd.grad(loss, [weight, scale, output], retain_graph=True)
    scale.grad_dtype = torch.float32
    scale.grad = torch.zeros(4)
    buffer = scale.grad
    work.head_backward(loss, None, {id(weight): "embed.weight"}, GradientSums([weight, scale]))
    assert weight.grad is None
    assert scale.grad is buffer
    assert torch.equal(scale.grad, expected[1].float())
    assert torch.equal(output.grad, expected[2])
    roots, gradients = work.deferred()
    torch.autograd.backward(roots, gradients)
    assert torch.equal(weight.grad, expected[0])


def test_a_head_that_reads_what_no_layer_was_given_is_refused():
    weight = torch.randn(4, requires_grad=True)
    loss = (weight.cos() * torch.randn(4, requires_grad=True)).sum()
    with pytest.raises(UnsupportedCallError, match=r"its head reads what embed\.weight gives"):
        passed([weight.sin()]).head_backward(loss, None, {id(weight): "embed.weight"}, GradientSums([]))


def test_a_head_that_reads_two_things_made_of_each_other_is_refused():
    weight, output = (torch.randn(4, requires_grad=True) for _ in range(2))
    embedded = weight.sin()
    between = embedded * output
    with pytest.raises(UnsupportedCallError, match="what was computed between layers"):
        passed([embedded, between]).head_backward(
            (embedded + between).sum(), None, {id(weight): "embed.weight"}, GradientSums([])
        )
