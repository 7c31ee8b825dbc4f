"""Devices that exist on every machine; for GPUs see ``test_cuda.py``."""

import pytest
import torch
from architectures import random_batches, small_config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from greedysnake import Trainer
from greedysnake.engine.devices import CpuDevice, EmulatedDevice, bytes_of, device_problem
from greedysnake.errors import ModelError
from greedysnake.models.streaming import StreamedModel


@pytest.mark.parametrize("name", ["auto", "cpu", "emulated"])
def test_names_of_devices_that_are_always_there(name):
    assert device_problem(name) is None


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:0:1", "cpu:0", ""])
def test_names_of_no_device(name):
    assert "is not one of auto, cpu, cuda, cuda:N, emulated" in device_problem(name)


def test_a_gpu_that_is_not_there():
    problem = device_problem("cuda:99")
    assert f"there are {torch.cuda.device_count()} GPUs" in problem or "sees no GPU here" in problem


@pytest.mark.parametrize("device", [CpuDevice(), EmulatedDevice()])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_an_emptied_tensor_gets_its_bytes_again(device, dtype):
    tensor = torch.randn(3, 5, 7).to(dtype)
    expected, host = tensor.clone(), torch.empty(tensor.nbytes, dtype=torch.uint8)
    alias = tensor.detach()
    device.copy(host, bytes_of(tensor))
    tensor.untyped_storage().resize_(0)
    device.refill(tensor, host)
    assert torch.equal(tensor, expected)
    assert torch.equal(alias, expected)  # who held the tensor holds it still


@pytest.mark.parametrize(
    "view",
    [
        lambda hidden: hidden.transpose(0, 1).contiguous().transpose(0, 1),  # strides of its own
        lambda hidden: torch.cat([hidden, hidden])[: len(hidden)],  # half of a larger memory
    ],
)
@pytest.mark.parametrize("on_ssd", [0.0, 1.0])
def test_a_hidden_state_that_is_a_view_is_refused_where_it_would_leave(view, on_ssd, tmp_path, monkeypatch):
    original = LlamaDecoderLayer.forward
    monkeypatch.setattr(LlamaDecoderLayer, "forward", lambda *args, **kwargs: view(original(*args, **kwargs)))
    config = small_config("llama")
    with (
        Trainer(
            config,
            tmp_path / "store",
            dtype="float32",
            device="emulated",
            boundaries_on_device=0.0,
            boundaries_on_ssd=on_ssd,
        ) as trainer,
        pytest.raises(ModelError, match=r"view of other memory.*engine\.boundaries_on_device"),
    ):
        trainer.step(random_batches(1)[0])


def test_running_out_of_memory_is_not_taken_for_a_fault_of_the_model(tmp_path, monkeypatch):
    def exhausted(self, work, index, *args):
        raise torch.OutOfMemoryError("no memory left")

    with Trainer(small_config("llama"), tmp_path / "store", dtype="float32") as trainer:
        monkeypatch.setattr(StreamedModel, "_set_seed", exhausted)
        with pytest.raises(torch.OutOfMemoryError):
            trainer.step(random_batches(1)[0])


def test_a_device_is_given_back_only_when_the_trainer_is(tmp_path, monkeypatch):
    """Its cap on memory holds from the first step to the last, also when a larger batch needs a new plan."""
    closed = []

    def close(self):
        closed.append(self)

    monkeypatch.setattr(EmulatedDevice, "close", close)
    with Trainer(small_config("llama"), tmp_path / "store", dtype="float32", device="emulated") as trainer:
        trainer.step(random_batches(1, 2)[0])
        trainer.step(random_batches(1, 3)[0])
        assert closed == []
    assert len(closed) == 1
