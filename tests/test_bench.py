"""greedysnake bench: a small matrix really runs, goes on where it ended, and says what is wrong."""

import json
import sys
from pathlib import Path

import pytest
from bench_runs import command, read
from PIL import Image
from small_run import run_well

from greedysnake.bench.measure import code_digest
from greedysnake.cli.app import main

RAN = ("greedysnake", "horizontal", "torch", "torch-float32-products")
MIB = 2**20


def fails(*arguments: str, capsys) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["greedysnake", *arguments])
        with pytest.raises(SystemExit, match=r"^1$"):
            main()
    return " ".join(capsys.readouterr().err.split())


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    """A folder in which four systems were measured, and one that is not installed was left out."""
    folder = tmp_path_factory.mktemp("bench")
    run_well(*command(folder, *RAN, "zero-infinity"))
    return folder


def test_the_systems_train_the_same(measured):
    found = read(measured)
    outcomes = {one["cell"]["system"]: one["outcome"] for one in found["measured"]}
    assert {name: outcomes[name]["status"] for name in RAN} == dict.fromkeys(RAN, "done")
    assert outcomes["zero-infinity"]["status"] == "skipped"
    assert "--install-zero-infinity" in outcomes["zero-infinity"]["why"]
    assert found["wrong"] == []
    for outcome in (outcomes[name] for name in RAN):
        assert len(outcome["steps"]) == 2
        assert all(step["seconds"] > 0 and step["grad_norm"] > 0 for step in outcome["steps"])
        assert outcome["process_peak_bytes"] > 50 * MIB
    losses = [[step["loss"] for step in outcomes[name]["steps"]] for name in RAN]
    assert losses[0] == pytest.approx(losses[2], rel=2e-3)
    # what each was told to do, it did
    plans = {name: outcomes[name]["details"]["plan"] for name in RAN[:2]}
    assert plans["greedysnake"]["choices"]["resident_state"] == 1
    assert not list((measured / "store" / "greedysnake-bench").glob("store*"))  # removed


def test_it_plans_with_the_machines_figures_within_the_limits(tmp_path):
    arguments = command(tmp_path, "greedysnake", "horizontal")
    run_well(*arguments, "--hardware", "laptop-cpu-24gb")
    found = read(tmp_path)
    assert found["method"]["hardware"] == "laptop-cpu-24gb"
    reasons = {one["cell"]["system"]: one["outcome"]["details"]["plan"]["reasons"] for one in found["measured"]}
    assert any("from the figures of laptop-cpu-24gb" in reason for reason in reasons["greedysnake"])
    assert not any("from the figures of" in reason for reason in reasons["horizontal"])
    for one in found["measured"]:  # predicted beside measured
        prediction = one["outcome"]["details"]["plan"]["prediction"]
        assert prediction["machine"] == "laptop-cpu-24gb"
        assert prediction["step_seconds"] > 0


def test_it_leaves_a_table_and_a_picture(measured):
    table = (measured / "bench.md").read_text()
    assert all(f"| {name} |" in table for name in RAN)
    assert "skipped" in table
    with Image.open(measured / "bench.png") as image:
        assert image.size[0] == 1600


def test_a_half_finished_file_is_gone_on_with(measured):
    before = read(measured)
    kept = [one for one in before["measured"] if one["cell"]["system"] != "torch"]
    (measured / "bench.json").write_text(json.dumps({**before, "measured": kept}))
    run_well(*command(measured, *RAN))
    after = {one["cell"]["system"]: one["outcome"] for one in read(measured)["measured"]}
    for one in kept:
        assert after[one["cell"]["system"]] == one["outcome"]  # not measured again
    first = next(one["outcome"] for one in before["measured"] if one["cell"]["system"] == "torch")
    assert after["torch"]["status"] == "done"
    assert after["torch"]["seconds"] != first["seconds"]
    assert [step["loss"] for step in after["torch"]["steps"]] == [step["loss"] for step in first["steps"]]


def test_what_was_measured_otherwise_is_not_gone_on_with(measured, capsys):
    assert "steps 2, now 3" in fails(*command(measured, "torch"), "--steps", "3", capsys=capsys)


def test_results_of_another_machine_or_of_other_code_are_told_apart(measured, tmp_path, capsys):
    before = read(measured)
    codes = {one["outcome"]["code"] for one in before["measured"] if one["outcome"]["status"] == "done"}
    assert codes == {code_digest()}
    elsewhere = {**before, "machine": {**before["machine"], "cpu": "Z80"}}
    (tmp_path / "bench.json").write_text(json.dumps(elsewhere))
    assert "on Z80, now" in fails(*command(tmp_path, "torch"), capsys=capsys)
    for one in before["measured"]:
        one["outcome"]["code"] = "another"
    (tmp_path / "bench.json").write_text(json.dumps(before))
    run_well(*command(tmp_path, "torch"))
    assert "1 of these cells were measured by another version" in " ".join(capsys.readouterr().out.split())


def test_problems_come_all_at_once(tmp_path, capsys):
    said = fails(
        *command(tmp_path, "tensorflow"), "--memory", "much", "--disk", "4 beans", "--model", "9b", capsys=capsys
    )
    for part in ("--memory: 'much'", "--disk: '4 beans'", "tensorflow", "--model 9b"):
        assert part in said
    said = fails(*command(tmp_path, "torch"), "--memory", "0", "--disk", "0.1B", capsys=capsys)
    for part in ("--memory: '0' leaves nothing", "--disk: '0.1B' leaves nothing"):
        assert part in said
    (tmp_path / "bench.json").write_text("[1]")
    assert "not a file of results" in fails(*command(tmp_path, "torch"), capsys=capsys)
    assert "--storage" in fails("bench", capsys=capsys)
    out = tmp_path / "bench.json" / "there.json"
    said = fails(*command(tmp_path, "torch"), "--out", str(out), capsys=capsys)
    assert f"--out {out}: cannot write there: Not a directory" in said
