"""DualPipe and DualPipe-V: forwards and backwards of two streams of microbatches in pairs that hide communication.

Source: DeepSeek-V3 technical report, section 3.2.1 and figure 5; the order is that of deepseek-ai/DualPipe
(``dualpipe.py``, steps 1 to 8), and of PyTorch's ``ScheduleDualPipeV``. DualPipe-V is "cut in half" of it: the same
list for half of the ranks, whose second stream is the second half of the model instead of the other direction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from simtrain.program.actions import Action, ActionKind, Pair, Program, Step

F, B, I, W = ActionKind  # noqa: E741


def dualpipe(ranks: int, microbatches: int, virtual: int) -> Program:
    """The first half of the microbatches enters at rank 0, the second at the last rank; the model is held twice.

    Rank r holds stage r for those of the first half, and stage ``ranks - 1 - r`` for those of the second. Needs an even
    number of ranks and of microbatches, 2 x ranks of these at least.
    """
    half, each = ranks // 2, microbatches // 2

    def streams(rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        to_right, to_left = (rank, 0), (ranks - 1 - rank, each)
        return (to_right, to_left) if rank < half else (to_left, to_right)

    return tuple(tuple(_steps(streams(rank), min(rank, ranks - 1 - rank), half, each)) for rank in range(ranks))


def dualpipe_v(ranks: int, microbatches: int, virtual: int) -> Program:
    """Rank r holds the stages r and ``2 ranks - 1 - r``. Needs 2 x ranks microbatches at least."""
    return tuple(
        tuple(_steps(((rank, 0), (2 * ranks - 1 - rank, 0)), rank, ranks, microbatches)) for rank in range(ranks)
    )


def _steps(streams: tuple[tuple[int, int], tuple[int, int]], place: int, depth: int, each: int) -> Iterator[Step]:
    """Steps of one rank.

    Parameters
    ----------
    streams
        Stage and first microbatch of the stream that enters here earlier, and of the other.
    place
        Distance from the end where that stream enters.
    depth
        Ranks from there to the turn.
    each
        Microbatches of each stream.
    """
    rank = _Rank(streams)
    near, far = 0, 1
    left = depth - place - 1
    for _ in range(2 * left):
        yield rank.run(near, F)
    for _ in range(place + 1):
        yield rank.run(near, F)
        yield rank.run(far, F)
    for _ in range(left):
        yield rank.run(far, I)
        yield from rank.weight()
        yield rank.run(far, F)
    for turn in range(each - 2 * depth + place + 1):
        if turn == 0 and not left:  # apart, which makes the bubble smaller
            yield rank.run(near, F)
            yield rank.run(far, B)
        else:
            yield rank.pair(near, far)
        yield rank.pair(far, near)
    for _ in range(left):
        yield rank.run(far, B)
        yield rank.pair(far, near)
    # from the middle of the last backwards on the weight gradients wait
    kinds = [B if turn < place + 1 else I for turn in range(2 * (place + 1))]
    for kind, stream in zip(kinds, (far, near) * (place + 1), strict=True):
        yield rank.run(stream, kind)
    for _ in range(left):
        yield from rank.weight()
        yield rank.run(near, I)
    for _ in range(place + 1):
        yield from rank.weight()


class _Rank:
    """Numbers the microbatches of both streams, and keeps the weight gradients that wait."""

    def __init__(self, streams: tuple[tuple[int, int], tuple[int, int]]) -> None:
        self.stages = [stage for stage, _ in streams]
        self.next = {(stream, kind): first for stream, (_, first) in enumerate(streams) for kind in (F, B)}
        self.waiting: deque[Action] = deque()

    def run(self, stream: int, kind: ActionKind) -> Action:
        """The next action of a stream."""
        key = (stream, F if kind is F else B)
        action = Action(self.stages[stream], kind, self.next[key])
        self.next[key] += 1
        if kind is I:
            self.waiting.append(action._replace(kind=W))
        return action

    def pair(self, forward: int, backward: int) -> Pair:
        """The next forward of one stream with the next backward of the other."""
        return Pair(self.run(forward, F), self.run(backward, B))

    def weight(self) -> Iterator[Action]:
        """The weight gradient that waits longest, if any."""
        if self.waiting:
            yield self.waiting.popleft()
