"""Measure this machine for the planner, in less than two minutes."""

import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from greedysnake.engine.devices import Device, make_device
from greedysnake.models.lora import Lora
from greedysnake.plan import probe_compute
from greedysnake.plan.activations import BatchShape
from greedysnake.plan.describe import DTYPES, describe_skeleton
from greedysnake.plan.hardware import ComputeRates, Hardware, LayerTimes, SharedCores
from greedysnake.plan.host import usable_bytes
from greedysnake.plan.probe_disk import measure_disks
from greedysnake.plan.probe_passes import EVERY, LEAST_BESIDE, passes_within
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
USUAL_SECONDS = 4.0
"""For each rate."""
_MOST_SECONDS = 115.0
"""Of the whole probe, with so many for each rate: where a layer takes long, it is measured fewer times."""
_COMPUTE = "compute and shares of the matrix rate"
_MEASURED = ("disks", "host_memory", _COMPUTE, "compute_memory", "optimizer", "copy_rate")
_OF_A_DEVICE = ("device_memory", "h2d and d2h")
_DEFAULTS = "operation_seconds and step_seconds"


def probe_machine(
    folders: Sequence[Path],
    *,
    config: PretrainedConfig | None = None,
    dtype: str = "bfloat16",
    rows: int = 1,
    tokens: int = _SAMPLE_TOKENS,
    freeze: Sequence[str] = (),
    lora: Lora | None = None,
    device: str = "auto",
    products: str = "auto",
    seconds: float = USUAL_SECONDS,
    say: Callable[[str], None] = lambda text: None,
) -> Hardware:
    """Measure disks, copies, computation, optimizer and free memory.

    Args:
        folders: storage folders, measured one by one and together.
        config: of a model whose layers are measured; None for a small sample.
        dtype: of its weights.
        rows, tokens: of a micro-batch.
        freeze: patterns over names of parameters that are not trained.
        lora: adapters that are trained instead of the model's own parameters.
        device, products: as for training.
        seconds: for each rate; with more than usual the whole takes longer in proportion.
        say: told what is being done.

    Raises:
        StorageError: a folder cannot be used.
        ModelError: the model cannot be built.
        ConfigError: a pattern or the adapters do not fit the model.
    """
    deadline = time.monotonic() + _MOST_SECONDS * max(1.0, seconds / USUAL_SECONDS)
    where = make_device(device, None, products=products)
    try:
        say("disks: reads, writes, both together")
        disks, together = measure_disks(folders, seconds=seconds)
        figures = measure_computer(
            where,
            folders[0],
            config=config,
            dtype=dtype,
            batch=BatchShape(micro_batches=1, rows=rows, tokens=tokens),
            freeze=freeze,
            lora=lora,
            seconds=seconds,
            deadline=deadline,
            say=say,
        )
    finally:
        where.close()
    return Hardware(name=platform.node() or "this machine", disks=tuple(disks), together=together, **figures)


def measure_computer(
    where: Device,
    folder: Path,
    *,
    config: PretrainedConfig | None,
    dtype: str,
    batch: BatchShape,
    freeze: Sequence[str] = (),
    lora: Lora | None = None,
    seconds: float,
    deadline: float,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Everything but the disks, and where all figures come from, as fields of :class:`Hardware`.

    Args:
        where: device to compute on.
        folder: on a disk, which computation is measured beside.
        config, dtype, freeze, lora, seconds, say: as of :func:`probe_machine`.
        batch: sizes of a micro-batch.
        deadline: when the last figure should be there (seconds of ``time.monotonic``).
    """
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
    free, host = where.free_bytes(), usable_bytes()  # before the layer's weights and gradients take some
    sources = dict.fromkeys(_MEASURED + (_OF_A_DEVICE if where.separate else ()), _measured_with())
    sources |= {"shared_cores": _measured_with(), _DEFAULTS: "assumed: as for any machine"}

    say("one layer of the model, forward and backward")
    layer = probe_compute.make_layer_probe(
        config or _sample(), dtype, batch.rows, batch.tokens, where, freeze=freeze, lora=lora
    )
    shared = None
    try:
        workload = describe_skeleton(layer.skeleton, dtype=dtype)
        micro_batch = probe_compute.first_pass(layer)
        passes = passes_within(
            deadline - time.monotonic(), micro_batch, seconds=seconds, shares_cores=not where.separate
        )
        if passes != EVERY:
            say(f"it with fewer passes than usual, as a micro-batch takes {micro_batch:.1f} s")
            sources[_COMPUTE] += ", with fewer passes than usual"
        times = probe_compute.layer_times(layer, dtype, seconds=2 * seconds, passes=passes)
        if not where.separate and passes.rounds:
            say("the layer beside the optimizer, and beside the disks")
            shared = shared_cores(layer, optimizer, folder, optimizer_rate, seconds=seconds, passes=passes)
    finally:
        layer.model.close()
    del layer
    if where.separate:
        shared, sources["shared_cores"] = SharedCores(), "assumed: nothing is shared, as the device has its own cores"
    elif shared is None:
        say("a small layer beside the optimizer, and beside the disks")
        small = probe_compute.make_layer_probe(_sample(), dtype, 1, _SAMPLE_TOKENS, where)
        try:
            shared = shared_cores(small, optimizer, folder, optimizer_rate, seconds=seconds, passes=LEAST_BESIDE)
        finally:
            small.model.close()
        sources["shared_cores"] += ", with a small layer, as the model's own takes long"
    return {
        "host_memory": host,
        "device_memory": host if where.separate and free is None else free,
        "h2d": to,
        "d2h": back,
        "compute": {dtype: _rates(workload, batch, times, matrix)},
        "compute_memory": memory,
        "optimizer": optimizer_rate,
        "copy_rate": copying,
        "shared_cores": shared,
        "layer_times": (times,),
        "sources": sources,
    }


def _measured_with() -> str:
    return f"measured by greedysnake probe with torch {torch.__version__}, {torch.get_num_threads()} threads"


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
