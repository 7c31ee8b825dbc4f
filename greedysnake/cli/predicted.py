"""What the plan predicts of a run's steps, in words before it starts and beside what was measured when it ends."""

import statistics
from pathlib import Path
from typing import Any

from greedysnake.cli.record import RunRecord
from greedysnake.engine.trainer import Trainer
from greedysnake.plan.placement import Plan
from greedysnake.report.metrics import write_json_atomic
from greedysnake.report.run_files import HARDWARE
from greedysnake.report.wording import percent, seconds, tokens

COMPARED = ("step_seconds", "ssd_read_bytes", "ssd_write_bytes", "host_peak_bytes")


def describe_prediction(plan: Plan) -> str:
    """Where the plan comes from, and how long a step will take if that is known."""
    found = plan.prediction
    if found is None:
        return (
            "Plan: by a rule, as there are no figures of this machine. With them it is better, and a step's time is "
            "predicted: greedysnake probe --storage FOLDER --config CONFIG.yaml writes hardware.json here, which "
            "training then uses"
        )
    busiest = max(found.busy, key=lambda name: found.busy[name])
    basis = "layers measured" if found.measured else "the profile's rates, not this model's layers"
    return (
        f"Plan: from the figures of {found.machine} ({basis}): {percent(plan.choices.delayed_share)} of each update "
        f"delayed, {percent(plan.choices.resident_weights)} of weights and {percent(plan.choices.resident_state)} of "
        f"state in host memory; predicted {seconds(found.step_seconds)} a step, "
        f"{tokens(found.tokens_per_second)} tokens/s, {busiest} busy {percent(found.busy[busiest])}"
    )


def write_plan(run: Path, trainer: Trainer, steps: int) -> None:
    """``plan.json`` of a run of so many steps, and the machine's rates for the report where they are known.

    Raises:
        OSError: the folder cannot be written.
    """
    write_json_atomic(run / "plan.json", {"steps": steps, **(trainer.plan.as_json() if trainer.plan else {})})
    machine = trainer.settings.hardware
    if machine is not None:
        disk = machine.disk_rates
        rates = {
            "disk": {
                "read_bytes_per_s": disk.read,
                "write_bytes_per_s": disk.write,
                "mixed_bytes_per_s": disk.mixed_read + disk.mixed_write,
            },
            "h2d_bytes_per_s": machine.h2d,
            "d2h_bytes_per_s": machine.d2h,
            "optimizer_parameters_per_s": machine.optimizer,
        }
        write_json_atomic(run / HARDWARE, rates)


def predicted_and_measured(plan: Plan | None, record: RunRecord) -> dict[str, Any]:
    """For ``summary.json``: what a step was to take and took; of times and bytes the mean after the first step."""
    steady = [result for result in record.results[1:] or record.results if result.skipped is None]
    if plan is None or not steady:
        return {}
    found = plan.prediction
    predicted: dict[str, float | None] = dict.fromkeys(COMPARED)
    if found is not None:
        predicted |= {name: getattr(found, name) for name in COMPARED[:3]}
    predicted["host_peak_bytes"] = sum(plan.host_bytes.values())
    measured = {
        "step_seconds": statistics.mean(result.seconds for result in steady),
        "ssd_read_bytes": statistics.mean(result.ssd_read_bytes for result in steady),
        "ssd_write_bytes": statistics.mean(result.ssd_write_bytes for result in steady),
        "host_peak_bytes": max(result.host_peak_bytes for result in steady),
    }
    return {"predicted": predicted, "measured": measured}
