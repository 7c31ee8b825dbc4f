"""LoRA: the model's own weights stay as they are, and small adapters beside some of its matrices are trained.

The adapters are those of the ``peft`` library (the optional dependency ``lora``), put into the model's modules before
it is cut into units, so that each lies in the unit of its matrix. Source of the method: arXiv 2106.09685.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from greedysnake.errors import ConfigError

if TYPE_CHECKING:
    from peft import LoraConfig

ADAPTER = "default"
"""peft's name of the one adapter."""

ALL_LINEAR = "all-linear"
_BASE = ".base_layer."
_ADAPTER_SEED = 0x10A4


@dataclass(frozen=True, kw_only=True)
class Lora:
    """How adapters are made.

    Attributes:
        r: rank.
        alpha: an adapter's output is scaled by ``alpha / r``.
        dropout: share of an adapter's inputs that is dropped in training.
        target_modules: names of modules, each the end of a full name; or ``"all-linear"``: all linear ones but the
            output projection.
        bias: which biases of the model are trained too: ``"none"``, ``"all"``, or ``"lora_only"``, those of the target
            modules.
        use_rslora: whether outputs are scaled by ``alpha / sqrt(r)`` instead (arXiv 2312.03732).
        init: first values: ``"default"``, the first matrix as of a linear layer, or ``"gaussian"``; the second matrix
            is zero in both, so that training starts from the model as it is.

    Raises:
        ConfigError: listing everything that makes no sense.
    """

    r: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: str | tuple[str, ...] = ALL_LINEAR
    bias: str = "none"
    use_rslora: bool = False
    init: str = "default"

    def __post_init__(self) -> None:
        problems = []
        if self.r < 1:
            problems.append(f"lora.r: must be at least 1, got {self.r}")
        if not self.alpha > 0:
            problems.append(f"lora.alpha: must be above 0, got {self.alpha}")
        if not 0 <= self.dropout < 1:
            problems.append(f"lora.dropout: must be at least 0 and below 1, got {self.dropout}")
        if isinstance(self.target_modules, str) and self.target_modules != ALL_LINEAR:
            problems.append(
                f"lora.target_modules: needs a list of names or {ALL_LINEAR!r}, got {self.target_modules!r}; write "
                f"[{self.target_modules!r}]"
            )
        if not self.target_modules:
            problems.append("lora.target_modules: needs at least one name")
        if self.bias not in ("none", "all", "lora_only"):
            problems.append(f"lora.bias: must be none, all or lora_only, got {self.bias!r}")
        if self.init not in ("default", "gaussian"):
            problems.append(f"lora.init: must be default or gaussian, got {self.init!r}")
        if problems:
            raise ConfigError("\n".join(problems))
        if not isinstance(self.target_modules, str):  # a list is as good, also as JSON gives it back
            object.__setattr__(self, "target_modules", tuple(self.target_modules))

    def peft_config(self) -> "LoraConfig":
        """The same in peft's words.

        Raises:
            ConfigError: peft is not installed.
        """
        try:
            from peft import LoraConfig
        except ImportError as error:
            raise ConfigError("lora: needs the peft package. Install it: pip install greedysnake[lora]") from error
        targets = self.target_modules
        return LoraConfig(
            r=self.r,
            lora_alpha=self.alpha,  # peft says int, and only divides it
            lora_dropout=self.dropout,
            target_modules=targets if isinstance(targets, str) else list(targets),
            bias=self.bias,
            use_rslora=self.use_rslora,
            init_lora_weights=True if self.init == "default" else "gaussian",
            task_type="CAUSAL_LM",
        )


def add_adapters(model: PreTrainedModel, lora: Lora) -> None:
    """Put adapters into a model on the meta device, in the dtype of their modules, and freeze everything else.

    Raises:
        ConfigError: a target is not there, or cannot have an adapter; or peft is not installed.
    """
    config = lora.peft_config()
    from peft import inject_adapter_in_model

    names = [name for name, _ in model.named_modules()]
    if not isinstance(lora.target_modules, str):
        lost = [t for t in lora.target_modules if not any(n == t or n.endswith(f".{t}") for n in names)]
        if lost:
            linear = {
                name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)
            }
            raise ConfigError(
                f"lora.target_modules: the model has no modules named {', '.join(lost)}; its linear modules are "
                f"{', '.join(sorted(linear))}"
            )
    owners: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), set()).add(name)
    try:
        with torch.device("meta"):
            inject_adapter_in_model(config, model, ADAPTER)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ConfigError(f"lora: {error}") from error
    for name, module in _adapted(model):
        weight = module.get_base_layer().weight
        shared = owners[id(weight)]
        if len(shared) > 1:
            raise ConfigError(
                f"lora.target_modules: {name} shares its weight ({' and '.join(sorted(shared))}), so an adapter for it "
                f"could not be merged. Leave it out"
            )
        for inner_name, inner in module.named_parameters():
            if is_adapter(inner_name):
                inner.data = inner.data.to(weight.dtype)


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return any(part.startswith("lora_") for part in name.split("."))


def base_name(name: str) -> str:
    """The name that a parameter has in the model without adapters."""
    return name.replace(_BASE, ".")


def _adapted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Modules with an adapter, by name."""
    from peft.tuners.lora import LoraLayer

    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))


def adapter_parts(module: nn.Module) -> Iterator[nn.Module]:
    """What the adapters in a module are made of, without the modules that they are beside."""
    for _, adapted in _adapted(module):
        inside = set(adapted.get_base_layer().modules())
        yield from (part for part in adapted.modules() if part not in inside)


def initialize_adapters(module: nn.Module, lora: Lora, seed: int, *, without: Iterable[nn.Module] = ()) -> None:
    """First values of the adapters in a module; they depend on ``seed`` alone.

    Args:
        module: its adapters' parameters have memory.
        lora: how they are made.
        seed: of their values.
        without: modules in it whose adapters are left as they are.
    """
    passed_over = {inner for outer in without for inner in outer.modules()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed ^ _ADAPTER_SEED)
        for adapted in (found for _, found in _adapted(module) if found not in passed_over):
            adapted.reset_lora_parameters(ADAPTER, True if lora.init == "default" else "gaussian")


def merge_adapters(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of the model without adapters that compute what some weights with adapters do.

    Args:
        model: the modules, with adapters; given memory for a moment.
        tensors: all parameters of some modules, by full name; changed.

    Returns:
        By the names that they have without adapters.
    """
    parameters = dict(model.named_parameters())
    for name, module in _adapted(model):
        weight = f"{name}{_BASE}weight"
        if weight not in tensors:
            continue
        own = [inner for inner in tensors if inner.startswith(f"{name}.lora_")]
        for inner in own:
            parameters[inner].data = tensors[inner]
        tensors[weight] += module.get_delta_weight(ADAPTER)
        for inner in own:
            parameters[inner].data = torch.empty(0, dtype=tensors[inner].dtype)
    return without_adapters(tensors)


def without_adapters(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of the model itself, by the names that they have without adapters."""
    return {base_name(name): tensor for name, tensor in tensors.items() if not is_adapter(name)}


def write_adapter(
    model: PreTrainedModel, lora: Lora, trained: dict[str, Tensor], folder: Path, base_model: str | None
) -> None:
    """Write what is trained as a folder that ``peft.PeftModel.from_pretrained`` puts onto the base model.

    Args:
        model: the modules, with adapters.
        lora: how they were made.
        trained: the trained parameters, by full name.
        folder: exists, and is empty.
        base_model: where the base model is, if that is known.
    """
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    state = get_peft_model_state_dict(model, state_dict=trained, adapter_name=ADAPTER, save_embedding_layers=False)
    tensors = {f"base_model.model.{name}": tensor.detach().contiguous().clone() for name, tensor in state.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = lora.peft_config()
    config.base_model_name_or_path = base_model
    config.inference_mode = True
    config.save_pretrained(folder)
