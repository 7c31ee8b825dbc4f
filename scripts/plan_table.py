"""The table of plans in docs/planning.md: presets on shipped profiles, as greedysnake plan finds them.

    python scripts/plan_table.py [--models gpt-30b ...] [--machines a100-40gb ...] [--clipping]

A line a plan, as soon as it is found; those that fit nowhere are left out. At the end, on stderr, the processor time
of each search.
"""

import argparse
import sys
import time

from greedysnake.errors import GreedySnakeError
from greedysnake.plan.forecast import SHOWN_RESOURCES, Forecast, forecast, where
from greedysnake.plan.hardware import load_hardware
from greedysnake.plan.presets import MODEL_PRESETS
from greedysnake.plan.query import PlanQuery
from greedysnake.plan.snapshots import DEFAULT_SNAPSHOT_STEPS
from greedysnake.schedule import Tier

TOKENS = 20e9
MACHINES = ("a100-40gb", "a100-80gb", "h200-141gb", "rtx4090-desktop", "laptop-rtx5090-24gb")
COLUMNS = (
    *("model", "machine", "tokens/s", "step s", "M x B", "α", "weights, state in host memory", "boundaries", "kept"),
    *("limited by", "disk TiB", "days for 20 B", "kWh", "of the disks' endurance, times"),
)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=sorted(MODEL_PRESETS, key=lambda name: int(name[4:-1])))
    parser.add_argument("--machines", nargs="+", default=list(MACHINES))
    parser.add_argument("--clipping", action="store_true")
    arguments = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}", flush=True)
    searched = []
    for model in arguments.models:
        preset = MODEL_PRESETS[model]
        workload = preset.workload()
        for machine in arguments.machines:
            query = PlanQuery(
                workload=workload,
                hardware=load_hardware(machine),
                tokens=preset.tokens,
                clipping=arguments.clipping,
                snapshot_every=DEFAULT_SNAPSHOT_STEPS,
            )
            start = time.process_time()
            try:
                print(line(forecast(query, helps=False)), flush=True)
            except GreedySnakeError:
                continue
            finally:
                searched.append(f"{model} on {machine}: searched for {time.process_time() - start:.1f} s")
    print("\n".join(searched), file=sys.stderr)


def line(found: Forecast) -> str:
    """One plan."""
    case, budget = found.candidate.case, found.budget(TOKENS)
    choices = case.choices
    shares = {
        Tier.DEVICE: choices.boundaries_on_device,
        Tier.HOST: 1 - choices.boundaries_on_device - choices.boundaries_on_ssd,
        Tier.SSD: choices.boundaries_on_ssd,
    }
    cells = (
        found.query.workload.name,
        found.query.hardware.name,
        f"{found.candidate.tokens_per_second:.4g}",
        f"{found.candidate.step.seconds:.0f}",
        f"{case.batch.micro_batches} x {case.batch.rows}",
        f"{choices.delayed_share:g}",
        f"{100 * choices.resident_weights:.0f} %, {100 * choices.resident_state:.0f} %",
        ", ".join(f"{100 * share:.0f} % {where(tier)}" for tier, share in shares.items() if share > 0.005),
        f"{100 * choices.kept_activations:.1f} %",
        f"{SHOWN_RESOURCES[found.bottleneck]} {100 * found.busy[found.bottleneck]:.0f} %",
        f"{found.needs.total(Tier.SSD) / 2**40:.2f}",
        f"{budget.days:,.0f}",
        "-" if budget.kilowatt_hours is None else f"{budget.kilowatt_hours:,.0f}",
        "-" if budget.endurance_share is None else f"{budget.endurance_share:.1f}",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
