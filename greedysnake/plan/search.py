"""The search for a plan: a linear program for each batch and α, then simulation of the best.

The program is a lower bound that ignores the filling and draining of the pipeline and who waits behind whom in
a queue, so its winner and those near it are simulated, and what counts is the simulated step.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, product
from math import inf

from greedysnake.plan.activations import BatchShape
from greedysnake.plan.collecting import without_collecting
from greedysnake.plan.failure import least_case, nothing_fits
from greedysnake.plan.placer import Placer
from greedysnake.plan.program import Placement
from greedysnake.plan.query import (
    Candidate,
    Case,
    PlanQuery,
    builder,
    fits,
    group_sizes,
    simulate_plain,
    with_snapshots,
)
from greedysnake.plan.step_costs import unit_seconds

_MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_ROWS = (1, 2, 4, 8)
_MOST_ROWS = 64
_UNIT_SIZES = (1, 2, 4)
_SATURATED = 0.97
"""A batch is large enough when it reaches this share of what the largest one would."""
_LARGER = 4
"""Times the batch that the program needs is the largest looked at: there is a choice if simulation is less kind."""
_ALPHAS = (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 0.85, 1.0)
_ALPHA_STEPS = (-0.05, 0.05, -0.15, 0.15)
_NEAR = 1.05
"""Placements within this factor of the shortest are simulated too."""
_WORTH_CUTTING = 1.02
"""So many times as fast must a step be with smaller groups, which move more bytes: less is within what is not known."""
_TRIED_IN_GROUPS = 2
"""Of the program's best with groups of one size."""
_MUCH_SLOWER = 0.9
_TIE_BREAK = 1e-3
SIMULATED_OPERATIONS = 200_000
"""After which no further near winner is simulated: a few seconds' work, and the same plan on any machine."""


@dataclass(frozen=True, kw_only=True)
class _Bound:
    """The program's answer for one batch, cut into groups, and α."""

    batch: BatchShape
    group_size: int | None
    delayed_share: float
    placement: Placement

    @property
    def sequences(self) -> int:
        return self.batch.micro_batches * self.batch.rows

    @property
    def tokens_per_second(self) -> float:
        return self.sequences * self.batch.tokens / self.placement.seconds


def search(query: PlanQuery) -> Candidate:
    """The plan with the most tokens per second, simulated.

    With a free batch, the smallest that comes close to what any batch could reach.

    Raises:
        MemoryBudgetError: no plan fits in memory; with what is short, by how much, and what to change.
        StorageError: none fits on the disks.
    """
    with without_collecting():
        return _search(query)


def _search(query: PlanQuery) -> Candidate:
    placer, trials = Placer(query), Trials(query)
    bounds = _bounds(query, placer)
    if not bounds:
        return _refined(placer, _least_demanding(query, trials), trials)
    # kept activations spare a small batch more than they can make good of what its pipeline's filling takes
    roof = min(
        max(bound.tokens_per_second for bound in bounds), max(compute_roof(query, bound.batch) for bound in bounds)
    )
    sizes = [
        list(group)
        for _, group in groupby(sorted(bounds, key=lambda bound: bound.sequences), key=lambda bound: bound.sequences)
    ]
    close = [size for size in sizes if max(bound.tokens_per_second for bound in size) >= _SATURATED * roof]
    best: Candidate | None = None
    for size in close:
        found = _simulate_near(query, placer, size, trials)
        if found is None:
            continue
        if best is None or found.tokens_per_second * _SATURATED > best.tokens_per_second:
            best = found
        if best.tokens_per_second >= _SATURATED**2 * roof or trials.spent:
            break
    return _refined(placer, best or _least_demanding(query, trials), trials)


def _least_demanding(query: PlanQuery, trials: "Trials") -> Candidate:
    """The case that takes the least: the program counts buffers that not every case has, and so may find room for none.

    Raises:
        MemoryBudgetError, StorageError: it does not fit either.
    """
    case = least_case(query, batches(query))
    found = None if case is None else trials.best([case])
    if found is None:
        raise nothing_fits(query, batches(query))
    return found


def batches(query: PlanQuery) -> Iterator[BatchShape]:
    """Batches to look at."""
    if query.sequences is not None:
        if query.rows or query.micro_batches:
            sizes: Iterable[int] = [query.rows or max(1, query.sequences // (query.micro_batches or 1))]
        else:
            sizes = range(1, min(query.sequences, _MOST_ROWS) + 1)
        for rows in sizes:
            micro_batches, rest = divmod(query.sequences, rows)
            if not rest and query.micro_batches in (None, micro_batches):
                yield _batch(query, micro_batches, rows)
        return
    for rows, micro_batches in product(
        [query.rows or enough_rows(query)], [query.micro_batches] if query.micro_batches else _MICRO_BATCHES
    ):
        yield _batch(query, micro_batches, rows)


def _batch(query: PlanQuery, micro_batches: int, rows: int) -> BatchShape:
    return BatchShape(micro_batches=micro_batches, rows=rows, tokens=query.tokens, mask_bytes=query.mask_bytes)


def enough_rows(query: PlanQuery) -> int:
    """The smallest micro-batch that computes nearly as fast as a larger one, if it fits on the device."""
    roofs = {}
    for rows in _ROWS:
        batch = BatchShape(micro_batches=1, rows=rows, tokens=query.tokens)
        computing = query.workload.computing_bytes(batch, separate_device=query.hardware.separate_device)
        room = query.limits.device if query.limits.device is not None else query.limits.host
        if computing < room / 2 or rows == 1:
            roofs[rows] = compute_roof(query, batch)
    return next(rows for rows, roof in roofs.items() if roof >= _SATURATED * max(roofs.values()))


def _bounds(query: PlanQuery, placer: Placer) -> list[_Bound]:
    """The best placement for each batch and α, without a decision between tiers for what cannot be split.

    Batches come in order of size, and those too large to be any better than what was found are left out.
    """
    alphas: Iterable[float] = _ALPHAS if query.delayed_share is None else (query.delayed_share,)
    bounds: list[_Bound] = []
    best, enough = 0.0, None
    for batch in sorted(batches(query), key=lambda batch: (batch.micro_batches * batch.rows, batch.rows)):
        sequences = batch.micro_batches * batch.rows
        if enough is not None and sequences > _LARGER * enough:
            break
        for group_size, alpha in product(group_sizes(query, batch), alphas):
            layers = query.layers_per_unit or 1
            placement = placer.place(batch, alpha, layers, placer.fixed_shares(), group_size)
            if placement is not None:
                found = _Bound(batch=batch, group_size=group_size, delayed_share=alpha, placement=placement)
                bounds.append(found)
                best = max(best, bounds[-1].tokens_per_second)
        if enough is None and best >= 0.99 * compute_roof(query, batch):
            enough = sequences
    return bounds


def compute_roof(query: PlanQuery, batch: BatchShape) -> float:
    """Tokens per second if a step were computation and nothing else."""
    units = unit_seconds(query.hardware, query.workload, batch)
    overhead = 2 * len(units) * query.hardware.operation_seconds
    seconds = sum(unit.forward for unit in units[:-1]) + sum(unit.backward for unit in units) + overhead
    return batch.rows * batch.tokens / seconds


class Trials:
    """Simulated cases, as many as there are operations to spend on them."""

    def __init__(self, query: PlanQuery) -> None:
        self._query = query
        self._build = builder(query)
        self._left = SIMULATED_OPERATIONS
        self._ssd_is_slow = False  # boundaries on SSD have been seen to cost much
        self._tried: dict[Case, Candidate] = {}
        self._counted: set[Case] = set()  # with their snapshots

    @property
    def spent(self) -> bool:
        """Whether nothing more should be simulated."""
        return self._left <= 0

    def simulate(self, case: Case) -> Candidate | None:
        """The case, simulated now or before, without snapshots if it was not close; None if it does not fit."""
        if case not in self._tried:
            if not fits(case.needs(self._query), self._query.limits):
                return None
            self._tried[case] = simulate_plain(case, self._query, self._build)
            self._left -= len(self._tried[case].step.starts)
        return self._tried[case]

    def _with_snapshots(self, candidate: Candidate) -> Candidate:
        if candidate.case not in self._counted:
            self._counted.add(candidate.case)
            counted = with_snapshots(candidate, self._query, self._build)
            if counted is not candidate:
                self._left -= len(candidate.step.starts)
            self._tried[candidate.case] = counted
        return self._tried[candidate.case]

    def best(self, cases: Iterable[Case], best: Candidate | None = None) -> Candidate | None:
        """The fastest of ``best`` and those of ``cases`` that there is time to simulate, at least one of them."""
        for case in cases:
            if best is not None and (self.spent or (self._ssd_is_slow and _more_on_ssd(case, best))):
                continue
            found = self.simulate(case)
            if found is None:
                continue
            if best is not None and found.tokens_per_second < _MUCH_SLOWER * best.tokens_per_second:
                self._ssd_is_slow = self._ssd_is_slow or _more_on_ssd(case, best)
            if best is None or _value(found) > _value(best):
                found = self._with_snapshots(found)
            if best is None or _value(found) > _value(best):
                best = found
        return best


def _value(candidate: Candidate) -> float:
    """Tokens per second; of two that are as fast, the one that uses the disks less is better."""
    return candidate.tokens_per_second / (1 + _TIE_BREAK * candidate.step.disk_busy / candidate.step.seconds)


def _more_on_ssd(case: Case, best: Candidate) -> bool:
    """Whether a case keeps more boundaries on SSD than the best one does."""
    return case.choices.boundaries_on_ssd > best.case.choices.boundaries_on_ssd


def _simulate_near(query: PlanQuery, placer: Placer, bounds: list[_Bound], trials: Trials) -> Candidate | None:
    """The best simulated plan among the placements near the program's best.

    The program thinks too well of small groups, of which each fills and drains the pipeline anew: so first come plans
    in a single group, or as it is given, and then smaller and smaller groups, until these are much slower: at least one
    of each size, whatever has been spent.
    """
    of_size: dict[int | None, list[_Bound]] = {}
    for bound in sorted(bounds, key=lambda bound: (bound.placement.seconds, bound.batch.rows)):
        of_size.setdefault(bound.group_size, []).append(bound)
    sizes = sorted(of_size, key=lambda size: -inf if size is None else -size)
    best = _simulate_largest(query, placer, of_size[sizes[0]], trials)
    for size in sizes[1:]:
        in_order = of_size[size]
        if best is not None and _WORTH_CUTTING * in_order[0].placement.seconds > best.mean_seconds:
            continue
        own = trials.best(
            case
            for bound in in_order[:_TRIED_IN_GROUPS]
            for case in placer.cases(bound.batch, bound.delayed_share, query.layers_per_unit or 1, size)[:2]
        )
        if own is None:
            continue
        if best is not None and own.tokens_per_second < _MUCH_SLOWER * best.tokens_per_second:
            break
        best = own if best is None or _value(own) > _WORTH_CUTTING * _value(best) else best
    return best


def _simulate_largest(query: PlanQuery, placer: Placer, in_order: list[_Bound], trials: Trials) -> Candidate | None:
    """The best simulated plan near the program's best, of bounds with groups of one size, the best first."""
    shortest = in_order[0].placement.seconds
    near = [bound for bound in in_order if bound.placement.seconds <= _NEAR * shortest]
    best: Candidate | None = None
    for bound in _first_of_each_batch(near):
        best = trials.best(_cases_of(query, placer, [bound]), best)
    for bound in in_order if best is None else ():  # what fits in parts need not fit whole
        unit_size = query.layers_per_unit or 1
        cases = placer.cases(bound.batch, bound.delayed_share, unit_size, bound.group_size)
        best = best or trials.best(cases)
    return best


def _cases_of(query: PlanQuery, placer: Placer, bounds: Iterable[_Bound]) -> Iterator[Case]:
    """Of each bound the shortest cases by the program, and the one that leaves the fewest boundaries to SSD."""
    for bound in bounds:
        cases = placer.cases(bound.batch, bound.delayed_share, query.layers_per_unit or 1, bound.group_size)
        fewest = sorted(cases, key=lambda case: case.choices.boundaries_on_ssd)[:2]
        yield from dict.fromkeys([*fewest, *cases[:3]])


def _refined(placer: Placer, best: Candidate, trials: Trials) -> Candidate:
    """The best that is reached from neighbour to better neighbour."""
    while not trials.spent:
        better = trials.best(placer.neighbours(best.case, _ALPHA_STEPS, _UNIT_SIZES), best)
        if better is None or better is best:
            break
        best = better
    return best


def _first_of_each_batch(bounds: list[_Bound]) -> list[_Bound]:
    """The three best of the best batch, and the best of the next two ways to cut the batch."""
    shapes = list(dict.fromkeys(bound.batch for bound in bounds))[:3]
    found = [bound for bound in bounds if bound.batch == shapes[0]][:3]
    return found + [next(bound for bound in bounds if bound.batch == shape) for shape in shapes[1:]]
