"""A model opened to generate text only: weights stream from SSD, no gradients and no optimizer state.

Weights that fit in host memory stay there and are read once. The others are read again for every token, from
the store of a run, or for a model folder from a temporary store that holds them as they are computed with.
"""

import shutil
import tempfile
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import GenerationConfig

from greedysnake.closing import Closing
from greedysnake.engine.buffers import Buffers
from greedysnake.engine.devices import Device, make_device
from greedysnake.engine.executor import Executor
from greedysnake.engine.generating import generate
from greedysnake.engine.loading import unit_groups
from greedysnake.engine.opening import DTYPES, open_committed
from greedysnake.engine.unit_store import weight_places
from greedysnake.engine.work import StepWork
from greedysnake.errors import MemoryBudgetError, StorageError
from greedysnake.models.checkpoint import Checkpoint, read_config
from greedysnake.models.initialize import initialize_units
from greedysnake.models.layout import UnitLayout
from greedysnake.models.skeleton import Skeleton, build_skeleton
from greedysnake.models.streaming import StreamedModel
from greedysnake.optim import AdamW, ChunkUpdater, UpdateScalars
from greedysnake.plan.activations import BatchShape
from greedysnake.plan.host import process_bytes, usable_bytes
from greedysnake.plan.model_sizes import inference_bytes
from greedysnake.plan.placement import step_shape
from greedysnake.schedule import Buffer, Choices, Pool, Schedule, Tier, build_evaluation, check_schedule
from greedysnake.storage import Store, Transfer, aligned_empty
from greedysnake.units import format_bytes

_START_BYTES = 64 * 2**20  # what a process gains with its first pass: code paths, threads
_POOLS = ("weights", "device_weights", "resident_weights")


@dataclass(frozen=True, kw_only=True)
class GenerationSize:
    """What memory is reserved for.

    Attributes:
        rows: prompts that go through the model together.
        prompt_tokens: tokens in the longest of them.
        new_tokens: most tokens added to each.
    """

    rows: int
    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Which weights stay in memory.

    Attributes:
        schedule: of one pass.
        choices: what it was built with.
        pools: memory for weights.
        expected_bytes, budget_bytes: of host memory.
    """

    schedule: Schedule
    choices: Choices
    pools: dict[str, Pool]
    expected_bytes: int
    budget_bytes: int

    def resident(self, unit: int) -> bool:
        """Whether a unit's weights stay in host memory."""
        return self.choices.weights_resident(unit)


class Generator(Closing):
    """Generates text with a model that may be larger than memory. Use :meth:`of_run` or :meth:`of_folder`.

    Attributes:
        skeleton: the model.
        placement: which weights stay in memory.
    """

    def __init__(self, skeleton: Skeleton, store: Store, placement: Placement, device: Device) -> None:
        self.skeleton = skeleton
        self.placement = placement
        self._store = store
        self._device = device
        self._temporary: Path | None = None
        self._model = StreamedModel(skeleton, 0, device.torch_device)
        self._buffers = Buffers(placement.pools, device)
        self._executor = Executor(
            model=self._model,
            store=store,
            buffers=self._buffers,
            updater=ChunkUpdater(AdamW(), 0),
            choices=placement.choices,
            device=device,
        )

    @classmethod
    def of_run(
        cls,
        folders: Sequence[Path],
        size: GenerationSize,
        *,
        device: str = "auto",
        host_memory: int | None = None,
        device_memory: int | None = None,
    ) -> Self:
        """The model in a run's storage folders as its last snapshot has it.

        Args:
            folders: all of the run's, in order.
            size: of what will be generated.
            device: as for a trainer.
            host_memory, device_memory: bytes that may be used; None: what is free, less a tenth.

        Raises:
            StorageError: there is no snapshot, or another process holds it.
            MemoryBudgetError: not even two units fit in memory.
        """
        store, skeleton, contents = open_committed(folders)
        products = contents["settings"].get("matrix_products", "auto")
        with ExitStack() as undo:
            undo.callback(store.close)
            made = make_device(device, device_memory, products=products)
            undo.callback(made.close)
            self = cls(skeleton, store, place_weights(skeleton, size, made, host_memory), made)
            self._executor.fill_residents()
            undo.pop_all()
        return self

    @classmethod
    def of_folder(
        cls,
        folder: Path,
        size: GenerationSize,
        *,
        scratch: Path | None = None,
        device: str = "auto",
        host_memory: int | None = None,
        device_memory: int | None = None,
    ) -> Self:
        """The model in a folder with ``config.json`` and safetensors weights, in its own dtype.

        Args:
            folder: the model folder.
            size: of what will be generated.
            scratch: where a temporary folder is made for weights that do not fit in memory; None: the system's.
            device, host_memory, device_memory: as for :meth:`of_run`.

        Raises:
            ModelError: the folder is missing, damaged, or of a model that cannot be run layer by layer.
            StorageError: there is no room in ``scratch``.
            MemoryBudgetError: not even two units fit in memory.
        """
        config = read_config(folder)
        dtype = config.dtype if config.dtype in DTYPES.values() else torch.float32
        skeleton = build_skeleton(config, dtype=dtype)
        checkpoint = Checkpoint(folder, config)
        if skeleton.model.can_generate() and (folder / "generation_config.json").is_file():
            skeleton.model.generation_config = GenerationConfig.from_pretrained(folder)
        with ExitStack() as undo:
            made = make_device(device, device_memory)
            undo.callback(made.close)
            placement = place_weights(skeleton, size, made, host_memory, loading_bytes=loading_bytes_of(skeleton))
            try:
                temporary = Path(tempfile.mkdtemp(prefix="greedysnake-", dir=scratch))
            except OSError as error:
                raise StorageError(
                    f"cannot make a temporary folder in {scratch or 'the system one'}: {error}"
                ) from error
            undo.callback(shutil.rmtree, temporary, ignore_errors=True)
            streamed = {
                key: chunk.weight_bytes
                for unit, layout in enumerate(skeleton.layouts)
                if not placement.resident(unit)
                for key, chunk in weight_places(unit, layout)
            }
            store = Store.create([temporary / "weights"], run=uuid.uuid4().hex, durable={}, scratch=streamed, slots=1)
            undo.callback(store.close)
            self = cls(skeleton, store, placement, made)
            self._temporary = temporary
            self._load(checkpoint)
            undo.pop_all()
        return self

    @property
    def read_bytes(self) -> int:
        """Bytes of weights read from SSD so far."""
        return self._store.read_bytes

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        seed: int | None = None,
        streamer: Callable[[], Any] | None = None,
        **options: Any,
    ) -> Tensor:
        """As :meth:`greedysnake.Trainer.generate`; ``streamer`` as in :func:`generate`."""
        return generate(self._model, self._run_pass, input_ids, attention_mask, seed=seed, streamer=streamer, **options)

    def _run_pass(self) -> None:
        try:
            with torch.random.fork_rng(devices=[]):
                work = StepWork(prompt=UpdateScalars(lr=0.0, number=0, clip=1.0))
                self._executor.run(self.placement.schedule, work)
        except BaseException:
            self._model.abandon()
            raise

    def _load(self, checkpoint: Checkpoint) -> None:
        """Bring a model folder's weights to memory and to the store, a unit at a time."""
        layouts = self.skeleton.layouts
        for units in unit_groups(self.skeleton):
            masters = {unit: torch.zeros(layouts[unit].elements) for unit in units}
            initialize_units(self.skeleton, masters, 0, buffers_only=True)  # for those that no file holds
            checkpoint.fill(self.skeleton, masters)
            for unit in units:
                resident = Buffer("resident_weights", unit)
                if resident in self._buffers:
                    _convert(layouts[unit], masters.pop(unit), self._buffers[resident])
                    continue
                weights = aligned_empty(layouts[unit].weight_bytes)
                _convert(layouts[unit], masters.pop(unit), weights)
                Transfer.together(
                    self._store.write(key, [chunk.weights(weights)])
                    for key, chunk in weight_places(unit, layouts[unit])
                ).wait()

    def close(self) -> None:
        """Let go of the store, and delete it where it is a temporary one; closing twice does nothing."""
        self._model.close()
        self._store.close()
        self._device.close()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)


def place_weights(
    skeleton: Skeleton, size: GenerationSize, device: Device, host_memory: int | None, *, loading_bytes: int = 0
) -> Placement:
    """Keep as many units in host memory as fit, beside buffers for the others.

    Args:
        skeleton: the model.
        size: of what will be generated.
        device: where computation runs.
        host_memory: bytes that the process may use; None: what is free, less a tenth.
        loading_bytes: memory that loading takes, before anything is computed.

    Raises:
        MemoryBudgetError: it does not fit.
    """
    budget = usable_bytes() if host_memory is None else host_memory
    computing = inference_bytes(
        skeleton, rows=size.rows, prompt_tokens=size.prompt_tokens, tokens=size.prompt_tokens + size.new_tokens
    )
    process = process_bytes() + _START_BYTES
    host = process + max(loading_bytes, 0 if device.separate else computing)
    shape = step_shape(skeleton, BatchShape(micro_batches=1, rows=size.rows, tokens=size.prompt_tokens))
    units = len(skeleton.layouts)
    tied = int(skeleton.structure.tied)

    def placed(resident: int, slots: int) -> Placement:
        choices = Choices(separate_device=device.separate, resident_weights=resident / units, weight_slots=slots + tied)
        schedule = build_evaluation(shape, choices)
        pools = {name: schedule.pools[name] for name in _POOLS}
        if resident == units:  # nothing streams
            pools["weights"] = replace(pools["weights"], slot_bytes=())
        weights = sum(pool.bytes for pool in pools.values() if pool.tier == Tier.HOST)
        return Placement(
            schedule=schedule, choices=choices, pools=pools, expected_bytes=host + weights, budget_bytes=budget
        )

    # with three buffers the next unit is read while one is in use and another has just been; two still overlap
    for resident, slots in [(units, 2), *((count, s) for s in (3, 2) for count in range(units - 1, -1, -1))]:
        found = placed(resident, slots)
        if found.expected_bytes <= budget:
            check_schedule(found.schedule)
            return found
    least = placed(0, 2)
    raise MemoryBudgetError(
        f"generating needs about {format_bytes(least.expected_bytes)} of host memory and may use "
        f"{format_bytes(budget)}: {format_bytes(process)} for the process itself, "
        f"{format_bytes(least.expected_bytes - host)} for weights in flight, "
        f"{format_bytes(computing)} for computation and cache, {format_bytes(loading_bytes)} to load the model. Raise "
        f"--host-memory if there is more, or give fewer or shorter prompts"
    )


def loading_bytes_of(skeleton: Skeleton) -> int:
    """Memory to load a model folder: units in float32, as read and as laid out, and one as it is computed with.

    Embedding and head are loaded together, the others one by one.
    """
    together = (sum(skeleton.layouts[unit].elements for unit in units) for units in unit_groups(skeleton))
    return 8 * max(together) + max(layout.weight_bytes for layout in skeleton.layouts)


def _convert(layout: UnitLayout, master: Tensor, weights: Tensor) -> None:
    """Fill a unit's weights (uint8) from float32 [layout.elements], laid out as its gradient buffer."""
    for slot in layout.parameters:
        slot.weight(weights).copy_(slot.gradient(master))
