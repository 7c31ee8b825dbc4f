"""What the probe measures, on a small layer: figures that add up, not how fast the machine is."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import AutoConfig

from greedysnake.engine.devices import make_device
from greedysnake.plan.probe_compute import LayerProbe, OptimizerWork, layer_times, make_layer_probe
from greedysnake.plan.probe_shared import shared_cores, speed_beside

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def layer() -> Iterator[LayerProbe]:
    device = make_device("cpu", None)
    probe = make_layer_probe(AutoConfig.for_model("llama", **SMALL), "bfloat16", 2, 32, device)
    yield probe
    probe.model.close()
    device.close()


def test_what_several_do_beside_a_layer_is_added_up(layer):
    done: list[int] = []
    both = threading.Barrier(2)

    def work(stopped: Callable[[], bool]) -> int:
        both.wait(timeout=60)  # they go on at the same time
        count = 1
        while not stopped():
            count += 1
        done.append(count)
        return count

    threads = torch.get_num_threads()
    speed, together, took = speed_beside([work, work], layer, 0.03)
    assert len(done) >= 2
    assert together == sum(done)
    assert 0 < speed <= 1
    assert took > 0
    assert torch.get_num_threads() == threads


def test_what_fails_beside_a_layer_is_raised(layer):
    def fail(stopped: Callable[[], bool]) -> int:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        speed_beside([fail], layer, 0.03)


def test_a_layer_is_measured_beside_optimizer_and_disk(layer, tmp_path):
    found = shared_cores(layer, OptimizerWork(torch.bfloat16), tmp_path, 1e9, seconds=0.03)
    assert 0 < found.compute <= 1
    assert 0 < found.cpu <= 1
    assert found.transfer >= 0
    assert list(tmp_path.iterdir()) == [], "the probe's files"


def test_a_layer_is_measured_with_kept_activations_and_without(layer):
    found = layer_times(layer, "bfloat16", seconds=0.01)
    assert (found.rows, found.tokens, found.hidden, found.vocabulary) == (2, 32, 64, 96)
    assert found.layer_kept_forward is not None
    assert found.layer_kept_backward is not None
    twice = found.divided(2)
    for name, value in found:
        assert getattr(twice, name) == (value / 2 if isinstance(value, float) else value), name
    assert found.divided(1) == found
