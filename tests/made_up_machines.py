"""A small model, made-up machines, and plans for it on them."""

from dataclasses import replace
from functools import cache

from transformers import AutoConfig

from greedysnake.plan.describe import describe_model
from greedysnake.plan.hardware import Hardware
from greedysnake.plan.query import Candidate, PlanQuery
from greedysnake.plan.search import search

SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 32000,
    "max_position_embeddings": 1024,
}
SMALL = describe_model(AutoConfig.for_model("llama", **SIZES, tie_word_embeddings=False), name="small")
TIED = describe_model(AutoConfig.for_model("llama", **SIZES, tie_word_embeddings=True), name="tied")
GIB = 2**30


def machine(**changes: object) -> Hardware:
    """A machine on which the small model is neither bound by one resource alone nor rid of its disks."""
    figures: dict[str, object] = {
        "name": "made up",
        "disks": [
            {
                "name": "disk",
                "read": 2.0e9,
                "write": 1.5e9,
                "mixed_read": 1.2e9,
                "mixed_write": 0.9e9,
                "capacity": 64 * GIB,
                "endurance": 1e15,
            }
        ],
        "host_memory": 6 * GIB,
        "device_memory": 3 * GIB,
        "h2d": 10e9,
        "d2h": 10e9,
        "compute": {"bfloat16": {"matrix": 20e12, "forward": 0.5, "backward": 0.5, "head": 0.5}},
        "compute_memory": 5e11,
        "optimizer": 0.6e9,
        "copy_rate": 1e10,
        "operation_seconds": 1e-4,
        "watts": 100,
    }
    return Hardware.model_validate({**figures, **changes})


CPU_ONLY = {"device_memory": None, "h2d": None, "d2h": None, "shared_cores": {"compute": 0.8, "cpu": 0.6}}
MACHINES = {
    "accelerator": machine(),
    "slow disk": machine(
        disks=[{"name": "d", "read": 5e8, "write": 4e8, "mixed_read": 4e8, "mixed_write": 2e8, "capacity": 64 * GIB}]
    ),
    "cpu": machine(**CPU_ONLY),
}
BUSY_CPU = machine(**CPU_ONLY | {"shared_cores": {"compute": 0.8, "cpu": 0.6, "transfer": 1e-10}})
"""Where the disks' traffic takes time from computation too."""


def query(hardware: Hardware | None = None, **changes: object) -> PlanQuery:
    return replace(
        PlanQuery(workload=SMALL, hardware=hardware or MACHINES["accelerator"], tokens=1024, clipping=False),
        **changes,
    )


@cache
def plan_for(name: str, sequences: int, clipping: bool = False) -> Candidate:
    return search(query(MACHINES[name], sequences=sequences, clipping=clipping))
