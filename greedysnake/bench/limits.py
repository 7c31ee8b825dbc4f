"""Hard limits for a command: memory that the kernel kills beyond, and a disk that it paces.

A control group does both, and counts what was used: version 2 or 1 of the interface, as root or below a group that was
delegated. Where none can be made and systemd runs, ``systemd-run`` makes one.
"""

import os
import re
import shutil
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from greedysnake.errors import GreedySnakeError

_V1_ROOT = Path("/sys/fs/cgroup")
_UNPACED = 10**15
"""Bytes a second. Version 1 counts a disk's traffic only where it has a limit for it; this one is never reached."""
_ENTER = 'for group in $GROUPS_TO_ENTER; do echo $$ > "$group/cgroup.procs" || exit 125; done; exec "$@"'
_NEEDED = (
    "a memory limit or a paced disk needs a control group (cgroup). Run as root on Linux with the cgroup controllers "
    "{controllers}; or, with systemd, as a user whose controllers are delegated (systemctl edit user@.service: "
    "Delegate=cpu memory io). In a container, limit the container itself (docker run --memory 8g, --device-read-bps) "
    "and give no limits here. Without --memory and --disk nothing of this is needed"
)


class LimitsError(GreedySnakeError):
    """The limits asked for cannot be set on this machine; the message says what that needs."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a command may use.

    Attributes:
        memory: bytes of memory, page cache included; None: no limit.
        disk: bytes a second that may be read and, separately, written on ``folder``'s disk; None: no limit.
        folder: on the disk to pace.
        swap: whether memory beyond the limit may go to the machine's swap, instead of the command being killed.
    """

    folder: Path
    memory: int | None = None
    disk: int | None = None
    swap: bool = False


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What the kernel counted for a command and its children; None where it was not counted.

    Attributes:
        peak_memory_bytes: most memory charged at once, page cache included.
        oom_kills: processes that were killed for memory.
        read_bytes, written_bytes: of the disk.
    """

    peak_memory_bytes: int | None = None
    oom_kills: int | None = None
    read_bytes: int | None = None
    written_bytes: int | None = None


class Box:
    """A place to run one command in, without limits; its subclasses have them.

    Attributes:
        prefix: words to put before the command.
        environment: variables that ``prefix`` needs.
    """

    kind = "none"
    prefix: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}

    def counts(self) -> Counts:
        """What the command has used; ask once it has ended and before :meth:`close`."""
        return Counts()

    def close(self) -> None:
        """Kill whatever still runs in it, and remove it."""

    def __enter__(self) -> "Box":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Groups(Box):
    """Control groups that the command enters before it starts."""

    def __init__(self, groups: tuple[Path, ...]) -> None:
        self._groups = groups
        self.prefix = ("sh", "-c", _ENTER, "sh")
        self.environment = {"GROUPS_TO_ENTER": " ".join(map(str, groups))}

    def close(self) -> None:
        """Kill whatever still runs in the groups, and remove them."""
        for _ in range(100):
            left = [pid for group in self._groups for pid in _read(group / "cgroup.procs").split()]
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            if not left:
                break
            time.sleep(0.05)
        for group in self._groups:
            with suppress(OSError):
                group.rmdir()


class GroupV2(_Groups):
    """A control group of version 2."""

    kind = "cgroup v2"

    def __init__(self, group: Path, device: str) -> None:
        super().__init__((group,))
        self._group, self._device = group, device

    def counts(self) -> Counts:
        """From memory.peak (Linux 5.19), memory.events and io.stat."""
        traffic = re.search(rf"^{self._device} (.*)$", _read(self._group / "io.stat"), re.M)
        moved = dict(re.findall(r"(\w+)=(\d+)", traffic[1])) if traffic else {}
        return Counts(
            peak_memory_bytes=_number(_read(self._group / "memory.peak")),
            oom_kills=_field(_read(self._group / "memory.events"), "oom_kill"),
            read_bytes=_number(moved.get("rbytes", "")),
            written_bytes=_number(moved.get("wbytes", "")),
        )


class GroupV1(_Groups):
    """Two control groups of version 1: one for memory, one for the disk."""

    kind = "cgroup v1"

    def __init__(self, memory: Path, disk: Path, device: str) -> None:
        super().__init__((memory, disk))
        self._memory, self._disk, self._device = memory, disk, device

    def counts(self) -> Counts:
        """From the memory and blkio controllers."""
        moved = _read(self._disk / "blkio.throttle.io_service_bytes")
        return Counts(
            peak_memory_bytes=_number(_read(self._memory / "memory.max_usage_in_bytes")),
            oom_kills=_field(_read(self._memory / "memory.oom_control"), "oom_kill"),
            read_bytes=_field(moved, f"{self._device} Read"),
            written_bytes=_field(moved, f"{self._device} Write"),
        )


class SystemdScope(Box):
    """A transient scope of systemd, which counts for itself; what was used is not known here."""

    kind = "systemd-run"

    def __init__(self, limits: Limits, device: str) -> None:
        words = ["systemd-run", "--scope", "--quiet", "--collect", *(["--user"] if os.geteuid() else [])]
        if limits.memory is not None:
            words += ["-p", f"MemoryMax={limits.memory}"]
            words += [] if limits.swap else ["-p", "MemorySwapMax=0"]
        if limits.disk is not None:
            where = f"/dev/block/{device}"
            words += ["-p", f"IOReadBandwidthMax={where} {limits.disk}"]
            words += ["-p", f"IOWriteBandwidthMax={where} {limits.disk}"]
        self.prefix = (*words, "--")


def open_box(limits: Limits, name: str) -> Box:
    """A box for one command: the first kind of those above that this machine allows.

    Args:
        limits: of the command.
        name: of the control group, unique.

    Raises:
        LimitsError: there are limits, and they cannot be set.
    """
    device, tried = "", []
    try:
        device = disk_of(limits.folder)
    except LimitsError:
        if limits.disk is not None:
            raise
    for opened in (_open_v2, _open_v1):
        try:
            return opened(limits, name, device)
        except OSError as error:
            tried.append(str(error))
    if limits.memory is None and limits.disk is None:
        return Box()
    if shutil.which("systemd-run") and Path("/run/systemd/system").is_dir() and not (os.geteuid() and limits.disk):
        return SystemdScope(limits, device)
    controllers = "memory and io (version 2) or memory and blkio (version 1)"
    raise LimitsError(f"{_NEEDED.format(controllers=controllers)}. Tried: {'; '.join(tried)}")


def disk_of(folder: Path) -> str:
    """The numbers (``"259:0"``) of the whole disk that holds a folder.

    Raises:
        LimitsError: it lies on no single disk.
    """
    status = folder.stat().st_dev
    numbers = f"{os.major(status)}:{os.minor(status)}"
    entry = Path("/sys/dev/block") / numbers
    if not entry.exists():
        raise LimitsError(
            f"{folder} lies on a file system without a disk of its own (device {numbers}), so --disk cannot pace it. "
            f"Give a --storage folder on ext4, xfs or the like, or leave --disk out"
        )
    return _read(entry.resolve().parent / "dev").strip() if (entry / "partition").exists() else numbers


def _open_v2(limits: Limits, name: str, device: str) -> Box:
    mounts = re.findall(r"^\S+ (\S+) cgroup2 ", _read(Path("/proc/self/mounts")), re.M)
    own = re.search(r"^0::(.*)$", _read(Path("/proc/self/cgroup")), re.M)
    if not mounts or not own:
        raise OSError("no cgroup v2 is mounted")
    root = Path(mounts[0])
    here = root / own[1].strip("/")
    needed = {"memory", *(["io"] if limits.disk is not None else [])}
    for parent in (here, *here.parents):
        if parent.is_relative_to(root) and (group := _child(parent, name, needed)):
            break
    else:
        raise OSError(f"cgroup v2: no group above {here} offers {' and '.join(sorted(needed))} and may be written")
    try:
        if limits.memory is not None:
            (group / "memory.max").write_text(str(limits.memory))
            if not limits.swap and (group / "memory.swap.max").exists():
                (group / "memory.swap.max").write_text("0")
        if limits.disk is not None:
            (group / "io.max").write_text(f"{device} rbps={limits.disk} wbps={limits.disk}")
    except OSError:
        group.rmdir()
        raise
    return GroupV2(group, device)


def _child(parent: Path, name: str, needed: Iterable[str]) -> Path | None:
    """A new group below ``parent`` with the controllers needed, or None."""
    group = parent / name
    try:
        group.mkdir()
    except OSError:
        return None
    for _ in range(2):
        if set(needed) <= set(_read(group / "cgroup.controllers").split()):
            return group
        for controller in needed:
            with suppress(OSError):  # a group with processes of its own may not, save for the root
                (parent / "cgroup.subtree_control").write_text(f"+{controller}")
    group.rmdir()
    return None


def _open_v1(limits: Limits, name: str, device: str) -> Box:
    memory, disk = (_own_v1(controller) / name for controller in ("memory", "blkio"))
    made = []
    try:
        for group in (memory, disk):
            group.mkdir()
            made.append(group)
        if limits.memory is not None:
            (memory / "memory.limit_in_bytes").write_text(str(limits.memory))
            with_swap = memory / "memory.memsw.limit_in_bytes"
            if not limits.swap and with_swap.exists():
                with_swap.write_text(str(limits.memory))
        for kind in ("read", "write") if device else ():
            pace = f"{device} {_UNPACED if limits.disk is None else limits.disk}"
            (disk / f"blkio.throttle.{kind}_bps_device").write_text(pace)
    except OSError:
        for group in made:
            group.rmdir()
        raise
    return GroupV1(memory, disk, device)


def _own_v1(controller: str) -> Path:
    """This process's group of a controller of version 1, or its root where the group is not to be seen."""
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(",") and (own := _V1_ROOT / controller / path.strip("/")).is_dir():
            return own
    return _V1_ROOT / controller


def swap_free_bytes() -> int:
    """Swap of this machine that is free."""
    found = re.search(r"^SwapFree:\s+(\d+) kB", _read(Path("/proc/meminfo")), re.M)
    return int(found[1]) * 1024 if found else 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None


def _field(text: str, name: str) -> int | None:
    """The number after ``name`` at the start of a line."""
    found = re.search(rf"^{name} (\d+)$", text, re.M)
    return int(found[1]) if found else None
