"""Which content each buffer holds from when to when, in any order that a schedule allows."""

from dataclasses import dataclass

from greedysnake.schedule.operations import Buffer, Schedule


@dataclass(frozen=True, kw_only=True)
class Life:
    """One content of a buffer, from its first write to its release.

    Attributes:
        buffer: where it is.
        writer: index of the operation that made it; None: it was there before the step.
        uses: indices of all operations that touch it.
        released: whether nobody needs it when ``uses`` have ended; if not, it is there after the step.
    """

    buffer: Buffer
    writer: int | None
    uses: tuple[int, ...]
    released: bool


def content_lives(schedule: Schedule) -> list[Life]:
    """Every content that any buffer has in a step, by the order of its release; those that stay come last."""
    begun: dict[Buffer, tuple[int | None, list[int]]] = {buffer: (None, []) for buffer in sorted(schedule.live_in)}
    lives = []
    for operation in schedule.operations:
        for buffer in dict.fromkeys((*operation.reads, *operation.writes)):
            if buffer not in begun:
                begun[buffer] = (operation.index, [])
            begun[buffer][1].append(operation.index)
        for buffer in operation.releases:
            writer, uses = begun.pop(buffer)
            lives.append(Life(buffer=buffer, writer=writer, uses=tuple(uses), released=True))
    lives += [
        Life(buffer=buffer, writer=writer, uses=tuple(uses), released=False) for buffer, (writer, uses) in begun.items()
    ]
    return lives
