"""Fresh weights, unit by unit, by the model's own initialisation."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as transformers_init

from greedysnake.models.lora import adapter_parts, initialize_adapters
from greedysnake.models.skeleton import Skeleton

_FLAG = "_is_hf_initialized"


def mix_seed(*numbers: int) -> int:
    """One 63-bit seed from several numbers, such that nearby numbers give unrelated seeds (splitmix64)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) % 2**64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % 2**64
        state ^= state >> 31
    return state % 2**63


def initialize_units(
    skeleton: Skeleton, masters: Mapping[int, Tensor], seed: int, *, buffers_only: bool = False
) -> None:
    """Random weights for decoder units, or for embedding and head together.

    Buffers of the modules (rotary frequencies, say) are set in passing. The numbers depend on ``seed``
    and the layer, not on how layers are grouped into units.

    Args:
        skeleton: the model.
        masters: by unit, float32 [layout.elements] laid out as its gradient buffer, filled in place.
        seed: of the run.
        buffers_only: set the modules' buffers and leave the weights, which come from elsewhere.
    """
    for unit, master in masters.items():
        for slot in skeleton.layouts[unit].parameters:
            skeleton.parameters[slot.name].data = slot.gradient(master)
    model, layers = skeleton.model, skeleton.structure.layers
    inner = [index for unit in masters for index in skeleton.unit_layers[unit]]
    _forget_flags(model)
    if buffers_only:
        for parameter in model.parameters():
            setattr(parameter, _FLAG, True)
    if skeleton.lora is not None:  # so that the model's own weights are as without them
        for part in adapter_parts(model):
            setattr(part, _FLAG, True)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), transformers_init.guard_torch_init_functions():
        for index in inner:
            torch.manual_seed(mix_seed(seed, 1 + index))
            _initialize_tree(layers[index], _owner(model, skeleton.structure.layers_name), ())
        if not inner:
            for layer in layers:
                for module in layer.modules():
                    setattr(module, _FLAG, True)
            torch.manual_seed(mix_seed(seed, 0))
            _initialize_tree(model, model, [skeleton.parameters[name] for name in skeleton.structure.shared])
    _forget_flags(model)
    if skeleton.lora is not None:
        for index in inner:
            initialize_adapters(layers[index], skeleton.lora, mix_seed(seed, 1 + index))
        if not inner:
            initialize_adapters(model, skeleton.lora, mix_seed(seed, 0), without=layers)
    for unit in masters:
        skeleton.detach(unit)


def _initialize_tree(module: nn.Module, owner: PreTrainedModel, shared: Collection[Tensor]) -> None:
    """Children first, each by the model that owns it, as transformers does for a whole model.

    There, parameters are tied after that. Here the first module that has one of ``shared``, the embedding, keeps others
    from initialising it again in their own way.
    """
    for child in module.children():
        _initialize_tree(child, child if isinstance(child, PreTrainedModel) else owner, shared)
    # transformers' per-module initialisation; it has no public twin
    owner._initialize_weights(module, owner.is_custom_code())
    own = {id(parameter) for parameter in module.parameters(recurse=False)}
    for parameter in shared:
        if id(parameter) in own:
            setattr(parameter, _FLAG, True)


def _owner(model: PreTrainedModel, path: str) -> PreTrainedModel:
    """The nearest model above the module at ``path``."""
    owner, module = model, model
    for name in path.split("."):
        module = getattr(module, name)
        if isinstance(module, PreTrainedModel):
            owner = module
    return owner


def _forget_flags(model: nn.Module) -> None:
    for module in model.modules():
        module.__dict__.pop(_FLAG, None)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if hasattr(tensor, _FLAG):
                delattr(tensor, _FLAG)
