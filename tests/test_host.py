"""What this machine has, against what the kernel says elsewhere."""

import os
import resource
import subprocess
import sys

import torch

from greedysnake.plan.host import process_bytes, process_peak_bytes, usable_bytes

MIB = 2**20


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
