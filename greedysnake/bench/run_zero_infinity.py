"""Runs one cell with DeepSpeed ZeRO-Infinity: parameters and optimizer state on NVMe, computation on the CPU.

Runs in an environment of its own (``greedysnake bench --install-zero-infinity``). The settings were tuned on CPUs, and
each has its reason beside it; ``docs/benchmark.md`` has them as a table.
"""

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from greedysnake.bench.runner import BETAS, EPS, WEIGHT_DECAY, Job, Report, read_job


@dataclass(frozen=True, kw_only=True)
class ZeroSettings:
    """DeepSpeed's settings.

    Attributes:
        parameters: ``nvme``, or ``cpu``: 16-bit weights stay in memory.
        optimizer: ``nvme`` or ``cpu``.
        parameter_buffers: for weights on their way from NVMe, each as large as the largest parameter.
        optimizer_buffers: for state on its way, each as large as the largest group of it; reading and writing behind
            the update takes up to twelve, and fewer end in an AssertionError; without, five are enough.
        group_elements: state is updated in groups of parameters; DeepSpeed ends a group with the parameter that brings
            it to so many elements or more.
        pipeline: whether state is read and written behind the update.
        in_memory_elements: parameters that are kept in memory although they belong on NVMe.
        prefetch_elements: parameters to fetch ahead.
        persistent_elements: smaller parameters (norms) always stay in memory.
        accumulate: type in which gradients of micro-batches are added; ``bf16`` is DeepSpeed's choice.
        block_bytes, queue_depth, io_threads: of asynchronous I/O.
        checkpointing: whether activations are recomputed layer by layer; else all of a micro-batch's stay in memory.
        reentrant: kind of checkpointing. Without, recomputed activations refer to swap buffers that are used again by
            then, and gradients are silently wrong.
        products: how matrices are multiplied, of ``greedysnake.engine.products.CHOICES``; DeepSpeed has torch's own.
    """

    parameters: str = "nvme"
    optimizer: str = "nvme"
    parameter_buffers: int = 5
    optimizer_buffers: int = 12
    group_elements: int = 3_000_000
    pipeline: bool = True
    in_memory_elements: int = 0
    prefetch_elements: int = 50_000_000
    persistent_elements: int = 100_000
    accumulate: str = "bf16"
    block_bytes: int = 1 << 20
    queue_depth: int = 16
    io_threads: int = 1
    checkpointing: bool = True
    reentrant: bool = True
    products: str = "native"


def zero_config(job: Job, settings: ZeroSettings, largest_elements: int) -> dict[str, Any]:
    """DeepSpeed's configuration.

    Args:
        job: what is to be done.
        settings: as above.
        largest_elements: of any parameter; buffers are as large.
    """
    unit = 1 << 16
    buffer = (largest_elements // unit + 1) * unit
    where = {"nvme_path": job.storage, "pin_memory": True}
    parameters: dict[str, Any] = {"device": settings.parameters, **where}
    if settings.parameters == "nvme":
        parameters |= {
            "buffer_count": settings.parameter_buffers,
            "buffer_size": buffer,
            "max_in_cpu": settings.in_memory_elements,
        }
    optimizer: dict[str, Any] = {"device": settings.optimizer, **where}
    if settings.optimizer == "nvme":
        optimizer |= {
            "buffer_count": settings.optimizer_buffers,
            "pipeline_read": settings.pipeline,
            "pipeline_write": settings.pipeline,
            "fast_init": False,
        }
    return {
        "train_micro_batch_size_per_gpu": job.rows,
        "gradient_accumulation_steps": job.micro_batches,
        "gradient_clipping": job.max_grad_norm or 0.0,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": settings.accumulate},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": job.lr, "betas": list(BETAS), "eps": EPS, "weight_decay": WEIGHT_DECAY},
        },
        "zero_optimization": {
            "stage": 3,
            "offload_param": parameters,
            "offload_optimizer": optimizer,
            "overlap_comm": False,  # there is one rank
            "contiguous_gradients": True,
            "reduce_bucket_size": max(largest_elements, 10_000_000),
            "sub_group_size": settings.group_elements,
            "stage3_max_live_parameters": 10**9,
            "stage3_max_reuse_distance": 0,  # its default keeps parameters until the swap buffers are exhausted
            "stage3_prefetch_bucket_size": settings.prefetch_elements,
            "stage3_param_persistence_threshold": settings.persistent_elements,
        },
        "aio": {
            "block_size": settings.block_bytes,
            "queue_depth": settings.queue_depth,
            "intra_op_parallelism": settings.io_threads,
            "single_submit": False,
            "overlap_events": True,
        },
    }


def main() -> None:
    """Train and report."""
    job, report = read_job(), Report()
    settings = ZeroSettings(**job.settings)
    single = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({"DS_ACCELERATOR": "cpu", "MASTER_PORT": str(20000 + os.getpid() % 20000), **single})
    import deepspeed  # type: ignore[import-not-found]  # of the other environment
    import torch
    import transformers
    from safetensors import safe_open

    from greedysnake.engine.products import computing_products

    torch.set_num_threads(job.threads)
    deepspeed.init_distributed(dist_backend="gloo", rank=0, world_size=1)
    config = transformers.AutoConfig.from_pretrained(job.model, local_files_only=True)
    with torch.device("meta"):
        sizes = [p.numel() for p in transformers.AutoModelForCausalLM.from_config(config).parameters()]
    ds = zero_config(job, settings, max(sizes))
    with deepspeed.zero.Init(config_dict_or_path=ds, dtype=torch.bfloat16):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    named = dict(model.named_parameters())
    for path in sorted(Path(job.model).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                with deepspeed.zero.GatheredParameters([named[name]], modifier_rank=0), torch.no_grad():
                    named[name].copy_(file.get_tensor(name))
    if settings.checkpointing:
        kind = {"use_reentrant": settings.reentrant}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kind)
    engine, *_ = deepspeed.initialize(model=model, config=ds, model_parameters=model.parameters())
    engine.train()
    report.line("ready")
    spent = dict.fromkeys(("forward", "backward", "update"), 0.0)

    def step(batch: list[dict[str, torch.Tensor]]) -> tuple[float, float | None]:
        loss = 0.0
        for part in batch:
            times = [time.perf_counter()]
            mean = engine(**part, use_cache=False).loss
            times.append(time.perf_counter())
            engine.backward(mean)  # divides by the number of micro-batches
            times.append(time.perf_counter())
            engine.step()
            times.append(time.perf_counter())
            for name, start, end in zip(spent, times, times[1:], strict=False):
                spent[name] += end - start
            loss += mean.item() / len(batch)
        norm = engine.get_global_grad_norm()
        return loss, None if norm is None else float(norm)

    with computing_products(settings.products):
        report.steps(job, step)
    versions = {"torch": torch.__version__, "deepspeed": deepspeed.__version__}
    report.done(**versions, settings=asdict(settings), seconds_of_all_steps=spent)


if __name__ == "__main__":
    main()
