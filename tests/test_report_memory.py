"""Memory over a step: right whatever the operations' timing, in the trace, and as a picture; rates beside a probe's."""

import json
import random
import re
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_run import copy_of_records, run_well, write_config
from test_report_page import page_of, text_of
from test_schedule import CHOICES, KINDS, shapes

from greedysnake.report.areas import Layer, Level, stacked_areas
from greedysnake.report.events import OperationEvent
from greedysnake.report.memory import (
    GROUPS,
    TierMemory,
    counter_samples,
    memory_of_samples,
    pool_group,
    step_memory,
)
from greedysnake.report.run_files import read_run
from greedysnake.report.sections_rates import probed_rate
from greedysnake.schedule import BUILDERS, Buffer, Resource, Schedule, Tier, check_schedule
from greedysnake.units import format_bytes

DURABLE = {"ssd_weights", "ssd_state", "ssd_frozen"}
OVERLAPPING = {Resource.SSD_READ, Resource.SSD_WRITE}


def one_by_one(schedule: Schedule) -> list[OperationEvent]:
    return [OperationEvent.of(operation, operation.index, operation.index + 1) for operation in schedule.operations]


def at_random(schedule: Schedule, seed: int) -> list[OperationEvent]:
    """The events of a run in which every operation waits for what it must and takes any time."""
    chance = random.Random(seed)
    events: list[OperationEvent] = []
    latest: dict[Resource, OperationEvent] = {}
    for operation in schedule.operations:
        turn = latest.get(operation.resource)
        free = 100.0 if turn is None else turn.start_s if operation.resource in OVERLAPPING else turn.end_s
        start = max([free, *(events[earlier].end_s for earlier in operation.after)]) + chance.choice([0, 0, 1, 3])
        events.append(OperationEvent.of(operation, start, start + chance.choice([0, 1, 2, 20])))
        latest[operation.resource] = events[-1]
    return events


def size(schedule: Schedule, buffer: Buffer) -> int:
    return schedule.pools[buffer.pool].slot_bytes[buffer.slot]


def held(schedule: Schedule, buffers: set[Buffer] | frozenset[Buffer]) -> dict[tuple[Tier, str], int]:
    """Bytes of some buffers by tier and group."""
    found: defaultdict[tuple[Tier, str], int] = defaultdict(int)
    for buffer in buffers:
        if buffer.pool not in DURABLE:
            found[schedule.pools[buffer.pool].tier, pool_group(buffer.pool)] += size(schedule, buffer)
    return found


def value_at(memory: TierMemory, group: str, time: float) -> int:
    index = max(index for index, begin in enumerate(memory.times_s) if begin <= time)
    return memory.live_bytes[group][index]


@settings(max_examples=60, deadline=None)
@given(shapes(), CHOICES, KINDS, st.booleans())
def test_one_by_one_the_peaks_are_those_of_the_checker(shape, choices, name, pending):
    schedule = BUILDERS[name](shape, choices, pending=pending)
    peaks = check_schedule(schedule)
    memory = {one.tier: one for one in step_memory(schedule, one_by_one(schedule))}
    for tier in (Tier.HOST, Tier.DEVICE):
        expected = peaks.host if tier == Tier.HOST else peaks.device
        assert (max(memory[tier].total_bytes()) if tier in memory else 0) == expected
    durable = sum(pool.bytes for name, pool in schedule.pools.items() if name in DURABLE)
    assert (max(memory[Tier.SSD].total_bytes()) if Tier.SSD in memory else 0) == peaks.ssd - durable


@settings(max_examples=60, deadline=None)
@given(shapes(), CHOICES, KINDS, st.booleans(), st.integers(0, 2**32))
def test_in_any_order_what_is_in_use_is_live_and_never_more_than_reserved(shape, choices, name, pending, seed):
    schedule = BUILDERS[name](shape, choices, pending=pending)
    events = at_random(schedule, seed)
    memory = {one.tier: one for one in step_memory(schedule, events)}
    for tier, one in memory.items():
        pools = [pool for name, pool in schedule.pools.items() if name not in DURABLE and pool.tier == tier]
        assert one.reserved_bytes == sum(pool.bytes for pool in pools) > 0
        assert list(one.times_s) == sorted(set(one.times_s))
        assert list(one.live_bytes) == [group for group in GROUPS if group in one.live_bytes]
        assert max(one.total_bytes()) <= one.reserved_bytes
        assert min(min(values) for values in one.live_bytes.values()) >= 0
        after = held(schedule, schedule.live_out)
        assert {group: values[-1] for group, values in one.live_bytes.items()} == {
            group: after.get((tier, group), 0) for group in one.live_bytes
        }
    moments = random.Random(seed).sample(sorted({e.start_s + 0.5 for e in events}), 1)
    for moment in [events[0].start_s + 0.5, *moments]:
        running = [schedule.operations[e.operation] for e in events if e.start_s < moment < e.end_s]
        in_use = {buffer.whole for operation in running for buffer in (*operation.reads, *operation.writes)}
        for (tier, group), used in held(schedule, in_use).items():
            assert not used or value_at(memory[tier], group, moment) >= used


@settings(max_examples=40, deadline=None)
@given(shapes(), CHOICES, KINDS, st.integers(0, 2**32), st.floats(0, 1))
def test_a_step_that_was_cut_short_shows_what_it_came_to(shape, choices, name, seed, share):
    schedule = BUILDERS[name](shape, choices, pending=True)
    events = sorted(at_random(schedule, seed), key=lambda e: e.end_s)
    kept = events[: round(share * len(events))]
    whole = {one.tier: one for one in step_memory(schedule, events)}
    cut = step_memory(schedule, kept)
    assert bool(cut) == bool(kept)
    first = min(e.start_s for e in events)
    for one in cut:
        assert one.reserved_bytes == whole[one.tier].reserved_bytes
        assert one.times_s[-1] == kept[-1].end_s
        for index, time in enumerate(one.times_s):
            for group, values in one.live_bytes.items():
                assert values[index] >= 0
                # What began is over at the same time, or was never seen to end, as the last event then is the cut.
                if first <= time < kept[-1].end_s:
                    assert values[index] <= value_at(whole[one.tier], group, time)


def test_events_of_no_schedule_tell_nothing():
    schedule = small()
    known = one_by_one(schedule)[0]
    unknown = OperationEvent(
        kind="forward", resource="compute", unit=0, micro_batch=0, chunk=None, start_s=0.0, end_s=1.0, bytes=0
    )
    assert step_memory(schedule, []) == step_memory(schedule, [unknown]) == []
    assert step_memory(schedule, [known, unknown]) == step_memory(schedule, [known])


def small(**changes) -> Schedule:
    from greedysnake.schedule import Choices, ChunkShape, StepShape, UnitShape

    chunk = ChunkShape(weight_bytes=200, state_bytes=1000, gradient_bytes=400)
    shape = StepShape(units=(UnitShape(chunks=(chunk, chunk)),) * 4, micro_batches=2, boundary_bytes=64)
    return BUILDERS["vertical"](shape, Choices(**changes), pending=True)


def test_numbers_by_hand():
    schedule = small(delayed_share=1.0, state_slots=1, weight_slots=1)
    (memory,) = step_memory(schedule, one_by_one(schedule))
    assert memory.tier == Tier.HOST
    live = memory.live_bytes
    assert live["waiting gradients"][0] == live["waiting gradients"][-1] == 4 * 2 * 400
    assert min(live["waiting gradients"]) == 0
    assert max(live["weights"]) == 400
    assert max(live["state"]) == 1000
    assert live["boundaries"][-1] == live["weights"][-1] == live["state"][-1] == 0
    assert max(live["boundaries"]) == 3 * 2 * 64 + 64  # all of three units, and the gradient of one of the head's


@settings(max_examples=30, deadline=None)
@given(shapes(), CHOICES, KINDS, st.integers(0, 2**32))
def test_counters_give_the_memory_back(shape, choices, name, seed):
    schedule = BUILDERS[name](shape, choices, pending=True)
    memory = step_memory(schedule, at_random(schedule, seed))
    samples = counter_samples(memory)
    assert memory_of_samples(samples) == memory
    names_of: defaultdict[str, set[tuple[str, ...]]] = defaultdict(set)
    for _, counter, values in samples:
        names_of[counter].add(tuple(values))
    assert all(len(names) == 1 for names in names_of.values())  # viewers take the series of a counter's first sample


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The folder of a run of seconds that uses every tier, made through the command line."""
    folder = tmp_path_factory.mktemp("memory")
    engine = {"device": "emulated", "boundaries_on_ssd": 1.0, "gradients": "ssd", "resident_weights": 0.5}
    training = {"micro_batch_size": 1, "eval_every": None}
    config = write_config(folder, data={"eval_share": 0.0}, training=training, engine=engine)
    run_well("train", config, "--json")
    return folder / "run"


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy of the run's records, to be damaged."""
    return copy_of_records(trained, tmp_path / "run")


def trace_of(run: Path) -> list[dict]:
    return json.loads((run / "trace.json").read_text())["traceEvents"]


def test_the_trace_has_counters_of_every_tier(trained):
    trace = trace_of(trained)
    counters = [entry for entry in trace if entry["ph"] == "C"]
    tiers = ("device memory", "host memory", "SSD scratch space")
    assert {entry["name"] for entry in counters} == {
        f"{tier}{suffix}" for tier in tiers for suffix in ("", " by purpose")
    }
    series: defaultdict[str, set[tuple[str, ...]]] = defaultdict(set)
    for entry in counters:
        assert entry.keys() == {"ph", "pid", "tid", "name", "cat", "ts", "args"}
        assert entry["args"]
        assert all(isinstance(value, int) and value >= 0 for value in entry["args"].values())
        series[entry["name"]].add(tuple(entry["args"]))
    assert all(len(names) == 1 for names in series.values())
    steps = [(entry["ts"], entry["ts"] + entry["dur"]) for entry in trace if entry.get("cat") == "step"]
    assert len(steps) == 3
    for start, end in steps:
        inside = [entry for entry in counters if start - 0.001 <= entry["ts"] <= end + 0.001]
        assert {entry["name"] for entry in inside} == set(series)
    assert all(any(start - 0.001 <= entry["ts"] <= end + 0.001 for start, end in steps) for entry in counters)
    updates = [entry for entry in trace if entry.get("cat") == "update" and entry["args"]["step"] == 4]
    # embedding and head, and in each of two layers: attention, MLP, two norms; the last norm
    parameters = 2 * 258 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32
    assert sum(entry["args"]["parameters"] for entry in updates) == parameters


def test_the_report_says_what_each_tier_held(trained):
    traced, page = read_run(trained).traced, page_of(trained)
    text = text_of(page)
    assert [memory.tier for memory in traced.memory] == list(Tier)
    assert "Memory over step 4" in text
    for memory, words in zip(traced.memory, ("Device memory", "Host memory", "SSD scratch space"), strict=True):
        peak = format_bytes(max(memory.total_bytes()))
        assert f"{words}: at most {peak} of {format_bytes(memory.reserved_bytes)} reserved" in text
        assert memory.times_s[0] == 0
    assert "gradients that wait for their update, at most" in text
    assert "weights and state that stay, at most" in text
    plan = json.loads((trained / "plan.json").read_text())["host_memory"]
    outside = plan["by_purpose"]["process"] + plan["by_purpose"]["master_weights"]
    assert f"The budget leaves {format_bytes(plan['budget_bytes'] - outside)} for these, far above" in text
    assert f"Not in it, about {format_bytes(outside)}: Python and its libraries" in text


def test_a_budget_in_sight_is_a_line(run):
    plan = json.loads((run / "plan.json").read_text())
    host = next(memory for memory in read_run(run).traced.memory if memory.tier == Tier.HOST)
    purposes = plan["host_memory"]["by_purpose"]
    outside = sum(purpose for name, purpose in purposes.items() if pool_group(name) is None)
    plan["host_memory"]["budget_bytes"] = outside + 2 * host.reserved_bytes
    (run / "plan.json").write_text(json.dumps(plan))
    page = page_of(run)
    assert f"what the budget leaves for these, {format_bytes(2 * host.reserved_bytes)}" in text_of(page)
    assert page.count('<line class="reserved"') == 3


def test_traces_without_or_with_damaged_counters_keep_their_timeline(run):
    trace = json.loads((run / "trace.json").read_text())
    entries = trace["traceEvents"]
    (run / "trace.json").write_text(json.dumps({"traceEvents": [e for e in entries if e["ph"] != "C"]}))
    text = text_of(page_of(run))
    assert "The trace does not tell what memory held." in text
    assert "Timeline of step 4" in text
    assert "Not everything is here" not in text
    for damage in (
        {"args": {"live": -5, "free": 2}},
        {"args": {"live": 1e30, "free": 2}},
        {"args": {"live": float("inf"), "free": 2}},
        {"args": {"live": float("nan"), "free": 2}},
        {"args": {"live": "much", "free": []}},
        {"args": {}},
        {"args": None},
        {"ts": None},
        {"ts": "soon"},
        {"name": None, "ts": None},
    ):
        damaged = [{**e, **damage} if e["ph"] == "C" else e for e in entries]
        (run / "trace.json").write_text(json.dumps({"traceEvents": damaged}))
        text = text_of(page_of(run))
        assert "the memory counters of trace.json are damaged" in text, damage
        assert "Timeline of step 4" in text


def test_counters_of_unknown_names_are_left_out(run):
    trace = json.loads((run / "trace.json").read_text())
    before = read_run(run).traced.memory
    start = min(entry["ts"] for entry in trace["traceEvents"] if entry.get("args", {}).get("step") == 4)
    trace["traceEvents"].append({"ph": "C", "name": "</script>", "ts": start, "args": {"live": 7}})
    (run / "trace.json").write_text(json.dumps(trace))
    assert read_run(run).traced.memory == before


def test_the_shortest_peak_is_drawn():
    times = [index / 10_000 for index in range(10_001)]
    values = [5] * 10_001
    values[3_217] = 100
    layers = [
        Layer(name="base", color="m-weights", values=[5] * 10_001),
        Layer(name="top", color="m-state", values=values),
    ]
    chart = stacked_areas(layers, times, str, label="a chart", levels=[Level(value=105, name="all", look="reserved")])
    (level,) = map(float, re.findall(r'<line class="reserved"[^>]*y1="([^"]*)"', chart))
    paths = re.findall(r'<path class="stacked"[^>]* d="([^"]*)"', chart)
    assert len(paths) == 2
    corners = [tuple(map(float, pair.split())) for path in paths for pair in re.findall(r"[\d.]+ [\d.]+", path)]
    assert min(y for _, y in corners) == level
    assert all(62 <= x <= 1126 and 10 <= y <= 164 for x, y in corners)
    assert len(chart) < 20_000
    assert "\\ntop: 100\\nbase: 5\\ntogether: 105" in chart
    assert "nothing was held" in stacked_areas(
        [Layer(name="x", color="y", values=[0, 0])], [0.0, 1.0], str, label="none"
    )
    assert "nothing was held" in stacked_areas([Layer(name="x", color="y", values=[1])], [0.0], str, label="none")


PROBE = {
    "disk": {"read_bytes_per_s": 4e9, "write_bytes_per_s": 2e9, "mixed_bytes_per_s": 1e12},
    "h2d_bytes_per_s": 1e12,
    "optimizer_parameters_per_s": 1e14,
}


def rows_of(page: str) -> dict[str, list[str]]:
    """The cells of the rates' rows by their last title; of two rows, the traced step's."""
    table = page.partition("<h2>Rates reached</h2>")[2].partition("</table>")[0]
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in table.split("<tr>")]
    return {row[0]: row[1:] for row in rows if row}


def test_rates_are_told_beside_the_probes(run):
    page = page_of(run)
    assert "No probe of this machine was made, so there is nothing to compare these with." in text_of(page)
    assert {len(cells) for cells in rows_of(page).values()} == {4}
    assert "the probe's rate" not in text_of(page)

    (run / "hardware.json").write_text(json.dumps(PROBE))
    page = page_of(run)
    assert "No probe" not in text_of(page)
    rows = rows_of(page)
    assert set(rows) == {
        "SSD read",
        "SSD write",
        "SSD, both together",
        "host → device",
        "device → host",
        "optimizer, on the CPU",
    }
    assert rows["SSD read"][4] == "4.00 GB/s"
    assert rows["SSD write"][4] == "2.00 GB/s"
    assert rows["device → host"][4:] == ["–", "–"]
    assert rows["optimizer, on the CPU"][0] == "37.2 k parameters"
    assert rows["optimizer, on the CPU"][4:] == ["100 T parameters/s", "&lt;0.1%"]
    assert re.fullmatch(r"[\d.<]+%", rows["SSD read"][5])


def test_the_share_of_the_probes_rate(run):
    (run / "trace.json").unlink()
    line = {
        "loss": 3.0,
        "seconds": 1.0,
        "ssd_read_bytes": 2_000_000_000,
        "ssd_write_bytes": 0,
        "busy": {"ssd_read": 0.5, "ssd_write": 0.0},
    }
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": step, **line}) + "\n" for step in range(1, 5)))
    (run / "hardware.json").write_text(
        json.dumps({"disk": {"read_bytes_per_s": 5e9}, "optimizer_parameters_per_s": "?"})
    )
    rows = rows_of(page_of(run))
    assert rows["SSD read"] == ["2 GB", "<b>4.00 GB/s</b>", "2.00 GB/s", "50%", "5.00 GB/s", "80%"]
    assert rows["SSD write"] == ["0 B", "<b>–</b>", "–", "0%", "–", "–"]


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"disk": 7}', '{"disk": {"read_bytes_per_s": -1}}', '{"disk": [3]}']
)
def test_any_hardware_file_gives_a_page(run, content):
    (run / "hardware.json").write_text(content)
    text = text_of(page_of(run))
    damaged = not content.startswith("{") or content == "{"
    assert ("hardware.json is damaged" in text) == damaged
    assert ("No probe of this machine was made" in text) == damaged
    assert ("hardware.json has no rate of these" in text) == (not damaged)


def test_rates_of_a_probe_are_numbers_above_zero():
    for value in (None, 0, -1.0, float("nan"), float("inf"), True, "1e9", [1e9], {}):
        assert probed_rate({"disk": {"read_bytes_per_s": value}}, "disk.read_bytes_per_s") is None
    assert probed_rate(PROBE, "disk.read_bytes_per_s") == 4e9
    assert probed_rate({}, "disk.read_bytes_per_s") is None
