"""What a new run is made from: its model, its first plan, and the store that takes in its first weights."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from transformers import PretrainedConfig, PreTrainedModel

from greedysnake.engine.devices import Device
from greedysnake.engine.loading import LoadedSoFar, open_or_create, source_digest
from greedysnake.engine.opening import DTYPES, config_of, frozen_names
from greedysnake.engine.prepared import scratch_of
from greedysnake.engine.settings import LAYOUT, TrainerSettings
from greedysnake.engine.unit_store import durable_extents, fixed_extents
from greedysnake.errors import ConfigError
from greedysnake.models.hub import local_folder
from greedysnake.models.resize import with_vocabulary
from greedysnake.models.skeleton import Skeleton, build_skeleton
from greedysnake.plan.activations import BatchShape
from greedysnake.plan.placement import Plan, make_plan
from greedysnake.plan.request import PlanRequest
from greedysnake.plan.wishes import wish_for
from greedysnake.storage import Store, System


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The model that a new run begins with.

    Attributes:
        model: a model folder, a transformers config (random weights), or a loaded model.
        name: what a user called it by: a folder or a name on the hub; None for what is in memory.
        stored_config: config of the weights that are there.
        config: of the run's model, which may have more tokens.
    """

    model: str | Path | PretrainedConfig | PreTrainedModel
    name: str | None
    stored_config: PretrainedConfig
    config: PretrainedConfig

    @classmethod
    def of(
        cls,
        model: str | Path | PretrainedConfig | PreTrainedModel,
        *,
        vocab_size: int | None,
        trust_remote_code: bool,
    ) -> Self:
        """What a user calls a model; one that is only on the hub is fetched.

        Raises:
            ConfigError: ``vocab_size`` is given for what is not a model folder, or is not possible.
            ModelError: it cannot be read or used.
        """
        name = None
        if isinstance(model, str | Path):
            name = str(Path(model).absolute() if Path(model).is_dir() else model)
            model = local_folder(model, with_code=trust_remote_code)
        stored = config_of(model, trust_remote_code=trust_remote_code)
        if vocab_size is not None and not isinstance(model, str | Path):
            raise ConfigError("vocab_size: only a model folder's embedding can be given more rows here")
        return cls(model=model, name=name, stored_config=stored, config=with_vocabulary(stored, vocab_size))

    def build(self, settings: TrainerSettings) -> Skeleton:
        """The model without weights, cut into its units; what a loaded model's owner has frozen is not trained."""
        return build_skeleton(
            self.config,
            dtype=DTYPES[settings.dtype],
            layers_per_unit=settings.layers_per_unit or 1,
            chunk_elements=settings.chunk_elements,
            split_master=settings.split_master,
            frozen=frozen_names(self.model),
            freeze=settings.freeze,
            lora=settings.lora,
        )


@dataclass(frozen=True, kw_only=True)
class NewRun:
    """A new run before it has a store.

    Attributes:
        origin: its model.
        settings: of it, the size of its units decided.
        skeleton: the model in these units.
        request: what its plans are asked for.
        plan: its first plan; None while the batch is not known.
    """

    origin: Origin
    settings: TrainerSettings
    skeleton: Skeleton
    request: PlanRequest
    plan: Plan | None

    @classmethod
    def of(
        cls,
        origin: Origin,
        skeleton: Skeleton,
        settings: TrainerSettings,
        *,
        batch: BatchShape | None,
        device: Device,
    ) -> Self:
        """Plan for a batch if it is known, and decide the size of the units; the model is built anew if that differs.

        Raises:
            MemoryBudgetError: it does not fit.
        """
        request = request_on(device, settings)
        wish = None if batch is None else wish_for(skeleton, batch, request)
        layers = 1 if wish is None else wish.layers_per_unit
        if settings.layers_per_unit is None:
            settings = replace(settings, layers_per_unit=layers)
            if layers > 1:
                skeleton = origin.build(settings)
        plan = None if batch is None else make_plan(skeleton, batch, request, wish)
        return cls(origin=origin, settings=settings, skeleton=skeleton, request=request, plan=plan)

    def open_store(self, system: System | None) -> LoadedSoFar:
        """The run's store, with what a load of the same model that was broken off has left in it.

        Raises:
            StorageError: the folders are in use, hold something else, or are too small.
        """
        settings, layouts = self.settings, self.skeleton.layouts
        scratch: Mapping[str, int] = {} if self.plan is None else scratch_of(self.plan, self.skeleton)
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

        layout_settings = {name: getattr(settings, name) for name in LAYOUT}
        source = source_digest(self.origin.model, self.skeleton, layout_settings)
        return open_or_create(settings.storage, source, self.skeleton, scratch=scratch, create=create, system=system)


def request_on(device: Device, settings: TrainerSettings) -> PlanRequest:
    """What plans are asked for on a device, with its memory that is free now."""
    return settings.request(separate_device=device.separate, device_free_bytes=device.free_bytes())
