"""The GreedySnake paper's claims, simulated: saturated throughput over ZeRO-Infinity's, for a range of machines.

    python scripts/paper_claims.py [--models gpt-65b gpt-175b] [--gpus 1] [--rows 1 2 4] [--host-memory 256 512]
        [--disks 0.5 1 2]

Published (arXiv 2512.17570): on one A100 1.96 for GPT-65B and 2.53 for GPT-175B, on four A100s 1.93 for GPT-65B. The
machine is the a100-40gb profile with other memory and disks, both systems with the same micro-batches, gradients not
clipped. Several GPUs are taken as one larger (greedysnake/plan/gpus.py). Ours is the best of a few placements at 16, 32
and 64 sequences a step and GPU; ZeRO-Infinity's order is taken at its asymptote, what one more micro-batch costs once
the optimizer's share of the step is gone, with as many 16-bit weights in host memory as fit beside its
16-bit gradients.
"""

import argparse

from greedysnake.plan.activations import BatchShape
from greedysnake.plan.gpus import as_one_device
from greedysnake.plan.hardware import load_hardware
from greedysnake.plan.presets import MODEL_PRESETS
from greedysnake.plan.query import PlanQuery
from greedysnake.plan.roofline import baseline_residents, baseline_seconds, best_of_few, on_other_machine
from greedysnake.plan.search import compute_roof

PUBLISHED = {("gpt-65b", 1): 1.96, ("gpt-65b", 4): 1.93, ("gpt-175b", 1): 2.53}
GIB = 2**30
COLUMNS = (
    *("model", "GPUs", "B", "host GiB", "SSD read, write GB/s"),
    *("ours tokens/s", "ZeRO-Infinity's order", "ratio", "published"),
)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gpt-65b", "gpt-175b"])
    parser.add_argument("--gpus", type=int, default=1, help="GPUs that share the disks and host memory")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4], help="sequences of a GPU's micro-batch")
    parser.add_argument("--host-memory", type=float, nargs="+", default=[256, 512], help="GiB a run may use")
    parser.add_argument("--disks", type=float, nargs="+", default=[0.5, 1.0, 2.0], help="factor on the disks' rates")
    arguments = parser.parse_args()
    machine = load_hardware("a100-40gb")
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
    for name in arguments.models:
        workload = MODEL_PRESETS[name].workload()
        several = as_one_device(machine, arguments.gpus, workload)
        base = PlanQuery(workload=workload, hardware=several, tokens=MODEL_PRESETS[name].tokens, clipping=False)
        for rows in arguments.rows:
            for host in arguments.host_memory:
                for factor in arguments.disks:
                    query = on_other_machine(base, host_memory=host * GIB, disks=factor)
                    print(line(query, name, arguments.gpus, rows, host), flush=True)


def line(query: PlanQuery, name: str, gpus: int, rows_each: int, host: float) -> str:
    """One line of the table."""
    rows = gpus * rows_each  # the GPUs' micro-batches are computed at the same time
    batches = [BatchShape(micro_batches=count // rows_each, rows=rows, tokens=query.tokens) for count in (16, 32, 64)]
    found = [best for batch in batches if (best := best_of_few(query, batch)) is not None]
    ours = max((best.tokens_per_second for best in found), default=0.0)
    few, more = (BatchShape(micro_batches=count, rows=rows, tokens=query.tokens) for count in (4, 8))
    gradients = 2 * query.workload.parameters
    resident = baseline_residents(query, more)
    apart = baseline_seconds(query, more, resident_weights=resident) - baseline_seconds(
        query, few, resident_weights=resident
    )
    theirs = (more.micro_batches - few.micro_batches) * rows * query.tokens / apart
    note = "" if gradients < query.hardware.host_memory else " (its gradients do not fit)"
    disk = query.hardware.disk_rates
    return (
        f"| {name} | {gpus} | {rows_each} | {host:g} | {disk.read / 1e9:.3g}, {disk.write / 1e9:.3g} | "
        + (f"{ours:.0f} of {compute_roof(query, batches[0]):.0f}" if ours else "does not fit")
        + f" | {theirs:.0f}, {resident:.0%} of weights in memory{note} | "
        + (f"{ours / theirs:.2f}" if ours else "-")
        + f" | {PUBLISHED.get((name, gpus), '-')} |"
    )


if __name__ == "__main__":
    main()
