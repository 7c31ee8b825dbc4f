"""The linear program for one query: cached sizes, given shares, and whole choices out of its solutions."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, floor

from greedysnake.plan.activations import KEPT_LEAVES, BatchShape
from greedysnake.plan.costs import StepCosts
from greedysnake.plan.memory import Needs, step_needs
from greedysnake.plan.phases import phase_work, step_totals
from greedysnake.plan.program import Placement, solve, space_rows
from greedysnake.plan.query import Case, PlanQuery, over
from greedysnake.plan.slots import NARROW, SLOTS, WIDE, with_slots
from greedysnake.schedule import Choices, StepShape, Tier

_BUFFERS = (WIDE, NARROW)


@dataclass(frozen=True, kw_only=True)
class _Frame:
    """What placements of one batch, cut into groups, and of one unit size have in common, whatever α is."""

    shape: StepShape
    groups: int
    together: float  # the largest group's share of all micro-batches
    costs: StepCosts
    needs: tuple[Needs, ...]  # with wide and with narrow buffers


class Placer:
    """Solves the linear program for one query.

    Args:
        query: what is asked.
    """

    def __init__(self, query: PlanQuery) -> None:
        self._query = query
        self._frames: dict[tuple[BatchShape, int, int | None], _Frame] = {}
        self._cases: dict[tuple[BatchShape, float, int, int | None], list[Case]] = {}

    def place(
        self,
        batch: BatchShape,
        alpha: float,
        layers_per_unit: int,
        fixed: dict[str, float],
        group_size: int | None = None,
    ) -> Placement | None:
        """The shares that make a step shortest, with whichever number of buffers leaves the better room for them.

        Args:
            batch: sizes of the batch.
            alpha: the delayed share.
            layers_per_unit: decoder layers of a unit.
            fixed: shares that are given (:meth:`fixed_shares`).
            group_size: micro-batches that go through the units together; None: all.
        """
        found = self._placements(batch, alpha, layers_per_unit, fixed, group_size)
        return min((placement for placement, _ in found), key=lambda placement: placement.seconds, default=None)

    def _placements(
        self,
        batch: BatchShape,
        alpha: float,
        layers_per_unit: int,
        fixed: dict[str, float],
        group_size: int | None,
    ) -> Iterator[tuple[Placement, Choices]]:
        """The best shares with wide and with narrow buffers, where they leave room for any, and those buffers."""
        query, key = self._query, (batch, layers_per_unit, group_size)
        if key not in self._frames:
            self._frames[key] = self._frame(batch, layers_per_unit, group_size)
        frame, separate = self._frames[key], query.hardware.separate_device
        waits = query.waits_for_norm(alpha)
        work = phase_work(
            frame.shape,
            frame.costs,
            delayed_share=alpha,
            wait_for_norm=waits,
            separate_device=separate,
            groups=frame.groups,
            snapshots=1 / query.snapshot_every if query.snapshot_every else 0.0,
        )
        for needs, slots in zip(frame.needs, _BUFFERS, strict=True):
            rows = space_rows(
                frame.shape,
                needs,
                query.limits,
                delayed_share=alpha,
                wait_for_norm=waits,
                separate_device=separate,
                groups=frame.groups,
                together=frame.together,
            )
            placement = solve(work, frame.costs, rows, fixed)
            if placement is not None:
                yield placement, slots

    def _frame(self, batch: BatchShape, layers_per_unit: int, group_size: int | None) -> _Frame:
        query = self._query
        # totals are the same for any number of chunks, so a single one will do
        shape = query.step_shape(batch, layers_per_unit=layers_per_unit, chunks_per_unit=1)
        least = Choices(
            separate_device=query.hardware.separate_device,
            boundaries_on_ssd=1.0,
            gradients=Tier.SSD,
            group_size=group_size,
        )
        case = Case(batch=batch, layers_per_unit=layers_per_unit, choices=least)
        computing = case.computing_bytes(query)
        return _Frame(
            shape=shape,
            groups=len(least.groups(shape)),
            together=least.together(shape) / shape.micro_batches,
            costs=case.costs(query),
            needs=tuple(
                step_needs(
                    query.workload,
                    shape,
                    with_slots(least, slots),
                    computing=computing,
                    slots=2 if query.second_slot else 1,
                    process=query.process_bytes,
                )
                for slots in _BUFFERS
            ),
        )

    def fixed_shares(self) -> dict[str, float]:
        """What of the program's shares the query gives."""
        query = self._query
        fixed = {
            name: getattr(query, name)
            for name in ("resident_weights", "resident_state", "kept_activations")
            if getattr(query, name) is not None
        }
        if not query.hardware.separate_device:
            fixed["boundaries_device"] = 0.0
        elif query.boundaries_on_device is not None:
            fixed["boundaries_device"] = query.boundaries_on_device
        if query.boundaries_on_ssd is not None:
            fixed["boundaries_ssd"] = query.boundaries_on_ssd
        if query.gradients is not None:
            fixed["gradients_host"] = float(query.gradients == Tier.HOST)
        return fixed

    def cases(self, batch: BatchShape, alpha: float, layers_per_unit: int, group_size: int | None = None) -> list[Case]:
        """Whole choices for a batch, α, unit and group size: several ways to use host memory, the shortest first."""
        key = (batch, alpha, layers_per_unit, group_size)
        if key not in self._cases:
            self._cases[key] = self._find_cases(batch, alpha, layers_per_unit, group_size)
        return self._cases[key]

    def _find_cases(self, batch: BatchShape, alpha: float, layers_per_unit: int, group_size: int | None) -> list[Case]:
        found: list[tuple[float, int, Case]] = []
        for fixed in self._variants(alpha, held=group_size is not None):
            for placement, slots in self._placements(batch, alpha, layers_per_unit, fixed, group_size):
                choices = Choices(
                    delayed_share=alpha,
                    wait_for_norm=self._query.waits_for_norm(alpha),
                    group_size=group_size,
                    separate_device=self._query.hardware.separate_device,
                    boundaries_on_device=_whole(placement.boundaries_device),
                    boundaries_on_ssd=_whole(max(0.0, 1 - placement.boundaries_device - placement.boundaries_host)),
                    kept_activations=_whole(placement.kept_activations),
                    overlap=self._query.overlap,
                    gradients=Tier.HOST if fixed["gradients_host"] else Tier.SSD,
                    resident_weights=placement.resident_weights,
                    resident_state=placement.resident_state,
                )
                case = Case(batch=batch, layers_per_unit=layers_per_unit, choices=with_slots(choices, slots))
                fitted = self.fit_shares(case)
                if fitted is not None:
                    found.append((placement.seconds, len(found), fitted))
        cases = [case for _, _, case in sorted(found, key=lambda entry: entry[:2])]
        return list(dict.fromkeys(cases))

    def _variants(self, alpha: float, *, held: bool) -> Iterator[dict[str, float]]:
        """Shares to give the program, which should not decide everything alone: where gradients wait, and boundaries.

        The program does not know who waits behind whom in the backward, where boundaries and state are read: so none on
        SSD, or, with nothing else in host memory, as few as must be, or as many as the program likes.

        Args:
            alpha: the delayed share.
            held: whether gradients are put away between groups of micro-batches, whatever α is.
        """
        query = self._query
        gradients = [query.gradients] if query.gradients else [Tier.HOST, Tier.SSD]
        if alpha == 0 and not held and not query.waits_for_norm(alpha) and not query.gradients:
            gradients = [Tier.HOST]  # none are held
        boundaries = [{"boundaries_ssd": 0.0}, {"resident_weights": 0.0, "resident_state": 0.0}, {}]
        for shares, tier in product(boundaries, gradients):
            yield {**shares, "gradients_host": float(tier == Tier.HOST), **self.fixed_shares()}

    def fit_shares(self, case: Case) -> Case | None:
        """The case with shares of whole units and chunks that fit; None if it does not fit at all.

        Activations that are kept give way first; of what is resident, state before weights as it saves less for its
        bytes; then boundaries leave the device for host memory, and host memory for SSD.
        """
        query, shape = self._query, case.shape(self._query)
        leaving = max(1, len(shape.units) - 2)
        steps = {"resident_state": max(len(unit.chunks) for unit in shape.units), "resident_weights": len(shape.units)}
        given = {name for name in steps if getattr(query, name) is not None}
        for name in steps.keys() - given:
            share = floor(getattr(case.choices, name) * steps[name] + 1e-6) / steps[name]
            case = case.with_choices(**{name: share})
        together = case.choices.together(shape)
        pairs = max(1, len(shape.keepers) * together)
        if query.kept_activations is None:
            share = min(case.choices.kept_activations, self._most_kept(case, shape) / pairs)
            case = case.with_choices(kept_activations=floor(share * pairs + 1e-6) / pairs)
        on_device, on_ssd = case.choices.boundaries_on_device, case.choices.boundaries_on_ssd
        if query.boundaries_on_device is None:
            on_device = floor(on_device * leaving + 1e-6) / leaving
        if query.boundaries_on_ssd is None:
            on_ssd = min(ceil(on_ssd * leaving - 1e-6) / leaving, 1 - on_device)
        case = case.with_choices(boundaries_on_device=on_device, boundaries_on_ssd=on_ssd)

        sizes = step_totals(shape, updates_in_backward=True)
        unit_bytes = sizes.boundaries / leaving * together / shape.micro_batches
        step_bytes = {name: getattr(sizes, name.removeprefix("resident_")) / count for name, count in steps.items()}
        movable = [name for name in steps if name not in given]
        while short := over(case.needs(query), query.limits):
            choices = case.choices
            computed_in = Tier.DEVICE if choices.separate_device else Tier.HOST
            resident = next((name for name in movable if getattr(choices, name) > 0), None)
            if computed_in in short and query.kept_activations is None and choices.kept_at_once(shape):
                fewer = max(1, ceil(short[computed_in] / shape.kept_bytes)) if shape.kept_bytes else pairs
                case = case.with_choices(kept_activations=max(0, choices.kept_at_once(shape) - fewer) / pairs)
            elif Tier.DEVICE in short and query.boundaries_on_device is None and choices.boundaries_on_device > 0:
                units = max(1, ceil(short[Tier.DEVICE] / unit_bytes))
                share = max(0.0, choices.boundaries_on_device - units / leaving)
                case = case.with_choices(boundaries_on_device=_whole(share))
            elif Tier.HOST in short and resident is not None:
                fewer = max(1, floor(short[Tier.HOST] / step_bytes[resident]))
                share = max(0, round(getattr(choices, resident) * steps[resident]) - fewer) / steps[resident]
                case = case.with_choices(**{resident: share})
            elif Tier.HOST in short and query.boundaries_on_ssd is None and _in_host(choices) > 1e-6:
                units = max(1, floor(short[Tier.HOST] / unit_bytes))
                share = min(1 - choices.boundaries_on_device, choices.boundaries_on_ssd + units / leaving)
                case = case.with_choices(boundaries_on_ssd=share)
            else:
                return None
        return case

    def _most_kept(self, case: Case, shape: StepShape) -> int:
        """How many pairs may keep their activations, which leave a part of the memory free, as in training.

        What the planner lets stay in host memory is left out: it takes what they leave.
        """
        query, choices = self._query, case.choices
        limit = query.limits.device if choices.separate_device else query.limits.host
        if limit is None or not shape.kept_bytes:
            return choices.kept_at_once(shape)
        given = {name: getattr(query, name) or 0.0 for name in ("resident_weights", "resident_state")}
        others = case.with_choices(kept_activations=0.0, **given).needs(query).total(choices.compute_tier)
        return max(0, floor(((1 - KEPT_LEAVES) * limit - others) / shape.kept_bytes))

    def likely(
        self, batch: BatchShape, alpha: float, layers_per_unit: int, group_size: int | None = None
    ) -> list[Case]:
        """The case with the fewest boundaries on SSD, and the shortest by the program."""
        cases = self.cases(batch, alpha, layers_per_unit, group_size)
        fewest = min(cases, key=lambda case: case.choices.boundaries_on_ssd, default=None)
        return list(dict.fromkeys([*([fewest] if fewest else []), *cases[:1]]))

    def neighbours(self, case: Case, alphas: tuple[float, ...], unit_sizes: tuple[int, ...]) -> Iterator[Case]:
        """Cases that differ in one choice: α by one of ``alphas``, the unit size, or the number of buffers."""
        query, group_size = self._query, case.choices.group_size
        if case.choices.boundaries_on_ssd > 0:  # mostly better first, but not where the disks limit all
            yield case.with_choices(boundaries_first=not case.choices.boundaries_first)
        if query.delayed_share is None:
            for step in alphas:
                alpha = round(case.choices.delayed_share + step, 2)
                if 0 <= alpha <= 1:
                    yield from self.likely(case.batch, alpha, case.layers_per_unit, group_size)
        for slots in SLOTS:
            other = self.fit_shares(replace(case, choices=with_slots(case.choices, slots)))
            if other is not None:
                yield other
        if query.layers_per_unit is None:
            for size in unit_sizes:
                if size != case.layers_per_unit and size <= query.workload.layers:
                    yield from self.likely(case.batch, case.choices.delayed_share, size, group_size)


def _in_host(choices: Choices) -> float:
    """Share of the boundaries that waits in host memory."""
    return 1 - choices.boundaries_on_device - choices.boundaries_on_ssd


def _whole(share: float) -> float:
    """A share without the solver's rounding errors."""
    return min(1.0, max(0.0, round(share, 6)))
