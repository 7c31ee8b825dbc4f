"""When the content of a buffer is over, in any order that a schedule allows."""

from dataclasses import dataclass

from greedysnake.schedule.operations import Buffer, Schedule


@dataclass(frozen=True, kw_only=True)
class Life:
    """One content of a buffer, from its first write to its release.

    Attributes:
        buffer: where it is.
        writer: index of the operation that made it.
        uses: indices of all operations that touch it; when they have ended, nobody needs it.
    """

    buffer: Buffer
    writer: int
    uses: tuple[int, ...]


def content_lives(schedule: Schedule) -> list[Life]:
    """Every content that a step both makes and releases."""
    begun: dict[Buffer, tuple[int, list[int]]] = {}
    lives = []
    for operation in schedule.operations:
        for buffer in dict.fromkeys((*operation.reads, *operation.writes)):
            if buffer in begun:
                begun[buffer][1].append(operation.index)
            elif buffer in operation.writes and buffer not in schedule.live_in:
                begun[buffer] = (operation.index, [operation.index])
        for buffer in operation.releases:
            if buffer in begun:
                writer, uses = begun.pop(buffer)
                lives.append(Life(buffer=buffer, writer=writer, uses=tuple(uses)))
    return lives
