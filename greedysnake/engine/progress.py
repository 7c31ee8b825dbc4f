"""How far a run has come: all that its future depends on besides weights, state and data."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from greedysnake.errors import NonFiniteError


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Counters of a run.

    Every random number is drawn from seeds made of the run's seed and these counters, and the data of a step is
    found by its number, so a run that has its weights and state back, and these, goes on exactly.

    Attributes:
        steps_done: steps so far, skipped ones included; the learning rate and the data follow it.
        updates: optimizer updates so far; Adam's bias correction follows it.
        skipped_in_a_row: steps skipped since the last update because they were not finite.
    """

    steps_done: int = 0
    updates: int = 0
    skipped_in_a_row: int = 0

    def after_update(self) -> Self:
        """One step further, with an update."""
        return replace(self, steps_done=self.steps_done + 1, updates=self.updates + 1, skipped_in_a_row=0)

    def after_skip(self, *, counts: bool) -> Self:
        """One step further, without one; ``counts``: as one of those in a row that stop a run."""
        return replace(self, steps_done=self.steps_done + 1, skipped_in_a_row=self.skipped_in_a_row + counts)

    def as_json(self) -> dict[str, Any]:
        """Plain values; :meth:`from_json` takes them back."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """A run's progress from what :meth:`as_json` gave."""
        return cls(**values)

    def check_skipped(self, limit: int, reason: str | None) -> None:
        """Stop a run that gets nowhere.

        Args:
            limit: so many skipped in a row stop it.
            reason: why the last one was.

        Raises:
            NonFiniteError: so many were skipped.
        """
        if self.skipped_in_a_row >= limit:
            raise NonFiniteError(
                f"{self.skipped_in_a_row} steps in a row were skipped, the last one (step {self.steps_done}) because "
                f"{reason}. The state before them is kept. Lower optimizer.lr, set optimizer.max_grad_norm, or look at "
                f"the data"
            )
