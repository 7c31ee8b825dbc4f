"""Plain PyTorch training to compare with: the whole model in memory, torch's own optimizer.

Gradients of the micro-batches are added in the order that the schedule says; a tied embedding's gradient
is the sum over micro-batches of what comes through the head, plus the sum of what comes through the lookup.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from greedysnake import AdamW, Trainer
from greedysnake.engine.batches import target_tokens
from greedysnake.models.skeleton import decays
from greedysnake.models.streaming import layer_seed
from greedysnake.models.structure import find_layers


def torch_adamw(groups: Mapping[bool, list[nn.Parameter]], settings: AdamW) -> torch.optim.AdamW:
    """torch's own optimizer of parameters with (True) and without weight decay."""
    return torch.optim.AdamW(
        [
            {"params": groups[True], "weight_decay": settings.weight_decay},
            {"params": groups[False], "weight_decay": 0.0},
        ],
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        fused=True,
    )


class PlainTrainer:
    """The same steps as :class:`greedysnake.Trainer`, the ordinary way, in float32.

    Parameters that do not require gradients are not given to the optimizer.
    """

    def __init__(self, model: PreTrainedModel, settings: AdamW, *, seed: int, lr: Callable[[int], float]) -> None:
        self.model = model.train()
        self.settings = settings
        self._seed, self._lr, self._step = seed, lr, 0
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        seen = set()
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad and id(parameter) not in seen:
                    seen.add(id(parameter))
                    groups[decays(module, name, parameter) or settings.decay_norms_and_biases].append(parameter)
        self.optimizer = torch_adamw(groups, settings)

    def step(self, micro_batches: Sequence[dict[str, Tensor]], order: Callable[[str], Sequence[int]]) -> float:
        """One optimizer step; ``order`` gives the order of addition for a parameter. Returns the loss."""
        twin, tied = self._untied_twin()
        gradients: list[dict[str, Tensor]] = []
        loss = 0.0
        count = torch.tensor(target_tokens(micro_batches))
        for index, batch in enumerate(micro_batches):
            twin.zero_grad()
            with self._seeded(twin, index):
                result = twin(**batch, use_cache=False, num_items_in_batch=count).loss
            result.backward()
            loss += result.item()
            gradients.append({name: p.grad.clone() for name, p in twin.named_parameters() if p.grad is not None})
        head_order = list(order("head"))
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                continue
            parameter.grad = _added(gradients, name, order(name))
            if name in tied:
                embedding, head = tied[name]
                parameter.grad = _added(gradients, head, head_order) + _added(gradients, embedding, order(name))
        if self.settings.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr(self._step)
        self.optimizer.step()
        self._step += 1
        return loss

    def step_as(self, trainer: Trainer, micro_batches: Sequence[dict[str, Tensor]]) -> float:
        """One optimizer step in the order of the step that ``trainer`` has just made. Returns the loss."""
        assert trainer.plan is not None
        schedule, layouts = trainer.plan.schedules.step(pending=self._step > 0), trainer.skeleton.layouts
        unit_of = {slot.name: unit for unit, layout in enumerate(layouts) for slot in layout.parameters}
        unit_of["head"] = len(layouts) - 1
        return self.step(micro_batches, lambda parameter: schedule.backward_order(unit_of[parameter]))

    def train_beside(self, trainer: Trainer, batches: Iterable[Sequence[dict[str, Tensor]]]) -> bool:
        """Make steps in ``trainer`` and the same here; their losses agree. Returns whether any of them was clipped."""
        clipped = False
        for batch in batches:
            result = trainer.step(batch)
            clipped |= result.clipped
            assert result.loss == pytest.approx(self.step_as(trainer, batch), rel=1e-6)
        return clipped

    def _untied_twin(self) -> tuple[PreTrainedModel, dict[str, tuple[str, str]]]:
        """A copy in which the head has a weight of its own; and the embedding's and its name there, by the model's."""
        twin = copy.deepcopy(self.model)
        embedding, head = twin.get_input_embeddings(), twin.get_output_embeddings()
        if head is None or head.weight is not embedding.weight:
            return twin, {}
        head.weight = nn.Parameter(embedding.weight.detach().clone(), requires_grad=embedding.weight.requires_grad)
        names = {id(p): name for name, p in twin.named_parameters()}
        shared = next(
            name for name, p in self.model.named_parameters() if p is self.model.get_input_embeddings().weight
        )
        return twin, {shared: (names[id(embedding.weight)], names[id(head.weight)])}

    def _seeded(self, model: PreTrainedModel, micro_batch: int):
        """Draw each layer's random numbers from the seeds that the streamed model uses."""
        _, layers = find_layers(model)
        hooks = []

        def reseed(layer: int):
            return lambda *_: torch.manual_seed(layer_seed(self._seed, self._step, micro_batch, layer)) and None

        for index, layer in enumerate(layers):
            hooks.append(layer.register_forward_pre_hook(reseed(index)))
        hooks.append(layers[-1].register_forward_hook(reseed(len(layers))))
        reseed(-1)()

        class _Remove:
            def __enter__(self):
                return None

            def __exit__(self, *_):
                for hook in hooks:
                    hook.remove()

        return _Remove()


def _added(gradients: list[dict[str, Tensor]], name: str, order: Sequence[int]) -> Tensor | None:
    if all(name not in found for found in gradients):
        return None  # frozen
    total = torch.zeros_like(next(g[name] for g in gradients if name in g))
    for index in order:
        if name in gradients[index]:
            total += gradients[index][name]
    return total
