"""Memory as a fold over traces whose answer is known by hand."""

from __future__ import annotations

import numpy as np

from simtrain.program.demand import Demand, Memory, MemoryBytes
from simtrain.program.lowered import Lowered, SimRank, Stream, Task, TaskList, Work
from simtrain.trace.memory import MemoryProfile, profile
from simtrain.trace.spans import Trace

A, L, W = Memory.ACTIVATIONS, Memory.LOGITS, Memory.WORKSPACE
REST = {Memory.PARAMETERS: 100.0, Memory.BUFFERS: 0.0}


def demand(*, keeps: MemoryBytes = (), frees: MemoryBytes = (), transient: MemoryBytes = ()) -> Demand:
    return Demand(1.0, (), keeps=keeps, frees=frees, transient=transient)


FORWARD = demand(keeps=((A, 10.0), (L, 4.0)), transient=((W, 1.0),))
BACKWARD = demand(frees=((A, 10.0), (L, 4.0)), transient=((W, 7.0),))
IDLE = demand()


def fold(demands: list[Demand], spans: list[tuple[int, int, float, float]], ranks: int = 1) -> MemoryProfile:
    """Spans are (rank, work, start, end)."""
    tasks = TaskList(tuple(Task(0, work, -1) for work in range(len(demands))), (Stream.COMPUTE,))
    lowered = Lowered(
        works=tuple(Work((), -1, str(work)) for work in range(len(demands))),
        lists=(tasks,),
        ranks=tuple(SimRank(rank, 1, (), 0, ()) for rank in range(ranks)),
        groups=(),
    )
    rank, work, start, end = zip(*spans, strict=True)
    trace = Trace(
        lowered,
        tuple(demands),
        np.array(rank, dtype=np.int32),
        np.array(work, dtype=np.int32),
        np.array(start, dtype=float),
        np.array(end, dtype=float),
        np.full(len(spans), -1),
    )
    return profile(trace, [REST] * ranks, capacity=1000.0)


def test_curve_peak_and_return() -> None:
    found = fold([FORWARD, BACKWARD, IDLE], [(0, 0, 0.0, 1.0), (0, 2, 1.0, 2.0), (0, 1, 3.0, 5.0)])
    assert found.times[0].tolist() == [0, 1, 3, 5]  # the idle span moves nothing
    assert found.total(0).tolist() == [115, 114, 121, 100]
    assert found.curves[0][A].tolist() == [10, 10, 10, 0]
    assert Memory.BUFFERS not in found.curves[0]
    at, total, by_category = found.peak(0)
    assert (at, total) == (3, 121)
    assert by_category == {Memory.PARAMETERS: 100, A: 10, L: 4, W: 7}
    assert found.capacity == 1000


def test_release_before_allocation_at_one_instant() -> None:
    """The second forward starts where the backward ends: their tensors never exist together."""
    spans = [(0, 0, 0.0, 1.0), (0, 1, 1.0, 2.0), (0, 2, 2.0, 3.0), (0, 3, 3.0, 4.0)]
    found = fold([FORWARD, BACKWARD, FORWARD, BACKWARD], spans)
    assert found.total(0).tolist() == [115, 121, 115, 121, 100]


def test_work_without_duration_never_dips_below_rest() -> None:
    found = fold([FORWARD, BACKWARD], [(0, 0, 1.0, 1.0), (0, 1, 1.0, 1.0)])
    assert found.total(0).tolist() == [100, 100]


def test_overlapping_streams_add_up() -> None:
    found = fold([FORWARD, demand(transient=((Memory.GATHERED, 50.0),))], [(0, 0, 0.0, 4.0), (0, 1, 1.0, 2.0)])
    assert found.total(0).tolist() == [115, 165, 115, 114]


def test_worst_rank() -> None:
    found = fold([FORWARD, BACKWARD], [(0, 0, 0.0, 1.0), (1, 0, 0.0, 1.0), (1, 1, 1.0, 2.0)], ranks=3)
    assert [found.peak(index)[1] for index in range(3)] == [115, 121, 100]
    assert found.worst == 1
    assert found.ranks == (0, 1, 2)
    assert found.times[2].tolist() == [0]


def test_curves_are_whole_bytes() -> None:
    """Shards are fractions of bytes; what rounding leaves of them never shows, least of all as negative memory."""
    shards = [demand(keeps=((A, 1e10 / 3),)), demand(keeps=((A, 1e9 / 7),)), demand(frees=((A, 1e10 / 3 + 1e9 / 7),))]
    found = fold(shards, [(0, i % 3, float(i), float(i + 1)) for i in range(3000)])
    assert (found.curves[0][A] % 1 == 0).all()
    assert found.total(0)[-1] == 100
