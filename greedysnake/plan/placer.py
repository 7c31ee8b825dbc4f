"""The linear program for one query: cached sizes, given shares, and whole choices out of its solutions."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import floor

from greedysnake.plan.activations import BatchShape
from greedysnake.plan.costs import StepCosts
from greedysnake.plan.memory import Needs, step_needs
from greedysnake.plan.program import Placement, phase_work, solve, space_rows, step_totals
from greedysnake.plan.query import NARROW, WIDE, Case, PlanQuery, fits, over, with_slots
from greedysnake.schedule import Choices, StepShape, Tier


@dataclass(frozen=True, kw_only=True)
class _Frame:
    """What placements of one batch and unit size have in common, whatever α is."""

    shape: StepShape
    costs: StepCosts
    needs: tuple[Needs, ...]  # with wide and with narrow buffers


class Placer:
    """Solves the linear program for one query.

    Args:
        query: what is asked.
    """

    def __init__(self, query: PlanQuery) -> None:
        self._query = query
        self._frames: dict[tuple[BatchShape, int], _Frame] = {}
        self._cases: dict[tuple[BatchShape, float, int], list[Case]] = {}

    def place(self, batch: BatchShape, alpha: float, layers_per_unit: int, fixed: dict[str, float]) -> Placement | None:
        """The shares that make a step shortest; with narrow buffers if wide ones leave no room.

        Args:
            batch: sizes of the batch.
            alpha: the delayed share.
            layers_per_unit: decoder layers of a unit.
            fixed: shares that are given (:meth:`fixed_shares`).
        """
        query, key = self._query, (batch, layers_per_unit)
        if key not in self._frames:
            self._frames[key] = self._frame(batch, layers_per_unit)
        frame, separate = self._frames[key], query.hardware.separate_device
        waits = query.clipping and alpha < 1
        work = phase_work(frame.shape, frame.costs, delayed_share=alpha, wait_for_norm=waits, separate_device=separate)
        for needs in frame.needs:
            rows = space_rows(
                frame.shape,
                batch,
                needs,
                query.limits,
                delayed_share=alpha,
                wait_for_norm=waits,
                separate_device=separate,
            )
            placement = solve(work, frame.costs, rows, fixed)
            if placement is not None:
                return placement
        return None

    def _frame(self, batch: BatchShape, layers_per_unit: int) -> _Frame:
        query = self._query
        # totals are the same for any number of chunks, so a single one will do
        shape = query.workload.step_shape(
            batch, layers_per_unit=layers_per_unit, chunks_per_unit=1, split_master=query.split_master
        )
        least = Choices(separate_device=query.hardware.separate_device, boundaries=Tier.SSD, gradients=Tier.SSD)
        case = Case(batch=batch, layers_per_unit=layers_per_unit, choices=least)
        computing = case.computing_bytes(query)
        return _Frame(
            shape=shape,
            costs=case.costs(query),
            needs=tuple(
                step_needs(query.workload, shape, with_slots(least, slots), computing=computing)
                for slots in (WIDE, NARROW)
            ),
        )

    def fixed_shares(self, boundaries: Tier | None = None, gradients: Tier | None = None) -> dict[str, float]:
        """What of the program's shares is given, by the query or else by the arguments."""
        query = self._query
        fixed: dict[str, float] = {}
        for name in ("resident_weights", "resident_state"):
            if getattr(query, name) is not None:
                fixed[name] = getattr(query, name)
        boundaries, gradients = query.boundaries or boundaries, query.gradients or gradients
        if boundaries is not None:
            fixed["boundaries_device"] = float(boundaries == Tier.DEVICE)
            fixed["boundaries_host"] = float(boundaries == Tier.HOST)
        elif not query.hardware.separate_device:
            fixed["boundaries_device"] = 0.0
        if gradients is not None:
            fixed["gradients_host"] = float(gradients == Tier.HOST)
        return fixed

    def cases(self, batch: BatchShape, alpha: float, layers_per_unit: int) -> list[Case]:
        """Whole choices for a batch, α and unit size: each tier for boundaries and gradients, the shortest first."""
        key = (batch, alpha, layers_per_unit)
        if key not in self._cases:
            self._cases[key] = self._find_cases(batch, alpha, layers_per_unit)
        return self._cases[key]

    def _find_cases(self, batch: BatchShape, alpha: float, layers_per_unit: int) -> list[Case]:
        found: list[tuple[float, int, Case]] = []
        for boundaries, gradients in self._tiers(alpha):
            placement = self.place(batch, alpha, layers_per_unit, self.fixed_shares(boundaries, gradients))
            if placement is None:
                continue
            choices = Choices(
                delayed_share=alpha,
                wait_for_norm=self._query.clipping and alpha < 1,
                separate_device=self._query.hardware.separate_device,
                boundaries=boundaries,
                gradients=gradients,
                resident_weights=placement.resident_weights,
                resident_state=placement.resident_state,
            )
            for slots in (WIDE, NARROW):
                case = Case(batch=batch, layers_per_unit=layers_per_unit, choices=with_slots(choices, slots))
                fitted = self.fit_shares(case)
                if fitted is not None:
                    found.append((placement.seconds, len(found), fitted))
                    break
        return [case for _, _, case in sorted(found, key=lambda entry: entry[:2])]

    def _tiers(self, alpha: float) -> Iterator[tuple[Tier, Tier]]:
        query = self._query
        boundaries = [Tier.DEVICE, Tier.HOST, Tier.SSD] if query.hardware.separate_device else [Tier.HOST, Tier.SSD]
        gradients = [Tier.HOST, Tier.SSD]
        if alpha == 0 and not query.clipping:
            gradients = [Tier.HOST]  # none are held
        return product(
            [query.boundaries] if query.boundaries else boundaries,
            [query.gradients] if query.gradients else gradients,
        )

    def fit_shares(self, case: Case) -> Case | None:
        """The case with resident shares of whole units and chunks that fit; None if it does not fit at all."""
        query, shape = self._query, case.shape(self._query)
        steps = {"resident_state": max(len(unit.chunks) for unit in shape.units), "resident_weights": len(shape.units)}
        given = {name for name in steps if getattr(query, name) is not None}
        for name in steps.keys() - given:
            share = floor(getattr(case.choices, name) * steps[name] + 1e-6) / steps[name]
            case = case.with_choices(**{name: share})
        sizes = step_totals(shape, updates_in_backward=True)
        step_bytes = {name: getattr(sizes, name.removeprefix("resident_")) / count for name, count in steps.items()}
        for name in [name for name in steps if name not in given]:  # state first: it saves less for its bytes
            while (share := getattr(case.choices, name)) > 0:
                missing = over(case.needs(query), query.limits).get(Tier.HOST, 0)
                if not missing:
                    break
                fewer = max(1, floor(missing / step_bytes[name]))
                case = case.with_choices(**{name: max(0, round(share * steps[name]) - fewer) / steps[name]})
        return case if fits(case.needs(query), query.limits) else None

    def neighbours(self, case: Case, alphas: tuple[float, ...], unit_sizes: tuple[int, ...]) -> Iterator[Case]:
        """Cases that differ in one choice: α by one of ``alphas``, the unit size, or the number of buffers."""
        query = self._query
        if query.delayed_share is None:
            for step in alphas:
                alpha = round(case.choices.delayed_share + step, 2)
                if 0 <= alpha <= 1:
                    yield from self.cases(case.batch, alpha, case.layers_per_unit)[:2]
        if query.layers_per_unit is None:
            for size in unit_sizes:
                if size != case.layers_per_unit and size <= query.workload.layers:
                    yield from self.cases(case.batch, case.choices.delayed_share, size)[:2]
        for slots in (WIDE, NARROW):
            other = self.fit_shares(replace(case, choices=with_slots(case.choices, slots)))
            if other is not None:
                yield other
