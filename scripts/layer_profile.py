"""Where the time of one decoder layer goes, by plain PyTorch: a bound on what streaming can reach.

    python scripts/layer_profile.py --model 0.37b --tokens 1024
    python scripts/layer_profile.py --model 0.37b --tokens 1024 --compile
    python scripts/layer_profile.py --model 0.37b --tokens 1024 --products native --runs 1

One layer, forward and backward, with weights in memory and nothing else running. Prints the median seconds, the share
of the time in each kind of work, and the rate of the layer's own matrix products beside that of a large one. With
``--compile``, the layer runs through torch.compile, which needs a C++ compiler. ``--products`` and ``--dtype`` are a
run's ``engine.matrix_products`` and ``model.dtype``; compiled code has torch's own products.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the command line sets it, before torch is loaded

import torch
from torch import Tensor
from torch.profiler import profile
from transformers import AutoModelForCausalLM

from greedysnake.bench.models import bench_config
from greedysnake.engine.devices import make_device
from greedysnake.engine.opening import DTYPES
from greedysnake.engine.products import CHOICES
from greedysnake.plan.probe_compute import matrix_rate

KINDS = {"matrix products": ("mm", "addmm", "bmm"), "attention": ("scaled_dot_product",)}


def main() -> None:
    """Measure and print."""
    arguments = parse()
    torch.manual_seed(0)
    config = bench_config(arguments.model, arguments.tokens)
    config.num_hidden_layers = 1
    dtype = DTYPES[arguments.dtype]
    device = make_device("cpu", None, products="native" if arguments.compile else arguments.products)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).model
    layer = model.layers[0]
    hidden = torch.randn(1, arguments.tokens, config.hidden_size, dtype=dtype, requires_grad=True)
    gradient = torch.randn_like(hidden)
    positions = model.rotary_emb(hidden, torch.arange(arguments.tokens)[None])
    run = torch.compile(layer) if arguments.compile else layer

    def step() -> tuple[float, float]:
        start = time.perf_counter()
        output: Tensor = run(hidden, position_embeddings=positions, attention_mask=None)
        middle = time.perf_counter()
        output.backward(gradient)
        return middle - start, time.perf_counter() - middle

    with device.computing():
        times = [step() for _ in range(arguments.runs + arguments.uncounted)][arguments.uncounted :]
        found = shares(step, arguments.runs)
    forward, backward = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    print(f"forward {forward:.0f} ms, backward {backward:.0f} ms, {torch.get_num_threads()} threads")
    for kind, share in found.items():
        print(f"{kind:18} {share:4.0%}")
    matrices = sum(p.numel() for p in layer.parameters() if p.dim() == 2)
    needed = 6 * matrices * arguments.tokens
    rate = matrix_rate(device, dtype, 1536)
    print(f"all matrix products at the rate of a large one would take {1e3 * needed / rate:.0f} ms")


def shares(step: Callable[[], object], steps: int) -> dict[str, float]:
    """Share of the operators' time in each kind of work."""
    with profile() as found:
        for _ in range(steps):
            step()
    spent = dict.fromkeys((*KINDS, "everything else"), 0.0)
    for event in found.key_averages():
        name = event.key.removeprefix("aten::").lstrip("_")
        kind = next((kind for kind, starts in KINDS.items() if name.startswith(starts)), "everything else")
        spent[kind] += event.self_cpu_time_total
    return {kind: seconds / sum(spent.values()) for kind, seconds in spent.items()}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="0.37b", help="a Llama that greedysnake bench knows")
    parser.add_argument("--tokens", type=int, default=1024, help="of the one sequence")
    parser.add_argument("--runs", type=int, default=15, help="whose median is taken")
    parser.add_argument("--uncounted", type=int, default=3, help="runs before them")
    parser.add_argument("--dtype", default="bfloat16", choices=list(DTYPES))
    parser.add_argument("--products", default="auto", choices=CHOICES, help="how 16-bit matrices are multiplied")
    parser.add_argument("--compile", action="store_true", help="run the layer through torch.compile")
    return parser.parse_args()


if __name__ == "__main__":
    main()
