"""greedysnake bench: a small matrix really runs, goes on where it ended, and does not believe wrong losses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from small_run import run_well

from greedysnake.bench.cells import Cell, Measured, Method, Outcome, Setting, StepNumbers
from greedysnake.bench.check import family, unchecked, wrong_cells
from greedysnake.bench.estimate import Estimator
from greedysnake.bench.limits import GroupV1, GroupV2, Limits, LimitsError, disk_of, open_box
from greedysnake.bench.matrix import cells_of, settings_of
from greedysnake.bench.measure import code_digest
from greedysnake.bench.models import PRESETS, bench_config
from greedysnake.bench.picture import draw_smallest, draw_table
from greedysnake.bench.results import Results, open_results
from greedysnake.bench.run_zero_infinity import ZeroSettings, zero_config
from greedysnake.bench.runner import Job, micro_batches
from greedysnake.bench.smallest import CLOSE, Smallest, bisect, most_trials
from greedysnake.bench.systems import DEFAULT_SYSTEMS, SYSTEMS, ablations
from greedysnake.bench.table import markdown, table_lines
from greedysnake.cli.app import main
from greedysnake.engine.settings import TrainerSettings
from greedysnake.errors import ConfigError
from greedysnake.plan.hardware import load_hardware, paced

RAN = ("greedysnake", "horizontal", "torch")
MIB = 2**20


def command(folder: Path, *systems: str) -> list[str]:
    small = ["--model", "tiny", "--tokens", "16", "--micro-batches", "2", "--steps", "2", "--runs", "1"]
    named = [word for system in systems for word in ("--system", system)]
    return ["bench", "--storage", str(folder / "store"), "--out", str(folder / "bench.json"), *small, *named]


def fails(*arguments: str, capsys) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["greedysnake", *arguments])
        with pytest.raises(SystemExit, match=r"^1$"):
            main()
    return " ".join(capsys.readouterr().err.split())


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    """A folder in which three systems were measured, and one that is not installed was left out."""
    folder = tmp_path_factory.mktemp("bench")
    run_well(*command(folder, *RAN, "zero-infinity"))
    return folder


def read(folder: Path) -> dict:
    return json.loads((folder / "bench.json").read_text())


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


# Memory


@given(st.integers(1, 4000), st.integers(300, 3000))
def test_bisection_finds_where_it_begins_to_work(needed, most):
    tried = []

    def works(size: int) -> bool:
        tried.append(size)
        return size >= needed * MIB

    smallest, largest = bisect(works, 256 * MIB, most * MIB)
    assert len(tried) <= most_trials(256 * MIB, max(most, 257) * MIB) + 1
    if needed > most:
        assert (smallest, largest) == (None, most * MIB)
    elif needed <= 256:
        assert (smallest, largest) == (256 * MIB, None)
    else:
        assert largest < needed * MIB <= smallest
        assert smallest / largest <= CLOSE or smallest - largest <= MIB


def test_smallest_memory_is_drawn(tmp_path):
    of = {"model": "tiny", "micro_batches": 4, "disk": None}
    answers = [
        Smallest(**of, system="greedysnake", works=300 * MIB, fails=280 * MIB, why=None),
        Smallest(**of, system="torch", works=None, fails=900 * MIB, why="out of memory"),
    ]
    draw_smallest(tmp_path / "smallest.png", answers, "tiny")
    with Image.open(tmp_path / "smallest.png") as image:
        assert image.size[0] == 1600


@pytest.fixture
def box_of(tmp_path):
    """Opens boxes that count and limit; skipped where this machine has no control groups."""

    def opened(**limits):
        name = f"greedysnake-test-{os.getpid()}"
        try:
            box = open_box(Limits(folder=tmp_path, **limits), name)
        except LimitsError as error:
            pytest.skip(str(error))
        if not isinstance(box, GroupV1 | GroupV2):
            pytest.skip(f"no control group may be made here ({box.kind})")
        return box

    return opened


def run_in(box, code: str) -> int:
    words = [*box.prefix, sys.executable, "-c", code]
    return subprocess.run(words, env={**os.environ, **box.environment}, capture_output=True).returncode


def test_memory_beyond_the_limit_is_death(box_of):
    with box_of(memory=100 * MIB) as box:
        assert run_in(box, f"b'x' * {30 * MIB}") == 0
        counts = box.counts()
        assert counts.oom_kills == 0
        assert 30 * MIB <= counts.peak_memory_bytes <= 100 * MIB
        assert run_in(box, f"b'x' * {300 * MIB}") != 0
        assert box.counts().oom_kills >= 1
    with box_of(memory=100 * MIB):  # it was removed, and its name is free
        pass


def test_the_disks_bytes_are_counted(box_of, tmp_path):
    code = (
        "import mmap, os; m = mmap.mmap(-1, 1 << 20); m.write(b'x' * (1 << 20));"
        f"f = os.open({str(tmp_path / 'file')!r}, os.O_CREAT | os.O_RDWR | os.O_DIRECT);"
        "[os.pwrite(f, m, i << 20) for i in range(4)]; [os.preadv(f, [m], i << 20) for i in range(2)]"
    )
    try:
        disk_of(tmp_path)
    except LimitsError as error:
        pytest.skip(str(error))
    with box_of(disk=100 * MIB) as box:
        if run_in(box, code) != 0:
            pytest.skip("no direct I/O here")
        counts = box.counts()
    assert 4 * MIB <= counts.written_bytes < 8 * MIB
    assert 2 * MIB <= counts.read_bytes < 8 * MIB


def test_what_limits_need_is_said(tmp_path):
    with pytest.raises(LimitsError, match="--storage"):
        disk_of(Path("/proc"))
    if os.geteuid() or Path("/run/systemd/system").exists():
        pytest.skip("needs root, to stop being root, and no systemd")
    tmp_path.chmod(0o755)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setresuid(65534, 65534, 65534)
            open_box(Limits(folder=Path("/"), memory=MIB), "greedysnake-test")
            os.write(writing, b"made it")
        except LimitsError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    said = os.read(reading, 4096).decode()
    assert "Run as root" in said
    assert "Without --memory and --disk" in said


def test_too_little_memory_is_found_within_a_real_limit(tmp_path, box_of):
    box_of(memory=MIB).close()  # or skip
    run_well(*command(tmp_path, "greedysnake"), "--smallest-memory", "--memory", "200MiB")
    (one,) = read(tmp_path)["measured"]
    assert one["outcome"]["status"] in ("refused", "out of memory")
    assert one["outcome"]["peak_memory_bytes"] <= 200 * MIB
    assert (tmp_path / "bench.png").exists()


def test_results_survive_the_file(tmp_path):
    found = results(greedysnake=outcome(6.0), torch=Outcome(status="out of memory", why="killed"))
    (tmp_path / "bench.json").write_text(found.model_dump_json())
    assert open_results(tmp_path / "bench.json", Method()) == found
