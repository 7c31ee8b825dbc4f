"""The search, on a small model and made-up machines."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_machines import BUSY_CPU, GIB, MACHINES, SMALL, machine, plan_for, query

from greedysnake.errors import ConfigError, MemoryBudgetError, StorageError
from greedysnake.plan.activations import KEPT_LEAVES, BatchShape
from greedysnake.plan.forecast import describe, forecast, what_would_help
from greedysnake.plan.memory import step_needs
from greedysnake.plan.placer import Placer
from greedysnake.plan.presets import MODEL_PRESETS
from greedysnake.plan.query import Case, PlanQuery, fits, simulate_case
from greedysnake.plan.random_cases import random_case
from greedysnake.plan.request import PlanRequest
from greedysnake.plan.search import batches, search
from greedysnake.plan.step_costs import least_seconds
from greedysnake.schedule import BUILDERS, Choices, Tier


@pytest.mark.parametrize("name", sorted(MACHINES))
def test_a_plan_fits_and_is_no_faster_than_the_roofline(name):
    asked, plan = query(MACHINES[name], sequences=6), plan_for(name, 6)
    assert fits(plan.case.needs(asked), asked.limits)
    assert plan.least_seconds <= plan.step.seconds <= 1.5 * plan.least_seconds
    assert plan.case.batch.micro_batches * plan.case.batch.rows == 6


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([*MACHINES.values(), BUSY_CPU]), st.integers(0, 10**6))
def test_no_step_is_faster_than_its_roofline(hardware, seed):
    asked = query(hardware, sequences=6)
    case = random_case(asked, 6, random.Random(seed))
    found = simulate_case(case, asked)
    assert found.step.seconds >= found.least_seconds * (1 - 1e-9)
    shape, costs = case.shape(asked), case.costs(asked)
    assert found.least_seconds == least_seconds(found.step.schedule, shape, costs)


@pytest.mark.parametrize("clipping", [False, True])
@pytest.mark.parametrize("name", sorted(MACHINES))
def test_random_plans_hardly_beat_the_chosen_one(name, clipping):
    asked = query(MACHINES[name], sequences=6, clipping=clipping)
    chosen = plan_for(name, 6, clipping)
    rng, tried = random.Random(3), 0
    while tried < 12:
        case = random_case(asked, 6, rng)
        if fits(case.needs(asked), asked.limits):
            tried += 1
            other = simulate_case(case, asked)
            assert other.step.seconds >= 0.95 * chosen.step.seconds, case


def test_a_free_batch_is_large_enough_and_no_larger():
    found = forecast(query(), helps=False)
    assert found.candidate.tokens_per_second >= 0.85 * found.compute_roof
    batch = found.candidate.case.batch
    larger = search(query(sequences=4 * batch.micro_batches * batch.rows, rows=batch.rows))
    assert larger.tokens_per_second <= 1.1 * found.candidate.tokens_per_second


def test_what_is_fixed_by_hand_stays():
    fixed = {
        "delayed_share": 0.35,
        "layers_per_unit": 2,
        "boundaries_on_device": 0.25,
        "boundaries_on_ssd": 0.5,
        "gradients": Tier.SSD,
        "resident_weights": 0.25,
        "resident_state": 0.0,
        "rows": 2,
        "micro_batches": 3,
    }
    plan = search(query(**fixed))
    choices, batch = plan.case.choices, plan.case.batch
    assert (batch.rows, batch.micro_batches, plan.case.layers_per_unit) == (2, 3, 2)
    for name in (
        "delayed_share",
        "boundaries_on_device",
        "boundaries_on_ssd",
        "gradients",
        "resident_weights",
        "resident_state",
    ):
        assert getattr(choices, name) == fixed[name]


def test_the_same_question_has_the_same_answer():
    assert search(query(sequences=6)).case == plan_for("accelerator", 6).case


@pytest.mark.parametrize(
    ("changes", "error", "parts"),
    [
        ({"host_memory": GIB}, MemoryBudgetError, ["host memory: needs at least", "short", "more host memory"]),
        ({"device_memory": 2**20}, MemoryBudgetError, ["device memory: needs at least", "more device memory"]),
        (
            {"disks": [{**MACHINES["accelerator"].disks[0].model_dump(), "capacity": GIB}]},
            StorageError,
            ["disk: needs at least", "more disk"],
        ),
    ],
)
def test_what_does_not_fit_says_what_is_short_and_by_how_much(changes, error, parts):
    with pytest.raises(error) as caught:
        search(query(machine(**changes)))
    for part in parts:
        assert part in str(caught.value)


def test_a_batch_that_cannot_be_cut_is_refused():
    with pytest.raises(ConfigError, match="7 sequences a step do not divide"):
        search(query(sequences=7, rows=2))


def test_sequences_are_cut_into_as_many_micro_batches_as_are_given():
    """However long these get: 100 in one is more than the search tries by itself."""
    asked = query(sequences=100, micro_batches=1)
    assert list(batches(asked)) == [BatchShape(micro_batches=1, rows=100, tokens=1024)]
    with pytest.raises(ConfigError, match="100 sequences a step do not divide into 3 micro-batches"):
        search(query(sequences=100, micro_batches=3))
    with pytest.raises(ConfigError, match="3 sequences a step do not divide into 4 micro-batches"):
        search(query(sequences=3, micro_batches=4))


def test_help_names_the_bottleneck_first():
    slow = query(MACHINES["slow disk"], sequences=2)
    helps = what_would_help(slow, plan_for("slow disk", 2))
    by_change = {help_.change: help_.speedup for help_ in helps}
    assert set(list(by_change)[:2]) == {"disks twice as fast", "twice the host memory"}
    assert 1.3 < by_change["disks twice as fast"] <= 2.05
    fast = query(machine(compute={"bfloat16": {"matrix": 1e12, "forward": 1, "backward": 1, "head": 1}}), sequences=4)
    assert what_would_help(fast, search(fast))[0].change == "computation twice as fast"


def test_help_tries_a_larger_batch_where_one_was_given():
    """With slow disks a step of one micro-batch and one of two take about as long."""
    change, slow = (
        "twice the micro-batches (another batch size for training)",
        query(MACHINES["slow disk"], sequences=2),
    )
    plan = plan_for("slow disk", 2)
    last = what_would_help(slow, plan)[-1]
    assert last.change == change
    assert 1.8 < last.speedup <= 2
    planned = plan_for("slow disk", 4).tokens_per_second / plan.tokens_per_second
    assert 0.9 * planned <= last.speedup
    free = replace(slow, sequences=None)
    assert change not in [help_.change for help_ in what_would_help(free, plan)]
    saturated = query(sequences=64)
    assert change not in [help_.change for help_ in what_would_help(saturated, search(saturated))]


def test_help_tries_more_device_memory():
    """Where computation limits a step, it keeps more activations, and recomputes fewer."""
    rates = {"bfloat16": {"matrix": 1e12, "forward": 1, "backward": 1, "head": 1}}
    asked = query(machine(compute=rates), sequences=4)
    plan = search(asked)
    (found,) = (help_ for help_ in what_would_help(asked, plan) if help_.change == "twice the device memory")
    larger = search(query(machine(compute=rates, device_memory=6 * GIB), sequences=4))
    assert 1.05 < found.speedup <= 1.01 * larger.tokens_per_second / plan.tokens_per_second
    on_cpu = what_would_help(query(MACHINES["cpu"], sequences=2), plan_for("cpu", 2))
    assert "twice the device memory" not in [help_.change for help_ in on_cpu]


def test_a_budget_is_days_energy_and_wear():
    found = describe(query(sequences=6), plan_for("accelerator", 6))
    budget = found.budget(1e9)
    assert budget.days == pytest.approx(1e9 / found.candidate.tokens_per_second / 86400)
    assert budget.kilowatt_hours == pytest.approx(0.1 * 24 * budget.days)
    assert budget.endurance_share == pytest.approx(budget.steps * found.candidate.step.ssd_written_bytes / 1e15)
    alone = replace(found.candidate, snapshot_bytes=1e9)
    assert describe(found.query, alone).budget(1e9).written_bytes == budget.written_bytes + 1e9 * budget.steps
    shown = found.as_json(1e9)
    assert shown["predicted"] is True
    assert shown["budget"]["tokens"] == 1e9
    assert shown["bottleneck"] in ("compute", "disk", "h2d", "d2h", "cpu")


def test_a_snapshot_writes_what_stays_in_host_memory():
    asked = query(snapshot_every=4)
    choices = Choices(separate_device=True, resident_weights=0.5, resident_state=0.5)
    case = Case(batch=BatchShape(micro_batches=2, rows=1, tokens=1024), layers_per_unit=1, choices=choices)
    found = simulate_case(case, asked)
    pools = found.step.schedule.pools
    assert 4 * found.snapshot_bytes == pools["resident_weights"].bytes + pools["resident_state"].bytes
    assert found.mean_written_bytes == found.step.ssd_written_bytes + found.snapshot_bytes


@pytest.mark.parametrize("hardware", [*MACHINES.values(), BUSY_CPU], ids=[*MACHINES, "busy cpu"])
def test_without_overlap_a_step_is_the_sum_of_its_operations(hardware):
    query = PlanQuery(workload=SMALL, hardware=hardware, tokens=256, snapshot_every=2)
    case = random_case(query, 4, random.Random(1)).with_choices(resident_state=0.5)
    overlapped, apart = simulate_case(case, query), simulate_case(case, replace(query, overlap=False))
    shape, costs = case.shape(query), case.costs(query)
    alone = sum(costs.work(operation, shape) for operation in overlapped.step.schedule.operations)
    assert apart.step.seconds == pytest.approx(alone + hardware.step_seconds)
    assert apart.step.seconds > 1.05 * overlapped.step.seconds
    assert apart.snapshot_seconds > 0
    assert apart.snapshot_bytes == overlapped.snapshot_bytes
    assert apart.step.ssd_written_bytes == overlapped.step.ssd_written_bytes
    assert not PlanRequest(overlap=False).query(SMALL, hardware, case.batch).overlap


def test_kept_activations_leave_memory_free_as_in_training():
    asked = query()
    choices = Choices(separate_device=True, kept_activations=1.0)
    case = Case(batch=BatchShape(micro_batches=16, rows=1, tokens=1024), layers_per_unit=1, choices=choices)
    fitted = Placer(asked).fit_shares(case)
    assert fitted is not None
    shape, limit = fitted.shape(asked), (1 - KEPT_LEAVES) * asked.limits.device
    assert 0 < fitted.choices.kept_activations < 1
    assert limit - shape.kept_bytes < fitted.needs(asked).total(Tier.DEVICE) <= limit


def test_planned_memory_is_what_the_pools_reserve():
    asked = query()
    choices = Choices(separate_device=True, delayed_share=0.5, resident_weights=0.5, gradients=Tier.HOST)
    case = Case(batch=BatchShape(micro_batches=2, rows=1, tokens=1024), layers_per_unit=1, choices=choices)
    shape = case.shape(asked)
    needs = step_needs(SMALL, shape, choices, computing=0)
    schedule = BUILDERS["vertical"](shape, choices, pending=True)
    reserved = schedule.reserved_bytes(Tier.DEVICE)
    assert needs.total(Tier.DEVICE) == reserved
    assert needs.host["resident weights"] == schedule.pools["resident_weights"].bytes
    assert needs.disk["ssd state"] == 2 * schedule.pools["ssd_state"].bytes


def test_a_large_models_plan_is_found_from_its_config_alone():
    workload = MODEL_PRESETS["gpt-175b"].workload()
    large = machine(
        host_memory=256 * GIB,
        device_memory=40 * GIB,
        h2d=24e9,
        d2h=24e9,
        optimizer=3e9,
        compute={"bfloat16": {"matrix": 312e12, "forward": 0.5, "backward": 0.5, "head": 0.5}},
        disks=[
            {
                "name": "d",
                "read": 13e9,
                "write": 7e9,
                "mixed_read": 7.8e9,
                "mixed_write": 4.2e9,
                "capacity": 14 * 2**40,
            }
        ],
    )
    asked = PlanQuery(workload=workload, hardware=large, tokens=2048, sequences=4, rows=1, clipping=False)
    placer = Placer(asked)
    case = placer.cases(BatchShape(micro_batches=4, rows=1, tokens=2048), 0.2, 1)[0]
    found = simulate_case(case, asked)
    assert fits(case.needs(asked), asked.limits)
    assert found.least_seconds <= found.step.seconds <= 1.3 * found.least_seconds
