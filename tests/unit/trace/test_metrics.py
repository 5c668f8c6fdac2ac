from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from simtrain.program.demand import Demand, TimeKind
from simtrain.program.lowered import Group, Piece, PieceKind, Span, Stream, Task, TaskList, Work
from simtrain.scenario.model import Part
from simtrain.scenario.scenario import Zero
from simtrain.simulate import simulate
from simtrain.trace import metrics
from simtrain.trace.communication import communication_table
from simtrain.trace.spans import Trace
from tests.factories import TORCH, scenario
from tests.unit.report.pipelines import job, pipeline, simple, trace

K = PieceKind
COMPUTE = Work((Piece(K.FORWARD, Part.MLP),), 0, "F")
MESSAGE = Work((Piece(K.RECV, Part.BOUNDARY, axis="pp", span=Span(2, 2, 1)),), 0, "recv")
BUCKET = Work((Piece(K.ALL_REDUCE, Part.GRADIENT, axis="dp", span=Span(4, 1, 4)),), 0, "reduce")


def nonzero(split: dict[TimeKind, float]) -> dict[TimeKind, float]:
    return {kind: seconds for kind, seconds in split.items() if seconds}


def gap_trace() -> Trace:
    """Rank 1 waits from 0 to 3: rank 0 computes until 2, then a message is 1 s in flight."""
    sender = TaskList((Task(0, 0, 0), Task(1, 1, 0, (0,))), (Stream.COMPUTE, Stream.SEND))
    receiver = TaskList((Task(1, 1, 0), Task(0, 0, 0, (0,))), (Stream.COMPUTE, Stream.RECV))
    lowered = job((sender, receiver), (COMPUTE, MESSAGE))
    spans = [(0, 0, 0.0, 2.0, -1), (0, 1, 2.0, 3.0, 0), (1, 0, 2.0, 3.0, 0), (1, 1, 3.0, 5.0, 2)]
    return trace(lowered, (simple(2.0), simple(1.0, TimeKind.PP, wire=8.0)), spans)


def test_gap_is_bubble_until_the_message_leaves_and_exposed_after():
    assert nonzero(metrics.time_split(gap_trace(), 1)) == {
        TimeKind.COMPUTE: 2.0,
        TimeKind.PP: 1.0,
        TimeKind.BUBBLE: 2.0,
    }


def test_tail_counts_like_a_gap():
    assert nonzero(metrics.time_split(gap_trace(), 0)) == {
        TimeKind.COMPUTE: 2.0,
        TimeKind.PP: 1.0,
        TimeKind.BUBBLE: 2.0,
    }


def test_overlapped_communication_is_not_exposed():
    tasks = TaskList((Task(0, 0, 0), Task(1, 1, -1, (0,)), Task(0, 0, 1)), (Stream.COMPUTE, Stream.REDUCE))
    lowered = job((tasks,), (COMPUTE, BUCKET))
    spans = [(0, 0, 0.0, 2.0, -1), (0, 1, 2.0, 3.0, 0), (0, 2, 2.0, 4.0, 0)]
    split = metrics.time_split(trace(lowered, (simple(2.0), simple(1.0, TimeKind.DP_REDUCE)), spans))
    assert nonzero(split) == {TimeKind.COMPUTE: 4.0}


def test_queue_of_two_buckets_is_followed_back():
    """The optimizer waits for bucket 2, which waits for bucket 1: both are exposed behind the last compute."""
    tasks = TaskList(
        (Task(0, 0, 0), Task(1, 1, -1, (0,)), Task(1, 1, -1, (0,)), Task(0, 0, 1, (2,))),
        (Stream.COMPUTE, Stream.REDUCE),
    )
    lowered = job((tasks,), (COMPUTE, BUCKET))
    spans = [(0, 0, 0.0, 2.0, -1), (0, 1, 2.0, 3.5, 0), (0, 2, 3.5, 5.0, 1), (0, 3, 5.0, 7.0, 2)]
    one = trace(lowered, (simple(2.0), simple(1.5, TimeKind.DP_REDUCE, wire=6.0)), spans)
    assert nonzero(metrics.time_split(one)) == {TimeKind.COMPUTE: 4.0, TimeKind.DP_REDUCE: 3.0}
    (row,) = communication_table(one, inside="NVLink3", between="HDR")
    assert (row["calls"], row["bytes"], row["seconds"], row["exposed_seconds"]) == (2.0, 12.0, 3.0, 3.0)
    assert (row["group_size"], row["machines"], row["network"]) == (4, 1, "NVLink3")


def test_joint_activity_counts_for_every_party():
    """Both ranks wait for one reduction, yet the optimizer of rank 1 names rank 0's span of it as what released it."""
    group = Group("dp", (0, 1), 2, 1, 2)
    tasks = TaskList((Task(0, 0, 0), Task(1, 1, -1, (0,), 0), Task(0, 0, 1, (1,))), (Stream.COMPUTE, Stream.REDUCE))
    lowered = job((tasks, tasks), (COMPUTE, BUCKET), (group,), ((0,), (0,)))
    first = [(0, 0, 0.0, 2.0, -1), (1, 0, 0.0, 1.0, -1), (0, 1, 2.0, 5.0, 0), (1, 1, 2.0, 5.0, 0)]
    one = trace(
        lowered, (simple(1.0), simple(3.0, TimeKind.DP_REDUCE)), [*first, (0, 2, 5.0, 6.0, 2), (1, 2, 5.0, 6.0, 2)]
    )
    split = metrics.time_split(one, 1)
    assert nonzero(split) == {TimeKind.COMPUTE: 2.0, TimeKind.DP_REDUCE: 3.0, TimeKind.BUBBLE: 1.0}


def test_slowdown_counts_with_its_kind_and_the_rest_is_contention():
    lowered = job((TaskList((Task(0, 0, 0),), (Stream.COMPUTE,)),), (COMPUTE,))
    slow = replace(lowered, ranks=(replace(lowered.ranks[0], slowdown=1.5),))
    demand = Demand(2.0, ((TimeKind.COMPUTE, 1.0), (TimeKind.TP, 1.0)))
    split = metrics.time_split(trace(slow, (demand,), [(0, 0, 0.0, 4.0, -1)]))
    assert nonzero(split) == {TimeKind.COMPUTE: 1.5, TimeKind.TP: 1.5, TimeKind.CONTENTION: 1.0}


def test_joint_work_that_a_slow_rank_does_not_stretch():
    lowered = job((TaskList((Task(0, 0, 0),), (Stream.COMPUTE,)),), (BUCKET,))
    slow = replace(lowered, ranks=(replace(lowered.ranks[0], slowdown=1.5),))
    split = metrics.time_split(trace(slow, (simple(2.0, TimeKind.DP_REDUCE),), [(0, 0, 0.0, 2.0, -1)]))
    assert nonzero(split) == {TimeKind.DP_REDUCE: 2.0}


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 4), (4, 4), (8, 32), (16, 5)])
def test_split_adds_up_on_every_rank(stages, microbatches):
    one = pipeline(stages, microbatches, message=0.05, reduce=3.0)
    for rank in range(stages):
        assert sum(metrics.time_split(one, rank).values()) == pytest.approx(one.step_time, rel=1e-12)
    summary = metrics.summarise_time(metrics.time_split(one))
    named = sum(value for key, value in summary.items() if key != "by_kind")
    assert named == pytest.approx(one.step_time, rel=1e-12)
    assert sum(summary["by_kind"].values()) == pytest.approx(one.step_time, rel=1e-12)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (8, 32)])
def test_bubble_is_the_closed_form(stages, microbatches):
    one = pipeline(stages, microbatches)
    bubble = metrics.time_split(one)[TimeKind.BUBBLE]
    assert bubble == pytest.approx((stages - 1) * 3.5, rel=1e-12)
    assert metrics.bubble_fraction(one) == pytest.approx(bubble / (microbatches * 3.5 + 0.5), rel=1e-12)


def test_mean_is_weighted_by_multiplicity():
    one = gap_trace()
    ranks = (replace(one.lowered.ranks[0], multiplicity=3), one.lowered.ranks[1])
    weighted = replace(one, lowered=replace(one.lowered, ranks=ranks), demands=(simple(1.0), simple(1.0, TimeKind.PP)))
    first, second = metrics.time_split(weighted, 0), metrics.time_split(weighted, 1)
    mean = metrics.time_split(weighted)
    assert mean == pytest.approx({kind: 0.75 * first[kind] + 0.25 * second[kind] for kind in first})


def test_critical_path_runs_back_from_the_last_end():
    assert metrics.critical_path(gap_trace()) == [0, 2, 3]


def test_streams_busy_counts_overlap_once():
    tasks = TaskList((Task(0, 0, 0), Task(1, 0, 0), Task(2, 0, 0)), (Stream.COMPUTE, Stream.SEND, Stream.SEND))
    spans = [(0, 0, 0.0, 2.0, -1), (0, 1, 0.0, 3.0, -1), (0, 2, 2.0, 6.0, 0)]
    busy = metrics.streams_busy(trace(job((tasks,), (COMPUTE,)), (simple(1.0),), spans), 0)
    assert busy == {Stream.COMPUTE: 2.0, Stream.SEND: 6.0}


def test_binds_names_the_largest_share_and_the_slow_stage():
    said = metrics.binds(gap_trace())
    assert said["what"] == "compute"
    assert said["share"] == pytest.approx(0.4)
    assert said["text"] == "compute (40% of the step), then pipeline bubble (40%)"
    one = gap_trace()
    uneven = replace(one, end=np.array([2.0, 3.0, 3.0, 9.0]))
    assert metrics.binds(uneven)["text"].endswith("; stage 1 sets the pace, 50% busier than the mean")


def test_binds_tells_memory_bandwidth_from_matrix_math():
    one = replace(gap_trace(), demands=(Demand(2.0, ((TimeKind.COMPUTE, 2.0),), flops=1e12, hbm_bytes=1e12), simple(1)))
    assert metrics.binds(one, matrix_peak=1e12, memory_bandwidth=2e12)["what"] == "matrix math"
    assert metrics.binds(one, matrix_peak=2e12, memory_bandwidth=1e12)["what"] == "memory bandwidth"


def test_collectives_inside_a_merged_work():
    """Two all-reduces over tp and a gather over cp in one compute work: time by kind, bytes by time."""
    tp, cp = Span(8, 1, 8), Span(2, 2, 1)
    pieces = (
        Piece(K.FORWARD, Part.ATTENTION),
        Piece(K.ALL_REDUCE, Part.ATTENTION, axis="tp", span=tp),
        Piece(K.ALL_GATHER, Part.ATTENTION, axis="cp", span=cp),
        Piece(K.ALL_REDUCE, Part.MLP, axis="tp", span=tp),
    )
    demand = Demand(4.0, ((TimeKind.COMPUTE, 2.0), (TimeKind.TP, 1.5), (TimeKind.CP, 0.5)), wire_bytes=80.0)
    lowered = job((TaskList((Task(0, 0, 0),), (Stream.COMPUTE,)),), (Work(pieces, 0, "F"),))
    table = communication_table(trace(lowered, (demand,), [(0, 0, 0.0, 4.0, -1)]), inside="NVLink", between="IB")
    assert [(r["axis"], r["calls"], r["bytes"], r["seconds"], r["network"]) for r in table] == [
        ("tp", 2.0, 60.0, 1.5, "NVLink"),
        ("cp", 1.0, 20.0, 0.5, "IB"),
    ]


def test_exposed_communication_of_table_and_split_agree():
    one = pipeline(8, 32, message=0.05, reduce=3.0)
    split = metrics.time_split(one)
    exposed: dict[str, float] = {}
    for row in communication_table(one):
        exposed[row["axis"]] = exposed.get(row["axis"], 0.0) + row["exposed_seconds"]
    assert exposed == pytest.approx(
        {"tp": split[TimeKind.TP], "dp": split[TimeKind.DP_REDUCE], "pp": split[TimeKind.PP]}, rel=1e-12
    )
    assert split[TimeKind.CONTENTION] == 0.0


@pytest.mark.parametrize(
    "changes",
    [
        {"pp": 2, "dp": 4, "tp": 2, "microbatches": 4},
        {"dp": 4, "zero": Zero.PARAMETERS, "stack": TORCH, "microbatches": 2},
        {"pp": 2, "virtual_stages": 2, "dp": 2, "microbatches": 4},
    ],
)
def test_folded_and_unfolded_ranks_give_the_same_split_and_table(changes):
    """Simulated for real: unfolded peers end together, and ties must not decide what is exposed and what is bubble."""
    folded, unfolded = (simulate(scenario(**changes), fold=fold).spans for fold in (True, False))
    assert len(unfolded.lowered.ranks) > len(folded.lowered.ranks)
    expected = metrics.time_split(folded)
    assert metrics.time_split(unfolded) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    for one, other in zip(communication_table(folded), communication_table(unfolded), strict=True):
        assert [one[key] for key in ("axis", "kind", "machines")] == [
            other[key] for key in ("axis", "kind", "machines")
        ]
        for key in ("calls", "bytes", "seconds", "exposed_seconds"):
            assert one[key] == pytest.approx(other[key], rel=1e-9, abs=1e-12)
