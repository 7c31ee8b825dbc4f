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
        least = Choices(separate_device=query.hardware.separate_device, boundaries_on_ssd=1.0, gradients=Tier.SSD)
        case = Case(batch=batch, layers_per_unit=layers_per_unit, choices=least)
        computing = case.computing_bytes(query)
        return _Frame(
            shape=shape,
            costs=case.costs(query),
            needs=tuple(
                step_needs(
                    query.workload,
                    shape,
                    with_slots(least, slots),
                    computing=computing,
                    slots=2 if query.second_slot else 1,
                )
                for slots in (WIDE, NARROW)
            ),
        )

    def fixed_shares(
        self, *, boundaries_on_ssd: float | None = None, gradients: Tier | None = None
    ) -> dict[str, float]:
        """What of the program's shares is given, by the query or else by the arguments."""
        query = self._query
        fixed = {
            name: getattr(query, name)
            for name in ("resident_weights", "resident_state")
            if getattr(query, name) is not None
        }
        if not query.hardware.separate_device:
            fixed["boundaries_device"] = 0.0
        elif query.boundaries_on_device is not None:
            fixed["boundaries_device"] = query.boundaries_on_device
        on_ssd = query.boundaries_on_ssd if query.boundaries_on_ssd is not None else boundaries_on_ssd
        if on_ssd is not None:
            fixed["boundaries_ssd"] = on_ssd
        gradients = query.gradients or gradients
        if gradients is not None:
            fixed["gradients_host"] = float(gradients == Tier.HOST)
        return fixed

    def cases(self, batch: BatchShape, alpha: float, layers_per_unit: int) -> list[Case]:
        """Whole choices for a batch, α and unit size: with and without boundaries on SSD, the shortest first."""
        key = (batch, alpha, layers_per_unit)
        if key not in self._cases:
            self._cases[key] = self._find_cases(batch, alpha, layers_per_unit)
        return self._cases[key]

    def _find_cases(self, batch: BatchShape, alpha: float, layers_per_unit: int) -> list[Case]:
        found: list[tuple[float, int, Case]] = []
        for on_ssd, gradients in self._variants(alpha):
            fixed = self.fixed_shares(boundaries_on_ssd=on_ssd, gradients=gradients)
            placement = self.place(batch, alpha, layers_per_unit, fixed)
            if placement is None:
                continue
            choices = Choices(
                delayed_share=alpha,
                wait_for_norm=self._query.clipping and alpha < 1,
                separate_device=self._query.hardware.separate_device,
                boundaries_on_device=_whole(placement.boundaries_device),
                boundaries_on_ssd=_whole(max(0.0, 1 - placement.boundaries_device - placement.boundaries_host)),
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
        cases = [case for _, _, case in sorted(found, key=lambda entry: entry[:2])]
        return list(dict.fromkeys(cases))

    def _variants(self, alpha: float) -> Iterator[tuple[float | None, Tier]]:
        """What the program should not decide alone: whether boundaries may go to SSD, and where gradients wait.

        In the backward, reads of boundaries wait behind reads of state, which the program does not know.
        """
        query = self._query
        gradients = [Tier.HOST, Tier.SSD]
        if alpha == 0 and not query.clipping:
            gradients = [Tier.HOST]  # none are held
        on_ssd = [None] if query.boundaries_on_ssd is not None else [0.0, None]
        return product(on_ssd, [query.gradients] if query.gradients else gradients)

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


def _whole(share: float) -> float:
    """A share without the solver's rounding errors."""
    return min(1.0, max(0.0, round(share, 6)))
