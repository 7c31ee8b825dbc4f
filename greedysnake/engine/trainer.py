"""Training a model whose weights and optimizer state live on SSD: the package's Python interface."""

import time
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from transformers import PretrainedConfig, PreTrainedModel

from greedysnake.engine.arguments import check_arguments
from greedysnake.engine.batches import check_micro_batches, target_tokens
from greedysnake.engine.devices import make_device
from greedysnake.engine.executor import NonFiniteStepError, StepWork
from greedysnake.engine.opening import DTYPES, config_of, frozen_names, write_model
from greedysnake.engine.prepared import PreparedPlan
from greedysnake.engine.results import StepResult
from greedysnake.engine.unit_store import durable_extents, read_unit_weights, scratch_extents
from greedysnake.errors import NonFiniteError
from greedysnake.models.export import export_model
from greedysnake.models.layout import DEFAULT_CHUNK_ELEMENTS
from greedysnake.models.skeleton import build_skeleton
from greedysnake.models.streaming import MicroBatch, StreamedModel
from greedysnake.optim import AdamW, LearningRate, LossScaling, UpdateScalars, first_scale
from greedysnake.plan.activations import BatchShape
from greedysnake.plan.host import process_peak_bytes
from greedysnake.plan.placement import Plan, PlanRequest, make_plan
from greedysnake.report.events import OperationEvent
from greedysnake.schedule import Resource, Schedule, Tier
from greedysnake.storage import Store
from greedysnake.units import parse_bytes


class Trainer:
    """Trains one model from one storage folder.

    Args:
        model: a model folder, a transformers config (random weights), or a loaded PreTrainedModel.
        storage: folder for weights and state, made if missing; exactly one for now.
        optimizer: AdamW's settings.
        learning_rate: by step; None keeps the optimizer's.
        dtype: ``"bfloat16"`` or ``"float16"`` (both with float32 master weights), or ``"float32"``.
        device: ``"auto"`` and ``"cpu"`` compute on the CPU, ``"cuda"`` on a GPU, ``"emulated"`` on the CPU as if it
            were a device with memory of its own, for tests.
        host_memory: bytes that the process may use, or text like ``"16GiB"``; None: what is free, less a tenth.
        device_memory: likewise of the device's own memory; None: what is free, less a tenth.
        delayed_share: α, the part of each unit's update that runs in the next step; None: planned.
        schedule: ``"vertical"``, or ``"horizontal"``, the baseline.
        seed: of random weights and dropout.
        layers_per_unit: decoder layers loaded and computed as one.
        snake: whether every other unit takes the micro-batches in reverse.
        boundaries, gradients: ``"host"``, ``"ssd"``, for boundaries also ``"device"``, or None: planned.
        resident_weights, resident_state: share of all weights and of all optimizer state that stays in host memory,
            and is written to SSD only for a snapshot; None: as much as fits.
        snapshot_every: steps between snapshots; None: 1 if nothing is resident, else 20.
        chunk_elements: most parameters updated as one, a multiple of 4096.
        max_skipped_steps: steps in a row that may be skipped because they are not finite; in float16, steps that
            only lower the loss scale are not counted.
        loss_scaling: how float16's loss scale changes; None: as in ``torch.amp.GradScaler``. Not used otherwise.
        batch: sizes of the batches to come, so that all is reserved at once; None: learnt from the first step.

    Raises:
        ConfigError, ModelError, StorageError, MemoryBudgetError: what is wrong and what to change.
    """

    def __init__(
        self,
        model: str | Path | PretrainedConfig | PreTrainedModel,
        storage: Sequence[str | Path] | str | Path,
        *,
        optimizer: AdamW | None = None,
        learning_rate: LearningRate | None = None,
        dtype: str = "bfloat16",
        device: str = "auto",
        host_memory: int | str | None = None,
        device_memory: int | str | None = None,
        delayed_share: float | None = None,
        schedule: str = "vertical",
        seed: int = 0,
        layers_per_unit: int = 1,
        snake: bool = True,
        boundaries: str | None = None,
        gradients: str | None = None,
        resident_weights: float | None = 0.0,
        resident_state: float | None = 0.0,
        snapshot_every: int | None = None,
        chunk_elements: int = DEFAULT_CHUNK_ELEMENTS,
        max_skipped_steps: int = 10,
        loss_scaling: LossScaling | None = None,
        batch: BatchShape | None = None,
    ) -> None:
        folders = [Path(storage)] if isinstance(storage, str | Path) else [Path(folder) for folder in storage]
        check_arguments(
            storage=folders,
            dtype=dtype,
            device=device,
            schedule=schedule,
            boundaries=boundaries,
            gradients=gradients,
            shares={
                "delayed_share": delayed_share,
                "resident_weights": resident_weights,
                "resident_state": resident_state,
            },
            counts={"layers_per_unit": layers_per_unit, "snapshot_every": snapshot_every},
            sizes={"host_memory": host_memory, "device_memory": device_memory},
        )
        self.optimizer = optimizer or AdamW()
        self._rate = learning_rate or LearningRate(peak=self.optimizer.lr)
        self._max_skipped = max_skipped_steps
        self._loss_scale = first_scale(dtype, loss_scaling)
        none_resident = resident_weights == 0 and resident_state == 0
        self._snapshot_every = snapshot_every or (1 if none_resident else 20)
        limit = None if device_memory is None else parse_bytes(device_memory)
        self._device = make_device(device, limit, seed)
        free = self._device.free_bytes()
        self._request = PlanRequest(
            schedule=schedule,
            delayed_share=delayed_share,
            snake=snake,
            boundaries=None if boundaries is None else Tier(boundaries),
            gradients=None if gradients is None else Tier(gradients),
            host_memory=None if host_memory is None else parse_bytes(host_memory),
            separate_device=self._device.separate,
            device_memory=limit if free is None else free,
            clipping=self.optimizer.max_grad_norm is not None,
            commits_every_step=self._snapshot_every == 1 and none_resident,
            resident_weights=resident_weights,
            resident_state=resident_state,
        )
        self._description = {"dtype": dtype, "layers_per_unit": layers_per_unit, "chunk_elements": chunk_elements}
        self.skeleton = build_skeleton(
            config_of(model),
            dtype=DTYPES[dtype],
            layers_per_unit=layers_per_unit,
            chunk_elements=chunk_elements,
            frozen=frozen_names(model),
        )
        plan = None if batch is None else make_plan(self.skeleton, batch, self._request)
        self.steps_done = 0
        self.last_snapshot = 0
        self._updates = 0
        self._skipped = 0
        self._delayed: UpdateScalars | None = None
        self._unusable = False
        self._prepared: PreparedPlan | None = None
        self._store = Store.create(
            folders[0],
            run=uuid.uuid4().hex,
            durable=durable_extents(self.skeleton.layouts),
            scratch={} if plan is None else self._scratch(plan),
        )
        try:
            write_model(self._store, self.skeleton, model, seed)
            self._model = StreamedModel(self.skeleton, seed, self._device.torch_device)
            if plan is not None:
                self._reserve(plan)
            self.snapshot()
        except BaseException:
            self._store.close()
            self._device.close()
            raise

    @property
    def plan(self) -> Plan | None:
        """What goes where; None before the first batch is known."""
        return None if self._prepared is None else self._prepared.plan

    @property
    def storage(self) -> Path:
        """The storage folder."""
        return self._store.folder

    @property
    def disk_bytes(self) -> int:
        """Disk reserved in the storage folder."""
        return self._store.disk_bytes

    # Training

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        """One optimizer update from a list of micro-batches.

        Args:
            micro_batches: dicts of ``input_ids`` and ``labels``, int64 [B, T], optionally ``attention_mask`` and
                whatever else the model's forward takes. Labels of -100 do not count.

        Raises:
            DataError: the micro-batches do not fit the model; nothing has changed.
            NonFiniteError: too many steps in a row were not finite.
        """
        start = time.perf_counter()
        self._check_usable()
        batch = check_micro_batches(micro_batches, self.skeleton.model.config)
        prepared = self._prepare(batch)
        read, written = self._store.read_bytes, self._store.written_bytes
        scale, rate = self._loss_scale, self._rate.at(self.steps_done)
        work = StepWork(
            prompt=UpdateScalars(lr=rate, number=self._updates + 1, clip=1.0, loss_scale=scale.scale),
            delayed=self._delayed,
            max_grad_norm=self.optimizer.max_grad_norm,
        )
        self._model.begin(
            micro_batches,
            step=self.steps_done,
            target_tokens=target_tokens(micro_batches),
            boundaries_leave=prepared.plan.choices.boundaries_leave,
            loss_scale=scale.scale,
        )
        skipped = None
        self._unusable = True  # until the step is counted: whatever breaks it off leaves the last commit as it is
        try:
            events = self._run(prepared, prepared.step_schedule(pending=self._delayed is not None), work)
        except NonFiniteStepError as error:
            skipped, events = scale.explain(str(error)), []
            self._store.revert(prepared.prompt_keys())  # delayed updates of the step before were sound and stay
        self._finish_step(prepared, work, skipped)
        return StepResult(
            step=self.steps_done,
            loss=sum(work.losses[m].item() for m in sorted(work.losses)) if skipped is None else float("nan"),
            grad_norm=work.gradient.norm if work.gradient else float("nan"),
            lr=work.prompt.lr,
            tokens=sum(batch["input_ids"].numel() for batch in micro_batches),
            seconds=time.perf_counter() - start,
            skipped=skipped,
            clipped=work.prompt.clip < 1,
            loss_scale=scale.reported,
            ssd_read_bytes=self._store.read_bytes - read,
            ssd_write_bytes=self._store.written_bytes - written,
            host_peak_bytes=process_peak_bytes(),
            events=tuple(events),
        )

    def measure(self, micro_batches: Sequence[MicroBatch], resources: Collection[Resource]) -> float:
        """Seconds that a step's operations on some resources take by themselves; the others' are left out.

        What it computes and writes means nothing, so the trainer cannot be used for anything else afterwards;
        the last commit stays.
        """
        prepared = self._prepare(check_micro_batches(micro_batches, self.skeleton.model.config))
        self._unusable = True
        scalars = UpdateScalars(lr=0.0, number=1, clip=1.0)
        work = StepWork(prompt=scalars, delayed=scalars, must_be_finite=False)
        self._model.begin(micro_batches, step=0, target_tokens=target_tokens(micro_batches))
        start = time.perf_counter()
        with torch.random.fork_rng(devices=[]):
            prepared.executor.run(prepared.step_schedule(pending=True), work, only=resources)
        return time.perf_counter() - start

    def evaluate(self, micro_batches: Iterable[MicroBatch], *, at_once: int = 8) -> float:
        """Mean loss over all target tokens of some micro-batches, without dropout; changes nothing.

        Args:
            micro_batches: as for :meth:`step`.
            at_once: micro-batches brought through the model together.
        """
        self._check_usable()
        total, tokens, rest = 0.0, 0, iter(micro_batches)
        while group := list(islice(rest, at_once)):
            total, tokens = total + self._evaluate(group), tokens + target_tokens(group)
        if not tokens:
            return float("nan")
        return total / tokens

    def _evaluate(self, group: list[MicroBatch]) -> float:
        """Summed loss of micro-batches that go through the model together."""
        batch = check_micro_batches(group, self.skeleton.model.config)
        prepared = self._prepared or self._prepare(batch)
        self.flush()
        work = StepWork(prompt=UpdateScalars(lr=0.0, number=0, clip=1.0))
        self._model.begin(group, step=self.steps_done, target_tokens=1, training=False)
        with torch.no_grad():
            self._run(prepared, prepared.evaluation_schedule(len(group)), work)
        return sum(loss.item() for loss in work.losses.values())

    def flush(self) -> None:
        """Apply delayed updates now; the next step then has none to apply. The numbers stay the same."""
        if self._delayed is None or self._prepared is None:
            return
        work = StepWork(prompt=self._delayed, delayed=self._delayed)
        self._unusable = True
        self._run(self._prepared, self._prepared.flush_schedule(), work)
        self._delayed = None
        self._unusable = False

    def snapshot(self) -> None:
        """Commit everything that is in the store: a crash from here on leaves this state."""
        contents = {
            **self._description,
            "steps_done": self.steps_done,
            "updates": self._updates,
            "updates_pending": self._delayed is not None,
            "loss_scale": self._loss_scale.scale,
            "loss_scale_good_steps": self._loss_scale.good_steps,
        }
        try:
            self._store_residents()
            self._store.commit(contents)
            self.last_snapshot = self.steps_done
        except BaseException:
            self._unusable = True
            raise

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the model to a folder that ``AutoModelForCausalLM.from_pretrained`` loads.

        Raises:
            ModelError: the folder exists and is not empty, or cannot be written.
        """
        self._check_usable()
        self.flush()
        self._store_residents()
        layouts = self.skeleton.layouts
        export_model(self.skeleton, lambda u: read_unit_weights(self._store, u, layouts[u]), Path(folder))

    def close(self) -> None:
        """Apply delayed updates, commit, and free the storage folder; closing twice does nothing.

        After a step that was broken off, what the last commit holds is what stays.
        """
        try:
            if not self._unusable:
                self.flush()
                self.snapshot()
        finally:
            self._unusable = True
            try:
                self._model.close()
            finally:
                self._store.close()
                self._device.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Parts of a step

    def _run(self, prepared: PreparedPlan, schedule: Schedule, work: StepWork) -> list[OperationEvent]:
        """Carry out a schedule; whatever breaks it off leaves the trainer unusable and the last commit whole."""
        try:
            with torch.random.fork_rng(devices=[]):
                return prepared.executor.run(schedule, work)
        except NonFiniteStepError:
            self._model.abandon()
            raise
        except BaseException:
            self._unusable = True
            self._model.abandon()
            raise

    def _finish_step(self, prepared: PreparedPlan, work: StepWork, skipped: str | None) -> None:
        """Count the step, remember what it left for the next one, and commit."""
        self.steps_done += 1
        if skipped is None:
            self._updates += 1
            self._skipped = 0
            self._delayed = work.prompt if prepared.leaves_delayed() else None
        else:
            self._skipped += self._loss_scale.counts_as_skipped(loss_finite=work.gradient is not None)
            self._delayed = None
        self._loss_scale = self._loss_scale.after_step(finite=skipped is None)
        self._unusable = False
        if self.steps_done % self._snapshot_every == 0:
            self.snapshot()
        if self._skipped >= self._max_skipped:
            raise NonFiniteError(
                f"{self._skipped} steps in a row were skipped, the last one (step {self.steps_done}) because "
                f"{skipped}. The state before them is kept. Lower optimizer.lr, set optimizer.max_grad_norm, or look "
                f"at the data"
            )

    def _prepare(self, batch: BatchShape) -> PreparedPlan:
        """What is ready for a batch: what there is, if the batch fits it."""
        before = self._prepared
        if before is not None:
            if before.serves(batch):
                return before
            own = before.plan.batch
            batch = replace(batch, rows=max(batch.rows, own.rows), tokens=max(batch.tokens, own.tokens))
            self.flush()
            self._store_residents()
            self._prepared = before = None  # its memory is free for the new plan
        self._device.release_host()
        plan = make_plan(self.skeleton, batch, self._request)
        self._store.reserve_scratch(self._scratch(plan))
        return self._reserve(plan)

    def _reserve(self, plan: Plan) -> PreparedPlan:
        """Memory for everything that the plan's schedules need."""
        self._prepared = PreparedPlan(plan, self._model, self._store, optimizer=self.optimizer, device=self._device)
        return self._prepared

    def _store_residents(self) -> None:
        """Write what stays in host memory to the store, so that the store is complete."""
        if self._prepared is not None:
            self._prepared.executor.store_residents()

    def _scratch(self, plan: Plan) -> Mapping[str, int]:
        return scratch_extents(self.skeleton.layouts, plan.build(pending=True), plan.batch.micro_batches)

    def _check_usable(self) -> None:
        if self._unusable:
            raise RuntimeError("the trainer is closed, or a step was broken off; what the last commit holds is kept")
