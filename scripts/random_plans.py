"""Random plans against the chosen one: how much faster than the planner's is the best of many that fit?

    python scripts/random_plans.py [--plans 200] [--model gpt-30b] [--sequences 16] [--machines a100-40gb ...]

Prints a line for each machine; the last column must not be above 1.05.
"""

import argparse
import random

from greedysnake.plan.hardware import load_hardware
from greedysnake.plan.presets import MODEL_PRESETS
from greedysnake.plan.query import PlanQuery, fits, simulate_case
from greedysnake.plan.random_cases import random_case
from greedysnake.plan.search import search


def main() -> None:
    """Draw, simulate, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=200)
    parser.add_argument("--model", default="gpt-30b")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--machines", nargs="+", default=["a100-40gb", "rtx4090-desktop", "laptop-rtx5090-24gb"])
    arguments = parser.parse_args()
    workload = MODEL_PRESETS[arguments.model].workload()
    print("| machine | clipping | plans that fit | chosen s | best random s | chosen / best |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in arguments.machines:
        for clipping in (False, True):
            query = PlanQuery(
                workload=workload,
                hardware=load_hardware(name),
                tokens=MODEL_PRESETS[arguments.model].tokens,
                sequences=arguments.sequences,
                clipping=clipping,
            )
            chosen = search(query).step.seconds
            rng, found = random.Random(0), []
            while len(found) < arguments.plans:
                case = random_case(query, arguments.sequences, rng)
                if fits(case.needs(query), query.limits):
                    found.append(simulate_case(case, query).step.seconds)
            ratio = chosen / min(found)
            print(f"| {name} | {clipping} | {len(found)} | {chosen:.1f} | {min(found):.1f} | {ratio:.3f} |", flush=True)


if __name__ == "__main__":
    main()
