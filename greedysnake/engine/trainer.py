"""Training a model whose weights and optimizer state live on SSD: the package's Python interface."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from greedysnake.closing import Closing
from greedysnake.engine.batches import check_micro_batches, target_tokens
from greedysnake.engine.beginning import NewRun, Origin, request_on
from greedysnake.engine.devices import Device
from greedysnake.engine.exporting import companion_files, export_options, export_store
from greedysnake.engine.generating import check_prompts, generate
from greedysnake.engine.loading import forget
from greedysnake.engine.opening import check_undamaged, open_committed, storage_paths, write_model
from greedysnake.engine.prepared import PreparedPlan
from greedysnake.engine.progress import Progress
from greedysnake.engine.results import StepResult
from greedysnake.engine.runner import Runner
from greedysnake.engine.settings import TrainerSettings
from greedysnake.engine.work import NonFiniteStepError, StepWork
from greedysnake.models.export import DEFAULT_SHARD_BYTES
from greedysnake.models.skeleton import Skeleton
from greedysnake.models.streaming import MicroBatch, StreamedModel
from greedysnake.optim import AdamW, LearningRate, UpdateScalars, first_scale
from greedysnake.plan.activations import BatchShape
from greedysnake.plan.host import process_peak_bytes
from greedysnake.plan.placement import Plan
from greedysnake.plan.request import PlanRequest
from greedysnake.schedule import Resource
from greedysnake.storage import FolderBudget, Store, System


class Trainer(Closing):
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
        chosen = TrainerSettings.of(storage=storage_paths(storage), optimizer=optimizer or AdamW(), **settings)
        with ExitStack() as undo:
            device = chosen.make_device()
            undo.callback(device.close)
            origin = Origin.of(model, vocab_size=vocab_size, trust_remote_code=chosen.trust_remote_code)
            skeleton = origin.build(chosen)
            new = NewRun.of(origin, skeleton, chosen, batch=batch, device=device)
            loaded = new.open_store(system)
            undo.callback(loaded.store.close)
            self._base_model = origin.name
            self._model_files = write_model(
                loaded, new.skeleton, origin.model, chosen.seed, stored=origin.stored_config, progress=progress
            )
            self._set_up(new.settings, new.skeleton, loaded.store, device, new.request)
            self._progress, self.last_snapshot, self.notes = Progress(), 0, dict(notes or {})
            if new.plan is not None:
                self._runner.reserve(new.plan)
            self.snapshot()
            forget(loaded.store)
            undo.pop_all()

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
            changes: settings other than when the run began; not what the content of the store depends on (dtype,
                layers_per_unit, chunk_elements, seed, second_slot, split_master, freeze, lora).

        Raises:
            StorageError: there is no snapshot, it is damaged, or another run holds it.
            ConfigError: a change is not possible, or there is no such device here.
        """
        folders = storage_paths(storage)
        self = cls.__new__(cls)
        store, skeleton, contents = open_committed(folders, writable=True, system=system)
        with ExitStack() as undo:
            undo.callback(store.close)
            settings = TrainerSettings.from_json(contents["settings"]).changed({**changes, "storage": folders})
            device = settings.make_device()
            undo.callback(device.close)
            check_undamaged(store, progress)
            self._base_model, self._model_files = contents["base_model"], contents["model_files"]
            store.reserve_scratch({})
            self._set_up(settings, skeleton, store, device, request_on(device, settings))
            self._runner.groups.update({int(count): size for count, size in contents.get("groups", {}).items()})
            self._progress, self.notes = Progress.from_json(contents["progress"]), contents["notes"]
            self.last_snapshot = self._progress.steps_done
            self._loss_scale = replace(self._loss_scale, **contents["loss_scale"])
            undo.pop_all()
        return self

    def _set_up(
        self, settings: TrainerSettings, skeleton: Skeleton, store: Store, device: Device, request: PlanRequest
    ) -> None:
        """Make the model in a store ready to run."""
        self.settings = settings
        self.skeleton = skeleton
        self._store = store
        self._loss_scale = first_scale(settings.dtype, settings.loss_scaling)
        model = StreamedModel(skeleton, settings.seed, device.torch_device)
        self._runner = Runner(model, store, device, optimizer=settings.optimizer, request=request)

    @property
    def steps_done(self) -> int:
        """Steps so far, skipped ones included."""
        return self._progress.steps_done

    @property
    def plan(self) -> Plan | None:
        """What goes where; None before the first batch is known."""
        prepared = self._runner.prepared
        return None if prepared is None else prepared.plan

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
        self._runner.check_usable()
        self._runner.prepare(batch)

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
            MemoryBudgetError, StorageError: they fit no plan, and nothing has changed; or memory ran out or a transfer
                failed in the middle, and the last commit is what stays.
            ModelError: the model cannot be run unit by unit; the last commit is what stays.
            NonFiniteError: too many steps in a row were not finite; the last of them is counted and changed nothing.
            RuntimeError: the trainer is closed, or a step was broken off before.
        """
        start = time.perf_counter()
        self._runner.check_usable()
        batch = check_micro_batches(micro_batches, self.skeleton.model.config)
        prepared = self._runner.prepare(batch)
        read, written = self._store.read_bytes, self._store.written_bytes
        due = self.steps_done > self.last_snapshot and self.steps_done % self.settings.steps_between_snapshots == 0
        scale, rate = self._loss_scale, self.settings.rate.at(self.steps_done)
        targets = target_tokens(micro_batches)
        work = StepWork(
            prompt=UpdateScalars(lr=rate, number=self._progress.updates + 1, clip=1.0, loss_scale=scale.scale),
            delayed=self._runner.delayed,
            max_grad_norm=self.settings.optimizer.max_grad_norm,
            contents=self._contents() if due else {},
        )
        self._runner.model.begin(
            micro_batches,
            step=self.steps_done,
            target_tokens=targets,
            boundaries_leave=prepared.plan.choices.boundaries_leave,
            kept_bytes=prepared.plan.shape.kept_bytes,
            loss_scale=scale.scale,
            head_chunk_tokens=prepared.plan.head_chunk_tokens,
        )
        skipped = None
        schedule = prepared.step_schedule(pending=self._runner.delayed is not None, snapshot=due)
        with self._runner.changing():  # until the step is counted
            try:
                events = self._runner.run(prepared, schedule, work)
            except NonFiniteStepError as error:
                skipped, events = scale.explain(str(error)), []
                self._store.revert(prepared.prompt_keys())  # delayed updates of the step before were sound and stay
            finally:
                if work.committed:
                    self.last_snapshot = self.steps_done
            self._finish_step(prepared, work, skipped)
        self._progress.check_skipped(self.settings.max_skipped_steps, skipped)
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
        return self._runner.measure(micro_batches, resources)

    def evaluate(self, micro_batches: Iterable[MicroBatch], *, at_once: int | None = None) -> float:
        """Mean loss over all target tokens of some micro-batches, without dropout; changes nothing.

        Also broken off it changes nothing, and training can go on.

        Args:
            micro_batches: as for :meth:`step`.
            at_once: micro-batches brought through the model together, each taking memory for its boundary; None: as
                many as a step has.

        Raises:
            DataError: the micro-batches do not fit the model.
            MemoryBudgetError, StorageError: there is no plan yet and none fits, or a transfer failed.
        """
        self._runner.check_usable()
        return self._runner.mean_loss(micro_batches, at_once=at_once, step=self.steps_done)

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
        self._runner.check_usable()
        check_prompts(self.skeleton, input_ids, attention_mask)
        rows, tokens = input_ids.shape
        if self._runner.prepared is None:
            self._runner.prepare(BatchShape(micro_batches=1, rows=rows, tokens=tokens))
        self.flush()
        runner = self._runner
        return generate(runner.model, runner.run_forward, input_ids, attention_mask, seed=seed, **options)

    def flush(self) -> None:
        """Apply delayed updates now; the next step then has none to apply. The numbers stay the same."""
        self._runner.flush()

    def snapshot(self) -> None:
        """Apply delayed updates and commit everything now: a crash from here on leaves this state."""
        self._runner.check_usable()
        self.flush()
        with self._runner.changing():
            self._runner.store_residents()
            self._store.commit(self._contents())
            self.last_snapshot = self.steps_done

    def _contents(self) -> dict[str, Any]:
        """What a snapshot says about itself: with the bytes beside it, all that a run needs to go on."""
        slots = (slot for layout in self.skeleton.layouts for slot in layout.parameters)
        return {
            "settings": self.settings.as_json(),
            "progress": self._progress.as_json(),
            "base_model": self._base_model,
            "frozen": sorted(slot.name for slot in slots if not slot.trainable),
            "loss_scale": {"scale": self._loss_scale.scale, "good_steps": self._loss_scale.good_steps},
            "model_files": self._model_files,
            "groups": {str(count): size for count, size in self._runner.groups.items()},
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
        self._runner.check_usable()
        options = export_options(dtype, max_shard_size, overwrite=overwrite, beside=companion_files(self.storage))
        self.flush()
        self._runner.store_residents()
        export_store(self._store, self.skeleton, Path(folder), options, base_model=self._base_model, merge=merge)

    def close(self) -> None:
        """Apply delayed updates, commit, and free the storage folder; closing twice does nothing.

        After a step that was broken off, what the last commit holds is what stays.
        """
        try:
            if self._runner.usable:
                self.snapshot()
        finally:
            self._runner.close()

    # Parts of a step

    def _finish_step(self, prepared: PreparedPlan, work: StepWork, skipped: str | None) -> None:
        """Count the step, and remember what it left for the next one."""
        if skipped is None:
            self._progress = self._progress.after_update()
            self._runner.delayed = work.prompt if prepared.leaves_delayed() else None
        else:
            counts = self._loss_scale.counts_as_skipped(loss_finite=work.gradient is not None)
            self._progress = self._progress.after_skip(counts=counts)
            self._runner.delayed = None
        self._loss_scale = self._loss_scale.after_step(finite=skipped is None)
