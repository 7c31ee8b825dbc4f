"""AdamW, one chunk at a time, on weights and state in flat buffers.

The arithmetic is torch's fused kernel through its public functional form, one list entry a parameter,
so that the numbers are those of ``torch.optim.AdamW(fused=True)``.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from greedysnake.models.layout import Chunk
from greedysnake.optim.masters import read_master, write_master


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Settings of the optimizer.

    Attributes:
        lr: learning rate where no schedule says otherwise.
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay, by default not for norms and biases.
        decay_norms_and_biases: whether it is for those too.
        max_grad_norm: largest norm of the whole gradient, None for no clipping.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay_norms_and_biases: bool = False
    max_grad_norm: float | None = 1.0

    def __post_init__(self) -> None:
        problems = []
        if not 0 <= self.lr < math.inf:
            problems.append(f"lr must be a number from 0, got {self.lr}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            problems.append(f"betas must be two numbers in [0, 1), got {self.betas}")
        if not 0 < self.eps < math.inf:
            problems.append(f"eps must be a positive number, got {self.eps}")
        if not 0 <= self.weight_decay < math.inf:
            problems.append(f"weight_decay must be a number from 0, got {self.weight_decay}")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            problems.append(f"max_grad_norm must be positive, or None for no clipping, got {self.max_grad_norm}")
        if problems:
            raise ValueError("; ".join(problems))


@dataclass(frozen=True, kw_only=True)
class UpdateScalars:
    """What one optimizer update needs besides the tensors; a delayed update keeps it until it runs.

    Attributes:
        lr: learning rate of the step.
        number: how many updates this one makes, counting from 1 (Adam's bias correction).
        clip: factor that clipping scales the gradient by, at most 1.
        loss_scale: factor that the gradient carries and must lose (float16), a power of two.
    """

    lr: float
    number: int
    clip: float
    loss_scale: float = 1.0

    @property
    def gradient_factor(self) -> float:
        """What the gradient is multiplied by."""
        return self.clip / self.loss_scale


class ChunkUpdater:
    """Applies updates; owns one chunk's float32 master weights as working memory.

    Args:
        settings: of the optimizer.
        largest_elements: most elements of a chunk.
    """

    def __init__(self, settings: AdamW, largest_elements: int) -> None:
        self._settings = settings
        self._master = torch.empty(largest_elements, dtype=torch.float32)

    def update(self, chunk: Chunk, weights: Tensor, state: Tensor, gradient: Tensor, scalars: UpdateScalars) -> None:
        """One AdamW step on a chunk, in place.

        Args:
            chunk: what lies where.
            weights: uint8, the chunk's weights.
            state: uint8, its state: what completes its weights to masters (``optim.masters``), then two float32
                moments.
            gradient: float32 [elements]; scaled in place by ``scalars.gradient_factor``.
            scalars: of this update.
        """
        count = chunk.elements
        typed = weights.view(chunk.dtype)
        own, moments = state[: chunk.master_bytes], state[chunk.master_bytes : chunk.state_bytes]
        first, second = moments.view(torch.float32).split(count)
        master = read_master(typed, own, self._master[:count])
        if scalars.gradient_factor != 1:
            gradient.mul_(scalars.gradient_factor)
        tensors = (master, gradient, first, second)
        for decay in (True, False):
            spans = [slice(p.start, p.start + p.elements) for p in chunk.pieces if p.decay == decay]
            if spans:
                self._step(tensors, spans, scalars, decay=decay or self._settings.decay_norms_and_biases)
        write_master(master, typed, own)

    def _step(self, tensors: tuple[Tensor, ...], spans: list[slice], scalars: UpdateScalars, *, decay: bool) -> None:
        """AdamW on the parameters at ``spans`` of (master, gradient, first moment, second moment)."""
        master, gradient, first, second = ([tensor[span] for span in spans] for tensor in tensors)
        adamw(
            master,
            gradient,
            first,
            second,
            [],
            [torch.tensor(float(scalars.number - 1)) for _ in spans],  # the kernel counts up by one
            fused=True,
            amsgrad=False,
            beta1=self._settings.betas[0],
            beta2=self._settings.betas[1],
            lr=scalars.lr,
            weight_decay=self._settings.weight_decay if decay else 0.0,
            eps=self._settings.eps,
            maximize=False,
        )
