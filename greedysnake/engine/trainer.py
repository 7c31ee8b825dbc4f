"""Training a model whose weights and optimizer state live on SSD: the package's Python interface."""

import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from greedysnake.engine.batches import check_micro_batches, target_tokens
from greedysnake.engine.devices import make_device
from greedysnake.engine.generating import check_prompts, generate
from greedysnake.engine.loading import LoadedSoFar, forget, open_or_create, source_digest
from greedysnake.engine.opening import (
    DTYPES,
    check_undamaged,
    companion_files,
    config_of,
    export_options,
    frozen_names,
    open_committed,
    write_model,
)
from greedysnake.engine.prepared import PreparedPlan
from greedysnake.engine.progress import Progress
from greedysnake.engine.results import StepResult
from greedysnake.engine.settings import LAYOUT, TrainerSettings
from greedysnake.engine.unit_store import durable_extents, fixed_extents, read_unit, scratch_extents
from greedysnake.engine.work import NonFiniteStepError, StepWork
from greedysnake.errors import ConfigError, NonFiniteError
from greedysnake.models.export import DEFAULT_SHARD_BYTES, export_adapter, export_model
from greedysnake.models.hub import local_folder
from greedysnake.models.layout import ParameterSlot
from greedysnake.models.resize import with_vocabulary
from greedysnake.models.skeleton import Skeleton, build_skeleton
from greedysnake.models.streaming import MicroBatch, StreamedModel
from greedysnake.optim import AdamW, LearningRate, UpdateScalars, first_scale
from greedysnake.plan.activations import BatchShape
from greedysnake.plan.host import process_peak_bytes
from greedysnake.plan.placement import Plan, make_plan
from greedysnake.plan.wishes import wish_for
from greedysnake.report.events import OperationEvent
from greedysnake.schedule import Resource, Schedule
from greedysnake.storage import FolderBudget, Store, System


class Trainer:
    """Trains one model from its storage folders.

    Args:
        model: a model folder, a model's name on the hub, a transformers config (random weights), or a loaded
            PreTrainedModel.
        storage: folder for weights and state, or several, best one on each SSD; made if missing.
        optimizer: AdamW's settings.
        batch: sizes of the batches to come, so that all is reserved at once; None: learnt from the first step.
        vocab_size: rows of embedding and head, if the model in a folder is to have more than its weights have, for
            tokens that were added; see :func:`greedysnake.models.resize.fill_more_rows`.
        notes: JSON values of the caller's own, kept with every snapshot and given back by :meth:`resume`.
        progress: told bytes of weights that are in the storage, and those of the model, while it is filled. If that is
            broken off, the next trainer with the same model, storage and settings goes on with it.
        system: the store's system calls, for tests that stand between.
        settings: how to train: dtype, device, memory budgets and more; :class:`greedysnake.TrainerSettings` lists them.

    Raises:
        ConfigError, ModelError, StorageError, MemoryBudgetError: what is wrong and what to change.
    """

    def __init__(
        self,
        model: str | Path | PretrainedConfig | PreTrainedModel,
        storage: Sequence[str | Path] | str | Path,
        *,
        optimizer: AdamW | None = None,
        batch: BatchShape | None = None,
        vocab_size: int | None = None,
        notes: Mapping[str, Any] | None = None,
        progress: Callable[[int, int], None] | None = None,
        system: System | None = None,
        **settings: Any,
    ) -> None:
        chosen = TrainerSettings.of(storage=_folders(storage), optimizer=optimizer or AdamW(), **settings)
        base = str(Path(model).absolute() if Path(model).is_dir() else model) if isinstance(model, str | Path) else None
        if isinstance(model, str | Path):
            model = local_folder(model, with_code=chosen.trust_remote_code)
        config = config_of(model, trust_remote_code=chosen.trust_remote_code)
        if vocab_size is not None and not isinstance(model, str | Path):
            raise ConfigError("vocab_size: only a model folder's embedding can be given more rows here")
        build = partial(_build, with_vocabulary(config, vocab_size), frozen_names(model))
        self._set_up(chosen, build(chosen), Progress(), dict(notes or {}))
        self._base_model = base
        plan = self._first_plan(build, batch)
        loaded = self._new_store(model, {} if plan is None else self._scratch(plan), system)
        self._store = loaded.store
        try:
            self._model_files = write_model(loaded, self.skeleton, model, chosen.seed, stored=config, progress=progress)
            self._begin(plan)
            self.snapshot()
            forget(self._store)
        except BaseException:
            self._store.close()
            self._device.close()
            raise

    @classmethod
    def resume(
        cls,
        storage: Sequence[str | Path] | str | Path,
        *,
        progress: Callable[[int, int], None] | None = None,
        system: System | None = None,
        **changes: Any,
    ) -> Self:
        """Go on from the last snapshot in some storage, bitwise as if nothing had happened.

        Every chunk is read and checked against its checksum first.

        Args:
            storage: the run's folders, in the order in which they were given.
            progress: told bytes checked so far and in all.
            system: as for a new trainer.
            changes: settings other than when the run began; not what the content of the store depends on (dtype, seed,
                layers_per_unit, chunk_elements).

        Raises:
            StorageError: there is no snapshot, it is damaged, or another run holds it.
            ConfigError: a change is not possible.
        """
        folders = _folders(storage)
        self = cls.__new__(cls)
        store, skeleton, contents = open_committed(folders, writable=True, system=system)
        with ExitStack() as undo:
            undo.callback(store.close)
            settings = TrainerSettings.from_json(contents["settings"]).changed({**changes, "storage": folders})
            check_undamaged(store, progress)
            self._set_up(settings, skeleton, Progress.from_json(contents["progress"]), contents["notes"])
            undo.callback(self._device.close)
            self._loss_scale = replace(self._loss_scale, **contents["loss_scale"])
            self._store = store
            self._base_model = contents["base_model"]
            self._model_files = contents["model_files"]
            store.reserve_scratch({})
            self._begin(None)
            undo.pop_all()
        return self

    def _set_up(self, settings: TrainerSettings, skeleton: Skeleton, progress: Progress, notes: dict[str, Any]) -> None:
        """What needs no store yet."""
        self.settings = settings
        self.skeleton = skeleton
        self.notes = notes
        self._progress = progress
        self.last_snapshot = progress.steps_done
        self._device = make_device(settings.device, settings.device_limit, settings.seed)
        self._request = settings.request(
            separate_device=self._device.separate, device_free_bytes=self._device.free_bytes()
        )
        self._delayed: UpdateScalars | None = None
        self._loss_scale = first_scale(settings.dtype, settings.loss_scaling)
        self._unusable = False
        self._prepared: PreparedPlan | None = None

    def _new_store(
        self,
        model: str | Path | PretrainedConfig | PreTrainedModel,
        scratch: Mapping[str, int],
        system: System | None,
    ) -> LoadedSoFar:
        """The store of a new run, with what a load of the same model that was broken off has left in it."""
        settings, layouts = self.settings, self.skeleton.layouts
        fixed = fixed_extents(layouts)

        def create() -> Store:
            return Store.create(
                settings.storage,
                run=uuid.uuid4().hex,
                slots=2 if settings.second_slot else 1,
                durable=durable_extents(layouts),
                fixed=fixed,
                scratch=scratch,
                system=system,
            )

        source = None
        if settings.second_slot and not fixed:  # what has one slot cannot be committed before it is all there
            source = source_digest(model, self.skeleton, {name: getattr(settings, name) for name in LAYOUT})
        return open_or_create(settings.storage, source, self.skeleton, scratch=scratch, create=create, system=system)

    def _first_plan(self, build: Callable[[TrainerSettings], Skeleton], batch: BatchShape | None) -> Plan | None:
        """The plan of a new run if its batch is known, and the size of its units, built anew if not as they were."""
        wish = None if batch is None else wish_for(self.skeleton, batch, self._request)
        layers = 1 if wish is None else wish.layers_per_unit
        if self.settings.layers_per_unit is None:
            self.settings = replace(self.settings, layers_per_unit=layers)
            if layers > 1:
                self.skeleton = build(self.settings)
        return None if batch is None else make_plan(self.skeleton, batch, self._request, wish)

    def _begin(self, plan: Plan | None) -> None:
        """Make the model ready to run, and reserve memory for the plan if there is one already."""
        self._model = StreamedModel(self.skeleton, self.settings.seed, self._device.torch_device)
        if plan is not None:
            self._reserve(plan)

    @property
    def steps_done(self) -> int:
        """Steps so far, skipped ones included."""
        return self._progress.steps_done

    @property
    def plan(self) -> Plan | None:
        """What goes where; None before the first batch is known."""
        return None if self._prepared is None else self._prepared.plan

    @property
    def storage(self) -> Path:
        """The storage folder that says what the store holds; the first of several."""
        return self._store.folders[0]

    @property
    def disk_bytes(self) -> int:
        """Disk reserved in the storage folders."""
        return self._store.disk_bytes

    def disk_use(self) -> list[FolderBudget]:
        """Disk reserved in each storage folder, and what is left there."""
        return self._store.disk_use()

    def reserve(self, batch: BatchShape) -> None:
        """Plan for batches of these sizes and reserve everything now, which the first step would do otherwise.

        Raises:
            MemoryBudgetError, StorageError: it does not fit.
        """
        self._check_usable()
        self._prepare(batch)

    def use_learning_rate(self, rate: LearningRate) -> None:
        """Follow another schedule from the next step on; snapshots keep it."""
        self.settings = replace(self.settings, learning_rate=rate)

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
        due = self.steps_done > self.last_snapshot and self.steps_done % self.settings.steps_between_snapshots == 0
        scale, rate = self._loss_scale, self.settings.rate.at(self.steps_done)
        targets = target_tokens(micro_batches)
        work = StepWork(
            prompt=UpdateScalars(lr=rate, number=self._progress.updates + 1, clip=1.0, loss_scale=scale.scale),
            delayed=self._delayed,
            max_grad_norm=self.settings.optimizer.max_grad_norm,
            contents=self._contents() if due else {},
        )
        self._model.begin(
            micro_batches,
            step=self.steps_done,
            target_tokens=targets,
            boundaries_leave=prepared.plan.choices.boundaries_leave,
            loss_scale=scale.scale,
            head_chunk_tokens=prepared.plan.head_chunk_tokens,
        )
        skipped = None
        self._unusable = True  # until the step is counted: whatever breaks it off leaves the last commit as it is
        schedule = prepared.step_schedule(pending=self._delayed is not None, snapshot=due)
        try:
            events = self._run(prepared, schedule, work)
        except NonFiniteStepError as error:
            skipped, events = scale.explain(str(error)), []
            self._store.revert(prepared.prompt_keys())  # delayed updates of the step before were sound and stay
        finally:
            if work.committed:
                self.last_snapshot = self.steps_done
        self._finish_step(prepared, work, skipped)
        return StepResult(
            step=self.steps_done,
            loss=sum(work.losses[m].item() for m in sorted(work.losses)) if skipped is None else float("nan"),
            grad_norm=work.gradient.norm if work.gradient else float("nan"),
            lr=work.prompt.lr,
            tokens=sum(batch["input_ids"].numel() for batch in micro_batches),
            target_tokens=targets,
            seconds=time.perf_counter() - start,
            skipped=skipped,
            clipped=work.prompt.clip < 1,
            loss_scale=scale.reported,
            ssd_read_bytes=self._store.read_bytes - read,
            ssd_write_bytes=self._store.written_bytes - written,
            host_peak_bytes=process_peak_bytes(),
            events=tuple(events),
            schedule=schedule,
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
        self._model.begin(
            micro_batches,
            step=0,
            target_tokens=target_tokens(micro_batches),
            head_chunk_tokens=prepared.plan.head_chunk_tokens,
        )
        start = time.perf_counter()
        with torch.random.fork_rng(devices=[]):
            schedule = prepared.step_schedule(pending=True, snapshot=False)
            prepared.executor.run(schedule, work, only=resources)
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
        self._model.begin(
            group,
            step=self.steps_done,
            target_tokens=1,
            training=False,
            head_chunk_tokens=prepared.plan.head_chunk_tokens,
        )
        with torch.no_grad():
            self._run(prepared, prepared.evaluation_schedule(len(group)), work)
        return sum(loss.item() for loss in work.losses.values())

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        seed: int | None = None,
        **options: Any,
    ) -> Tensor:
        """Prompts with the tokens that the model adds to them, as it is now; changes nothing.

        Each new token is one pass over the weights, all prompts at once.

        Args:
            input_ids: prompts, int64 [B, T], shorter ones padded on the left.
            attention_mask: int64 [B, T], 0 where there is padding; None: there is none.
            seed: of the random numbers that tokens are drawn with.
            options: as in ``transformers.GenerationConfig``: ``max_new_tokens``, ``do_sample``, ``temperature``, ...

        Returns:
            int64 [B, T and more].

        Raises:
            DataError, ModelError: the prompts do not fit the model, or it cannot generate.
        """
        self._check_usable()
        check_prompts(self.skeleton, input_ids, attention_mask)
        rows, tokens = input_ids.shape
        prepared = self._prepared or self._prepare(BatchShape(micro_batches=1, rows=rows, tokens=tokens))
        self.flush()

        def run_pass() -> None:
            work = StepWork(prompt=UpdateScalars(lr=0.0, number=0, clip=1.0))
            try:
                with torch.random.fork_rng(devices=[]):
                    prepared.executor.run(prepared.evaluation_schedule(1), work)
            except BaseException:  # nothing has changed: the trainer can go on
                self._model.abandon()
                raise

        return generate(self._model, run_pass, input_ids, attention_mask, seed=seed, **options)

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
        """Apply delayed updates and commit everything now: a crash from here on leaves this state."""
        self._check_usable()
        self.flush()
        self._unusable = True
        self._store_residents()
        self._store.commit(self._contents())
        self.last_snapshot = self.steps_done
        self._unusable = False

    def _contents(self) -> dict[str, Any]:
        """What a snapshot says about itself: with the bytes beside it, all that a run needs to go on."""
        return {
            "settings": self.settings.as_json(),
            "progress": self._progress.as_json(),
            "base_model": self._base_model,
            "frozen": sorted(slot.name for slot in self._slots() if not slot.trainable),
            "loss_scale": {"scale": self._loss_scale.scale, "good_steps": self._loss_scale.good_steps},
            "model_files": self._model_files,
            "notes": self.notes,
        }

    def save_pretrained(
        self,
        folder: str | Path,
        *,
        dtype: str | None = None,
        max_shard_size: int | str = DEFAULT_SHARD_BYTES,
        overwrite: bool = False,
        merge: bool = False,
    ) -> None:
        """Write the model to a folder that ``AutoModelForCausalLM.from_pretrained`` loads, a unit at a time.

        The tokenizer is written too where the run began from a model folder with one. With LoRA, the adapters alone
        are written, to a folder that ``peft.PeftModel.from_pretrained`` loads onto the base model.

        Args:
            folder: to be created; it appears when it is complete.
            dtype: ``"bfloat16"``, ``"float16"`` or ``"float32"``, which are the master weights; None: the run's.
            max_shard_size: most bytes of a file, or text such as ``"5GB"``.
            overwrite: whether a model folder that is there is replaced.
            merge: with LoRA, write the whole model instead, with the adapters merged into its weights.

        Raises:
            ConfigError: ``dtype`` or ``max_shard_size`` is none.
            ModelError: the folder exists and is not empty, cannot be written, or float16 cannot hold a weight.
        """
        self._check_usable()
        options = export_options(dtype, max_shard_size, overwrite=overwrite, beside=companion_files(self.storage))
        self.flush()
        self._store_residents()
        layouts = self.skeleton.layouts

        def read(unit: int, masters: bool) -> dict[str, torch.Tensor]:
            return read_unit(self._store, unit, layouts[unit], masters=masters)

        if self.skeleton.lora is None or merge:
            export_model(self.skeleton, read, Path(folder), options)
        else:
            export_adapter(self.skeleton, read, Path(folder), self._base_model, options)

    def close(self) -> None:
        """Apply delayed updates, commit, and free the storage folder; closing twice does nothing.

        After a step that was broken off, what the last commit holds is what stays.
        """
        try:
            if not self._unusable:
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
        """Count the step, and remember what it left for the next one."""
        if skipped is None:
            self._progress = self._progress.after_update()
            self._delayed = work.prompt if prepared.leaves_delayed() else None
        else:
            counts = self._loss_scale.counts_as_skipped(loss_finite=work.gradient is not None)
            self._progress = self._progress.after_skip(counts=counts)
            self._delayed = None
        self._loss_scale = self._loss_scale.after_step(finite=skipped is None)
        self._unusable = False
        if self._progress.skipped_in_a_row >= self.settings.max_skipped_steps:
            raise NonFiniteError(
                f"{self._progress.skipped_in_a_row} steps in a row were skipped, the last one (step "
                f"{self.steps_done}) because {skipped}. The state before them is kept. Lower optimizer.lr, set "
                f"optimizer.max_grad_norm, or look at the data"
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
        self._prepared = PreparedPlan(
            plan, self._model, self._store, optimizer=self.settings.optimizer, device=self._device
        )
        return self._prepared

    def _store_residents(self) -> None:
        """Write what stays in host memory to the store, so that the store is complete."""
        if self._prepared is not None:
            self._prepared.executor.store_residents()

    def _scratch(self, plan: Plan) -> Mapping[str, int]:
        return scratch_extents(self.skeleton.layouts, plan.build(pending=True), plan.batch.micro_batches)

    def _slots(self) -> Iterator[ParameterSlot]:
        return (slot for layout in self.skeleton.layouts for slot in layout.parameters)

    def _check_usable(self) -> None:
        if self._unusable:
            raise RuntimeError("the trainer is closed, or a step was broken off; what the last commit holds is kept")


def _build(config: PretrainedConfig, frozen: frozenset[str], settings: TrainerSettings) -> Skeleton:
    """The model of a new run, cut into its units; parameters named in ``frozen`` are not trained."""
    return build_skeleton(
        config,
        dtype=DTYPES[settings.dtype],
        layers_per_unit=settings.layers_per_unit or 1,
        chunk_elements=settings.chunk_elements,
        frozen=frozen,
        freeze=settings.freeze,
        lora=settings.lora,
    )


def _folders(storage: Sequence[str | Path] | str | Path) -> tuple[Path, ...]:
    return (Path(storage),) if isinstance(storage, str | Path) else tuple(map(Path, storage))
