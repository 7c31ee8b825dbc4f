"""What a machine computes: matrix products, the units of a model, the optimizer, copies."""

import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PretrainedConfig

from greedysnake.engine.devices import Device
from greedysnake.models.layout import Chunk, Piece
from greedysnake.models.lora import Lora
from greedysnake.models.skeleton import Skeleton, build_skeleton
from greedysnake.models.streaming import StreamedModel
from greedysnake.optim import AdamW, ChunkUpdater, UpdateScalars
from greedysnake.plan.describe import DTYPES, describe_skeleton
from greedysnake.plan.hardware import LayerTimes
from greedysnake.plan.host import trim_heap
from greedysnake.plan.probe_passes import EVERY, Passes

CHUNK_ELEMENTS = 4 * 2**20
_COPY_BYTES = 256 * 2**20


def seconds_of(work: Callable[[], object], *, least_seconds: float = 0.5, least_runs: int = 3) -> float:
    """Median seconds of some runs of ``work``, after one that does not count."""
    work()
    runs: list[float] = []
    while len(runs) < least_runs or sum(runs) < least_seconds:
        start = time.perf_counter()
        work()
        runs.append(time.perf_counter() - start)
    return statistics.median(runs)


def matrix_rate(device: Device, dtype: torch.dtype, size: int) -> float:
    """Floating-point operations per second of a product of two square matrices.

    Args:
        device: where.
        dtype: of the matrices.
        size: rows and columns.
    """
    left, right = (torch.randn(size, size, device=device.torch_device).to(dtype) for _ in range(2))

    def product() -> None:
        torch.matmul(left, right)
        device.synchronize()

    with device.computing():
        return 2 * size**3 / seconds_of(product)


def copy_rate() -> float:
    """Bytes per second copied within host memory, by one thread as the executor's copies are."""
    source, target = (torch.ones(_COPY_BYTES, dtype=torch.uint8) for _ in range(2))
    with one_thread():
        return _COPY_BYTES / seconds_of(lambda: target.copy_(source))


def device_rates(device: Device) -> tuple[float, float]:
    """Bytes per second to and from a separate device."""
    host, memory = torch.ones(_COPY_BYTES, dtype=torch.uint8), device.allocate(_COPY_BYTES)
    device.prepare_host(host)
    to = _COPY_BYTES / seconds_of(lambda: device.copy(memory, host))
    back = _COPY_BYTES / seconds_of(lambda: device.copy(host, memory))
    return to, back


def memory_rate(device: Device) -> float:
    """Bytes per second of traffic with the memory that computation uses: a copy reads and writes."""
    source, target = (torch.ones(_COPY_BYTES // 4, device=device.torch_device) for _ in range(2))

    def move() -> None:
        target.copy_(source)
        device.synchronize()

    return 2 * _COPY_BYTES / seconds_of(move)


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for torch, as the executor gives the optimizer and copies."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class OptimizerWork:
    """One chunk's update, over and over.

    Args:
        dtype: of the weights.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        count = CHUNK_ELEMENTS
        pieces = (Piece(start=0, elements=count, decay=True),)
        self._chunk = Chunk(dtype=dtype, elements=count, weight_offset=0, gradient_offset=0, pieces=pieces)
        self._updater = ChunkUpdater(AdamW(lr=1e-5), count)
        self._weights = torch.zeros(self._chunk.weight_bytes, dtype=torch.uint8)
        self._state = torch.zeros(self._chunk.state_bytes, dtype=torch.uint8)
        self._gradient = torch.full((count,), 1e-3)

    def update(self) -> None:
        """Update the chunk."""
        scalars = UpdateScalars(lr=1e-5, number=1, clip=1.0)
        self._updater.update(self._chunk, self._weights, self._state, self._gradient, scalars)

    def rate(self) -> float:
        """Parameters per second, on one thread."""
        with one_thread():
            return CHUNK_ELEMENTS / seconds_of(self.update)


@dataclass(frozen=True, kw_only=True)
class LayerProbe:
    """A model of one decoder layer, alive in memory."""

    skeleton: Skeleton
    model: StreamedModel
    weights: list[Tensor]
    gradients: list[Tensor]
    rows: int
    tokens: int
    device: Device


def one_layer(config: PretrainedConfig) -> PretrainedConfig:
    """The config with a single decoder layer."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = 1
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(getattr(text, name, None), list):
            setattr(text, name, getattr(text, name)[:1])
    return config


def make_layer_probe(
    config: PretrainedConfig,
    dtype: str,
    rows: int,
    tokens: int,
    device: Device,
    *,
    freeze: Sequence[str] = (),
    lora: Lora | None = None,
) -> LayerProbe:
    """Build the model with one layer and random weights.

    Args:
        config: of the whole model.
        dtype: of its weights.
        rows, tokens: of a micro-batch.
        device: where to compute.
        freeze: patterns over names of parameters that are not trained. Where one layer cannot stand for all, or has
            nothing to train, all of it is.
        lora: adapters that are trained instead, likewise.

    Raises:
        ModelError: the model cannot be built, or not be run layer by layer.
        ConfigError: a pattern or the adapters do not fit the model.
    """
    skeleton = _one_layer_skeleton(config, dtype, freeze, lora)
    weights, gradients = [], []
    for layout in skeleton.layouts:
        memory = device.allocate(layout.weight_bytes)
        for slot in layout.parameters:
            slot.weight(memory).normal_(0, 0.02)
        weights.append(memory)
        gradients.append(device.allocate(4 * layout.gradient_elements).zero_().view(torch.float32))
    model = StreamedModel(skeleton, 0, device.torch_device)
    return LayerProbe(
        skeleton=skeleton, model=model, weights=weights, gradients=gradients, rows=rows, tokens=tokens, device=device
    )


def _one_layer_skeleton(config: PretrainedConfig, dtype: str, freeze: Sequence[str], lora: Lora | None) -> Skeleton:
    frozen: list[str] = []
    if freeze or lora is not None:
        whole = build_skeleton(config, dtype=DTYPES[dtype], freeze=freeze, lora=lora)
        layers = set(describe_skeleton(whole, dtype=dtype).parts[1:-1])
        if len(layers) > 1 or not whole.layouts[1].chunks:
            lora = None
        elif lora is None:
            frozen = [slot.name for layout in whole.layouts for slot in layout.parameters if not slot.trainable]
    # by name: patterns may speak of layers that are not there
    return build_skeleton(one_layer(config), dtype=DTYPES[dtype], frozen=frozen, lora=lora)


def _pass(probe: LayerProbe, times: dict[str, list[float]], *, kept: bool, micro_batches: int) -> None:
    """Some micro-batches forward and backward, each part timed.

    Args:
        probe: the model.
        times: what each part took.
        kept: whether the layer's activations stay from forward to backward.
        micro_batches: how many.
    """
    skeleton, model = probe.skeleton, probe.model
    vocabulary = int(skeleton.model.config.get_text_config().vocab_size)
    ids = torch.randint(0, vocabulary, (probe.rows, probe.tokens))
    batches = [{"input_ids": ids, "labels": ids}] * micro_batches
    if kept:
        trim_heap()  # in a step, too, what is kept comes into memory that the kernel has yet to map
    model.begin(batches, step=0, target_tokens=micro_batches * ids.numel(), kept_bytes=sys.maxsize if kept else 0)
    head, tied, how = len(skeleton.layouts) - 1, skeleton.structure.tied, "_kept" if kept else ""

    def timed(name: str, units: list[int], work: Callable[[], object], *, gradients: bool) -> None:
        start = time.perf_counter()
        for unit in units:
            skeleton.attach(unit, probe.weights[unit], probe.gradients[unit] if gradients else None)
        work()
        for unit in units:
            skeleton.detach(unit)
        probe.device.synchronize()
        times.setdefault(name, []).append(time.perf_counter() - start)

    parts: tuple[tuple[str, list[int], Callable[[int], object], bool], ...] = (
        ("embedding_forward", [0], lambda m: model.forward(0, m, probe.weights[0]), False),
        (f"layer{how}_forward", [1], lambda m: model.forward(1, m, probe.weights[1], keep=kept), False),
        ("head_backward", [head, 0] if tied else [head], model.head, True),
        (f"layer{how}_backward", [1], lambda m: model.backward(1, m, probe.weights[1]), True),
        ("embedding_backward", [0], lambda m: model.backward(0, m, probe.weights[0]), True),
    )
    for name, units, work, gradients in parts:
        if name == "embedding_backward" and skeleton.first_trained > 0:  # nothing there is trained
            times[name] = [0.0]
            continue
        with probe.device.computing():
            for micro_batch in range(micro_batches):
                timed(name, units, partial(work, micro_batch), gradients=gradients)
        if kept and micro_batches > 1:
            del times[name][-micro_batches]  # of the first, what is not kept does so as well


def first_pass(probe: LayerProbe) -> float:
    """Seconds of one micro-batch's way forward and back, the first: later ones are no slower."""
    start = time.perf_counter()
    _pass(probe, {}, kept=False, micro_batches=1)
    return time.perf_counter() - start


def mean_passes(
    probe: LayerProbe,
    *,
    seconds: float,
    kept: Sequence[bool] = EVERY.kept,
    micro_batches: int = EVERY.micro_batches,
) -> dict[str, float]:
    """Mean seconds of each part: a step is a sum of many, fast ones and slow ones.

    Args:
        probe: the model.
        seconds: to measure for; each pass is made at least once.
        kept: for each pass, whether the layer's activations stay.
        micro_batches: of each pass.
    """
    times: dict[str, list[float]] = {}
    start = time.perf_counter()
    while not times or time.perf_counter() - start < seconds:
        for stay in kept:
            _pass(probe, times, kept=stay, micro_batches=micro_batches)
    return {name: statistics.fmean(values) for name, values in times.items()}


def layer_times(probe: LayerProbe, dtype: str, *, seconds: float, passes: Passes = EVERY) -> LayerTimes:
    """Mean times of embedding, layer and head for one micro-batch of several in turn.

    Args:
        probe: the model.
        dtype: of its weights.
        seconds: to measure for; longer where the passes take longer.
        passes: at least.
    """
    if passes.warm_up:  # first passes are slower
        mean_passes(probe, seconds=0, kept=passes.kept, micro_batches=passes.micro_batches)
    found = mean_passes(probe, seconds=seconds, kept=passes.kept, micro_batches=passes.micro_batches)
    config = probe.skeleton.model.config.get_text_config()
    return LayerTimes(
        layer_parameters=sum(slot.elements for slot in probe.skeleton.layouts[1].parameters),
        trained_parameters=probe.skeleton.trained_count,
        hidden=int(config.hidden_size),
        vocabulary=int(config.vocab_size),
        dtype=dtype,  # type: ignore[arg-type]  # checked by pydantic
        rows=probe.rows,
        tokens=probe.tokens,
        head_forward=found["head_backward"] / 3,
        **found,
    )
