"""Training that is planned from the machine's figures: the same numbers, within memory, and predicted."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from architectures import random_batches, small_config
from committed import weights_in
from small_run import run_well, write_config

from greedysnake import AdamW, Trainer
from greedysnake.errors import ConfigError, MemoryBudgetError
from greedysnake.plan.activations import BatchShape
from greedysnake.plan.hardware import Hardware, save_hardware
from greedysnake.plan.placement import Plan
from greedysnake.plan.slots import SLOTS
from greedysnake.schedule import Tier

DISK = {"name": "disk", "read": 2e9, "write": 1.5e9, "mixed_read": 1.2e9, "mixed_write": 0.9e9, "capacity": 2**36}
RATES = {"matrix": 2e10, "forward": 0.5, "backward": 0.5, "head": 0.5}
FIGURES = {
    "name": "made up",
    "disks": [DISK],
    "host_memory": 2**34,
    "compute": {"float32": RATES, "bfloat16": RATES},
    "compute_memory": 1e10,
    "optimizer": 1e9,
    "copy_rate": 5e9,
}
MACHINE = Hardware.model_validate(FIGURES)
WITH_DEVICE = MACHINE.model_copy(update={"name": "with a GPU", "device_memory": 2**30, "h2d": 1e10, "d2h": 1e10})


def batch_of(batches) -> BatchShape:
    rows, tokens = batches[0][0]["input_ids"].shape
    return BatchShape(micro_batches=len(batches[0]), rows=rows, tokens=tokens)


def trainer_for(folder: Path, batches, **settings) -> Trainer:
    settings = {"dtype": "float32", "chunk_elements": 8192, "optimizer": AdamW(lr=1e-2), **settings}
    return Trainer(small_config("llama"), folder / "store", batch=batch_of(batches), **settings)


def planned(trainer: Trainer) -> Plan:
    assert trainer.plan is not None
    return trainer.plan


def trained(folder: Path, batches, **settings) -> tuple[list[float], dict[str, torch.Tensor]]:
    with trainer_for(folder, batches, **settings) as trainer:
        losses = [trainer.step(batch).loss for batch in batches]
    return losses, weights_in(folder / "store")


@pytest.mark.parametrize("clipping", [None, 1.0])
@pytest.mark.parametrize("resident", [0.0, None])
def test_a_planned_run_computes_the_same_numbers(tmp_path, clipping, resident):
    batches = random_batches(3)
    optimizer = AdamW(lr=1e-2, max_grad_norm=clipping)
    plain = trained(tmp_path / "rule", batches, optimizer=optimizer)
    settings = {"optimizer": optimizer, "hardware": MACHINE, "resident_weights": resident, "resident_state": resident}
    found = trained(tmp_path / "planned", batches, **settings)
    assert found[0] == plain[0]
    assert found[1].keys() == plain[1].keys()
    for name, weights in plain[1].items():
        assert torch.equal(found[1][name], weights), name


@pytest.mark.parametrize(
    "settings", [{}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "split_master": False, "layers_per_unit": None}]
)
def test_a_plan_says_what_a_step_takes_and_the_step_moves_that(settings, tmp_path):
    batches = random_batches(4)
    with trainer_for(tmp_path, batches, hardware=MACHINE, **settings) as trainer:
        plan = planned(trainer)
        results = [trainer.step(batch) for batch in batches]
    prediction = plan.prediction
    assert prediction is not None
    assert prediction.machine == "made up"
    assert prediction.step_seconds >= prediction.least_seconds > 0
    assert results[-1].ssd_read_bytes == pytest.approx(prediction.ssd_read_bytes, rel=0.05)
    assert results[-1].ssd_write_bytes == pytest.approx(prediction.ssd_write_bytes, rel=0.05)
    assert plan.as_json()["prediction"]["step_seconds"] == prediction.step_seconds


def test_a_run_without_overlap_is_predicted_without_overlap(tmp_path):
    batches = random_batches(2)
    fixed = {"hardware": MACHINE, "delayed_share": 0.5, "boundaries_on_ssd": 0.5, "gradients": "host"}
    found = {}
    for overlap in (True, False):
        with trainer_for(tmp_path / str(overlap), batches, overlap=overlap, **fixed) as trainer:
            plan = planned(trainer)
            events = trainer.step(batches[0]).events
        assert plan.choices.overlap == overlap
        assert plan.prediction is not None
        found[overlap] = plan.prediction
        spans = sorted((event.start_s, event.end_s) for event in events)
        assert overlap or all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert found[False].step_seconds > 1.05 * found[True].step_seconds
    working = sum(found[False].busy.values()) * found[False].step_seconds
    assert working + MACHINE.step_seconds == pytest.approx(found[False].step_seconds, rel=0.01)
    assert found[False].ssd_read_bytes == found[True].ssd_read_bytes
    one, other = (weights_in(tmp_path / str(overlap) / "store") for overlap in (True, False))
    assert all(torch.equal(weights, other[name]) for name, weights in one.items())


def test_snapshots_of_what_stays_in_memory_are_counted(tmp_path):
    batches = random_batches(5)
    settings = {"hardware": MACHINE, "resident_weights": 1.0, "resident_state": 1.0, "snapshot_every": 2}
    with trainer_for(tmp_path, batches, **settings) as trainer:
        plan = planned(trainer)
        results = [trainer.step(batch) for batch in batches]
    prediction = plan.prediction
    assert prediction is not None
    state = sum(plan.schedules.step(pending=True).pools[name].bytes for name in ("resident_weights", "resident_state"))
    assert prediction.ssd_write_bytes == pytest.approx(state / 2)
    assert prediction.snapshot_step_seconds > 0
    mean = sum(result.ssd_write_bytes for result in results[1:]) / (len(results) - 1)
    assert mean == pytest.approx(prediction.ssd_write_bytes, rel=0.05)


def test_what_is_fixed_by_hand_stays(tmp_path):
    fixed = {
        "delayed_share": 0.35,
        "layers_per_unit": 1,
        "boundaries_on_ssd": 0.5,
        "gradients": "ssd",
        "resident_weights": 0.25,
        "resident_state": 0.5,
    }
    with trainer_for(tmp_path, random_batches(1), hardware=MACHINE, **fixed) as trainer:
        choices, units = planned(trainer).choices, len(trainer.skeleton.unit_layers[1])
    assert units == 1
    assert choices.gradients == Tier.SSD
    for name in ("delayed_share", "boundaries_on_ssd", "resident_weights", "resident_state"):
        assert getattr(choices, name) == fixed[name]


def test_memory_is_never_over_the_budget(tmp_path):
    """With less and less of it, first what stays in memory goes, then buffers; in the end it is refused."""
    batches = random_batches(1)
    free = {"hardware": MACHINE, "resident_weights": None, "resident_state": None}
    with trainer_for(tmp_path / "all", batches, **free) as trainer:
        most = planned(trainer)
    process, whole = most.host_bytes["process"], sum(most.host_bytes.values())
    seen = []
    for part in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.0):
        # this process may grow by a little from one trainer to the next
        budget = process + 4 * 2**20 + int(part * (whole - process))
        try:
            with trainer_for(tmp_path / str(part), batches, host_memory=budget, **free) as trainer:
                plan = planned(trainer)
        except MemoryBudgetError as error:
            seen.append("refused: short" if "short" in str(error) else str(error))
            continue
        assert sum(plan.host_bytes.values()) <= plan.host_budget == budget
        seen.append("fits")
    assert seen[0] == "fits"
    assert seen[-1] == "refused: short"


def test_more_buffers_where_memory_allows(tmp_path):
    with trainer_for(tmp_path, random_batches(1)) as trainer:
        assert planned(trainer).choices.state_slots == SLOTS[0].state_slots


@pytest.mark.parametrize("layers", [1, None])
def test_a_resumed_run_is_planned_from_the_same_figures(tmp_path, layers):
    batches = random_batches(2)
    with trainer_for(tmp_path, batches, hardware=MACHINE, layers_per_unit=layers) as trainer:
        trainer.step(batches[0])
        units = len(trainer.skeleton.layouts)
    with Trainer.resume(tmp_path / "store") as trainer:
        assert trainer.settings.hardware == MACHINE
        assert len(trainer.skeleton.layouts) == units
        trainer.step(batches[1])
        assert planned(trainer).prediction is not None
    with Trainer.resume(tmp_path / "store", hardware=None) as trainer:
        trainer.step(batches[1])
        assert planned(trainer).prediction is None


@pytest.mark.parametrize(("machine", "device"), [(WITH_DEVICE, "cpu"), (MACHINE, "emulated")])
def test_figures_of_another_kind_of_machine_are_refused(tmp_path, machine, device):
    with pytest.raises(ConfigError, match=r"engine\.hardware: .* greedysnake probe"):
        trainer_for(tmp_path, random_batches(1), hardware=machine, device=device)


def test_an_emulated_device_is_planned_for_too(tmp_path):
    with trainer_for(tmp_path, random_batches(1), hardware=WITH_DEVICE, device="emulated") as trainer:
        plan = planned(trainer)
        assert plan.choices.separate_device
        assert plan.fits_device()
        assert plan.prediction is not None


def test_a_run_shows_what_was_predicted_beside_what_was_measured(tmp_path, capsys):
    save_hardware(MACHINE, tmp_path / "hardware.json")
    config = write_config(tmp_path, engine={"hardware": str(tmp_path / "hardware.json")})
    run_well("train", config)
    assert "from the figures of made up" in capsys.readouterr().out.replace("\n", " ")
    run = tmp_path / "run"
    prediction = json.loads((run / "plan.json").read_text())["prediction"]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["predicted"]["step_seconds"] == pytest.approx(prediction["step_seconds"])
    assert summary["measured"].keys() == summary["predicted"].keys()
    assert all(value > 0 for value in summary["measured"].values())
    run_well("report", run)
    page = (run / "report.html").read_text()
    assert "Predicted and measured" in page
    assert "Predicted from the figures of made up" in page
    assert "reached of it" in page  # rates beside those of the figures


def test_figures_that_probe_left_in_the_working_directory_are_used(tmp_path, monkeypatch, capsys):
    save_hardware(MACHINE, tmp_path / "hardware.json")
    config = write_config(tmp_path)
    monkeypatch.chdir(tmp_path)
    run_well("train", config)
    assert "from the figures of made up" in capsys.readouterr().out.replace("\n", " ")
    run_well("plan", config, "--json")
    assert json.loads(capsys.readouterr().out)["machine"] == "made up"
    monkeypatch.chdir("/")
    run_well("resume", tmp_path / "run", "training.steps=5")  # which keeps the place that they were found in
    assert "from the figures of made up" in capsys.readouterr().out.replace("\n", " ")
    monkeypatch.chdir(tmp_path)
    run_well("train", config, "engine.hardware=null", f"run={tmp_path / 'ruled'}", "engine.storage=null")
    assert "by a rule" in capsys.readouterr().out
    (tmp_path / "hardware.json").write_text("beans")
    with pytest.raises(AssertionError):
        run_well("train", config, f"run={tmp_path / 'bad'}")
    assert "hardware.json" in capsys.readouterr().err
    assert not (tmp_path / "bad").exists()


def test_a_run_without_figures_starts_and_says_how_to_get_them(tmp_path, capsys):
    config = write_config(tmp_path)
    run_well("train", config)
    assert "greedysnake probe" in capsys.readouterr().out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["predicted"]["step_seconds"] is None
    assert summary["predicted"]["host_peak_bytes"] > 0
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["prediction"] is None


def test_figures_that_cannot_be_read_are_told_before_anything_is_made(tmp_path, capsys):
    config = write_config(tmp_path, engine={"hardware": str(tmp_path / "nowhere.json")})
    with pytest.raises(AssertionError):
        run_well("train", config)
    assert not (tmp_path / "run").exists()
