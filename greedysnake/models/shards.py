"""Safetensors files written a tensor at a time: where every byte goes is known before the first one is there."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from greedysnake.closing import Closing

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What the format calls each dtype (https://huggingface.co/docs/safetensors)."""

MAX_HEADER_BYTES = 100_000_000
"""Longer ones safetensors itself refuses."""

_ALIGNMENT = 8  # of the data, by spaces after the header, as safetensors' own writer does


@dataclass(frozen=True, kw_only=True)
class TensorSize:
    """Shape and dtype of a tensor to be written."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """Those of a tensor, which may be on the meta device."""
        return cls(shape=tuple(tensor.shape), dtype=tensor.dtype)

    @property
    def elements(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def bytes(self) -> int:
        """Bytes of its content."""
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file: its name, its header with its length before it, and the offset of each tensor in it."""

    name: str
    header: bytes
    offsets: Mapping[str, int]
    bytes: int


def plan_shards(tensors: Mapping[str, TensorSize], most_bytes: int) -> list[Shard]:
    """Cut tensors, in their order, into files of at most ``most_bytes`` of content.

    A tensor is never cut, so one that is larger has a file of its own. A single file is named as
    ``from_pretrained`` expects a model without an index.
    """
    groups: list[dict[str, TensorSize]] = []
    filled = 0
    for name, size in tensors.items():
        if not groups or (groups[-1] and filled + size.bytes > most_bytes):
            groups.append({})
            filled = 0
        groups[-1][name] = size
        filled += size.bytes
    count = len(groups)
    names = [SINGLE_NAME] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    return [_shard(name, group) for name, group in zip(names, groups, strict=True)]


def _shard(name: str, tensors: Mapping[str, TensorSize]) -> Shard:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    # wide dtypes first, so that each tensor starts at a multiple of its own width
    for key, size in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
        starts[key] = end
        end += size.bytes
        entries[key] = {
            "dtype": DTYPE_NAMES[size.dtype],
            "shape": list(size.shape),
            "data_offsets": [starts[key], end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return Shard(
        name=name,
        header=header,
        offsets={key: len(header) + start for key, start in starts.items()},
        bytes=len(header) + end,
    )


def index_of(shards: list[Shard], tensors: Mapping[str, TensorSize]) -> dict[str, object]:
    """The content of the index file that says which shard holds which tensor."""
    return {
        "metadata": {
            "total_parameters": sum(size.elements for size in tensors.values()),
            "total_size": sum(size.bytes for size in tensors.values()),
        },
        "weight_map": {name: shard.name for shard in shards for name in shard.offsets},
    }


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """What a file's header says of one of its tensors: the format's name of its dtype, and its bytes."""

    dtype: str
    bytes: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors in a safetensors file, by name.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not such a file.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= MAX_HEADER_BYTES:
            raise ValueError(f"{path.name} is not a safetensors file: its header would have {length} bytes")
        content = file.read(length)
    try:
        entries = json.loads(content)
        return {
            name: StoredTensor(dtype=entry["dtype"], bytes=entry["data_offsets"][1] - entry["data_offsets"][0])
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{path.name} is not a safetensors file: its header is damaged") from error


class ShardWriter(Closing):
    """Writes tensors into their places, in any order; every tensor once.

    Args:
        folder: where the files are made.
        shards: what :func:`plan_shards` gave.
        tensors: the same as it was given.

    Raises:
        OSError: from any method.
    """

    def __init__(self, folder: Path, shards: list[Shard], tensors: Mapping[str, TensorSize]) -> None:
        self._places = {name: (index, offset) for index, s in enumerate(shards) for name, offset in s.offsets.items()}
        self._left = dict(tensors)
        self._files: list[int] = []
        try:
            for shard in shards:
                self._files.append(os.open(folder / shard.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
                os.ftruncate(self._files[-1], shard.bytes)
                _write(self._files[-1], shard.header, 0)
        except BaseException:
            self.close()
            raise

    def write(self, name: str, tensor: Tensor) -> None:
        """Put a tensor of the shape and dtype that were planned into its file."""
        size = self._left.pop(name, None)
        if size != TensorSize.of(tensor):
            raise ValueError(f"tensor {name!r} was planned as {size}, and is {TensorSize.of(tensor)}")
        index, offset = self._places[name]
        content = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
        _write(self._files[index], memoryview(content), offset)  # type: ignore[arg-type]

    def flush(self) -> None:
        """Make what was written last, and leave none of it in the page cache."""
        for file in self._files:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)

    def finish(self) -> None:
        """Flush; every tensor must have been written."""
        if self._left:
            raise ValueError(f"{len(self._left)} tensors were planned and not written: {sorted(self._left)[:3]}")
        self.flush()

    def close(self) -> None:
        """Close the files."""
        while self._files:
            os.close(self._files.pop())


def _write(file: int, content: bytes | memoryview, offset: int) -> None:
    view = memoryview(content)
    while view:
        count = os.pwrite(file, view, offset)
        view, offset = view[count:], offset + count
