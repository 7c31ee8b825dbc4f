"""plan, simulate and probe as a person uses them."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from greedysnake.cli.app import app
from greedysnake.cli.planning import make_query, parse_count
from greedysnake.errors import ConfigError, GreedySnakeError
from greedysnake.plan.hardware import load_hardware, save_hardware
from greedysnake.plan.roofline import roofline_points

SETTINGS = """
run: {run}
model:
  config:
    model_type: llama
    vocab_size: 300
    hidden_size: 64
    intermediate_size: 160
    num_hidden_layers: 3
    num_attention_heads: 4
    num_key_value_heads: 2
    max_position_embeddings: 64
  dtype: float32
data: {{train: {run}, sequence_length: 32}}
training: {{steps: 2, micro_batches: 3, micro_batch_size: 2}}
optimizer: {{lr: 1e-3}}
engine: {{host_memory: 3GiB}}
"""


IN_ANOTHER_ORDER = ["simulate", "gpt-30b", "--micro-batches", "1", "--schedule"]


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(SETTINGS.format(run=tmp_path / "run"))
    return path


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_plan_of_a_runs_settings_keeps_what_they_fix(settings):
    found = json.loads(run("plan", str(settings), "--hardware", "laptop-cpu-24gb", "--tokens", "1M", "--json"))
    assert found["predicted"] is True
    assert found["batch"] == {"micro_batches": 3, "rows": 2, "tokens": 32, "sequences": 6, "tokens_per_step": 192}
    assert found["dtype"] == "float32"
    assert found["host_memory"]["limit_bytes"] == 3 * 2**30
    assert found["choices"]["resident_weights"] == 0.0  # the settings' default
    assert found["budget"]["steps"] == pytest.approx(1e6 / 192)
    assert found["budget"]["tokens_per_parameter"] == pytest.approx(1e6 / found["parameters"])
    assert found["budget"]["best_tokens"] == 20 * found["parameters"]
    assert found["step_seconds"] >= found["roofline"]["step_seconds"]


def test_a_plan_in_words_says_that_nothing_was_run_and_where_figures_come_from(settings):
    text = run("plan", str(settings), "training.micro_batches=5", "--hardware", "laptop-cpu-24gb")
    for part in (
        "predicted, nothing was run",
        "tokens/s",
        "5 micro-batches of 2 x 32",
        "What it needs",
        "days",
        "assumed",
    ):
        assert part in text


def test_the_command_line_goes_before_the_settings(settings):
    arguments = ["plan", str(settings), "--hardware", "laptop-cpu-24gb", "--micro-batches", "2", "--json"]
    assert json.loads(run(*arguments))["batch"]["micro_batches"] == 2
    arguments = ["plan", str(settings), "--hardware", "laptop-cpu-24gb", "--sequences", "4", "--delayed-share", "0.5"]
    shares = ["--resident-weights", "0.5", "--resident-state", "0.25"]
    found = json.loads(run(*arguments, *shares, "--no-clipping", "--json"))
    assert (found["choices"]["resident_weights"], found["choices"]["resident_state"]) == (0.5, 0.25)
    assert found["batch"]["sequences"] == 4
    assert found["choices"]["delayed_share"] == 0.5
    assert found["choices"]["wait_for_norm"] is False


def test_energy_needs_a_wattage_which_may_be_given(settings, tmp_path):
    machine = tmp_path / "machine.json"
    save_hardware(load_hardware("laptop-cpu-24gb").model_copy(update={"watts": None}), machine)
    arguments = ["plan", str(settings), "--hardware", str(machine), "--tokens", "1M", "--json"]
    assert json.loads(run(*arguments))["budget"]["kilowatt_hours"] is None
    budget = json.loads(run(*arguments, "--watts", "250"))["budget"]
    assert budget["kilowatt_hours"] == pytest.approx(0.25 * 24 * budget["days"])


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_settings_are_planned_for_no_machine_that_nobody_named(settings, command):
    with pytest.raises(ConfigError, match=r"--hardware: missing.*greedysnake probe --storage FOLDER.*laptop-cpu-24gb"):
        run(command, str(settings))
    named = json.loads(run(command, str(settings), "engine.hardware=laptop-cpu-24gb", "--json"))
    assert named["machine"] == load_hardware("laptop-cpu-24gb").name


def test_the_roofline_is_drawn_and_its_points_are_in_the_json(settings, tmp_path):
    picture = tmp_path / "roofline.png"
    arguments = ["plan", str(settings), "--hardware", "rtx4090-desktop", "--roofline", str(picture), "--json"]
    points = json.loads(run(*arguments))["roofline_points"]
    with Image.open(picture) as image:
        assert min(image.size) > 500
    query = make_query(str(settings), "rtx4090-desktop", {}, [])
    assert points == [asdict(point) for point in roofline_points(query, rows=2)]
    assert [point["sequences"] for point in points] == [2, 4, 8, 16, 32, 64, 128]
    assert all(0 < point["ours"] <= point["ideal"] * (1 + 1e-9) for point in points)


def test_a_step_is_simulated_with_choices_made_by_hand_and_drawn(settings, tmp_path):
    picture = tmp_path / "step.png"
    arguments = ["simulate", str(settings), "--hardware", "rtx4090-desktop", "--timeline", str(picture)]
    text = run(*arguments, "--resident-weights", "1", "--delayed-share", "0")
    assert "vertical, 3 micro-batches of 2 x 32: simulated" in text
    with Image.open(picture) as image:
        assert min(image.size) > 200


def test_orders_can_be_compared():
    """At eight micro-batches ZeRO-Infinity's order reads weights sixteen times, ours twice."""
    found = {
        order: json.loads(run("simulate", "gpt-30b", "--schedule", order, "--micro-batches", "8", "--json"))
        for order in ("vertical", "zero-infinity")
    }
    parameters = 30e9
    assert found["vertical"]["ssd_read_bytes"] == pytest.approx(14 * parameters, rel=0.02)
    assert found["zero-infinity"]["ssd_read_bytes"] == pytest.approx((16 + 4 * 8) * parameters, rel=0.02)
    assert found["zero-infinity"]["ssd_written_bytes"] == pytest.approx(18 * parameters, rel=0.02)
    assert found["vertical"]["tokens_per_second"] > 1.5 * found["zero-infinity"]["tokens_per_second"]


@pytest.mark.parametrize(
    ("order", "option", "each"),
    [
        ("vertical", "--whole-master", 30),
        ("vertical", "--eight-bit-moments", 14),
        ("zero-infinity", "--whole-master", 38),  # as it is without
        ("zero-infinity", "--eight-bit-moments", 26),
    ],
)
def test_other_states_move_other_bytes_a_parameter(order, option, each):
    shown = json.loads(run("simulate", "gpt-30b", "--micro-batches", "1", "--schedule", order, option, "--json"))
    moved = shown["ssd_read_bytes"] + shown["ssd_written_bytes"]
    assert moved == pytest.approx(each * 30e9, rel=0.02)


@pytest.mark.parametrize(("order", "each"), [("vertical", 24), ("zero-infinity", 18)])
def test_a_simulated_step_says_what_the_disk_lacks(order, each, tmp_path):
    """Twelve bytes a parameter in two slots; ZeRO-Infinity's two, twelve and four have one."""
    large, full = load_hardware("a100-40gb"), tmp_path / "full.json"
    small = large.disks[0].model_copy(update={"capacity": 10**11})
    save_hardware(large.model_copy(update={"disks": (small, small)}), full)
    arguments = [*IN_ANOTHER_ORDER, order, "--hardware"]
    assert json.loads(run(*arguments, "a100-40gb", "--json"))["over_disk_bytes"] == 0
    missing = json.loads(run(*arguments, str(full), "--json"))["over_disk_bytes"]
    assert missing == pytest.approx(each * 30e9 - 2e11, rel=0.03)
    assert "GiB of disk too much" in run(*arguments, str(full))


def test_a_plan_says_how_micro_batches_go(settings):
    asked = ("plan", str(settings), "--hardware", "laptop-cpu-24gb", "--group-size")
    assert "in groups of 2 of the 3, each forward and backward before the next" in run(*asked, "2")
    assert "all go through a layer together" in run(*asked, "3")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "gpt-9000b"], "neither a file of settings nor a known model"),
        (["plan", "gpt-30b", "training.steps=3"], "only a file of settings"),
        (["plan", "gpt-30b", "--hardware", "abacus"], "neither a file nor a known machine"),
        (["plan", "gpt-30b", "--tokens", "many"], "needs a number above 0"),
        (["plan", "gpt-30b", "--watts", "0"], "--watts: found 0; needs a number above 0"),
        (["plan", "gpt-30b", "--watts", "nan"], "--watts: found nan; needs a number above 0"),
        (["plan", "gpt-175b", "--hardware", "rtx4090-desktop", "--sequences", "1"], "device memory: needs at least"),
        (["simulate", "gpt-30b", "--schedule", "diagonal"], "needs one of horizontal, vertical"),
        (
            [*IN_ANOTHER_ORDER, "zero-infinity", "--delayed-share", "0.5", "--resident-state", "0.1"],
            "--delayed-share 0.5, --resident-state 0.1: found with --schedule zero-infinity",
        ),
        ([*IN_ANOTHER_ORDER, "zero-offload", "--resident-weights", "1"], "--resident-weights 1: found with"),
        ([*IN_ANOTHER_ORDER, "horizontal", "--group-size", "2"], "--group-size 2: found with --schedule horizontal"),
    ],
)
def test_a_mistake_is_one_message(arguments, message):
    with pytest.raises(GreedySnakeError, match=message):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


@pytest.mark.parametrize(("text", "count"), [("20B", 20e9), ("500m", 5e8), ("3e9", 3e9), (" 1.5T ", 1.5e12), ("7", 7)])
def test_numbers_of_tokens(text, count):
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "B", "-3", "0", "nan", "1e30", "12X"])
def test_what_is_no_number_of_tokens(text):
    with pytest.raises(ConfigError, match="needs a number above 0"):
        parse_count(text)


@pytest.mark.slow
def test_a_probe_measures_this_machine_and_plan_uses_it(settings, tmp_path):
    out = tmp_path / "hardware.json"
    folder = tmp_path / "disk"
    arguments = ["--storage", str(folder), "--out", str(out), "--config", str(settings), "--seconds", "0.2"]
    text = run("probe", *arguments, "--json")
    hardware = load_hardware(out)
    assert json.loads(text)["name"] == hardware.name
    assert list(folder.iterdir()) == []  # nothing is left
    assert hardware.disk_rates.mixed_read <= hardware.disk_rates.read
    assert hardware.layer_times[0].rows == 2
    assert {"disks", "host_memory", "optimizer", "shared_cores"} <= {
        figure for key in hardware.sources for figure in key.split(" and ")
    }
    assert hardware.layer_times[0].layer_backward > hardware.layer_times[0].layer_forward
    found = json.loads(run("plan", str(settings), "--hardware", str(out), "--json"))
    assert found["computation_measured"] is True


def test_a_probe_of_a_folder_that_cannot_be_is_refused(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(GreedySnakeError, match="cannot be used"):
        CliRunner().invoke(app, ["probe", "--storage", str(blocked / "inner")], catch_exceptions=False)


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_boundaries_that_the_machine_cannot_keep_are_refused_in_a_message(settings, command):
    shares = ["engine.boundaries_on_device=0.5", "engine.boundaries_on_ssd=0.7"]
    for given, message in [
        (shares[:1], r"engine.boundaries_on_device: found 0.5; needs 0 or null, as laptop"),
        (shares, r"engine.boundaries_on_device: found 0.5, and engine.boundaries_on_ssd is 0.7; needs at most 1"),
    ]:
        with pytest.raises(ConfigError, match=message):
            run(command, str(settings), *given, "--hardware", "laptop-cpu-24gb")


def test_a_preset_is_planned_without_loading_torch_or_transformers():
    code = (
        "import sys\n"
        "from greedysnake.cli.planning import run_plan\n"
        "run_plan('gpt-30b', machine='h200-141gb', fixed={'sequences': 1}, overrides=[], picture=None)\n"
        "print(sorted({'torch', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
