"""A transformers model without weights, cut into units.

The skeleton is the model's own modules with parameters of no storage. A unit comes to life when its
parameters become views of flat buffers (:meth:`Skeleton.attach`), and gives them up again with
:meth:`Skeleton.detach`. Buffers (rotary frequencies and the like) are small and stay.
"""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import build_glob_alternation
from transformers.pytorch_utils import Conv1D

from greedysnake.errors import ConfigError, ModelError
from greedysnake.models.freezing import frozen_by
from greedysnake.models.layout import DEFAULT_CHUNK_ELEMENTS, ParameterInfo, ParameterSlot, UnitLayout, lay_out
from greedysnake.models.lora import Lora, add_adapters, base_name, is_adapter
from greedysnake.models.structure import Structure, find_layers, inspect_structure


@dataclass(frozen=True, kw_only=True)
class Skeleton:
    """A model cut into units: embedding, groups of decoder layers, head.

    Attributes:
        model: the modules; parameters have no storage unless attached.
        structure: its layers and what lies around them.
        unit_layers: layer indices of each unit, empty for embedding and head.
        layouts: buffers of each unit.
        parameters: every parameter by its first full name, in the model's own order.
        lora: how the adapters in it were made; None if there are none.
    """

    model: PreTrainedModel
    structure: Structure
    unit_layers: tuple[tuple[int, ...], ...]
    layouts: tuple[UnitLayout, ...]
    parameters: dict[str, nn.Parameter]
    lora: Lora | None = None

    @property
    def first_trained(self) -> int:
        """The first unit that has anything to train: no gradient is needed before it."""
        return next(unit for unit, layout in enumerate(self.layouts) if layout.chunks)

    @property
    def parameter_count(self) -> int:
        """Elements of all parameters, shared ones once."""
        return sum(slot.elements for layout in self.layouts for slot in layout.parameters)

    @property
    def trained_count(self) -> int:
        """Elements of the parameters that are trained."""
        return sum(slot.elements for layout in self.layouts for slot in layout.parameters if slot.trainable)

    @property
    def unit_names(self) -> tuple[str, ...]:
        """What a person calls each unit."""
        names = []
        for layers in self.unit_layers[1:-1]:
            names.append(f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}-{layers[-1]}")
        return ("embedding", *names, "head")

    def base_slots(self, unit: int) -> dict[str, ParameterSlot]:
        """A unit's parameters by the names that they have in the model without adapters; adapters are left out."""
        slots = self.layouts[unit].parameters
        if self.lora is None:
            return {slot.name: slot for slot in slots}
        return {base_name(slot.name): slot for slot in slots if not is_adapter(slot.name)}

    def attach(self, unit: int, weights: Tensor | None, gradients: Tensor | None = None) -> None:
        """Give a unit's parameters storage.

        Args:
            unit: the unit.
            weights: uint8, what the parameters become views of; None gives them their shape and no memory,
                for a backward that does not read them.
            gradients: float32, what their ``.grad`` become views of, if anything.
        """
        for slot in self.layouts[unit].parameters:
            parameter = self.parameters[slot.name]
            if weights is not None:
                parameter.data = slot.weight(weights)
            else:
                device = None if gradients is None else gradients.device
                parameter.data = torch.empty(1, dtype=slot.dtype, device=device).expand(slot.shape)
            parameter.grad = slot.gradient(gradients) if gradients is not None and slot.trainable else None

    def detach(self, unit: int) -> None:
        """Leave a unit's parameters without storage."""
        for slot in self.layouts[unit].parameters:
            parameter = self.parameters[slot.name]
            parameter.grad = None
            # on the same device: moving would part the parameter from the graph that still waits for its backward
            parameter.data = torch.empty(0, dtype=slot.dtype, device=parameter.device)

    def persistent_buffers(self) -> dict[str, Tensor]:
        """Buffers that belong to a saved model, by full name."""
        state = self.model.state_dict(keep_vars=True)
        return {name: buffer for name, buffer in self.model.named_buffers() if name in state}


def empty_model(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model of ``config`` on the meta device: shapes and modules, no bytes.

    Raises:
        ModelError: transformers cannot build it.
    """
    try:
        with torch.device("meta"):
            # a config made of a model folder's own code is there only if that code may be run
            own_code = type(config).__module__.startswith("transformers_modules.")
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype, trust_remote_code=own_code)
    except Exception as error:
        raise ModelError(
            f"transformers cannot build a causal language model of type {config.model_type!r}: {error}"
        ) from error
    if type(model.config) is not type(config) and type(model.config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"models of type {config.model_type!r} cannot be trained: transformers makes a model of type "
            f"{model.config.model_type!r} of them, which AutoModelForCausalLM does not load once it is saved"
        )
    return model


def build_skeleton(
    config: PretrainedConfig,
    *,
    dtype: torch.dtype,
    layers_per_unit: int = 1,
    chunk_elements: int = DEFAULT_CHUNK_ELEMENTS,
    split_master: bool = True,
    frozen: Collection[str] = (),
    freeze: Sequence[str] = (),
    lora: Lora | None = None,
) -> Skeleton:
    """Build the model of ``config`` without weights and cut it into units.

    Args:
        config: a transformers config.
        dtype: of the weights; parameters that the model keeps in float32 stay so.
        layers_per_unit: decoder layers loaded and computed as one.
        chunk_elements: most elements of an optimizer chunk.
        split_master: whether bfloat16 weights are the upper halves of their masters.
        frozen: names of parameters that are not trained, besides those that the architecture itself freezes.
        freeze: patterns over names of more of them.
        lora: adapters to train instead of the model's own parameters.

    Raises:
        ModelError: the model cannot be built, or not be run layer by layer.
        ConfigError: a pattern matches nothing, nothing is left to train, or there cannot be such adapters.
    """
    model = empty_model(config, dtype)
    if lora is not None:
        add_adapters(model, lora)
    infos = _parameter_infos(model, frozenset(frozen) | frozen_by(model, freeze))
    if not any(info.trainable for info in infos.values()):
        raise ConfigError(
            f"freeze: all {len(infos)} parameters of the model are frozen, so there is nothing to train. Leave some "
            f"out of the patterns"
        )
    parameters = _replace_tensors(model, infos)
    layers_name, _ = find_layers(model)
    outside = [name for name in parameters if not name.startswith(f"{layers_name}.")]
    for name in outside:  # the full shape over a single element of memory
        parameters[name].data = torch.zeros(1, dtype=infos[name].dtype).expand(infos[name].shape)
    structure = inspect_structure(model)
    for name in outside:
        parameters[name].data = torch.empty(0, dtype=infos[name].dtype)

    count = len(structure.layers)
    groups = [tuple(range(i, min(i + layers_per_unit, count))) for i in range(0, count, layers_per_unit)]
    prefixes = [tuple(f"{structure.layers_name}.{i}." for i in group) for group in groups]
    members = [
        structure.embedding,
        *(tuple(name for name in parameters if name.startswith(prefix)) for prefix in prefixes),
        structure.head,
    ]
    model.train()
    return Skeleton(
        model=model,
        structure=structure,
        unit_layers=((), *groups, ()),
        layouts=tuple(_layouts(members, infos, chunk_elements, split_master=split_master)),
        parameters=parameters,
        lora=lora,
    )


def _layouts(
    members: Iterable[Sequence[str]], infos: Mapping[str, ParameterInfo], chunk_elements: int, *, split_master: bool
) -> Iterator[UnitLayout]:
    """The layout of each unit, from its parameters' names; units that are alike share their chunks."""
    first: dict[tuple[ParameterInfo, ...], tuple[Sequence[str], UnitLayout]] = {}
    for names in members:
        kind = tuple(infos[name] for name in names)
        if kind not in first:
            own = dict(zip(names, kind, strict=True))
            first[kind] = names, lay_out(own, chunk_elements, split_master=split_master)
        others, layout = first[kind]
        name_of = dict(zip(others, names, strict=True))
        yield replace(layout, parameters=tuple(replace(slot, name=name_of[slot.name]) for slot in layout.parameters))


def kept_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[str], bool]:
    """Tells by full name which parameters and buffers transformers loads in float32 when ``dtype`` is asked for."""
    plan = model._get_dtype_plan(dtype)  # it has no public twin
    if not plan:
        return lambda name: False
    pattern, _, _ = build_glob_alternation(list(plan))
    return lambda name: pattern.search(name) is not None


def _parameter_infos(model: PreTrainedModel, frozen: Collection[str]) -> dict[str, ParameterInfo]:
    """Shape, dtype and weight decay of every parameter, by its first full name."""
    kept = kept_in_float32(model, model.dtype)
    infos = {}
    for module_name, module in model.named_modules():
        for local, parameter in module.named_parameters(recurse=False):
            name = f"{module_name}.{local}" if module_name else local
            infos[name] = ParameterInfo(
                shape=tuple(parameter.shape),
                dtype=torch.float32 if kept(name) else parameter.dtype,
                decay=decays(module, local, parameter),
                trainable=parameter.requires_grad and name not in frozen,
            )
    return {name: infos[name] for name, _ in model.named_parameters()}


def decays(module: nn.Module, name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies to a parameter by default: not to norms, biases and other vectors."""
    is_norm = "norm" in type(module).__name__.lower() and not isinstance(module, nn.Linear | nn.Embedding | Conv1D)
    return parameter.dim() >= 2 and not name.endswith("bias") and not is_norm


def _replace_tensors(model: PreTrainedModel, infos: dict[str, ParameterInfo]) -> dict[str, nn.Parameter]:
    """Swap meta parameters for ones without storage (ties kept) and meta buffers for zeros."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    replaced: dict[str, nn.Parameter] = {}
    for name, _ in model.named_parameters():
        empty = torch.empty(0, dtype=infos[name].dtype)
        replaced[name] = nn.Parameter(empty, requires_grad=infos[name].trainable)
        if infos[name].dtype != torch.float32 and infos[name].trainable:
            replaced[name].grad_dtype = torch.float32  # gradients add up in float32 (models.gradient_sums)
    kept = kept_in_float32(model, model.dtype)
    saved = model.state_dict(keep_vars=True)
    for module_name, module in model.named_modules():
        for local, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, local, replaced[names[id(parameter)]])
        for local, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if buffer.is_meta:
                name = f"{module_name}.{local}" if module_name else local
                wide = name in saved and buffer.is_floating_point() and kept(name)
                dtype = torch.float32 if wide else buffer.dtype
                setattr(module, local, torch.zeros_like(buffer, device="cpu", dtype=dtype))
    return replaced
