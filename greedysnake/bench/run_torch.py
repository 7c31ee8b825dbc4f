"""Runs one cell with plain PyTorch, everything in memory: what one would write by hand.

bfloat16 weights, float32 masters, moments and sums of gradients (18 bytes a parameter), activations recomputed layer
by layer or, with ``checkpointing`` false, all of a micro-batch's in memory, and torch's fused AdamW. ``products`` says
how matrices are multiplied; by default as torch does it.
"""

from greedysnake.bench.runner import BETAS, EPS, WEIGHT_DECAY, Report, read_job


def main() -> None:
    """Train and report."""
    job, report = read_job(), Report()
    import torch
    from torch import nn
    from transformers import AutoModelForCausalLM

    from greedysnake.engine.products import computing_products

    torch.set_num_threads(job.threads)
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.bfloat16, local_files_only=True).train()
    if job.settings.get("checkpointing", True):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    weights = list(model.parameters())
    for weight in weights:
        weight.grad_dtype = torch.float32
    masters = [nn.Parameter(weight.detach().float()) for weight in weights]
    optimizer = torch.optim.AdamW(masters, lr=job.lr, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True)
    report.line("ready")

    def step(batch: list[dict[str, torch.Tensor]]) -> tuple[float, float | None]:
        loss = 0.0
        for part in batch:
            mean = model(**part, use_cache=False).loss / len(batch)  # all micro-batches have as many tokens
            mean.backward()
            loss += mean.item()
        for master, weight in zip(masters, weights, strict=True):
            master.grad, weight.grad = weight.grad, None
        limit = float("inf") if job.max_grad_norm is None else job.max_grad_norm
        norm = nn.utils.clip_grad_norm_(masters, limit).item()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for master, weight in zip(masters, weights, strict=True):
                weight.copy_(master)
        return loss, norm

    with computing_products(job.settings.get("products", "native")):
        report.steps(job, step)
    report.done(torch=torch.__version__)


if __name__ == "__main__":
    main()
