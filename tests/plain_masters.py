"""Plain PyTorch training with float32 masters to compare with: the whole model in memory, in any dtype.

Gradients of the micro-batches are added in float32 in their natural order. Norm, clipping and AdamW run on the CPU.
In float16 the loss is scaled by torch's own GradScaler. Products of matrices are those of the streamed run. Models must
not tie their embeddings: autograd would add the two parts of such a gradient in the model's dtype.
"""

from collections.abc import Callable, Sequence

import torch
from plain import torch_adamw
from torch import Tensor, nn
from transformers import PreTrainedModel

from greedysnake import AdamW
from greedysnake.engine.batches import target_tokens
from greedysnake.engine.products import computing_products
from greedysnake.models.skeleton import decays
from greedysnake.optim import LossScaling, split_master


def half_up(master: Tensor) -> Tensor:
    """bfloat16 weights as the streamed run rounds them."""
    weights = torch.empty(master.shape, dtype=torch.bfloat16).flatten()
    split_master(master.clone().flatten(), weights, torch.empty_like(weights, dtype=torch.int16))
    return weights.view(master.shape)


ROUNDING: dict[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.float32: lambda master: master,
    torch.bfloat16: half_up,
    torch.float16: lambda master: master.to(torch.float16),
}


class MasterTrainer:
    """The same steps as :class:`greedysnake.Trainer` without snake, the ordinary way; ``model`` is on its device."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: AdamW,
        scaling: LossScaling | None = None,
        *,
        products: str = "auto",
    ) -> None:
        self.model = model.train()
        self._products = products
        self._settings = settings
        scaling = scaling or LossScaling()
        self.scaler = torch.amp.GradScaler(
            "cpu",
            init_scale=scaling.initial,
            growth_factor=scaling.growth,
            backoff_factor=scaling.backoff,
            growth_interval=scaling.growth_interval,
            enabled=model.dtype == torch.float16,
        )
        self._masters = {name: nn.Parameter(p.detach().cpu().float().clone()) for name, p in model.named_parameters()}
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for module_name, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                groups[decays(module, name, parameter)].append(self._masters[f"{module_name}.{name}"])
                if parameter.dtype != torch.float32:
                    parameter.grad_dtype = torch.float32
        self._optimizer = torch_adamw(groups, settings)

    def step(self, micro_batches: Sequence[dict[str, Tensor]]) -> float:
        """One optimizer step, or none where GradScaler skips it. Returns the loss."""
        device, loss = self.model.device, 0.0
        count = torch.tensor(target_tokens(micro_batches), device=device)
        for batch in micro_batches:
            inputs = {name: value.to(device) for name, value in batch.items()}
            with computing_products(self._products):
                part = self.model(**inputs, use_cache=False, num_items_in_batch=count).loss
                self.scaler.scale(part.cpu()).backward()
            loss += part.item()
        for name, parameter in self.model.named_parameters():
            self._masters[name].grad = None if parameter.grad is None else parameter.grad.cpu()
            parameter.grad = None
        if self._settings.max_grad_norm is not None:
            self.scaler.unscale_(self._optimizer)
            torch.nn.utils.clip_grad_norm_(self._masters.values(), self._settings.max_grad_norm)
        self.scaler.step(self._optimizer)
        self.scaler.update()
        for name, parameter in self.model.named_parameters():
            rounded = ROUNDING[parameter.dtype](self._masters[name].detach())
            parameter.data.copy_(rounded)
        return loss
