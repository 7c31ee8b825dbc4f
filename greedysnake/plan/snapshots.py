"""When snapshots are taken, and what that allows: the same rule for a run and for its prediction."""

DEFAULT_SNAPSHOT_STEPS = 20
"""Steps between snapshots where something stays in host memory, so that a snapshot has a cost."""


def nothing_resident(resident_weights: float | None, resident_state: float | None) -> bool:
    """Whether all weights and state go through SSD; None leaves that to the plan."""
    return resident_weights == 0 and resident_state == 0


def steps_between_snapshots(asked: int | None, resident_weights: float | None, resident_state: float | None) -> int:
    """As asked for; else 1 where a snapshot costs next to nothing."""
    return asked or (1 if nothing_resident(resident_weights, resident_state) else DEFAULT_SNAPSHOT_STEPS)


def can_take_back(
    steps_between: int, resident_weights: float | None, resident_state: float | None, *, second_slot: bool
) -> bool:
    """Whether what a step wrote can be taken back: the other slots hold the state before it, and memory none of it."""
    return second_slot and steps_between == 1 and nothing_resident(resident_weights, resident_state)
