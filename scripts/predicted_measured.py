"""What the planner predicts and what a run then does: seconds, peak host memory and bytes of a step, side by side.

    greedysnake probe --storage FOLDER --out hardware.json
    python scripts/predicted_measured.py FOLDER --hardware hardware.json
    python scripts/predicted_measured.py FOLDER --hardware hardware.json --models 0.37 --micro-batches 8 --alphas 0

For each model, number of micro-batches M and delayed share α: a trainer is made, its own schedule is simulated with the
figures of the hardware file, and the same schedule is run. Probe where you run: the same limits, the same paced disk.
The model's layers are measured directly before, as ``greedysnake probe --config`` does: a machine's speed drifts.

Every setting has a process of its own, and the results file (FOLDER/predicted_measured.json) is written after each one:
the script can be broken off, and goes on where it was when it is called again. Settings that failed are tried again.

- seconds: median of some steps after one that is not counted; predicted by simulation.
- host memory: most resident memory of the process during these steps (VmHWM, set back before them); predicted by the
  plan. What the process itself had when it was planned is taken off both.
- bytes: what the store counts in a step; predicted by the schedule.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the command line sets it, before torch is loaded

import torch
from measured_model import SIZES, model_config, random_batch

import greedysnake
from greedysnake.engine.devices import make_device
from greedysnake.plan.activations import BatchShape
from greedysnake.plan.describe import describe_model
from greedysnake.plan.hardware import Hardware, LayerTimes, load_hardware, save_hardware
from greedysnake.plan.probe_compute import layer_times, make_layer_probe
from greedysnake.plan.simulate import simulate
from greedysnake.plan.step_costs import least_seconds, measured_times, step_costs
from greedysnake.report.metrics import write_json_atomic
from greedysnake.report.trace import busy_shares
from greedysnake.schedule import Resource, Tier

MODELS: dict[str, dict[str, int]] = {
    "tiny": dict(zip(SIZES, (2, 64, 128, 4, 4), strict=True)) | {"vocabulary": 512},
    "0.1": dict(zip(SIZES, (8, 768, 2048, 12, 12), strict=True)) | {"vocabulary": 32000},
    "0.37": dict(zip(SIZES, (24, 1024, 2816, 16, 16), strict=True)) | {"vocabulary": 32000},
    "1.1": dict(zip(SIZES, (22, 2048, 5632, 32, 4), strict=True)) | {"vocabulary": 32000},
}
"""Llamas by billions of parameters."""
COMPARED = ("seconds", "host_bytes", "read_bytes", "written_bytes")


def main() -> None:
    """Measure what is asked for and not yet there, and print a line for each setting."""
    arguments = parse()
    if arguments.child is not None:
        return run_child(arguments)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    out: Path = arguments.out or arguments.folder / "predicted_measured.json"
    known = out.with_suffix(".hardware.json")
    save_hardware(load_hardware(arguments.hardware), known)
    found = json.loads(out.read_text(encoding="utf-8")) if out.exists() else []
    done = {name_of(result): result for result in found if "error" not in result and not arguments.again}
    print(HEADER, flush=True)
    for model in arguments.models:
        for micro_batches in arguments.micro_batches:
            for alpha in arguments.alphas:
                setting = {
                    "model": model,
                    "micro_batches": micro_batches,
                    "alpha": alpha,
                    "sequence": arguments.sequence,
                    "dtype": arguments.dtype,
                    "clipping": arguments.clipping,
                    "resident": arguments.resident,
                    "host_memory": arguments.host_memory,
                }
                name = name_of(setting)
                if name not in done:
                    done[name] = setting | measured_apart(arguments, setting, known)
                    others = [result for result in found if name_of(result) not in done]
                    write_json_atomic(out, [*others, *done.values()])
                print(line(done[name]), flush=True)
    return None


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder on the SSD to measure with; its store is removed each time")
    parser.add_argument("--hardware", required=True, help="what greedysnake probe wrote on this machine")
    parser.add_argument("--models", nargs="+", default=["0.1", "0.37", "1.1"], choices=list(MODELS))
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--alphas", nargs="+", default=["0", "planned"], help="delayed shares, or planned")
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--clipping", action="store_true", help="limit the gradient's norm")
    parser.add_argument("--resident", default="0", help="share of weights and state in host memory, or planned")
    parser.add_argument("--host-memory", default=None, help="of a run, such as 4GiB; by default what is free")
    parser.add_argument("--steps", type=int, default=3, help="steps measured, after one that is not")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds after which a setting is given up")
    parser.add_argument("--again", action="store_true", help="measure also what is in the results file")
    parser.add_argument("--out", type=Path, default=None, help="results file")
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)  # a setting to measure in this process
    return parser.parse_args()


def name_of(setting: dict[str, Any]) -> str:
    """What tells a setting from others."""
    names = ("model", "micro_batches", "alpha", "sequence", "dtype", "clipping", "resident", "host_memory")
    return " ".join(f"{name}={setting.get(name)}" for name in names)


def measured_apart(arguments: argparse.Namespace, setting: dict[str, Any], known: Path) -> dict[str, Any]:
    """A setting measured in a process of its own: what came of it, or the error that ended it."""
    result = arguments.folder / "setting.json"
    for task in ("layers", "step"):
        result.unlink(missing_ok=True)
        job = json.dumps({"task": task, "setting": setting, "known": str(known), "result": str(result)})
        command = [sys.executable, __file__, *sys.argv[1:], "--child", job]
        try:
            ended = subprocess.run(command, timeout=arguments.timeout, check=False)
        except subprocess.TimeoutExpired:
            return {"error": f"{task}: took more than {arguments.timeout:g} s"}
        finally:
            shutil.rmtree(arguments.folder / "store", ignore_errors=True)
        if not result.exists():
            return {"error": f"{task}: the process ended with {ended.returncode} and left no result"}
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        if "error" in found:
            break
    result.unlink(missing_ok=True)
    return found


def run_child(arguments: argparse.Namespace) -> None:
    """What the process of one setting does: measure, and leave a file whatever happens."""
    job = json.loads(arguments.child)
    setting, known = job["setting"], Path(job["known"])
    sizes = argparse.Namespace(**{name.replace("-", "_"): size for name, size in MODELS[setting["model"]].items()})
    sizes.sequence = setting["sequence"]
    try:
        if job["task"] == "layers":
            found = probe_layers(sizes, setting, known)
        else:
            found = measure(arguments, sizes, setting, load_hardware(known))
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"}
    write_json_atomic(Path(job["result"]), found)


def probe_layers(sizes: argparse.Namespace, setting: dict[str, Any], known: Path) -> dict[str, Any]:
    """Measure the model's layers, in place of what the hardware file had for them."""
    hardware, config = load_hardware(known), model_config(sizes)
    before = measured_times(hardware, describe_model(config, dtype=setting["dtype"]), batch_shape(setting))
    device = make_device("cpu", None)
    probe = make_layer_probe(config, setting["dtype"], 1, setting["sequence"], device)
    try:
        times: LayerTimes = layer_times(probe, setting["dtype"], seconds=8.0)
    finally:
        probe.model.close()
        device.close()
    others = tuple(one for one in hardware.layer_times if one is not before)
    save_hardware(hardware.model_copy(update={"layer_times": (*others, times)}), known)
    return {}


def batch_shape(setting: dict[str, Any]) -> BatchShape:
    """One sequence a micro-batch."""
    return BatchShape(micro_batches=setting["micro_batches"], rows=1, tokens=setting["sequence"])


def planned_settings(setting: dict[str, Any]) -> dict[str, Any]:
    """What of the trainer's settings the setting gives; None leaves it to the planner."""
    resident = None if setting["resident"] == "planned" else float(setting["resident"])
    return {
        "delayed_share": None if setting["alpha"] == "planned" else float(setting["alpha"]),
        "resident_weights": resident,
        "resident_state": resident,
    }


def measure(
    arguments: argparse.Namespace, sizes: argparse.Namespace, setting: dict[str, Any], hardware: Hardware
) -> dict[str, Any]:
    """Predict the trainer's own steps, then make them."""
    torch.manual_seed(0)
    batch, shape = random_batch(sizes, setting["micro_batches"]), batch_shape(setting)
    workload = describe_model(model_config(sizes), dtype=setting["dtype"])
    with greedysnake.Trainer(
        model_config(sizes),
        arguments.folder / "store",
        optimizer=greedysnake.AdamW(lr=1e-5, max_grad_norm=1.0 if setting["clipping"] else None),
        batch=shape,
        dtype=setting["dtype"],
        host_memory=setting["host_memory"],
        hardware=hardware,
        **planned_settings(setting),
    ) as trainer:
        plan = trainer.plan
        if plan is None:
            raise RuntimeError("a trainer that was given its batch has no plan")
        trainer.step(batch)
        peak_was_set_back = set_peak_back()
        results = [trainer.step(batch) for _ in range(arguments.steps)]
        last = results[-1]
        if last.schedule is None:
            raise RuntimeError("the last step was skipped")
        costs = step_costs(hardware, workload, shape)
        simulated = simulate(last.schedule, plan.shape, costs)
        busy = busy_shares(last.events, last.seconds)
        seconds = [result.seconds for result in results]
        return {
            "parameters": workload.parameters,
            "choices": plan.as_json()["choices"],
            "predicted": {
                "seconds": simulated.seconds,
                "host_bytes": sum(size for name, size in plan.host_bytes.items() if name != "process"),
                "read_bytes": simulated.ssd_read_bytes,
                "written_bytes": simulated.ssd_written_bytes,
                "least_seconds": least_seconds(last.schedule, plan.shape, costs),
                "live_buffers": simulated.peak_bytes[Tier.HOST],
                "host_by_purpose": plan.host_bytes,
                "busy": {str(resource): share for resource, share in simulated.busy_shares.items()},
            },
            "measured": {
                "seconds": statistics.median(seconds),
                "host_bytes": last.host_peak_bytes - plan.host_bytes["process"],
                "read_bytes": last.ssd_read_bytes,
                "written_bytes": last.ssd_write_bytes,
                "all_seconds": seconds,
                "host_peak_bytes": last.host_peak_bytes,
                "peak_was_set_back": peak_was_set_back,
                "busy": {str(resource): busy[resource] for resource in Resource},
            },
        }


def set_peak_back() -> bool:
    """Have the kernel count this process's most resident memory from now on; False if it does not let us."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


HEADER = (
    "model  M  α        step s: predicted  measured  ratio | host GiB: predicted  measured  ratio | "
    "read GB: predicted  measured  ratio | written GB: predicted  measured  ratio"
)


def line(result: dict[str, Any]) -> str:
    """A setting's figures; a ratio above 1 means more than was predicted."""
    start = f"{result['model']:5} {result['micro_batches']:>2}"
    if "error" in result:
        return f"{start}  {result['alpha']:7} failed: {result['error']}"
    alpha = f"{result['choices']['delayed_share']:.2f}{'*' if result['alpha'] == 'planned' else ' '}"
    parts = []
    for name, unit in zip(COMPARED, (1, 2**30, 1e9, 1e9), strict=True):
        predicted, measured = (result[which][name] / unit for which in ("predicted", "measured"))
        ratio = f"{measured / predicted:5.2f}" if predicted else "    -"
        parts.append(f"{predicted:17.3f}  {measured:8.3f}  {ratio}")
    return f"{start}  {alpha:7} " + " | ".join(parts)


if __name__ == "__main__":
    main()
