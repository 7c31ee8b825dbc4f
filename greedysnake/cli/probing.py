"""What ``greedysnake probe`` does: measure, say what is being measured, and write the figures down."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from greedysnake.cli.model import lora_of, model_config
from greedysnake.config import load_config
from greedysnake.plan.hardware import Hardware, save_hardware
from greedysnake.plan.probe import probe_machine
from greedysnake.report import wording
from greedysnake.report.wording import rate
from greedysnake.units import format_bytes


def run_probe(
    storage: Sequence[Path], out: Path, config: Path | None, console: Console, *, seconds: float = 4.0
) -> Hardware:
    """Measure this machine and write the figures to ``out``.

    Args:
        storage: storage folders.
        out: file to write.
        config: settings of a run whose model's layers are measured; None for a small sample.
        console: where progress goes.
        seconds: for each rate.

    Raises:
        GreedySnakeError: a folder, the settings or the model cannot be used, or ``out`` cannot be written.
    """
    start = time.monotonic()
    model: dict[str, Any] = {}
    if config is not None:
        settings = load_config(config)
        model = {
            "config": model_config(settings),
            "dtype": settings.model.dtype,
            "rows": settings.training.micro_batch_size,
            "tokens": settings.data.sequence_length,
            "freeze": settings.training.freeze or (),
            "lora": lora_of(settings),
            "device": settings.engine.device,
            "products": settings.engine.matrix_products,
        }

    def say(text: str) -> None:
        console.print(f"{time.monotonic() - start:5.0f} s  measuring {text} ...")

    hardware = probe_machine(storage, say=say, seconds=seconds, **model)
    save_hardware(hardware, out)
    disk, times = hardware.disk_rates, hardware.layer_times[0]
    dtype, rates = next(iter(hardware.compute.items()))
    console.print(
        f"{time.monotonic() - start:5.0f} s  done\n"
        f"disks        read {rate(disk.read)}, write {rate(disk.write)}, "
        f"both together {rate(disk.mixed_read)} and {rate(disk.mixed_write)}\n"
        f"memory       {format_bytes(hardware.host_memory)} for a run; copies {rate(hardware.copy_rate)}\n"
        f"computation  {rates.matrix / 1e12:.3g} TFLOP/s in {dtype} matrix products, "
        f"{100 * rates.forward:.0f} % of it in a layer's forward, {100 * rates.backward:.0f} % in its backward\n"
        f"one layer    {times.layer_parameters / 1e6:.3g} M parameters, {times.rows} x {times.tokens} tokens: forward "
        f"{wording.seconds(times.layer_forward)}, recompute and backward {wording.seconds(times.layer_backward)}\n"
        f"optimizer    {hardware.optimizer / 1e9:.3g} G parameters/s\n"
        f"Wrote {escape(str(out))}; use it with: greedysnake plan CONFIG --hardware {escape(str(out))}"
    )
    return hardware
