"""Where computation runs, and how bytes get there: one small interface, three devices.

The schedule decides what is copied when; a device does it. A copy returns when it is done: each direction
has a thread of its own, so copies overlap with everything else all the same.
"""

import random
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Protocol

import torch
from torch import Tensor

from greedysnake.engine.products import computing_products
from greedysnake.errors import ConfigError, MemoryBudgetError
from greedysnake.storage import aligned_empty
from greedysnake.units import format_bytes


class Device(Protocol):
    """Memory for computation.

    Attributes:
        separate: whether that memory is another than host memory.
        torch_device: where torch computes.
    """

    separate: bool
    torch_device: torch.device

    def computing(self) -> AbstractContextManager[object]:
        """While it is open, what this thread computes runs on the device.

        Raises:
            MemoryBudgetError: the device's memory did not suffice.
        """

    def allocate(self, count: int) -> Tensor:
        """``count`` bytes of device memory, uint8.

        Raises:
            MemoryBudgetError: there is not so much.
        """

    def prepare_host(self, memory: Tensor) -> None:
        """Make host memory ready to be copied from and to, until :meth:`release_host`.

        Raises:
            MemoryBudgetError: it cannot be.
        """

    def release_host(self) -> None:
        """Undo :meth:`prepare_host` for all memory, which can then be freed."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy bytes between host and device memory; done when it returns."""

    def refill(self, tensor: Tensor, source: Tensor) -> None:
        """Give a computed tensor whose storage was emptied its memory and its bytes again; done when it returns."""

    def synchronize(self) -> None:
        """Return when the computation that this thread has started is done."""

    def freed(self, memory: Tensor) -> None:
        """Told when the content of some memory is over."""

    def free_bytes(self) -> int | None:
        """Device memory that is free; None where that is host memory."""

    def close(self) -> None:
        """Release host memory, and give back what else the device holds; closing twice does nothing."""


class CpuDevice:
    """Host memory is device memory: nothing to copy but boundaries on their way to SSD.

    Args:
        products: how matrices of 16-bit numbers are multiplied, of ``products.CHOICES``.
    """

    separate = False
    torch_device = torch.device("cpu")

    def __init__(self, products: str = "auto") -> None:
        self._products = products

    def computing(self) -> AbstractContextManager[object]:
        """It always does; here only how products are computed is decided."""
        return computing_products(self._products)

    def allocate(self, count: int) -> Tensor:
        """Page-aligned host memory."""
        return aligned_empty(count)

    def prepare_host(self, memory: Tensor) -> None:
        """Nothing to do."""

    def release_host(self) -> None:
        """Nothing to do."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """A plain copy."""
        target.copy_(source)

    def refill(self, tensor: Tensor, source: Tensor) -> None:
        """Memory from torch's allocator, and a copy."""
        tensor.untyped_storage().resize_(tensor.nbytes)
        self.copy(bytes_of(tensor), source)

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
        products: as of the CPU.
    """

    separate = True

    def __init__(self, seed: int = 0, longest_delay_s: float = 0.002, products: str = "auto") -> None:
        super().__init__(products)
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
    """An NVIDIA GPU: computation on its default stream, copies on a stream for each direction, from pinned memory.

    No stream waits for another one on the GPU. Instead a copy has ended when :meth:`copy` returns, and computation
    when :meth:`synchronize` does, so what the schedule starts afterwards finds all bytes in place on any stream. Only
    torch's allocator needs more care: it hands freed memory on at once within the stream that it was allocated on.

    Args:
        device: such as ``cuda`` (torch's current GPU) or ``cuda:1``.
        memory: bytes of device memory that torch may use in this process until the device is closed, None for all.
    """

    separate = True

    def __init__(self, device: str = "cuda", memory: int | None = None) -> None:
        index = torch.device(device).index
        self.torch_device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self._memory = memory
        self._compute = torch.cuda.default_stream(self.torch_device)
        self._to_device = torch.cuda.Stream(self.torch_device)
        self._to_host = torch.cuda.Stream(self.torch_device)
        self._pinned: list[Tensor] = []
        weakref.finalize(self, _unpin, self._pinned, self.torch_device)  # where nobody closes it
        self._fraction_before: float | None = None
        if memory is not None:
            self._fraction_before = torch.cuda.get_per_process_memory_fraction(self.torch_device)
            total = torch.cuda.get_device_properties(self.torch_device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, memory / total), self.torch_device)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """On the default stream; the caller's current device, stream and random numbers stay what they were."""
        rng = torch.random.fork_rng(devices=[self.torch_device], device_type="cuda")
        with rng, torch.cuda.device(self.torch_device), torch.cuda.stream(self._compute):
            try:
                yield
            except torch.OutOfMemoryError as error:
                raise self._out_of_memory(error) from error

    def allocate(self, count: int) -> Tensor:
        """Memory from torch's allocator."""
        try:
            return torch.empty(count, dtype=torch.uint8, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            raise self._out_of_memory(error) from error

    def prepare_host(self, memory: Tensor) -> None:
        """Pin memory where it lies, so that it serves direct I/O too and nothing is rounded up."""
        if not memory.numel():
            return
        with torch.cuda.device(self.torch_device):
            result = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
        if int(result):
            with suppress(RuntimeError):  # CUDA tells a failed call once more at the next kernel: let it be this one
                torch.ones(1, device=self.torch_device)
            held = sum(pinned.numel() for pinned in self._pinned)
            raise MemoryBudgetError(
                f"cannot pin {format_bytes(memory.numel())} of host memory for {self.torch_device} after "
                f"{format_bytes(held)}: {torch.cuda.cudart().cudaGetErrorString(result)}. Free host memory, or lower "
                f"engine.host_memory"
            )
        self._pinned.append(memory)

    def release_host(self) -> None:
        """Unpin. The memory must not be freed before: CUDA would hold on to its pages and its addresses."""
        _unpin(self._pinned, self.torch_device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """A copy on the stream of its direction."""
        stream = self._to_device if target.is_cuda else self._to_host
        with torch.cuda.device(self.torch_device), torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            _wait_for(stream)

    def refill(self, tensor: Tensor, source: Tensor) -> None:
        """Memory and bytes, both on the stream of copies to the device.

        Memory that the computation's stream has freed may still be read and written by what runs there, so the copy
        takes none of it. And since the computation will free this memory, the allocator is told to keep it until the
        computation has come past that point.
        """
        with torch.cuda.device(self.torch_device), torch.cuda.stream(self._to_device):
            try:
                tensor.untyped_storage().resize_(tensor.nbytes)
            except torch.OutOfMemoryError as error:
                raise self._out_of_memory(error) from error
            target = bytes_of(tensor)
            target.record_stream(self._compute)
            target.copy_(source, non_blocking=True)
            _wait_for(self._to_device)

    def synchronize(self) -> None:
        """Wait for this thread's current stream."""
        _wait_for(torch.cuda.current_stream(self.torch_device))

    def freed(self, memory: Tensor) -> None:
        """Nothing to do."""

    def free_bytes(self) -> int | None:
        """What is free or kept by torch for reuse, less a tenth for what CUDA itself loads later, within the cap."""
        free = torch.cuda.mem_get_info(self.torch_device)[0]
        kept = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        usable = (free + kept) * 9 // 10
        return usable if self._memory is None else min(usable, self._memory)

    def close(self) -> None:
        """Unpin, and lift the cap."""
        self.release_host()
        if self._fraction_before is not None:
            torch.cuda.set_per_process_memory_fraction(self._fraction_before, self.torch_device)
            self._fraction_before = None

    def _out_of_memory(self, error: torch.OutOfMemoryError) -> MemoryBudgetError:
        allowed = "all" if self._memory is None else format_bytes(self._memory)
        return MemoryBudgetError(
            f"{self.torch_device} has no memory left; the run may use {allowed} of it. Raise engine.device_memory if "
            f"there is more, or lower training.micro_batch_size, data.sequence_length or training.micro_batches "
            f"({str(error).splitlines()[0]})"
        )


def _unpin(pinned: list[Tensor], device: torch.device) -> None:
    while pinned:
        with torch.cuda.device(device):
            torch.cuda.cudart().cudaHostUnregister(pinned[-1].data_ptr())
        pinned.pop()  # its memory may be freed now


def _wait_for(stream: torch.cuda.Stream) -> None:
    """Return when a stream has done what it was given so far, without spinning: the optimizer needs the cores."""
    reached = torch.cuda.Event(blocking=True)
    reached.record(stream)
    reached.synchronize()


def bytes_of(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory as uint8."""
    return tensor.detach().view(-1).view(torch.uint8)


def device_name_problem(name: str) -> str | None:
    """What is wrong with a device's name on any machine, if anything."""
    kind, colon, index = name.partition(":")
    if name in ("auto", "cpu", "emulated") or (kind == "cuda" and (not colon or index.isdecimal())):
        return None
    return f"{name!r} is not one of auto, cpu, cuda, cuda:N, emulated"


def device_problem(name: str) -> str | None:
    """What is wrong with a device's name, or why there is no such device here, if anything."""
    if (problem := device_name_problem(name)) or not name.startswith("cuda"):
        return problem
    if not torch.cuda.is_available():
        return f"{name!r} was asked for, but torch {torch.__version__} sees no GPU here; use 'cpu'"
    index, count = name.partition(":")[2], torch.cuda.device_count()
    if index and int(index) >= count:
        return f"{name!r} was asked for, but there are {count} GPUs here, counted from cuda:0"
    return None


def make_device(name: str, memory: int | None, seed: int = 0, products: str = "auto") -> Device:
    """The device of a name.

    Args:
        name: ``auto`` (the CPU), ``cpu``, ``cuda`` (or ``cuda:N``), ``emulated``.
        memory: bytes of the device's own memory that may be used.
        seed: of an emulated device's delays.
        products: how the CPU multiplies matrices of 16-bit numbers, of ``products.CHOICES``.

    Raises:
        ConfigError: there is no such device here.
    """
    if problem := device_problem(name):
        raise ConfigError(f"device: {problem}")
    if name == "emulated":
        return EmulatedDevice(seed, products=products)
    if name in ("auto", "cpu"):
        return CpuDevice(products)
    return CudaDevice(name, memory)
