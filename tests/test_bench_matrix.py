"""The matrix of a bench: its systems and models, and losses that are not believed."""

import json

import numpy as np
import pytest
from PIL import Image

from greedysnake.bench.cells import Cell, Measured, Method, Outcome, Setting, StepNumbers
from greedysnake.bench.check import family, unchecked, wrong_cells
from greedysnake.bench.estimate import Estimator
from greedysnake.bench.matrix import cells_of, settings_of
from greedysnake.bench.models import PRESETS, bench_config
from greedysnake.bench.picture import draw_smallest, draw_table
from greedysnake.bench.results import Results, open_results
from greedysnake.bench.run_zero_infinity import ZeroSettings, zero_config
from greedysnake.bench.runner import Job, micro_batches
from greedysnake.bench.smallest import Smallest
from greedysnake.bench.systems import DEFAULT_SYSTEMS, SYSTEMS, ablations
from greedysnake.bench.table import markdown, table_lines
from greedysnake.engine.settings import TrainerSettings
from greedysnake.errors import ConfigError
from greedysnake.plan.hardware import load_hardware, paced

MIB = 2**20


# Losses


def outcome(*losses: float, norm: float | None = 2.0) -> Outcome:
    steps = [StepNumbers(seconds=1, loss=loss, grad_norm=norm, read_bytes=3, written_bytes=4) for loss in losses]
    return Outcome(status="done", steps=tuple(steps), peak_memory_bytes=MIB)


def results(**outcomes: Outcome) -> Results:
    setting = Setting(model="tiny", micro_batches=4, memory=10 * MIB)
    ones = [
        Measured(cell=Cell(setting=setting, system=name.replace("_", "-")), outcome=one)
        for name, one in outcomes.items()
    ]
    return Results(method=Method(), machine={}, measured=tuple(ones))


def marked(found: Results) -> set[str]:
    return {cell.system for cell in wrong_cells(found.measured)}


def test_a_wrong_loss_is_marked():
    good, bad = outcome(6.0, 5.0), outcome(6.0, 5.02)
    assert marked(results(torch=good, greedysnake=outcome(6.01, 5.005), zero_infinity=bad)) == {"zero-infinity"}
    assert marked(results(torch=bad, greedysnake=good, zero_infinity=good)) >= {"torch"}  # even the reference
    assert marked(results(torch=good, greedysnake=bad, horizontal=bad, zero_infinity=good)) == {
        "greedysnake",
        "horizontal",
    }
    assert marked(results(greedysnake=good, zero_infinity=bad)) == {"greedysnake", "zero-infinity"}
    assert marked(results(greedysnake=good, horizontal=outcome(6.0, float("nan")))) >= {"horizontal"}
    assert marked(results(greedysnake=good, horizontal=outcome(6.0, 5.1))) == {"greedysnake", "horizontal"}
    assert marked(results(greedysnake=good, zero_infinity=outcome(6.0, 5.0, norm=2.03))) != set()
    assert marked(results(greedysnake=good, zero_infinity=outcome(6.0, 5.0, norm=None))) == set()


def test_variants_of_one_system_cannot_outvote_another():
    good, bad = outcome(6.0, 5.0), outcome(6.0, 5.02)
    ours = {"greedysnake": bad, "greedysnake_streamed": bad, "horizontal": bad}
    assert marked(results(**ours, zero_infinity=good)) == {
        "greedysnake",
        "greedysnake-streamed",
        "horizontal",
        "zero-infinity",
    }
    assert {family(name) for name in SYSTEMS if name.startswith("zero")} == {"deepspeed"}


def test_a_loss_that_was_compared_with_none_is_not_called_right():
    assert unchecked(results(greedysnake=outcome(6.0), horizontal=outcome(6.0)).measured) == {("tiny", 4)}
    assert unchecked(results(greedysnake=outcome(6.0), torch=outcome(6.0)).measured) == set()


def test_a_wrong_line_is_seen_in_table_and_picture(tmp_path):
    found = results(torch=outcome(6, 5), greedysnake=outcome(6, 5), zero_infinity=outcome(6, 7))
    lines = table_lines(found, ["torch", "greedysnake", "zero-infinity"])
    assert [line.wrong for line in lines] == [False, False, True]
    assert "WRONG: loss of step 2 is 7.0000" in markdown(lines)
    red = {}
    for name, shown in (("all", lines), ("right", lines[:2])):
        draw_table(tmp_path / "table.png", shown, "tiny")
        with Image.open(tmp_path / "table.png") as image:
            pixels = np.asarray(image.convert("RGB")).astype(int)
        red[name] = (np.abs(pixels - (0xC0, 0x39, 0x2B)).max(axis=2) < 30).sum()
    assert red["right"] == 0
    assert red["all"] > 100


@pytest.mark.parametrize("longest", [max(SYSTEMS, key=len), "streamed, without optimizer overlap (α = 0)"])
def test_names_are_not_cut_off_in_pictures(tmp_path, longest):
    found = results(**{longest: outcome(6, 5), "torch": outcome(6, 5)})
    draw_table(tmp_path / "table.png", table_lines(found, [longest, "torch"]), "tiny")
    answer = Smallest(model="tiny", micro_batches=1, disk=None, system=longest, works=2**30, fails=None, why=None)
    draw_smallest(tmp_path / "smallest.png", [answer], "tiny")
    for name in ("table.png", "smallest.png"):
        with Image.open(tmp_path / name) as image:
            edge = np.asarray(image.convert("RGB"))[:, :8]
        assert (edge == 255).all(), name


# The matrix


def test_systems_take_turns_within_a_run():
    settings = settings_of(["tiny"], [2, 4], [None, MIB], [None])
    cells = cells_of(settings, [SYSTEMS["torch"], SYSTEMS["greedysnake"]], 2)
    assert len(settings) == 4
    assert len(cells) == len(set(cells)) == 16
    assert [cell.system for cell in cells[:4]] == ["torch", "greedysnake"] * 2
    assert [cell.system for cell in cells[8:12]] == ["greedysnake", "torch"] * 2  # none is always the first
    assert [cell.run for cell in cells] == [0] * 8 + [1] * 8


def test_failures_and_skipped_cells_are_tried_again_and_others_are_not():
    ones = {"done": outcome(6.0), "failed": Outcome(status="failed"), "refused": Outcome(status="refused")}
    ones |= {"skipped": Outcome(status="skipped"), "late": Outcome(status="out of time")}
    found = results(**ones)
    missing = found.missing([one.cell for one in found.measured])
    assert {cell.system for cell in missing} == {"failed", "skipped", "late"}


def test_every_system_has_the_same_batches(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 100}')
    job = Job(
        model=str(tmp_path), storage="", micro_batches=3, rows=2, tokens=8, steps=1, seed=0, lr=1e-3,
        max_grad_norm=None, threads=1,
    )  # fmt: skip
    first, again, second = micro_batches(job, 0), micro_batches(job, 0), micro_batches(job, 1)
    assert len(first) == 3
    assert first[0]["input_ids"].shape == (2, 8)
    assert max(int(part["input_ids"].max()) for part in first) < 100
    assert all(a["input_ids"].equal(b["input_ids"]) for a, b in zip(first, again, strict=True))
    assert not first[0]["input_ids"].equal(second[0]["input_ids"])


def test_ablations_switch_off_one_thing_each(tmp_path):
    for base, clipping in (("greedysnake", True), ("greedysnake-streamed", True), ("greedysnake-streamed", False)):
        start, *variants = ablations(base, clipping=clipping)
        assert start == SYSTEMS[base]
        for system in variants:
            TrainerSettings.of(storage=(tmp_path,), **system.settings)
            differs = {name for name, value in system.settings.items() if start.settings.get(name, "") != value}
            assert differs, system.name
            assert len(differs) == 1 or "anything" in system.name
        assert len({system.name for system in variants}) == len(variants)
    with pytest.raises(ConfigError, match="torch"):
        ablations("torch", clipping=True)


def test_time_is_estimated_before_and_corrected_after():
    hardware, method = load_hardware("laptop-cpu-24gb"), Method(tokens=64)
    assert paced(hardware, 4 * MIB).disk_rates.read == 4 * MIB
    estimator = Estimator(hardware, method)
    cell = Cell(setting=Setting(model="tiny", micro_batches=2, disk=4 * MIB), system="greedysnake")
    before = {name: estimator.seconds(cell, SYSTEMS[name]) for name in DEFAULT_SYSTEMS}
    assert min(before.values()) > 0
    took = outcome(6.0).model_copy(update={"seconds": 3 * before["greedysnake"]})
    estimator.learn(Measured(cell=cell, outcome=took), SYSTEMS["greedysnake"])
    for name, seconds in before.items():
        assert estimator.seconds(cell, SYSTEMS[name]) == pytest.approx(3 * seconds)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_models(name):
    config = bench_config(name, 128)
    assert config.vocab_size == PRESETS[name]["vocab_size"]
    assert config.max_position_embeddings == 128


def test_a_model_may_be_a_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["tiny"]))
    (tmp_path / "run.yaml").write_text("model:\n  config: {model_type: gpt2, n_layer: 3}\n")
    assert bench_config(str(tmp_path / "config.json"), 8).hidden_size == PRESETS["tiny"]["hidden_size"]
    assert bench_config(str(tmp_path / "run.yaml"), 8).n_layer == 3
    (tmp_path / "run.yaml").write_text("a: 1")
    with pytest.raises(ConfigError, match="model_type"):
        bench_config(str(tmp_path / "run.yaml"), 8)


def test_variants_of_zero_infinity_differ_in_what_stays_in_memory():
    of = {name: ZeroSettings(**system.settings) for name, system in SYSTEMS.items() if system.order == "zero-infinity"}
    where = {name: (one.parameters, one.optimizer, one.checkpointing) for name, one in of.items()}
    assert where == {
        "zero-infinity": ("nvme", "nvme", True),
        "zero-infinity-weights-in-memory": ("cpu", "nvme", True),
        "zero-infinity-activations-in-memory": ("nvme", "nvme", False),
        "zero-infinity-in-memory": ("cpu", "nvme", False),
        "zero-infinity-least-memory": ("nvme", "nvme", True),
        "zero-offload": ("cpu", "cpu", True),
        "zero-offload-activations-in-memory": ("cpu", "cpu", False),
    }
    buffers = {name: one.optimizer_buffers * one.group_elements for name, one in of.items()}
    assert min(buffers, key=buffers.__getitem__) == "zero-infinity-least-memory"


def test_zero_infinitys_buffers_hold_the_largest_parameter():
    job = Job(
        model="", storage="/nvme", micro_batches=4, rows=1, tokens=8, steps=1, seed=0, lr=1e-3, max_grad_norm=None,
        threads=1,
    )  # fmt: skip
    for largest in (1, 65536, 394_000_000):
        zero = zero_config(job, ZeroSettings(), largest)["zero_optimization"]
        assert zero["offload_param"]["buffer_size"] >= largest
        assert zero["sub_group_size"] == ZeroSettings().group_elements
    assert (
        "buffer_size" not in zero_config(job, ZeroSettings(parameters="cpu"), 8)["zero_optimization"]["offload_param"]
    )


def test_results_survive_the_file(tmp_path):
    found = results(greedysnake=outcome(6.0), torch=Outcome(status="out of memory", why="killed"))
    (tmp_path / "bench.json").write_text(found.model_dump_json())
    assert open_results(tmp_path / "bench.json", Method()) == found
