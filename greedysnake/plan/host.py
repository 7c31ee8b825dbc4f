"""What this machine has: host memory that a run may use, and what the process uses already."""

import ctypes
from dataclasses import dataclass
from pathlib import Path

_MARGIN = 0.9


def process_bytes() -> int:
    """Resident memory of this process now."""
    return _status_bytes("VmRSS")


def process_peak_bytes() -> int:
    """Most resident memory that this process has had."""
    return _status_bytes("VmHWM")


def _status_bytes(field: str, root: Path = Path("/")) -> int:
    for line in (root / "proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no field {field}")


def usable_bytes(root: Path = Path("/")) -> int:
    """Memory that this process may have in all, less a margin: its own, and what others leave of the machine and of
    the limits of its cgroups.

    Args:
        root: of the file system in which the kernel says so.
    """
    found = [_available_bytes(root) + _status_bytes("VmRSS", root)]
    found += [left for left in (_left_bytes(group, root) for group in _groups(root)) if left is not None]
    return int(max(0, min(found)) * _MARGIN)


def _available_bytes(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no field MemAvailable")


@dataclass(frozen=True, kw_only=True)
class _Group:
    """A cgroup that has limits for memory, and what its files are called in its version of the interface."""

    folder: Path
    limits: tuple[str, ...]
    used: str
    stat_prefix: str


def _groups(root: Path) -> list[_Group]:
    """This process's cgroups up to the root, in both versions of the interface."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, ValueError):
        return []
    mounted, found = root / "sys/fs/cgroup", []
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        inner = [group.strip("/") for group in (path, *map(str, Path(path).parents))]
        if controllers == "":
            found += [
                _Group(
                    folder=mounted / group,
                    limits=("memory.max", "memory.high"),
                    used="memory.current",
                    stat_prefix="",
                )
                for group in inner
            ]
        elif "memory" in controllers.split(","):
            found += [
                _Group(
                    folder=mounted / "memory" / group,
                    limits=("memory.limit_in_bytes",),
                    used="memory.usage_in_bytes",
                    stat_prefix="total_",
                )
                for group in inner
            ]
    return found


def _left_bytes(group: _Group, root: Path) -> int | None:
    """What a cgroup's limits leave to this process, its own memory included; None without a limit.

    Pages of files are not counted as used: the kernel drops them where memory is wanted. Where the group does not say
    what is used, nothing is.
    """
    limits = [limit for limit in (_number(group.folder / name) for name in group.limits) if limit is not None]
    if not limits:
        return None
    used, files = _number(group.folder / group.used), _file_bytes(group)
    others = 0 if used is None or files is None else used - files - _unnamed_bytes(root)
    return min(limits) - max(0, others)


def _unnamed_bytes(root: Path) -> int:
    """This process's memory but for pages of files, which its cgroups count as those."""
    try:
        return _status_bytes("RssAnon", root) + _status_bytes("RssShmem", root)
    except OSError:  # kernels before 4.5
        return _status_bytes("VmRSS", root)


def _file_bytes(group: _Group) -> int | None:
    try:
        words = [line.split() for line in (group.folder / "memory.stat").read_text().splitlines()]
    except (OSError, ValueError):
        return None
    names = {f"{group.stat_prefix}{name}" for name in ("inactive_file", "active_file")}
    found = [int(line[1]) for line in words if len(line) == 2 and line[0] in names and line[1].isdigit()]
    return sum(found) if len(found) == len(names) else None


def _number(path: Path) -> int | None:
    """The number that a file holds; None if there is none, as in "max"."""
    try:
        text = path.read_text().strip()
    except (OSError, ValueError):
        return None
    return int(text) if text.isdigit() else None


def trim_heap() -> bool:
    """Give freed memory that the C library keeps back to the kernel; False where it has no way to (not glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return False
    trim(ctypes.c_size_t(0))
    return True
