"""What this machine has: host memory that a run may use, and what the process uses already."""

import ctypes
from pathlib import Path

_MARGIN = 0.9


def process_bytes() -> int:
    """Resident memory of this process now."""
    return _status_bytes("VmRSS")


def process_peak_bytes() -> int:
    """Most resident memory that this process has had."""
    return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no field {field}")


def usable_bytes() -> int:
    """Memory that this process may have in all: what is free or its own, within its cgroup's limit, less a margin."""
    available = _available_bytes() + process_bytes()
    limits = [limit for limit in map(_read_limit, _limit_files()) if limit is not None]
    return int(min([available, *limits]) * _MARGIN)


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no field MemAvailable")


def _limit_files() -> list[Path]:
    """Files with memory limits of this process's cgroups, for both versions of the interface."""
    root, files = Path("/sys/fs/cgroup"), []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        groups = [path, *map(str, Path(path).parents)]
        if controllers == "":
            files += [root / group.strip("/") / "memory.max" for group in groups]
        elif "memory" in controllers.split(","):
            files += [root / "memory" / group.strip("/") / "memory.limit_in_bytes" for group in groups]
    return files


def _read_limit(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def trim_heap() -> bool:
    """Give freed memory that the C library keeps back to the kernel; False where it has no way to (not glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return False
    trim(ctypes.c_size_t(0))
    return True
