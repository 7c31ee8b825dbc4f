"""Profiles of machines: shipped, saved, loaded, and wrong."""

import json
import re

import pytest

from greedysnake.errors import ConfigError
from greedysnake.plan.costs import Contention
from greedysnake.plan.hardware import Hardware, SharedCores, load_hardware, profile_names, save_hardware

NOT_FIGURES = {"name", "disks", "together", "layer_times", "sources"}
SHARES_OF_MATRIX = "shares of the matrix rate"


def figures_of(hardware: Hardware) -> set[str]:
    """Everything that a source is due for, given or by default: a field's name, and what each dtype has besides."""
    given = {name for name, value in hardware if value is not None} - NOT_FIGURES
    return given | {"disks", SHARES_OF_MATRIX}


@pytest.mark.parametrize("name", profile_names())
def test_each_figure_of_a_shipped_profile_has_its_source(name):
    hardware = load_hardware(name)
    assert hardware.name == name
    assert hardware.disk_rates.read > 0
    assert hardware.separate_device == ("cpu" not in name)
    told = [figure for key in hardware.sources for figure in key.split(" and ")]
    assert len(told) == len(set(told))
    assert set(told) == figures_of(hardware)
    for figure, source in hardware.sources.items():
        assert "assumed" in source or re.search("data sheet|paper|Laptop GPU", source), f"{figure}: {source}"


@pytest.mark.parametrize("name", profile_names())
def test_the_optimizers_rate_is_that_of_the_memory_traffic_it_is_derived_from(name):
    hardware = load_hardware(name)
    derived = re.search(r"(\d+) bytes of memory traffic a parameter at (\d+) GB/s", hardware.sources["optimizer"])
    assert derived is not None
    traffic, rate = map(int, derived.groups())
    assert hardware.optimizer * traffic == pytest.approx(1e9 * rate, rel=0.02)


def test_float32_is_without_tf32_which_the_engine_never_turns_on():
    devices = [hardware for hardware in map(load_hardware, profile_names()) if hardware.separate_device]
    for hardware in devices:
        rates = hardware.compute
        assert 2 * rates["float32"].matrix <= 1.001 * rates["bfloat16"].matrix, hardware.name  # 104.8 beside 209.5
        assert "TF32 is off" in hardware.sources["compute"]
    peaks = {hardware.name: hardware.compute["float32"].matrix for hardware in devices}
    assert peaks["a100-40gb"] == peaks["a100-80gb"] == 19.5e12
    assert peaks["h100-80gb"] == peaks["h200-141gb"] == 67e12


def test_there_is_a_profile_for_each_machine_that_people_ask_about():
    assert {"a100-40gb", "a100-80gb", "h100-80gb", "h200-141gb", "rtx4090-desktop", "rtx5090-desktop"} <= set(
        profile_names()
    )
    assert sum("24gb" in name for name in profile_names()) >= 1


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_a_saved_machine_is_the_same_when_loaded(tmp_path, suffix):
    hardware = load_hardware("rtx4090-desktop")
    path = tmp_path / "new" / f"machine.{suffix}"
    save_hardware(hardware, path)
    assert load_hardware(path) == hardware
    if suffix == "json":
        assert json.loads(path.read_text())["name"] == "rtx4090-desktop"


def test_a_stripe_is_as_fast_as_its_slowest_folder_unless_measured_together():
    hardware = load_hardware("a100-40gb")
    fast, slow = hardware.disks[0], hardware.disks[0].model_copy(update={"read": 4.0e9, "capacity": 10**9})
    two = hardware.model_copy(update={"disks": (fast, slow)})
    assert two.disk_rates.read == 8.0e9
    assert two.disk_rates.write == 2 * fast.write
    assert two.disk_capacity == 2 * 10**9
    assert two.model_copy(update={"together": slow}).disk_rates.read == 4.0e9


def test_what_is_shared_reaches_the_costs():
    shared = SharedCores(compute=0.9, cpu=0.7, transfer=2e-10)
    hardware = load_hardware("laptop-cpu-24gb").model_copy(update={"shared_cores": shared})
    assert hardware.contention == Contention(compute=0.9, cpu=0.7, transfer=2e-10)


def test_every_mistake_in_a_file_is_told_at_once(tmp_path):
    text = load_hardware("rtx4090-desktop").model_dump(mode="json", exclude_none=True)
    text["optimizer"] = "fast"
    text["host_memory"] = -1
    text["colour"] = "red"
    del text["copy_rate"]
    text["disks"][0]["mixed_read"] = 1e12
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(text))
    with pytest.raises(ConfigError) as caught:
        load_hardware(path)
    message = str(caught.value)
    for part in (
        "5 problems",
        "optimizer: found 'fast'",
        "host_memory: found -1",
        "colour: unknown key",
        "copy_rate: missing",
    ):
        assert part in message
    assert "disks.0: needs mixed_read at most read" in message


@pytest.mark.parametrize(
    ("text", "needed"),
    [
        ("", "needs a mapping"),
        ("[1, 2]", "needs a mapping"),
        ("name: a\nname: b", "given twice"),
        ("{", "not valid YAML"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path, text, needed):
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=needed):
        load_hardware(path)


def test_an_unknown_machine_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="a100-40gb"):
        load_hardware("abacus")


def test_half_an_accelerator_is_refused():
    data = load_hardware("rtx4090-desktop").model_dump()
    del data["h2d"]
    with pytest.raises(ValueError, match="needs h2d too"):
        Hardware.model_validate(data)
