"""The linear program: what it counts, and that more of a resource never makes a step slower."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_machines import MACHINES, SMALL, TIED, plan_for, query

from greedysnake.plan.activations import BatchShape
from greedysnake.plan.phases import phase_work
from greedysnake.plan.placer import Placer
from greedysnake.plan.query import Case
from greedysnake.plan.search import search
from greedysnake.plan.step_costs import least_shared
from greedysnake.schedule import BUILDERS, Choices, Kind, Resource, Tier


@pytest.mark.parametrize("workload", [SMALL, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize(("alpha", "waits"), [(0.0, True), (0.0, False), (0.5, True), (0.5, False), (1.0, False)])
@pytest.mark.parametrize("places", product((0.0, 0.5, 1.0), (Tier.HOST, Tier.SSD), (None, 1)))
def test_the_program_counts_the_bytes_and_seconds_of_the_real_schedule(workload, separate, alpha, waits, places):
    on_ssd, gradients, group_size = places
    kept = on_ssd if separate else 1 - on_ssd
    hardware = MACHINES["accelerator" if separate else "cpu"].model_copy(update={"operation_seconds": 0.0})
    batch = BatchShape(micro_batches=3, rows=1, tokens=1024)
    choices = Choices(
        delayed_share=alpha,
        wait_for_norm=waits,
        separate_device=separate,
        boundaries_on_ssd=on_ssd,
        kept_activations=kept,
        gradients=gradients,
        group_size=group_size,
        weight_slots=3,
        gradient_slots=2,
        state_slots=4,
    )
    asked = replace(query(hardware), workload=workload)
    case = Case(batch=batch, layers_per_unit=1, choices=choices)
    shape, costs = case.shape(asked), case.costs(asked)
    lost = 0.0 if separate else 0.1 * costs.units[1].forward / shape.boundary_bytes
    costs = replace(
        costs,
        units=tuple(
            replace(unit, kept_forward=1.2 * unit.forward, kept_backward=0.5 * unit.backward) for unit in costs.units
        ),
        contention=replace(costs.contention, transfer=lost),
    )
    # an α that is exact: chunks of every unit in halves
    shape = replace(
        shape,
        units=tuple(replace(unit, chunks=unit.chunks[:1] * 2) if unit.chunks else unit for unit in shape.units),
    )
    schedule = BUILDERS["vertical"](shape, choices, pending=alpha > 0)
    moved = dict.fromkeys(Resource, 0.0)
    for operation in schedule.operations:
        if operation.resource in (Resource.COMPUTE, Resource.CPU):
            if operation.kind != Kind.ADD_TIED_GRADIENT and (operation.kind, operation.unit) != (Kind.ZERO_GRADIENT, 0):
                moved[operation.resource] += costs.work(operation, shape)
        else:
            moved[operation.resource] += operation.bytes
    groups = len(choices.groups(shape))
    work = phase_work(shape, costs, delayed_share=alpha, wait_for_norm=waits, separate_device=separate, groups=groups)
    shares = {
        "resident_weights": 0.0,
        "resident_state": 0.0,
        "boundaries_device": 0.0,
        "boundaries_host": 1 - on_ssd,
        "gradients_host": float(gradients == Tier.HOST),
        "kept_activations": kept,
    }
    for resource in (Resource.SSD_READ, Resource.SSD_WRITE, Resource.H2D, Resource.D2H):
        planned = sum(getattr(phase, resource).at(shares) for phase in work.values())
        # a tied embedding's gradient crosses twice a group, and a head's weights may be loaded once more at the end
        tied_crosses = workload is TIED and resource in (Resource.H2D, Resource.D2H)
        slack = 2 * groups * shape.units[0].gradient_bytes if tied_crosses else 1
        assert planned == pytest.approx(moved[resource], abs=slack), resource
    # bytes that move at the end, where nothing is computed, take no time from it
    beside = [work[name] for name in ("forward", "between", "backward")]
    moved[Resource.COMPUTE] += lost * sum((phase.ssd_read + phase.ssd_write).at(shares) for phase in beside)
    for resource in (Resource.COMPUTE, Resource.CPU):
        planned = sum(getattr(phase, resource).at(shares) for phase in work.values())
        assert planned == pytest.approx(moved[resource], rel=0.05), resource


def test_two_kinds_of_work_that_share_something_take_the_least_time_that_they_can():
    assert least_shared(1.0, 1.0, 0.5, 0.5) == 2.0
    assert least_shared(1.0, 1.0, 1.0, 1.0) == 1.0
    assert least_shared(3.0, 1.0, 0.8, 0.5) == pytest.approx(2.0 + 3.0 - 2.0 * 0.8)
    assert least_shared(2.0, 2.0, 0.3, 0.3) == 4.0  # one after the other is better


MORE = {
    "disk": lambda m: m.model_copy(
        update={
            "disks": tuple(
                disk.model_copy(
                    update={k: 1.5 * getattr(disk, k) for k in ("read", "write", "mixed_read", "mixed_write")}
                )
                for disk in m.disks
            )
        }
    ),
    "host memory": lambda m: m.model_copy(update={"host_memory": int(1.3 * m.host_memory)}),
    "device memory": lambda m: m.model_copy(update={"device_memory": int(1.5 * m.device_memory)}),
    "copies": lambda m: m.model_copy(update={"h2d": 2 * m.h2d, "d2h": 2 * m.d2h}),
    "optimizer": lambda m: m.model_copy(update={"optimizer": 2 * m.optimizer}),
    "computation": lambda m: m.model_copy(
        update={"compute": {k: r.model_copy(update={"matrix": 2 * r.matrix}) for k, r in m.compute.items()}}
    ),
    "device's own traffic": lambda m: m.model_copy(update={"compute_memory": 2 * m.compute_memory}),
    "copies within the host": lambda m: m.model_copy(update={"copy_rate": 2 * m.copy_rate}),
    "disk space": lambda m: m.model_copy(
        update={"disks": tuple(disk.model_copy(update={"capacity": 2 * disk.capacity}) for disk in m.disks)}
    ),
    "a second disk": lambda m: m.model_copy(update={"disks": 2 * m.disks}),
}
OF_A_DEVICE = {"device memory", "copies", "device's own traffic"}
SHOWN_TWICE = ("disk", "host memory", "optimizer", "computation")
"""What more of is tried on the other machines too."""


@pytest.mark.parametrize(
    ("name", "more"),
    [
        *(("accelerator", more) for more in sorted(MORE)),
        *(("slow disk", more) for more in (*SHOWN_TWICE, "device memory", "copies")),
        *(("cpu", more) for more in SHOWN_TWICE),
    ],
)
def test_more_of_a_resource_never_makes_the_plan_slower(name, more):
    """To within a per cent: the search simulates the best few, not all."""
    after = query(MORE[more](MACHINES[name]), sequences=6)
    assert search(after).step.seconds <= 1.01 * plan_for(name, 6).step.seconds


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(MACHINES)),
    faster=st.sets(st.sampled_from(sorted(MORE.keys() - {"host memory", "device memory", "disk space"}))),
    alpha=st.sampled_from([0.0, 0.3, 1.0]),
    clipping=st.booleans(),
)
def test_faster_machines_never_make_the_programs_step_longer(name, faster, alpha, clipping):
    """Any resources at once, to rounding: the program looks at all shares."""
    batch = BatchShape(micro_batches=3, rows=2, tokens=1024)
    machine = MACHINES[name]
    for more in sorted(faster - (OF_A_DEVICE if name == "cpu" else set())):
        machine = MORE[more](machine)
    placers = [Placer(query(hardware, clipping=clipping)) for hardware in (MACHINES[name], machine)]
    before, after = (placer.place(batch, alpha, 1, placer.fixed_shares()) for placer in placers)
    assert before is not None
    assert after is not None
    assert after.seconds <= before.seconds * (1 + 1e-6)
