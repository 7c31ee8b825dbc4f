"""What the probe measures, on a small layer: figures that add up, not how fast the machine is."""

import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import AutoConfig

from greedysnake.engine.devices import EmulatedDevice, make_device
from greedysnake.models.lora import Lora
from greedysnake.plan import probe as probing
from greedysnake.plan import probe_compute, probe_shared
from greedysnake.plan.activations import BatchShape
from greedysnake.plan.describe import describe_model
from greedysnake.plan.hardware import Hardware, LayerTimes, load_hardware
from greedysnake.plan.probe import measure_computer
from greedysnake.plan.probe_compute import LayerProbe, OptimizerWork, layer_times, make_layer_probe
from greedysnake.plan.probe_passes import EVERY, FEWER, Passes, expected_seconds, passes_within
from greedysnake.plan.probe_shared import shared_cores, speed_beside
from greedysnake.plan.step_costs import measured_times

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


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_layer_is_measured_with_fewer_passes(layer, micro_batches):
    fewer = Passes(micro_batches=micro_batches, rounds=1, warm_up=False)
    found = layer_times(layer, "bfloat16", seconds=0, passes=fewer)
    assert (found.layer_kept_forward is None) == (found.layer_kept_backward is None) == (micro_batches == 1)
    speed, _, _ = speed_beside([lambda stopped: 1], layer, 0.0, fewer)
    assert 0 < speed <= 1


def test_as_much_is_measured_as_there_is_time_for():
    """From a layer that takes no time to one of which a single pass is too long."""
    tried = [0.001, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 1000.0]
    chosen = [passes_within(100.0, one, seconds=4.0, shares_cores=True) for one in tried]
    order = [EVERY, *FEWER]
    assert [order.index(one) for one in chosen] == sorted(order.index(one) for one in chosen)
    assert chosen[:3] == [EVERY] * 3
    assert chosen[-1] == FEWER[-1]
    assert set(chosen) == set(order)
    for one, passes in zip(tried, chosen, strict=True):
        expected = expected_seconds(passes, one, seconds=4.0, shares_cores=True)
        assert expected <= 100 or passes == FEWER[-1]
    # an accelerator's cores are its own, so there is less to measure
    assert passes_within(100.0, 3.0, seconds=4.0, shares_cores=False) == EVERY
    assert passes_within(100.0, 3.0, seconds=4.0, shares_cores=True) != EVERY
    assert passes_within(-1.0, 0.001, seconds=4.0, shares_cores=True) == FEWER[-1]


def test_expected_seconds_are_those_of_whole_passes():
    few = Passes(micro_batches=2, rounds=1, warm_up=False)
    # four micro-batches for the layer, at least 8 s; beside optimizer and disks two each, alone and half as long again
    assert expected_seconds(few, 1.0, seconds=4.0, shares_cores=False) == 8
    assert expected_seconds(few, 3.0, seconds=4.0, shares_cores=False) == 12
    assert expected_seconds(few, 3.0, seconds=4.0, shares_cores=True) == 12 + 2 * (6 + 9)
    assert expected_seconds(EVERY, 3.0, seconds=4.0, shares_cores=False) == 24 + 24
    assert expected_seconds(FEWER[-1], 3.0, seconds=4.0, shares_cores=False) == 9  # of 3 s each, till 8 s are over


class WatchedDevice(EmulatedDevice):
    """A device with a GiB of memory that knows what of it is taken."""

    def __init__(self) -> None:
        super().__init__(longest_delay_s=0.0)
        self.taken: list[weakref.ref[torch.Tensor]] = []

    def allocate(self, count: int) -> torch.Tensor:
        memory = super().allocate(count)
        self.taken.append(weakref.ref(memory))
        return memory

    def free_bytes(self) -> int:
        alive = [tensor for reference in self.taken if (tensor := reference()) is not None]
        return 2**30 - sum(tensor.nbytes for tensor in alive)


DISK = {"name": "disk", "read": 2e9, "write": 1e9, "mixed_read": 1e9, "mixed_write": 1e9, "capacity": 2**36}
BATCH = BatchShape(micro_batches=1, rows=2, tokens=32)


def measured(device, tmp_path, *, deadline: float = 1e12, **settings) -> tuple[Hardware, list[str]]:
    said: list[str] = []
    figures = measure_computer(
        device,
        tmp_path,
        config=AutoConfig.for_model("llama", **SMALL),
        dtype="bfloat16",
        batch=BATCH,
        seconds=0.01,
        deadline=deadline,
        say=said.append,
        **settings,
    )
    return Hardware.model_validate({"name": "here", "disks": [DISK], **figures}), said


@pytest.fixture
def little(monkeypatch):
    """Less to copy and multiply, so that a test is soon over."""
    monkeypatch.setattr(probe_compute, "_COPY_BYTES", 2**20)
    monkeypatch.setattr(probe_shared, "_FILE_BYTES", 2**26)
    monkeypatch.setattr(probing, "_MATRIX_SIZES", {"cpu": 64})
    monkeypatch.setattr(probing, "_SAMPLE", {"model_type": "llama", **SMALL})
    monkeypatch.setattr(probing, "_SAMPLE_TOKENS", 32)


@pytest.mark.usefixtures("little")
def test_device_memory_is_what_was_free_without_the_probes_layer(tmp_path):
    device = WatchedDevice()
    hardware, _ = measured(device, tmp_path)
    assert len(device.taken) > 1  # the layer's weights and gradients
    assert hardware.device_memory == 2**30
    assert hardware.h2d is not None
    assert list(tmp_path.iterdir()) == [], "the disks are not measured beside a device"


@pytest.mark.usefixtures("little")
@pytest.mark.parametrize("separate", [False, True])
def test_each_measured_figure_has_its_source(tmp_path, separate):
    hardware, _ = measured(EmulatedDevice() if separate else make_device("cpu", None), tmp_path)
    told = [figure for key in hardware.sources for figure in key.split(" and ")]
    given = {name for name, value in hardware if value is not None}
    assert set(told) == given - {"name", "layer_times", "sources"} | {"shares of the matrix rate"}
    assert len(told) == len(set(told))


@pytest.mark.usefixtures("little")
def test_a_probe_that_is_late_says_that_it_measures_less(tmp_path):
    hardware, said = measured(make_device("cpu", None), tmp_path, deadline=time.monotonic())
    assert any("fewer passes" in text for text in said)
    assert any("a small layer beside" in text for text in said)
    assert "small layer" in hardware.sources["shared_cores"]
    assert 0 < hardware.shared_cores.compute <= 1
    _, said = measured(make_device("cpu", None), tmp_path)
    assert not any("fewer passes" in text for text in said)


FROZEN = {"freeze": ["model.embed_tokens.*", "model.layers.*.mlp.*", "model.layers.3.mlp.*"]}
UPPER = {"freeze": ["model.layers.0.*", "model.layers.1.*"]}
LORA = {"lora": Lora(r=4)}


@pytest.mark.parametrize(
    ("probed", "run", "fits"),
    [
        ({}, {}, True),
        ({}, FROZEN, False),
        ({}, LORA, False),
        ({}, {"freeze": ["lm_head.*"]}, False),
        ({}, UPPER, False),
        (FROZEN, FROZEN, True),
        (FROZEN, {}, False),
        (LORA, LORA, True),
        (UPPER, UPPER, False),
        (UPPER, {}, True),
    ],
)
def test_times_are_of_a_model_of_which_the_same_is_trained(probed, run, fits):
    if LORA in (probed, run):
        pytest.importorskip("peft")
    config, device = AutoConfig.for_model("llama", **SMALL), make_device("cpu", None)
    layer = make_layer_probe(config, "bfloat16", 2, 32, device, **probed)
    times = layer_times(layer, "bfloat16", seconds=0, passes=FEWER[1])
    layer.model.close()
    device.close()
    workload, machine = describe_model(config, **run), load_hardware("laptop-cpu-24gb")

    def known(times: LayerTimes) -> bool:
        hardware = machine.model_copy(update={"layer_times": (times,)})
        return measured_times(hardware, workload, BATCH) is not None

    assert known(times) == fits
    assert (times.embedding_backward == 0) == (probed in (FROZEN, LORA))
    assert known(times.model_copy(update={"trained_parameters": None})) == (not run and probed != LORA)
