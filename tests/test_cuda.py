"""The CUDA device, its copies and its memory; skipped where torch sees no GPU."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from architectures import random_batches, small_config
from torch import Tensor

from greedysnake import Trainer
from greedysnake.engine.devices import CudaDevice, bytes_of, device_problem
from greedysnake.errors import MemoryBudgetError
from greedysnake.plan.activations import BatchShape
from greedysnake.storage import BLOCK_BYTES, aligned_empty
from greedysnake.storage.files import BlockFile

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

MIB = 2**20
DEVICE = "cuda"


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    made = CudaDevice(DEVICE)
    yield made
    made.close()


@pytest.fixture
def empty_gpu() -> Iterator[None]:
    """What torch has reserved counts from here on."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.get_per_process_memory_fraction()
    yield
    torch.cuda.set_per_process_memory_fraction(before)


def pinned(device: CudaDevice, count: int) -> Tensor:
    memory = aligned_empty(count)
    device.prepare_host(memory)
    return memory


def busy_work() -> Tensor:
    """Keeps the current stream busy for some milliseconds; returns before it is done."""
    matrix = torch.full((4096, 4096), 1e-4, device=DEVICE)
    for _ in range(20):
        matrix = matrix @ matrix
    return matrix


# Host memory


def test_memory_is_pinned_where_it_lies_and_no_more_of_it(device):
    memory = aligned_empty(8 * BLOCK_BYTES)
    own, address = memory[: 3 * BLOCK_BYTES], memory.data_ptr()
    assert not own.is_pinned()
    device.prepare_host(own)
    assert (own.data_ptr(), address % BLOCK_BYTES) == (address, 0)
    assert own.is_pinned()
    assert own[2 * BLOCK_BYTES :].is_pinned()
    assert not memory[3 * BLOCK_BYTES :].is_pinned()
    device.release_host()
    assert not own.is_pinned()
    device.prepare_host(memory)  # all of it, now that nothing overlaps
    assert memory[3 * BLOCK_BYTES :].is_pinned()
    device.close()
    device.close()
    assert not memory.is_pinned()


def test_a_device_that_nobody_closes_unpins(device):
    forgotten, memory = CudaDevice(DEVICE), aligned_empty(BLOCK_BYTES)
    forgotten.prepare_host(memory)
    assert memory.is_pinned()
    del forgotten
    assert not memory.is_pinned()


def test_memory_that_cannot_be_pinned_is_told(device):
    memory = pinned(device, BLOCK_BYTES)
    with pytest.raises(MemoryBudgetError, match="cannot pin"):
        device.prepare_host(memory)  # twice is an error


def test_direct_io_into_pinned_memory_and_on_to_the_gpu(device, tmp_path):
    size = 16 * MIB
    source, target, back = (pinned(device, size) for _ in range(3))
    source.random_(generator=torch.Generator().manual_seed(0))
    on_gpu = device.allocate(size)
    with ThreadPoolExecutor(2) as pool:
        file = BlockFile(tmp_path / "file", pool, pool, size=size)
        direct = file.direct
        for move in (lambda: file.write(source, 0), lambda: file.read(target, 0)):
            for piece in move():
                piece.result()
        file.close()
    if not direct:
        pytest.skip("the filesystem of the temporary folder refuses direct I/O")
    device.copy(on_gpu, target)
    device.copy(back, on_gpu)
    assert torch.equal(back, source)


# Copies


def test_copies_both_ways_are_right_while_the_gpu_computes(device):
    size, rounds = 32 * MIB, 30
    up, down = pinned(device, size), pinned(device, size)
    received, sent = device.allocate(size), device.allocate(size)

    def upload() -> None:
        for number in range(rounds):
            up.fill_(number)
            device.copy(received, up)
            up.fill_(255)  # must not be seen: the copy has ended
            assert int(received.min()) == int(received.max()) == number

    def download() -> None:
        for number in range(rounds):
            sent.fill_(number)
            device.synchronize()
            device.copy(down, sent)
            sent.fill_(255)
            device.synchronize()
            assert int(down.min()) == int(down.max()) == number

    with ThreadPoolExecutor(2) as pool, device.computing():
        copies = [pool.submit(upload), pool.submit(download)]
        while not all(copy.done() for copy in copies):
            busy_work()
            device.synchronize()
        for copy in copies:
            copy.result()


def test_the_direction_of_a_copy_has_a_stream_of_its_own(device):
    """A copy to the host does not wait for computation that runs meanwhile."""
    host, on_gpu = pinned(device, BLOCK_BYTES), device.allocate(BLOCK_BYTES)
    with device.computing():
        on_gpu.fill_(7)
        device.synchronize()
        for _ in range(20):
            busy_work()
        after = torch.cuda.Event()
        after.record()
        device.copy(host, on_gpu)
        assert not after.query()
        device.synchronize()
        assert after.query()
    assert int(host.min()) == int(host.max()) == 7


@pytest.mark.parametrize("attempt", range(5))
def test_a_tensor_that_comes_back_takes_no_memory_that_computation_still_uses(device, attempt):
    count = 8 * MIB
    host = pinned(device, 4 * count)
    returning = torch.full((count,), 3.0, device=DEVICE)
    torch.cuda.synchronize()
    device.copy(host, bytes_of(returning))
    returning.untyped_storage().resize_(0)
    with ThreadPoolExecutor(1) as pool, device.computing():
        source = torch.full((count,), 7.0, device=DEVICE)
        busy_work()
        result = source * 2  # waits behind the work before it
        del source  # the allocator may hand its memory on, on this stream
        pool.submit(device.refill, returning, host).result()
        device.synchronize()
        assert bool((result == 14).all())
        assert bool((returning == 3).all())


@pytest.mark.parametrize("attempt", range(5))
def test_memory_of_a_tensor_that_came_back_is_kept_until_computation_is_done_with_it(device, attempt):
    count = 8 * MIB
    host, other = pinned(device, 4 * count), pinned(device, 4 * count)
    host.view(torch.float32).fill_(3.0)
    other.view(torch.float32).fill_(5.0)
    first, second = (torch.empty(count, device=DEVICE) for _ in range(2))
    for tensor in (first, second):
        tensor.untyped_storage().resize_(0)
    with ThreadPoolExecutor(1) as pool, device.computing():
        pool.submit(device.refill, first, host).result()
        busy_work()
        result = first * 2
        del first  # before the multiplication has run
        pool.submit(device.refill, second, other).result()
        device.synchronize()
        assert bool((result == 6).all())
        assert bool((second == 5).all())


def test_computing_leaves_the_callers_stream_and_random_numbers_alone(device):
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state(device.torch_device)
    own = torch.cuda.Stream()
    with torch.cuda.stream(own):
        with device.computing():
            assert torch.cuda.current_stream() == torch.cuda.default_stream()
            torch.cuda.manual_seed(6)
            torch.rand(8, device=DEVICE)
        assert torch.cuda.current_stream() == own
    assert torch.equal(torch.cuda.get_rng_state(device.torch_device), state)


def test_names_of_gpus():
    count = torch.cuda.device_count()
    assert device_problem("cuda") is None
    assert device_problem(f"cuda:{count - 1}") is None
    assert f"there are {count} GPUs" in device_problem(f"cuda:{count}")


# Memory


def test_more_than_the_cap_is_a_clear_error_and_the_cap_ends_with_the_device(empty_gpu):
    emptied = torch.empty(128 * MIB, dtype=torch.uint8, device=DEVICE)
    emptied.untyped_storage().resize_(0)
    torch.cuda.empty_cache()
    device = CudaDevice(DEVICE, 64 * MIB)
    assert device.free_bytes() == 64 * MIB
    with pytest.raises(MemoryBudgetError, match=r"engine\.device_memory"):
        device.allocate(128 * MIB)
    with pytest.raises(MemoryBudgetError, match=r"engine\.device_memory"):
        device.refill(emptied, aligned_empty(128 * MIB))
    with pytest.raises(MemoryBudgetError, match=r"engine\.device_memory"), device.computing():
        torch.empty(128 * MIB, dtype=torch.uint8, device=DEVICE)
    device.close()
    assert CudaDevice(DEVICE).free_bytes() > 64 * MIB
    assert CudaDevice(DEVICE).allocate(128 * MIB).numel() == 128 * MIB


def test_a_run_keeps_within_its_device_memory(empty_gpu, tmp_path):
    with Trainer(small_config("llama"), tmp_path / "store", device=DEVICE, device_memory="1GiB") as trainer:
        for batch in random_batches(3):
            assert trainer.step(batch).skipped is None
        assert trainer.plan.device_budget <= 2**30
        assert 0 < torch.cuda.max_memory_reserved() <= 2**30


def test_a_run_that_does_not_fit_is_refused_before_it_starts(empty_gpu, tmp_path):
    batch = BatchShape(micro_batches=4, rows=2, tokens=12)
    with pytest.raises(MemoryBudgetError, match=r"engine\.device_memory"):
        Trainer(small_config("llama"), tmp_path / "store", device=DEVICE, device_memory="4MiB", batch=batch)


def test_memory_that_runs_out_in_a_step_is_a_clear_error(empty_gpu, tmp_path):
    ids = torch.randint(3, 128, (8, 64), generator=torch.Generator().manual_seed(0))
    config = small_config("llama", vocab_size=32000)  # 64 MiB of logits
    batch = BatchShape(micro_batches=1, rows=8, tokens=64)
    with Trainer(config, tmp_path / "store", device=DEVICE, batch=batch) as trainer:
        total = torch.cuda.get_device_properties(DEVICE).total_memory
        allowed = torch.cuda.memory_reserved() + 8 * MIB  # as if something else had taken the rest
        torch.cuda.set_per_process_memory_fraction(allowed / total)
        with pytest.raises(MemoryBudgetError, match=r"engine\.device_memory"):
            trainer.step([{"input_ids": ids, "labels": ids}])
