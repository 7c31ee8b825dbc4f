"""How a unit's parameters lie in flat buffers, and how optimizer chunks cut them.

A unit's weights are one byte buffer, its gradient one float32 buffer. Parameters that are trained come first, the
frozen ones, which have neither gradient nor state, behind them. Parameters of one dtype lie together, each from a
multiple of 64 elements: torch's fused AdamW gives bitwise the same numbers for a slice as for the whole parameter
when the slice starts at a multiple of 8 elements from the parameter's start. Chunks are whole blocks of 4096
elements, so that weights, remainders and moments of a chunk are whole blocks on disk too.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from greedysnake.schedule import ChunkShape, UnitShape
from greedysnake.storage import round_up

PARAMETER_ALIGNMENT = 64
CHUNK_ALIGNMENT = 4096
DEFAULT_CHUNK_ELEMENTS = 4 * 2**20

_MASTER_BYTES = {torch.float32: 0, torch.bfloat16: 2, torch.float16: 4}
_WHOLE_MASTER_BYTES = 4


def master_bytes(dtype: torch.dtype, *, split_master: bool) -> int:
    """State a parameter that completes its weight to a float32 master: nothing, a 16-bit remainder, or all of it."""
    return _MASTER_BYTES[dtype] if split_master or dtype == torch.float32 else _WHOLE_MASTER_BYTES


@dataclass(frozen=True, kw_only=True)
class ParameterSlot:
    """Where one parameter lies in its unit's buffers.

    Attributes:
        name: full name in the model.
        shape, dtype: as the model has them.
        weight_offset: first byte in the weight buffer.
        gradient_offset: first element in the float32 gradient buffer; of a frozen one, in a buffer as large as all
            of the unit's parameters, whose beginning is laid out as the gradient buffer.
        decay: whether weight decay applies.
        trainable: whether it is updated at all.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    weight_offset: int
    gradient_offset: int
    decay: bool
    trainable: bool = True

    @property
    def elements(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    def weight(self, weights: Tensor) -> Tensor:
        """The parameter as a view of its unit's weight buffer (uint8)."""
        size = self.elements * self.dtype.itemsize
        return weights[self.weight_offset : self.weight_offset + size].view(self.dtype).view(self.shape)

    def gradient(self, gradients: Tensor) -> Tensor:
        """Its gradient as a view of its unit's gradient buffer (float32)."""
        return gradients[self.gradient_offset : self.gradient_offset + self.elements].view(self.shape)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The part of a trainable parameter that lies in a chunk: elements from ``start`` of the chunk."""

    start: int
    elements: int
    decay: bool


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A run of elements of one dtype that is updated as one.

    Attributes:
        dtype: of its weights.
        elements: padding included, a multiple of 4096.
        weight_offset: first byte in the unit's weight buffer.
        gradient_offset: first element in the unit's gradient buffer.
        pieces: the trainable parameters in it, without padding.
        split_master: whether a bfloat16 weight is the upper half of its master; else the state holds the whole master.
    """

    dtype: torch.dtype
    elements: int
    weight_offset: int
    gradient_offset: int
    pieces: tuple[Piece, ...]
    split_master: bool = True

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights."""
        return self.elements * self.dtype.itemsize

    @property
    def master_bytes(self) -> int:
        """Bytes of its state that complete its weights to float32 masters."""
        return self.elements * master_bytes(self.dtype, split_master=self.split_master)

    @property
    def state_bytes(self) -> int:
        """Bytes of its state: what completes the weights to masters, then two float32 moments."""
        return self.master_bytes + 8 * self.elements

    def gradient(self, gradients: Tensor) -> Tensor:
        """Its part of the unit's gradient buffer (float32)."""
        return gradients[self.gradient_offset : self.gradient_offset + self.elements]

    def weights(self, weights: Tensor) -> Tensor:
        """Its part of the unit's weight buffer (uint8)."""
        return weights[self.weight_offset : self.weight_offset + self.weight_bytes]


@dataclass(frozen=True, kw_only=True)
class UnitLayout:
    """The buffers of a unit: its parameters, and the chunks that cover them end to end.

    Attributes:
        parameters: all of them.
        chunks: of what is trained.
        frozen: of what is not, behind the others: weights alone, which are read and never written.
    """

    parameters: tuple[ParameterSlot, ...]
    chunks: tuple[Chunk, ...]
    frozen: tuple[Chunk, ...] = ()

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight buffer."""
        return sum(chunk.weight_bytes for chunk in (*self.chunks, *self.frozen))

    @property
    def gradient_elements(self) -> int:
        """Elements of the gradient buffer."""
        return sum(chunk.elements for chunk in self.chunks)

    @property
    def elements(self) -> int:
        """Elements of a buffer that holds all parameters, frozen ones behind the others."""
        return sum(chunk.elements for chunk in (*self.chunks, *self.frozen))

    def shape(self, *, backward_needs_weights: bool = True) -> UnitShape:
        """The sizes that a schedule is built from."""
        return UnitShape(
            chunks=tuple(
                ChunkShape(
                    weight_bytes=chunk.weight_bytes,
                    state_bytes=chunk.state_bytes,
                    gradient_bytes=4 * chunk.elements,
                )
                for chunk in self.chunks
            ),
            frozen_weight_bytes=sum(chunk.weight_bytes for chunk in self.frozen),
            backward_needs_weights=backward_needs_weights,
        )


@dataclass(frozen=True, kw_only=True)
class ParameterInfo:
    """What a layout needs to know of a parameter."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    decay: bool
    trainable: bool = True


def lay_out(
    parameters: Mapping[str, ParameterInfo],
    chunk_elements: int = DEFAULT_CHUNK_ELEMENTS,
    *,
    split_master: bool = True,
) -> UnitLayout:
    """Lay a unit's parameters out in flat buffers and cut them into chunks.

    Args:
        parameters: by full name, in the model's order.
        chunk_elements: most elements of a chunk, a multiple of 4096.
        split_master: whether bfloat16 weights are the upper halves of their masters.
    """
    if chunk_elements <= 0 or chunk_elements % CHUNK_ALIGNMENT:
        raise ValueError(f"chunk_elements must be a positive multiple of {CHUNK_ALIGNMENT}, got {chunk_elements}")
    slots: list[ParameterSlot] = []
    chunks: dict[bool, list[Chunk]] = {True: [], False: []}  # by whether they are trained
    weight_base = gradient_base = 0
    segments = dict.fromkeys((info.trainable, info.dtype) for info in parameters.values())
    for trainable, dtype in sorted(segments, key=lambda segment: not segment[0]):
        end, pieces = 0, []  # element offsets within this segment
        for name, info in parameters.items():
            if (info.trainable, info.dtype) != (trainable, dtype):
                continue
            slot = ParameterSlot(
                name=name,
                shape=info.shape,
                dtype=dtype,
                weight_offset=weight_base + end * dtype.itemsize,
                gradient_offset=gradient_base + end,
                decay=info.decay,
                trainable=trainable,
            )
            slots.append(slot)
            if trainable:
                pieces.append((end, end + slot.elements, info.decay))
            end += round_up(slot.elements, PARAMETER_ALIGNMENT)
        end = round_up(end, CHUNK_ALIGNMENT)
        for start in range(0, end, chunk_elements):
            stop = min(start + chunk_elements, end)
            chunks[trainable].append(
                Chunk(
                    dtype=dtype,
                    elements=stop - start,
                    weight_offset=weight_base + start * dtype.itemsize,
                    gradient_offset=gradient_base + start,
                    pieces=tuple(
                        Piece(
                            start=max(first, start) - start, elements=min(last, stop) - max(first, start), decay=decay
                        )
                        for first, last, decay in pieces
                        if first < stop and last > start
                    ),
                    split_master=split_master,
                )
            )
        weight_base += end * dtype.itemsize
        gradient_base += end
    return UnitLayout(parameters=tuple(slots), chunks=tuple(chunks[True]), frozen=tuple(chunks[False]))
