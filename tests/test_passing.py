"""Gradients on their way between the head, the layers and the embedding."""

import pytest
import torch
from greenlet import greenlet
from one_type import BITWISE, CLOSE, try_type
from torch import Tensor

from greedysnake.models.calls import LayerCall, UnsupportedCallError
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


def test_the_embeddings_part_of_the_heads_gradient_waits_for_its_backward():
    weight, scale = (torch.randn(4, requires_grad=True) for _ in range(2))
    embedded = weight.sin()
    work = passed([embedded])
    output = torch.randn(4, requires_grad=True)
    loss = (embedded * output * scale).sum()
    expected = torch.autograd.grad(loss, [weight, scale, output], retain_graph=True)
    scale.grad = torch.zeros(4)
    buffer = scale.grad
    work.head_backward(loss, None, {id(weight): "embed.weight"})
    assert weight.grad is None
    assert scale.grad is buffer
    assert torch.equal(scale.grad, expected[1])
    assert torch.equal(output.grad, expected[2])
    roots, gradients = work.deferred()
    torch.autograd.backward(roots, gradients)
    assert torch.equal(weight.grad, expected[0])


def test_a_head_that_reads_what_no_layer_was_given_is_refused():
    weight = torch.randn(4, requires_grad=True)
    loss = (weight.cos() * torch.randn(4, requires_grad=True)).sum()
    with pytest.raises(UnsupportedCallError, match=r"its head reads what embed\.weight gives"):
        passed([weight.sin()]).head_backward(loss, None, {id(weight): "embed.weight"})


def test_a_head_that_reads_two_things_made_of_each_other_is_refused():
    weight, output = (torch.randn(4, requires_grad=True) for _ in range(2))
    embedded = weight.sin()
    between = embedded * output
    with pytest.raises(UnsupportedCallError, match="what was computed between layers"):
        passed([embedded, between]).head_backward((embedded + between).sum(), None, {id(weight): "embed.weight"})
