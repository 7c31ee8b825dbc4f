"""The trace file is valid and complete, and busy shares agree with counting instants."""

import json
import subprocess
import sys
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greedysnake.report.events import RESOURCES, OperationEvent, assign_lanes, operation_name
from greedysnake.report.trace import busy_shares, write_trace

UNIT_NAMES = ["embedding", "layer 0", "layer 1", "head"]


def make_event(**changes) -> OperationEvent:
    values = {
        "kind": "forward",
        "resource": "compute",
        "unit": 1,
        "micro_batch": 0,
        "chunk": None,
        "start_s": 100.0,
        "end_s": 100.5,
        "bytes": 0,
    }
    return OperationEvent(**values | changes)


ticks = st.integers(0, 40)
events_on_ticks = st.lists(
    st.builds(
        lambda resource, a, b: make_event(resource=resource, start_s=min(a, b), end_s=max(a, b)),
        st.sampled_from(RESOURCES),
        ticks,
        ticks,
    ),
    max_size=12,
)


@settings(max_examples=100, deadline=None)
@given(events_on_ticks)
def test_busy_shares_agree_with_counting_ticks(events):
    shares = busy_shares(events, 40)
    assert list(shares) == list(RESOURCES)
    for resource, share in shares.items():
        mine = [event for event in events if event.resource == resource]
        busy = sum(any(e.start_s <= tick and tick + 1 <= e.end_s for e in mine) for tick in range(40))
        assert share == pytest.approx(busy / 40)


def test_busy_shares_need_a_wall_time():
    assert busy_shares([], 1.0) == dict.fromkeys(RESOURCES, 0.0)
    with pytest.raises(ValueError, match="above 0"):
        busy_shares([], 0.0)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(ticks, ticks).map(sorted).map(tuple), max_size=15))
def test_lanes_never_overlap_and_are_as_few_as_possible(intervals):
    lanes = assign_lanes(intervals)
    for i, (start, end) in enumerate(intervals):
        for j in range(i):
            if lanes[i] == lanes[j] and start < end and intervals[j][0] < intervals[j][1]:
                assert end <= intervals[j][0] or intervals[j][1] <= start
    lasting = [(start, end) for start, end in intervals if start < end]
    if len(lasting) == len(intervals):
        most_at_once = max((sum(s <= t < e for s, e in lasting) for t in range(41)), default=0)
        assert max(lanes, default=-1) + 1 == most_at_once


def test_events_check_themselves():
    with pytest.raises(ValueError, match="'gpu'"):
        make_event(resource="gpu")
    with pytest.raises(ValueError, match="before it starts"):
        make_event(start_s=1.0, end_s=0.5)
    with pytest.raises(ValueError, match="before it starts"):
        make_event(end_s=float("nan"))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "forward layer 0 · micro-batch 0"),
        ({"kind": "head", "unit": 3, "micro_batch": 2}, "head · micro-batch 2"),
        ({"kind": "load_state", "micro_batch": None, "chunk": 5}, "load state layer 0 · chunk 5"),
        ({"kind": "total_norm", "unit": None, "micro_batch": None}, "total norm"),
        ({"unit": 9}, "forward unit 9 · micro-batch 0"),
    ],
)
def test_operations_are_named_in_words(changes, name):
    assert operation_name(make_event(**changes), UNIT_NAMES) == name


def test_trace_holds_every_event_once_and_names_every_row(tmp_path):
    steps = {
        2: [make_event(start_s=101.0, end_s=101.25, kind="backward")],
        1: [
            make_event(),
            make_event(
                kind="load_weights",
                resource="ssd_read",
                micro_batch=None,
                chunk=3,
                start_s=99.5,
                end_s=99.75,
                bytes=500_000_000,
            ),
            make_event(kind="total_norm", resource="cpu", unit=None, micro_batch=None, end_s=100.0),
        ],
        3: [],
    }
    write_trace(tmp_path / "trace.json", steps, UNIT_NAMES)
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [entry["args"]["name"] for entry in trace if entry["name"] == "process_name"] == ["greedysnake"]
    rows = {entry["tid"]: entry["args"]["name"] for entry in trace if entry["name"] == "thread_name"}
    assert [rows[tid] for tid in sorted(rows)] == ["steps", *RESOURCES]

    slices = [entry for entry in trace if entry["ph"] == "X"]
    assert Counter(rows[entry["tid"]] for entry in slices) == {
        "steps": 2,
        "compute": 2,
        "ssd_read": 1,
        "cpu": 1,
    }
    read = next(entry for entry in slices if rows[entry["tid"]] == "ssd_read")
    assert (read["ts"], read["dur"], read["name"]) == (0, 250_000, "load weights layer 0 · chunk 3")
    assert read["args"] == {
        "step": 1,
        "unit": "layer 0",
        "chunk": 3,
        "bytes": 500_000_000,
        "rate_MB_per_s": 2000.0,
    }
    backward = next(entry for entry in slices if entry["cat"] == "backward")
    assert (backward["ts"], backward["dur"]) == (1_500_000, 250_000)
    assert [entry["name"] for entry in slices if rows[entry["tid"]] == "steps"] == ["step 1", "step 2"]


def test_trace_gives_overlapping_operations_rows_of_their_own(tmp_path):
    events = [make_event(resource="ssd_read", start_s=0.1 * i, end_s=0.1 * i + 0.25) for i in range(9)]
    write_trace(tmp_path / "trace.json", {1: events}, UNIT_NAMES)
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [entry["args"]["name"] for entry in trace if entry["name"] == "thread_name"]
    assert {"ssd_read", "ssd_read (2)", "ssd_read (3)"} <= set(names)
    assert "ssd_read (4)" not in names
    by_thread = defaultdict(list)
    for entry in trace:
        if entry["ph"] == "X":
            by_thread[entry["tid"]].append((round(entry["ts"] * 1000), round(entry["dur"] * 1000)))
    for spans in by_thread.values():
        for (start, duration), (following, _) in zip(sorted(spans), sorted(spans)[1:], strict=False):
            assert start + duration <= following


def test_trace_of_nothing_is_valid(tmp_path):
    write_trace(tmp_path / "trace.json", {}, [])
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_reports_need_neither_torch_nor_pyplot():
    code = (
        "import sys, greedysnake.report.live, greedysnake.report.pictures, greedysnake.report.trace\n"
        "assert not {'torch', 'matplotlib.pyplot'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
