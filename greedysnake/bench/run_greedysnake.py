"""Runs one cell with GreedySnake; the job's settings are those of ``greedysnake.Trainer``."""

from greedysnake.bench.runner import BETAS, EPS, WEIGHT_DECAY, Report, read_job


def main() -> None:
    """Train and report."""
    job, report = read_job(), Report()
    import torch

    from greedysnake import AdamW, Trainer
    from greedysnake.errors import GreedySnakeError
    from greedysnake.plan.activations import BatchShape
    from greedysnake.plan.hardware import Hardware

    torch.set_num_threads(job.threads)
    optimizer = AdamW(
        lr=job.lr,
        betas=BETAS,
        eps=EPS,
        weight_decay=WEIGHT_DECAY,
        decay_norms_and_biases=True,
        max_grad_norm=job.max_grad_norm,
    )
    settings = dict(job.settings)
    if "hardware" in settings:
        settings["hardware"] = Hardware.model_validate(settings["hardware"])
    try:
        trainer = Trainer(
            job.model,
            job.storage,
            optimizer=optimizer,
            batch=BatchShape(micro_batches=job.micro_batches, rows=job.rows, tokens=job.tokens),
            second_slot=job.second_slot,
            seed=job.seed,
            **settings,
        )
    except GreedySnakeError as error:
        report.line("refused", why=str(error))
        return
    plan = trainer.plan.as_json() if trainer.plan else {}
    report.line("ready")

    def step(batch: list[dict[str, torch.Tensor]]) -> tuple[float, float | None]:
        result = trainer.step(batch)
        return result.loss, result.grad_norm

    report.steps(job, step)
    trainer.close()  # applies what is delayed, and takes a snapshot: it has to work within the limits too
    told = ("choices", "host_memory", "reasons", "prediction")
    report.done(torch=torch.__version__, plan={name: plan.get(name) for name in told})


if __name__ == "__main__":
    main()
