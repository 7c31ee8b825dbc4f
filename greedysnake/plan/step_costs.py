"""From a machine and a model to what each operation of a step costs, and the least that a step can take."""

from dataclasses import replace

from greedysnake.errors import ConfigError
from greedysnake.plan.activations import BatchShape
from greedysnake.plan.costs import StepCosts, UnitSeconds
from greedysnake.plan.hardware import Hardware, LayerTimes
from greedysnake.plan.workload import PartSizes, Workload
from greedysnake.schedule import Resource, Schedule, StepShape


def step_costs(hardware: Hardware, workload: Workload, batch: BatchShape, *, layers_per_unit: int = 1) -> StepCosts:
    """What the operations of a step of ``workload`` cost on ``hardware``.

    Measured times of the same units, where the profile has them, go before its rates.

    Raises:
        ConfigError: the profile has no rates for the model's dtype.
    """
    return StepCosts(
        disk=hardware.disk_rates,
        h2d=hardware.h2d or hardware.copy_rate,
        d2h=hardware.d2h or hardware.copy_rate,
        copy=hardware.copy_rate,
        device_fill=hardware.compute_memory,
        optimizer=hardware.optimizer,
        units=unit_seconds(hardware, workload, batch, layers_per_unit=layers_per_unit),
        contention=hardware.contention,
        overhead=dict.fromkeys(Resource, hardware.operation_seconds),
        step_overhead=hardware.step_seconds,
    )


def costs_one_by_one(costs: StepCosts) -> StepCosts:
    """The same where one operation runs at a time: nothing computes while bytes move, so they cost it nothing."""
    return replace(costs, contention=replace(costs.contention, transfer=0.0))


def unit_seconds(
    hardware: Hardware, workload: Workload, batch: BatchShape, *, layers_per_unit: int = 1
) -> tuple[UnitSeconds, ...]:
    """Seconds of computation of each unit for one micro-batch."""
    measured = measured_times(hardware, workload, batch)
    if measured is not None:
        return _from_measured(measured, workload, batch, layers_per_unit)
    rates = hardware.compute.get(workload.dtype)  # type: ignore[call-overload]
    if rates is None:
        raise ConfigError(
            f"{hardware.name} has compute rates for {', '.join(hardware.compute)}, not for {workload.dtype}: add them, "
            f"or measure them with greedysnake probe and a run of that dtype"
        )
    item, tokens = workload.activations.item_bytes, batch.rows * batch.tokens
    flops = workload.flops(batch, layers_per_unit=layers_per_unit)
    groups = workload.groups(layers_per_unit)
    memory = hardware.compute_memory

    # the embedding copies rows, and adds a gradient of its whole size
    rows_copied = 3 * tokens * workload.hidden * item / memory
    embedding = UnitSeconds(forward=rows_copied, backward=rows_copied + 3 * workload.parts[0].gradient_bytes / memory)
    layers = [
        UnitSeconds(
            # with few tokens, the time to read the weights is longer than that to compute with them
            forward=max(of.forward / (rates.matrix * rates.forward), _bytes(group) / memory),
            backward=max(of.backward / (rates.matrix * rates.backward), 3 * _bytes(group) / memory),
        )
        for of, group in zip(flops[1:-1], groups[1:-1], strict=True)
    ]
    head = UnitSeconds(
        forward=flops[-1].forward / (rates.matrix * rates.head),
        backward=flops[-1].backward / (rates.matrix * rates.head),
    )
    return (embedding, *layers, head)


def _bytes(group: list[PartSizes]) -> int:
    return sum(part.weight_bytes for part in group)


def measured_times(hardware: Hardware, workload: Workload, batch: BatchShape) -> LayerTimes | None:
    """Times that were measured with this model's units at this sequence length, if any; the nearest micro-batch.

    One layer was measured, so there are none where layers differ in size or in what of them is trained.
    """
    probed = (workload.parts[0], workload.parts[1], workload.parts[-1])
    parameters, frozen = (sum(getattr(part, name) for part in probed) for name in ("parameters", "frozen_parameters"))
    fitting = [
        times
        for times in hardware.layer_times
        if times.layer_parameters == workload.parts[1].parameters
        and times.hidden == workload.hidden
        and times.vocabulary == workload.vocabulary
        and times.dtype == workload.dtype
        and times.tokens == batch.tokens
        and (parameters if times.trained_parameters is None else times.trained_parameters) == parameters - frozen
    ]
    if not fitting or len(set(workload.parts[1:-1])) > 1:
        return None
    return min(fitting, key=lambda times: abs(times.rows - batch.rows))


def _from_measured(
    times: LayerTimes, workload: Workload, batch: BatchShape, layers_per_unit: int
) -> tuple[UnitSeconds, ...]:
    scale = batch.rows / times.rows

    def unit(layers: int) -> UnitSeconds:
        many = layers * scale
        return UnitSeconds(
            forward=many * times.layer_forward,
            backward=many * times.layer_backward,
            kept_forward=times.layer_kept_forward and many * times.layer_kept_forward,
            kept_backward=times.layer_kept_backward and many * times.layer_kept_backward,
        )

    layers = [unit(len(group)) for group in workload.groups(layers_per_unit)[1:-1]]
    return (
        # what the backward of an embedding takes is its size, not its tokens
        UnitSeconds(forward=scale * times.embedding_forward, backward=times.embedding_backward),
        *layers,
        UnitSeconds(forward=scale * times.head_forward, backward=scale * times.head_backward),
    )


def least_seconds(schedule: Schedule, shape: StepShape, costs: StepCosts) -> float:
    """The roofline: no order of the schedule's operations could take less.

    Of each resource, or pair of resources that share something, the least time in which its work can be done.
    """
    work = dict.fromkeys(Resource, 0.0)
    for operation in schedule.operations:
        work[operation.resource] += costs.work(operation, shape)
        if operation.resource in (Resource.SSD_READ, Resource.SSD_WRITE):
            work[Resource.COMPUTE] += costs.contention.transfer * operation.bytes
    disk, cores = costs.disk, costs.contention
    return costs.step_overhead + max(
        work[Resource.H2D],
        work[Resource.D2H],
        least_shared(
            work[Resource.SSD_READ],
            work[Resource.SSD_WRITE],
            disk.mixed_read / disk.read,
            disk.mixed_write / disk.write,
        ),
        least_shared(work[Resource.COMPUTE], work[Resource.CPU], cores.compute, cores.cpu),
    )


def least_shared(first: float, second: float, first_speed: float, second_speed: float) -> float:
    """Least time for two amounts of work that go on at lower speeds while both do.

    Time with both busy helps if their speeds add up to more than one, and is of no use otherwise.

    Args:
        first, second: seconds of work, each alone.
        first_speed, second_speed: of each while both are busy, as shares of its speed alone.
    """
    both = min(first / first_speed, second / second_speed) if first_speed + second_speed > 1 else 0.0
    return (first - both * first_speed) + (second - both * second_speed) + both
