"""A model folder of 1.1 B parameters: loaded, evaluated and exported by processes that may each use 4 GiB.

    python scripts/folders_1b.py [FOLDER]

FOLDER (default runs/folders-1b) takes 34 GB of disk. The model folder is made on the spot, a tensor at a time, so that
nothing in here ever holds the model. What is exported is compared with it, and each phase's peak of resident memory
is printed. To see that 4 GiB is enough, page cache included, start it inside a hard limit, for example

    systemd-run --scope -p MemoryMax=4G -p MemorySwapMax=0 python scripts/folders_1b.py
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from greedysnake import Trainer
from greedysnake.models.shards import INDEX_NAME, ShardWriter, TensorSize, index_of, plan_shards, read_header
from greedysnake.plan.host import process_peak_bytes
from greedysnake.units import format_bytes, parse_bytes

HOST_MEMORY = "4GiB"
SIZES = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}


def make_folder(folder: Path, sizes: dict[str, int | bool]) -> None:
    """A Llama with random bfloat16 weights."""
    config = AutoConfig.for_model("llama", **sizes, dtype="bfloat16", architectures=["LlamaForCausalLM"])
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).state_dict()
    tensors = {name: TensorSize.of(tensor) for name, tensor in state.items()}
    shards = plan_shards(tensors, 500 * 2**20)
    folder.mkdir(parents=True)
    with ShardWriter(folder, shards, tensors) as writer:
        for number, (name, size) in enumerate(tensors.items()):
            generator = torch.Generator().manual_seed(number)
            drawn = torch.randn(size.shape, generator=generator)
            writer.write(name, (1 + drawn if "norm" in name else 0.02 * drawn).bfloat16())
            writer.flush()
        writer.finish()
    (folder / INDEX_NAME).write_text(json.dumps(index_of(shards, tensors)))
    config.save_pretrained(folder)


def load(folder: Path) -> str:
    """Into a store."""
    Trainer(folder / "model", folder / "store", host_memory=HOST_MEMORY).close()
    return "from the model folder into the store"


def evaluate(folder: Path) -> str:
    """The loss of two sequences, after every byte of the store was checked."""
    ids = torch.randint(0, 32000, (2, 1, 512), generator=torch.Generator().manual_seed(0)) % SIZES["vocab_size"]
    with Trainer.resume(folder / "store", host_memory=HOST_MEMORY) as trainer:
        loss = trainer.evaluate([{"input_ids": row, "labels": row} for row in ids])
    return f"loss {loss:.4f}"


def export(folder: Path) -> str:
    """As it was, and as float32 masters."""
    with Trainer.resume(folder / "store", host_memory=HOST_MEMORY) as trainer:
        trainer.save_pretrained(folder / "same", max_shard_size="1GB")
        trainer.save_pretrained(folder / "masters", max_shard_size="1GB", dtype="float32")
    return "in bfloat16 and in float32"


def compare(folder: Path) -> str:
    """Every tensor of the exports with the one that was loaded."""
    count = 0
    places = [_places(folder / name) for name in ("model", "same", "masters")]
    for key in places[0]:
        original, same, master = (_tensor(place[key], key) for place in places)
        if same.dtype != original.dtype or not torch.equal(same, original) or not torch.equal(master, original.float()):
            raise SystemExit(f"{key} has changed on its way")
        count += 1
    return f"{count} tensors are the same in the model, its export and its float32 masters"


def _places(folder: Path) -> dict[str, Path]:
    """The file of each tensor in a model folder."""
    return {name: path for path in folder.glob("*.safetensors") for name in read_header(path)}


def _tensor(path: Path, key: str) -> torch.Tensor:
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(key)


PHASES = {"load": load, "evaluate": evaluate, "export": export, "compare": compare}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the phases, each in a process of its own; gives 1 if one of them took too much memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/folders-1b"))
    parser.add_argument("--phase", choices=list(PHASES), help="one alone, in this process")
    parser.add_argument("--small", action="store_true", help="a model of a few megabytes, to try the script")
    given = parser.parse_args(arguments)
    if given.small:
        SIZES.update(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=4)
    if given.phase:
        start = time.perf_counter()
        found = PHASES[given.phase](given.folder)
        print(json.dumps({"found": found, "peak": process_peak_bytes(), "seconds": time.perf_counter() - start}))
        return 0
    if given.folder.exists():
        raise SystemExit(f"{given.folder} exists already; name a folder to create")
    make_folder(given.folder / "model", SIZES)
    within = True
    for phase in PHASES:
        command = [sys.executable, __file__, str(given.folder), "--phase", phase, *(["--small"] if given.small else [])]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{phase} failed with {done.returncode}")
        report = json.loads(done.stdout.splitlines()[-1])
        within &= report["peak"] <= parse_bytes(HOST_MEMORY)
        peak = format_bytes(report["peak"])
        print(f"{phase}: {report['found']}; peak {peak} of {HOST_MEMORY}, {report['seconds']:.0f} s", flush=True)
    return int(not within)


if __name__ == "__main__":
    sys.exit(main())
