"""The smallest memory that a bench finds, and boxes that limit memory and count the disk's bytes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench_runs import command, read
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from small_run import run_well

from greedysnake.bench.limits import GroupV1, GroupV2, Limits, LimitsError, disk_of, open_box
from greedysnake.bench.picture import draw_smallest
from greedysnake.bench.smallest import CLOSE, Smallest, bisect, most_trials

MIB = 2**20


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
