"""Zero-bubble schedules: the backward in two halves, so that weight gradients fill what would be bubbles.

Source: Qi, Wan, Huang, Lin 2023, "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241): figure 3 (ZB-H1 above, ZB-H2
below), section 6 (ZB-V). Their B is our INPUT_GRAD.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from simtrain.program.actions import Action, ActionKind, Program

F, _, I, W = ActionKind  # noqa: E741


def zb_h1(ranks: int, microbatches: int, virtual: int) -> Program:
    """Weight gradients lag by as many microbatches as the rank's number: the memory of 1F1B, a third of its bubble.

    The order is that of PyTorch's ``ScheduleInterleavedZeroBubble``, virtual stages included.
    """
    return _handmade(ranks, microbatches, virtual, ahead=1)


def zb_h2(ranks: int, microbatches: int, virtual: int) -> Program:
    """Twice as many forwards before the first backward, and weight gradients that lag twice as far: no bubble inside.

    One stage a rank. Activations of up to 2 p - 1 microbatches.
    """
    return _handmade(ranks, microbatches, virtual, ahead=2)


def _handmade(ranks: int, microbatches: int, virtual: int, *, ahead: int) -> Program:
    """Interleaved 1F1B with ``ahead`` forwards a hop before the first backward, and W ``ahead * rank`` behind I."""
    size = microbatches // max(1, microbatches // ranks) if virtual > 1 else microbatches

    def order(rank: int, chunks: range) -> list[tuple[int, int]]:
        return [
            (chunk * ranks + rank, m)
            for first in range(0, microbatches, size)
            for chunk in chunks
            for m in range(first, first + size)
        ]

    def actions(rank: int) -> Iterator[Action]:
        forwards = deque(order(rank, range(virtual)))
        lead = min(len(forwards), (virtual - 1) * size + ahead * (ranks - 1 - rank))
        for _ in range(lead):
            yield _action(forwards.popleft(), F)
        waiting: deque[tuple[int, int]] = deque()
        for done in order(rank, range(virtual)[::-1]):
            if forwards:
                yield _action(forwards.popleft(), F)
            yield _action(done, I)
            waiting.append(done)
            if len(waiting) > ahead * rank:
                yield _action(waiting.popleft(), W)
        for left in waiting:
            yield _action(left, W)

    return tuple(tuple(actions(rank)) for rank in range(ranks))


def _action(place: tuple[int, int], kind: ActionKind) -> Action:
    return Action(place[0], kind, place[1])


def zb_v(ranks: int, microbatches: int, virtual: int) -> Program:
    """Two stages a rank in the shape of a V: the memory of 1F1B, no bubble where F, B and W take the same time.

    The order is that of PyTorch's ``ScheduleZBVZeroBubble``: made for 2 p - 1 microbatches at least, of which the
    numbers that do not exist are then left out.
    """
    return tuple(
        tuple(
            action for action in _v(rank, ranks, max(2 * ranks - 1, microbatches)) if action.microbatch < microbatches
        )
        for rank in range(ranks)
    )


def _v(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """One rank of ZB-V: warm-up until the first backward, triples F I W of either stage in turn, then what is left."""
    down, up = rank, 2 * ranks - 1 - rank
    count: dict[tuple[int, ActionKind], int] = {}

    def run(stage: int, *kinds: ActionKind) -> Iterator[Action]:
        for kind in kinds:
            number = count.get((stage, kind), 0)
            count[stage, kind] = number + 1
            yield Action(stage, kind, number)

    def repeat(times: int, *steps: tuple[int, str]) -> Iterator[Action]:
        for _ in range(times):
            for stage, letters in steps:
                yield from run(stage, *map(ActionKind, letters))

    yield from repeat(2 * (ranks - rank) - 1, (down, "F"))
    yield from repeat(rank, (up, "F"), (down, "F"))
    yield from repeat(ranks - rank, (up, "FIW"))
    while count[up, F] < microbatches:
        more = "FIW" if count[down, F] < microbatches else "IW"
        yield from repeat(1, (down, more), (up, "FIW"))
    yield from repeat(rank, (down, "I"), (up, "I"))
    yield from repeat(ranks - rank, (down, "IW"))
    yield from _rest(count, up, microbatches)
    yield from _rest(count, down, microbatches)


def _rest(count: dict[tuple[int, ActionKind], int], stage: int, microbatches: int) -> Iterable[Action]:
    """Weight gradients of a stage that are still to do."""
    return (Action(stage, W, m) for m in range(count.get((stage, W), 0), microbatches))
