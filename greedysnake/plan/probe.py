"""Measure this machine for the planner, in less than two minutes."""

import platform
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, PretrainedConfig

from greedysnake.engine.devices import make_device
from greedysnake.plan import probe_compute
from greedysnake.plan.activations import BatchShape
from greedysnake.plan.describe import DTYPES, describe_model
from greedysnake.plan.hardware import ComputeRates, Hardware, LayerTimes, SharedCores
from greedysnake.plan.host import usable_bytes
from greedysnake.plan.probe_disk import measure_disks
from greedysnake.plan.probe_shared import shared_cores
from greedysnake.plan.workload import Workload

_SAMPLE = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
"""A layer to measure with where no model is named."""
_SAMPLE_TOKENS = 512
_MATRIX_SIZES = {"cpu": 1536, "cuda": 8192}


def probe_machine(
    folders: Sequence[Path],
    *,
    config: PretrainedConfig | None = None,
    dtype: str = "bfloat16",
    rows: int = 1,
    tokens: int = _SAMPLE_TOKENS,
    device: str = "auto",
    seconds: float = 4.0,
    say: Callable[[str], None] = lambda text: None,
) -> Hardware:
    """Measure disks, copies, computation, optimizer and free memory.

    Args:
        folders: storage folders, measured one by one and together.
        config: of a model whose layers are measured; None for a small sample.
        dtype: of its weights.
        rows, tokens: of a micro-batch.
        device: as for training.
        seconds: for each rate.
        say: told what is being done.

    Raises:
        StorageError: a folder cannot be used.
        ModelError: the model cannot be built.
    """
    where = make_device(device, None)
    say("disks: reads, writes, both together")
    disks, together = measure_disks(folders, seconds=seconds)
    say("copies and memory")
    copying = probe_compute.copy_rate()
    to, back = probe_compute.device_rates(where) if where.separate else (None, None)
    memory = probe_compute.memory_rate(where)
    say("the optimizer")
    optimizer = probe_compute.OptimizerWork(DTYPES[dtype])
    optimizer_rate = optimizer.rate()
    say("matrix products")
    kind = where.torch_device.type
    matrix = probe_compute.matrix_rate(where, DTYPES[dtype], _MATRIX_SIZES.get(kind, _MATRIX_SIZES["cpu"]))
    say("one layer of the model, forward and backward")
    config = config or _sample()
    workload = describe_model(config, dtype=dtype)
    batch = BatchShape(micro_batches=1, rows=rows, tokens=tokens)
    layer = probe_compute.make_layer_probe(config, dtype, rows, tokens, where)
    try:
        times = probe_compute.layer_times(layer, dtype, seconds=2 * seconds)
        shared = SharedCores()
        if not where.separate:
            say("the layer beside the optimizer, and beside the disks")
            shared = shared_cores(layer, optimizer, folders[0], optimizer_rate, seconds=seconds)
    finally:
        layer.model.close()
    free = where.free_bytes()
    host = usable_bytes()
    where.close()
    return Hardware(
        name=platform.node() or "this machine",
        disks=tuple(disks),
        together=together,
        host_memory=host,
        device_memory=None if free is None else int(0.95 * free),
        h2d=to,
        d2h=back,
        compute={dtype: _rates(workload, batch, times, matrix)},  # type: ignore[dict-item]  # checked by pydantic
        compute_memory=memory,
        optimizer=optimizer_rate,
        copy_rate=copying,
        shared_cores=shared,
        layer_times=(times,),
        sources=dict.fromkeys(
            ("disks", "copies", "optimizer", "compute"),
            f"measured by greedysnake probe with torch {torch.__version__}, {torch.get_num_threads()} threads",
        ),
    )


def _sample() -> PretrainedConfig:
    settings = dict(_SAMPLE)
    return AutoConfig.for_model(str(settings.pop("model_type")), **settings)


def _rates(workload: Workload, batch: BatchShape, times: LayerTimes, matrix: float) -> ComputeRates:
    """Shares of the matrix rate that the measured units reach."""
    flops = workload.flops(batch)
    reached = {
        "forward": flops[1].forward / times.layer_forward,
        "backward": flops[1].backward / times.layer_backward,
        "head": flops[-1].backward / times.head_backward,
    }
    matrix = max(matrix, *reached.values())
    return ComputeRates(matrix=matrix, **{name: rate / matrix for name, rate in reached.items()})
