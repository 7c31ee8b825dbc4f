"""Where computation runs, and how bytes get there: one small interface, three devices.

The schedule decides what is copied when; a device does it. A copy returns when it is done: each direction
has a thread of its own, so copies overlap with everything else all the same.
"""

import random
import threading
import time
from typing import Protocol

import torch
from torch import Tensor

from greedysnake.storage import aligned_empty


class Device(Protocol):
    """Memory for computation.

    Attributes:
        separate: whether that memory is another than host memory.
        torch_device: where torch computes.
    """

    separate: bool
    torch_device: torch.device

    def allocate(self, count: int) -> Tensor:
        """``count`` bytes of device memory, uint8."""

    def prepare_host(self, memory: Tensor) -> None:
        """Make host memory ready to be copied from and to; it stays so until the device is closed."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy bytes between host and device memory; done when it returns."""

    def synchronize(self) -> None:
        """Return when the computation that this thread has started is done."""

    def freed(self, memory: Tensor) -> None:
        """Told when the content of some memory is over."""

    def free_bytes(self) -> int | None:
        """Device memory that is free; None where that is host memory."""

    def close(self) -> None:
        """Undo :meth:`prepare_host`."""


class CpuDevice:
    """Host memory is device memory: nothing to copy but boundaries on their way to SSD."""

    separate = False
    torch_device = torch.device("cpu")

    def allocate(self, count: int) -> Tensor:
        """Page-aligned host memory."""
        return aligned_empty(count)

    def prepare_host(self, memory: Tensor) -> None:
        """Nothing to do."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """A plain copy."""
        target.copy_(source)

    def synchronize(self) -> None:
        """Computation is done when it returns."""

    def freed(self, memory: Tensor) -> None:
        """Nothing to do."""

    def free_bytes(self) -> int | None:
        """There is only host memory."""
        return None

    def close(self) -> None:
        """Nothing to do."""


class EmulatedDevice(CpuDevice):
    """A separate device made of host memory, unkind on purpose, to test overlap on any machine.

    Copies take random times, and memory whose content is over is filled with NaN.

    Args:
        seed: of the delays.
        longest_delay_s: most seconds that a copy is held up.
    """

    separate = True

    def __init__(self, seed: int = 0, longest_delay_s: float = 0.002) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._longest_delay_s = longest_delay_s

    def copy(self, target: Tensor, source: Tensor) -> None:
        """A copy held up at its beginning or its end."""
        with self._lock:
            delay, first = self._random.random() * self._longest_delay_s, self._random.random() < 0.5
        if first:
            time.sleep(delay)
        target.copy_(source)
        if not first:
            time.sleep(delay)

    def freed(self, memory: Tensor) -> None:
        """Poison: all bits set is NaN in every floating-point type."""
        memory.fill_(255)


class CudaDevice:
    """An NVIDIA GPU: copies on their own streams from pinned host memory.

    Args:
        device: such as ``cuda:0``.
        memory: bytes of device memory that torch may use, None for all.
    """

    separate = True

    def __init__(self, device: str = "cuda", memory: int | None = None) -> None:
        self.torch_device = torch.device(device)
        self._memory = memory
        self._streams = threading.local()
        self._pinned: list[Tensor] = []
        if memory is not None:
            total = torch.cuda.get_device_properties(self.torch_device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, memory / total), self.torch_device)

    def allocate(self, count: int) -> Tensor:
        """Memory from torch's allocator."""
        return torch.empty(count, dtype=torch.uint8, device=self.torch_device)

    def prepare_host(self, memory: Tensor) -> None:
        """Pin memory where it lies, so that it serves direct I/O too and nothing is rounded up."""
        if memory.numel():
            error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
            torch.cuda.check_error(int(error))
            self._pinned.append(memory)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """A copy on this thread's own stream."""
        if not hasattr(self._streams, "own"):
            self._streams.own = torch.cuda.Stream(self.torch_device)
        with torch.cuda.stream(self._streams.own):
            target.copy_(source, non_blocking=True)
        self._streams.own.synchronize()

    def synchronize(self) -> None:
        """Wait for this thread's current stream."""
        torch.cuda.current_stream(self.torch_device).synchronize()

    def freed(self, memory: Tensor) -> None:
        """Nothing to do."""

    def free_bytes(self) -> int | None:
        """What the driver says is free, within the cap."""
        free = torch.cuda.mem_get_info(self.torch_device)[0]
        return free if self._memory is None else min(free, self._memory)

    def close(self) -> None:
        """Unpin."""
        for memory in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
        self._pinned = []


def device_problem(name: str) -> str | None:
    """What is wrong with a device's name here, if anything."""
    kind = name.partition(":")[0]
    if kind == "cuda" and not torch.cuda.is_available():
        return f"{name!r} was asked for, but torch {torch.__version__} sees no GPU here; use 'cpu'"
    if name in ("auto", "cpu", "emulated") or kind == "cuda":
        return None
    return f"{name!r} is not one of auto, cpu, cuda, cuda:N, emulated"


def make_device(name: str, memory: int | None, seed: int = 0) -> Device:
    """The device of a name without a problem.

    Args:
        name: ``auto`` (the CPU), ``cpu``, ``cuda`` (or ``cuda:N``), ``emulated``.
        memory: bytes of the device's own memory that may be used.
        seed: of an emulated device's delays.
    """
    if name == "emulated":
        return EmulatedDevice(seed)
    if name in ("auto", "cpu"):
        return CpuDevice()
    return CudaDevice(name, memory)
