"""What a training step will take: its own schedule, simulated with the machine's figures."""

from collections.abc import Callable
from dataclasses import dataclass

from greedysnake.models.skeleton import Skeleton
from greedysnake.plan.activations import BatchShape
from greedysnake.plan.hardware import Hardware
from greedysnake.plan.simulate import simulate
from greedysnake.plan.step_costs import costs_one_by_one, least_seconds, measured_times, step_costs
from greedysnake.plan.wishes import layer_workload
from greedysnake.schedule import Schedule, StepShape, one_by_one


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Of a step in the middle of a run.

    Attributes:
        machine: whose figures were used.
        measured: whether computation's times were measured with this model's own layers.
        step_seconds: of the mean step, snapshots included.
        snapshot_step_seconds: of a step in which a snapshot is taken.
        least_seconds: no order of the same work could take less.
        tokens_per_second: of full sequences.
        ssd_read_bytes, ssd_write_bytes: of the mean step.
        busy: share of the step in which each resource works.
    """

    machine: str
    measured: bool
    step_seconds: float
    snapshot_step_seconds: float
    least_seconds: float
    tokens_per_second: float
    ssd_read_bytes: float
    ssd_write_bytes: float
    busy: dict[str, float]


def predict(
    hardware: Hardware,
    skeleton: Skeleton,
    batch: BatchShape,
    shape: StepShape,
    build: Callable[..., Schedule],
    *,
    snapshot_every: int,
    overlap: bool = True,
) -> Prediction:
    """Simulate a plan's steps.

    Args:
        hardware: the machine.
        skeleton: the model.
        batch: sizes of the step's batch.
        shape: what schedules are built from.
        build: the schedule of a step, by ``pending`` and ``snapshot``.
        snapshot_every: steps between snapshots.
        overlap: whether operations of different resources run at the same time.

    Raises:
        ConfigError: the machine has no rates for the model's dtype.
    """
    workload = layer_workload(skeleton)
    costs = step_costs(hardware, workload, batch, layers_per_unit=len(skeleton.unit_layers[1]))
    schedules = [build(pending=True, snapshot=snapshot) for snapshot in (False, True)]
    if not overlap:
        schedules, costs = list(map(one_by_one, schedules)), costs_one_by_one(costs)
    plain, with_snapshot = (simulate(schedule, shape, costs) for schedule in schedules)

    def mean(name: str) -> float:
        usual, other = float(getattr(plain, name)), float(getattr(with_snapshot, name))
        return usual + (other - usual) / snapshot_every

    seconds = mean("seconds")
    return Prediction(
        machine=hardware.name,
        measured=measured_times(hardware, workload, batch) is not None,
        step_seconds=seconds,
        snapshot_step_seconds=with_snapshot.seconds,
        least_seconds=least_seconds(plain.schedule, shape, costs),
        tokens_per_second=batch.micro_batches * batch.rows * batch.tokens / seconds,
        ssd_read_bytes=mean("ssd_read_bytes"),
        ssd_write_bytes=mean("ssd_written_bytes"),
        busy={str(resource): share for resource, share in plain.busy_shares.items()},
    )
