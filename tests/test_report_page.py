"""The report page: right numbers from real and damaged runs, well-formed, loading nothing, safe with any text."""

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from small_run import copy_of_records, run_well, write_config

from greedysnake.cli.app import main
from greedysnake.errors import ConfigError
from greedysnake.report import facts
from greedysnake.report.charts import Series, line_chart, round_ticks
from greedysnake.report.events import OperationEvent
from greedysnake.report.page import report_page, write_report
from greedysnake.report.run_files import TracedStep, read_run
from greedysnake.report.trace import write_trace

HOSTILE = "</pre></script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x07\ud800 http://example.com/"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The folder of a run of a second, made through the command line."""
    folder = tmp_path_factory.mktemp("trained")
    run_well("train", write_config(folder, training={"steps": 5}), "--json")
    return folder / "run"


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy of the run's records, to be damaged."""
    return copy_of_records(trained, tmp_path / "run")


def page_of(run: Path) -> str:
    """The page of a run, checked to be well-formed and to load nothing."""
    page = report_page(read_run(run))
    page.encode()
    assert page.startswith("<!DOCTYPE html>\n")
    tree = ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))
    loading = {"src", "href", "srcset", "data", "action", "poster", "{http://www.w3.org/1999/xlink}href"}
    for element in tree.iter():
        assert not loading & element.attrib.keys(), element.attrib
        assert not any(name.startswith("on") for name in element.attrib)
        assert element.tag not in ("link", "img", "iframe", "object", "embed", "base", "form", "image", "use")
    assert len(list(tree.iter("script"))) == len(list(tree.iter("style"))) == 1
    assert not re.search(r"url\(|@import|https?:", "".join(text.text for text in tree.iter("style")))
    assert "nan" not in re.findall(r"\w+", page)
    ids = [element.attrib["id"] for element in tree.iter() if "id" in element.attrib]
    assert len(ids) == len(set(ids))
    return page


def text_of(page: str) -> str:
    tree = ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))
    return " ".join(" ".join(tree.find("body").itertext()).split())


def tiles_of(page: str) -> dict[str, tuple[str, str]]:
    """Number and note of each tile of the headline."""
    found = re.findall(r'<div class="tile"><span>(.*?)</span><b class="\w+">(.*?)</b><span>(.*?)</span>', page)
    return {name: (value, note) for name, value, note in found}


def test_a_finished_run(trained, capsys):
    run_well("report", trained)
    assert "report.html" in capsys.readouterr().out
    page = page_of(trained)
    assert (trained / "report.html").read_text() == page
    text, tiles = text_of(page), tiles_of(page)
    summary = json.loads((trained / "summary.json").read_text())
    plan = json.loads((trained / "plan.json").read_text())
    assert "Finished: 5 of 5 steps" in text
    assert "Not everything is here" not in text
    assert tiles["steps"][0] == "5"
    assert tiles["last loss"][0] == f"{summary['last_loss']:.3f}"
    assert tiles["last held-out loss"] == (
        f"{summary['last_eval_loss']:.3f}",
        f"from {summary['first_eval_loss']:.3f} at step 0",
    )
    assert "skipped steps" not in tiles
    assert "not measured" not in text.split("Rates reached")[0]
    assert "limits this run" in text
    for reason in plan["reasons"]:
        assert reason in text
    for words in ("Timeline of step 5", "load weights", "SSD, both together", "Python and its libraries", "max_grad"):
        assert words in text
    titles = re.findall(r"<title>(backward .*?)</title>", page, re.DOTALL)
    assert any("layer 1 · micro-batch 0" in title for title in titles)
    assert re.search(r"<title>load weights layer 0\n[^<]* s\n[\d.]+ kB at [\d.]+ [MG]B/s</title>", page)


def test_json_and_out(run, tmp_path, capsys):
    (run / "summary.json").unlink()
    run_well("report", run, "--out", tmp_path / "page.html", "--json")
    report = json.loads(capsys.readouterr().out)
    assert report["page"] == str(tmp_path / "page.html")
    assert len(report["missing"]) == 1
    assert (tmp_path / "page.html").read_text() == page_of(run)
    assert not (run / "report.html").exists()
    with pytest.raises(ConfigError, match="nowhere"):
        write_report(run, tmp_path / "nowhere" / "page.html")
    with pytest.raises(ConfigError, match="cannot write"):
        write_report(run, tmp_path)
    assert not list(tmp_path.glob(".*.tmp"))


def test_a_killed_run_says_what_is_missing(run):
    for name in ("summary.json", "trace.json"):
        (run / name).unlink()
    metrics = run / "metrics.jsonl"
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:3]) + b'{"step": 4, "lo')
    text = text_of(page_of(run))
    assert "No end was recorded: the run is still going or was killed, after 3 of 5 steps" in text
    assert "the last line of metrics.jsonl is torn" in text
    assert "summary.json is not there" in text
    assert "trace.json is not there" in text
    assert "No step was traced" in text


@pytest.mark.parametrize("kept", ["plan.json", "metrics.jsonl", "summary.json", "trace.json"])
def test_any_single_file_gives_a_page(run, kept):
    for path in run.iterdir():
        if path.name != kept:
            path.unlink()
    page = page_of(run)
    text = text_of(page)
    assert "config.yaml is not there" in text
    assert ("budget not known" in text) == (kept != "plan.json")
    assert ("No step was traced" in text) == (kept != "trace.json")
    assert (tiles_of(page)["last loss"][0] == "not measured") == (kept in ("plan.json", "trace.json"))


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"a": {"b": [}', "\x00\xff", "[" * 100_000, '"\\ud800"'])
def test_damaged_files_give_a_page(run, content):
    for path in run.iterdir():
        path.write_text(content, encoding="latin-1")
    page = page_of(run)
    for words in ("metrics.jsonl holds no whole step", "summary.json is damaged", "trace.json is damaged"):
        assert words in page
    assert tiles_of(page)["last loss"][0] == "not measured"


def test_wrong_types_are_not_measured(run):
    odd = {"loss": "low", "seconds": None, "busy": [1], "tokens": True, "lr": 10**400, "host_peak_bytes": {}}
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": step, **odd}) + "\n" for step in (1, 2)))
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 1e400}\n{"step": true}\n{"step": 3, "loss": 1e308, "grad_norm": -1e308, "lr": NaN}\n')
        metrics.write(f'{{"step": {10**400}}}\n{{"step": {"9" * 5000}}}\n')
    (run / "plan.json").write_text(json.dumps({"reasons": 7, "host_memory": [], "ssd": "x", "batch": None}))
    (run / "summary.json").write_text(json.dumps({"seconds": "long", "last_loss": [], "stopped_by": None}))
    (run / "trace.json").write_text(json.dumps({"traceEvents": [{"ph": "X"}, 3]}))
    page = page_of(run)
    tiles = tiles_of(page)
    for name in ("last loss", "tokens/s", "time of a step", "host memory", "SSD, each step"):
        assert tiles[name][0] == "not measured", name
    assert "Busy shares were not measured" in page
    assert "trace.json is damaged" in page


def test_what_is_no_run_folder_is_refused(tmp_path, capsys):
    for folder, words in ((tmp_path / "gone", "there is no such folder"), (tmp_path, "it has none of metrics.jsonl")):
        with pytest.raises(ConfigError, match=words):
            write_report(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["greedysnake", "report", str(tmp_path)])
        with pytest.raises(SystemExit, match="1"):
            main()
    errors = capsys.readouterr().err
    assert errors.startswith("error:")
    assert "Traceback" not in errors
    assert not list(tmp_path.iterdir())


def test_hostile_text_stays_text(run):
    (run / "config.yaml").write_bytes(
        yaml.safe_dump({"run": HOSTILE[:-20]}).encode() + HOSTILE.encode("utf-8", "replace")
    )
    plan = json.loads((run / "plan.json").read_text())
    plan["reasons"], plan["schedule"], plan["units"] = [HOSTILE], HOSTILE, HOSTILE
    plan["host_memory"]["by_purpose"][HOSTILE] = 5
    (run / "plan.json").write_text(json.dumps(plan))
    (run / "summary.json").write_text(json.dumps({"stopped_by": HOSTILE}))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[2] |= {"skipped": HOSTILE, "loss": None}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace = json.loads((run / "trace.json").read_text())
    for entry in trace["traceEvents"]:
        if entry["ph"] == "X":
            entry["args"]["unit"], entry["cat"] = HOSTILE, HOSTILE
    (run / "trace.json").write_text(json.dumps(trace))
    hostile_run = run.rename(run.with_name("<script>&'\""))
    page = page_of(hostile_run)
    assert "<img" not in page
    assert page.count("<script") == 1
    assert page.count("&lt;/script&gt;&lt;script&gt;alert(1)") >= 6


def write_steps(folder: Path, count: int, **changes) -> None:
    """Metrics of ``count`` steps of a second each, that read 2 GB in half a second and compute for 0.8 s."""
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, count + 1):
            line = {
                "step": step,
                "loss": 3 + 5 / step,
                "grad_norm": 1.0,
                "clipped": False,
                "lr": 1e-3,
                "tokens": 1000,
                "seconds": 1.0,
                "tokens_per_second": 1000.0,
                "ssd_read_bytes": 2_000_000_000,
                "ssd_write_bytes": 0,
                "host_peak_bytes": 2**30,
                "busy": {"compute": 0.8, "ssd_read": 0.5, "ssd_write": 0.0, "cpu": 0.1, "h2d": 0.0, "d2h": 0.0},
                "skipped": None,
            }
            file.write(json.dumps({name: changes.get(name, value) for name, value in line.items()}) + "\n")


def test_the_bottleneck_and_the_rates_in_words(run):
    (run / "trace.json").unlink()
    write_steps(run, 10)
    text = text_of(page_of(run))
    assert "Compute limits this run. It is busy 80% of a step: a step takes 1 s, 1.25× the 800 ms" in text
    assert "The others: SSD read 50%, CPU 10%." in text
    assert "Never busy: host → device, device → host, SSD write." in text
    assert "SSD read 2 GB 4.00 GB/s 2.00 GB/s 50%" in " ".join(re.sub(r"<[^>]*>", " ", page_of(run)).split())
    write_steps(run, 10, busy={"ssd_read": 0.4, "compute": 0.3})
    assert "No resource limits this run by itself" in text_of(page_of(run))


def test_why_a_run_ended(run):
    summary = json.loads((run / "summary.json").read_text())
    write_steps(run, 3)
    for stopped_by, words in (("Ctrl-C", "Stopped early by Ctrl-C, after 3 of 5 steps"), (None, "an error is likely")):
        (run / "summary.json").write_text(json.dumps({**summary, "stopped_by": stopped_by}))
        assert words in text_of(page_of(run))
    write_steps(run, 3, skipped="gradients are not finite")
    page = page_of(run)
    assert tiles_of(page)["skipped steps"][0] == "3"
    assert "step 2: gradients are not finite" in page


def test_repeated_steps_count_once(run):
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + metrics.read_text().splitlines(keepends=True)[2])
    assert [step["step"] for step in read_run(run).steps] == [1, 2, 3, 4, 5]


def test_long_runs_and_large_steps_stay_small(run):
    write_steps(run, 20_000)
    events = [
        OperationEvent(
            kind="forward",
            resource="compute",
            unit=unit,
            micro_batch=micro_batch,
            chunk=None,
            start_s=(unit * 64 + micro_batch) * 0.01,
            end_s=(unit * 64 + micro_batch) * 0.01 + 0.009,
            bytes=0,
        )
        for unit in range(300)
        for micro_batch in range(64)
    ]
    write_trace(run / "trace.json", {7: events}, [f"layer {unit}" for unit in range(300)])
    page = page_of(run)
    assert len(page) < 1_000_000
    assert "64 operations, from forward layer 299 · micro-batch 0 to forward layer 299 · micro-batch 63" in page


def test_waits_and_times_by_kind():
    def event(start: float, end: float, kind: str = "forward", resource: str = "compute") -> OperationEvent:
        return OperationEvent(
            kind=kind,
            resource=resource,
            unit=0,
            micro_batch=None,
            chunk=None,
            start_s=start,
            end_s=end,
            bytes=10,
        )

    events = [event(0.0, 1.0), event(0.5, 2.0), event(5.0, 6.0, "backward"), event(0.0, 10.0, "load_state", "ssd_read")]
    traced = TracedStep(number=1, events=events, unit_names=["embedding"])
    waits = facts.longest_waits(traced, "compute", 5)
    assert [(wait.start_s, wait.seconds) for wait in waits] == [(6.0, 4.0), (2.0, 3.0)]
    assert waits[0].before is None
    assert waits[1].before.kind == "backward"
    times = [(time.resource, time.kind, time.count, time.seconds, time.bytes) for time in facts.times_by_kind(traced)]
    assert times == [
        ("compute", "forward", 2, 2.0, 20),
        ("compute", "backward", 1, 1.0, 10),
        ("ssd_read", "load_state", 1, 10.0, 10),
    ]


def test_charts_of_little_or_odd_data():
    for points in ([(3, 0.0)], [(1, 5.0), (2, 5.0)], [(1, -1e140), (2, 1e140)], [(1, 1e-300), (2, 2e-300)]):
        series = Series(name="value", color="norm", points=points)
        for options in ({}, {"from_zero": True}, {"log": True}, {"limit": (10.0, "limit")}):
            chart = line_chart([series], str, label="a chart", **options)
            numbers = [float(found) for found in re.findall(r'(?:cx|cy|x1|y1)="([^"]*)"', chart)]
            assert all(-1 <= value <= 561 for value in numbers), chart
    assert "not measured" in line_chart([Series(name="value", color="norm", points=[])], str, label="a chart")


def test_one_wild_value_does_not_flatten_a_chart():
    points = [(step, 1.0 + step % 7) for step in range(200)]
    points[100] = (100, 1e6)
    chart = line_chart([Series(name="value", color="norm", points=points)], str, label="a chart")
    assert "higher values are cut off; the highest is 1000000.0" in chart


def test_ticks_are_round():
    assert round_ticks(0.0, 10.0, 5) == [0, 2, 4, 6, 8, 10]
    assert round_ticks(0.0, 4 * 2.0**30, 4, 2.0**30) == [index * 2.0**30 for index in range(5)]


def test_smoothing_follows_the_trend_and_not_one_wild_step():
    points = [(step, float(step)) for step in range(600)]
    points[300] = (300, 1e9)
    smooth = facts.smoothed(points)
    assert [step for step, _ in smooth] == [step for step, _ in points]
    assert all(abs(value - step) < 3 for step, value in smooth)
