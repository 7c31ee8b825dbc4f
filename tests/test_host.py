"""What this machine has, against what the kernel says elsewhere."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from greedysnake.plan.host import process_bytes, process_peak_bytes, usable_bytes

MIB = 2**20
GIB = 2**30


def physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_process_bytes_follow_what_is_allocated():
    """In a fresh process: from one that has long run, the kernel may take pages away meanwhile."""
    code = (
        "import mmap; from greedysnake.plan.host import process_bytes; before = process_bytes(); "
        f"memory = mmap.mmap(-1, {64 * MIB}); memory.write(b'1' * {64 * MIB}); grown = process_bytes() - before; "
        "memory.close(); print(grown, process_bytes() - before)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    grown, left = map(int, printed.split())
    assert 60 * MIB < grown < 150 * MIB  # the text that was written may still be there
    assert left < grown - 60 * MIB


def test_process_bytes_agree_with_the_page_count():
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    assert abs(process_bytes() - pages * os.sysconf("SC_PAGE_SIZE")) < 16 * MIB


def test_the_peak_stays_when_memory_goes():
    memory = torch.ones(64 * MIB, dtype=torch.uint8)
    high = process_bytes()
    del memory
    assert process_peak_bytes() >= high - MIB
    assert process_peak_bytes() >= process_bytes() - MIB
    kernel = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # counts what ran before an exec too
    assert process_peak_bytes() <= kernel + 16 * MIB


def test_usable_memory_is_less_than_the_machine_has():
    assert 0 < usable_bytes() <= 0.9 * physical_bytes()


def test_a_process_of_its_own_reports_its_own():
    code = "from greedysnake.plan.host import process_bytes, process_peak_bytes, usable_bytes as u; " + (
        "p = process_bytes(); print(p, process_peak_bytes(), u())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    own, peak, usable = map(int, result.stdout.split())
    assert 5 * MIB < own <= peak + MIB
    assert own < usable <= 0.9 * physical_bytes()


class FakeTree:
    """The kernel's files as a process finds them in a container: 64 GiB available, 1 GiB of it its own."""

    def __init__(self, root: Path, cgroup: str) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: 99999999 kB\nMemAvailable: {63 * GIB // 1024} kB\n")
        rss = f"VmRSS: {GIB // 1024} kB\nRssAnon: {GIB // 1024 - 1024} kB\nRssFile: 1024 kB\nRssShmem: 0 kB\n"
        self.write("proc/self/status", f"Name: python\n{rss}")
        self.write("proc/self/cgroup", cgroup)

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def two(self, group: str, *, used: int, file: int, **limits: int | str) -> None:
        """A group of version 2; ``limits`` are max and high."""
        for name, limit in limits.items():
            self.write(f"sys/fs/cgroup{group}/memory.{name}", f"{limit}\n")
        self.write(f"sys/fs/cgroup{group}/memory.current", f"{used}\n")
        stat = f"anon {used - file}\nfile {file}\ninactive_file {file // 2}\nactive_file {file - file // 2}\n"
        self.write(f"sys/fs/cgroup{group}/memory.stat", stat)

    def one(self, group: str, *, used: int, file: int, limit: int) -> None:
        """A group of version 1."""
        folder = f"sys/fs/cgroup/memory{group}"
        self.write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{folder}/memory.usage_in_bytes", f"{used}\n")
        stat = (
            f"inactive_file 7\nactive_file 7\ntotal_inactive_file {file // 2}\ntotal_active_file {file - file // 2}\n"
        )
        self.write(f"{folder}/memory.stat", stat)

    def usable_gib(self) -> float:
        return usable_bytes(self.root) / 0.9 / GIB


OWN_GIB = 1 - 1 / 1024
"""Of the fake process, without its pages of files."""


def test_what_others_in_the_cgroup_hold_is_not_usable(tmp_path):
    """32 GiB, of which another process holds 20, files 6, and this process the rest."""
    tree = FakeTree(tmp_path, "0::/pod/main\n")
    tree.two("/pod/main", used=27 * GIB, file=6 * GIB, max=32 * GIB, high="max")
    assert tree.usable_gib() == pytest.approx(32 - (21 - OWN_GIB))


def test_what_others_in_a_cgroup_of_the_first_version_hold_is_not_usable(tmp_path):
    tree = FakeTree(tmp_path, "4:cpu,memory:/pod\n0::/\n")
    tree.one("/pod", used=27 * GIB, file=6 * GIB, limit=32 * GIB)
    assert tree.usable_gib() == pytest.approx(32 - (21 - OWN_GIB))
    tree.one("", used=60 * GIB, file=0, limit=2**63 - 4096)  # no limit
    assert tree.usable_gib() == pytest.approx(32 - (21 - OWN_GIB))


def test_the_tightest_group_counts_and_the_limit_above_which_the_kernel_throttles(tmp_path):
    tree = FakeTree(tmp_path, "0::/pod/main\n")
    tree.two("/pod/main", used=GIB, file=0, max=48 * GIB, high=40 * GIB)
    assert tree.usable_gib() == pytest.approx(40, abs=0.01)
    tree.two("/pod", used=20 * GIB, file=2 * GIB, max=30 * GIB)  # 17 of them of other groups
    assert tree.usable_gib() == pytest.approx(30 - (18 - OWN_GIB))
    tree.two("", used=90 * GIB, file=0, max="max")
    assert tree.usable_gib() == pytest.approx(30 - (18 - OWN_GIB))
    tree.two("/pod", used=35 * GIB, file=2 * GIB, max="max", high=30 * GIB)  # more than it should: nothing is left
    assert tree.usable_gib() == 0


def test_the_machines_memory_bounds_any_limit(tmp_path):
    tree = FakeTree(tmp_path, "0::/pod\n")
    tree.two("/pod", used=GIB, file=0, max=100 * GIB)
    assert tree.usable_gib() == pytest.approx(64)


@pytest.mark.parametrize("cgroup", ["", "nonsense\n", "0::/\n", "4:memory:/\n", "0::/pod\n"])
def test_without_limits_the_machines_memory_is_usable(tmp_path, cgroup):
    tree = FakeTree(tmp_path, cgroup)
    assert tree.usable_gib() == pytest.approx(64)
    (tmp_path / "proc/self/cgroup").unlink()
    assert tree.usable_gib() == pytest.approx(64)


@pytest.mark.parametrize("odd", ["", "max\n", "-1\n", "inactive_file many\n"])
def test_a_limit_counts_whole_where_the_group_does_not_say_what_is_used(tmp_path, odd):
    tree = FakeTree(tmp_path, "0::/pod\n")
    tree.write("sys/fs/cgroup/pod/memory.max", f"{32 * GIB}")
    assert tree.usable_gib() == pytest.approx(32)
    tree.write("sys/fs/cgroup/pod/memory.current", odd)
    tree.write("sys/fs/cgroup/pod/memory.stat", odd)
    assert tree.usable_gib() == pytest.approx(32)
    tree.write("sys/fs/cgroup/pod/memory.current", f"{20 * GIB}")
    assert tree.usable_gib() == pytest.approx(32)
