"""Speed of the engine: ``python -m tests.bench.engine_speed``. Prints tasks a second and peak memory of three programs.

1. pipeline: 8 ranks, 1F1B, 2,000 microbatches, sends and receives that hold no compute units;
2. the same where messages take 2 % of the compute units, so that every task can meet another on them;
3. 4,096 unfolded ranks of about 300 tasks each: 8 stages, data-parallel reductions of 512 ranks beside the backward;
4. the same with a NIC a pipeline, on which its 8 reductions meet: all are one coupled set.
"""

from __future__ import annotations

import resource
import time

from simtrain.engine.run import run
from simtrain.program.demand import Demand, TimeKind
from simtrain.program.lowered import Group, Lowered, Piece, PieceKind, SimRank, Stream, Task, TaskList, Work
from simtrain.scenario.model import Part

STREAMS = (Stream.COMPUTE, *(Stream.RECV, Stream.SEND) * 2, Stream.REDUCE)
COMPUTE, ACT_IN, ACT_OUT, GRAD_IN, GRAD_OUT, REDUCE = range(6)
WORKS = tuple(
    Work((Piece(kind, Part.MLP),), 0, kind.value)
    for kind in (PieceKind.FORWARD, PieceKind.BACKWARD, PieceKind.SEND, PieceKind.RECV, PieceKind.REDUCE_SCATTER)
)
FORWARD, BACKWARD, SEND, RECV, SCATTER = range(5)


def stage_list(stage: int, stages: int, microbatches: int, reductions: int = 0) -> TaskList:
    """One stage of 1F1B; slots 0 and 1 are the channels from and to its neighbours' activations, 2 and 3 gradients."""
    warm = min(stages - stage, microbatches)
    order = [("F", i) for i in range(warm)]
    for i in range(microbatches):
        order += [("B", i)] + [("F", warm + i)] * (warm + i < microbatches)
    tasks: list[Task] = []
    for kind, i in order:
        source, out = (stage > 0, stage < stages - 1) if kind == "F" else (stage < stages - 1, stage > 0)
        recv, send = ((ACT_IN, 0), (ACT_OUT, 1)) if kind == "F" else ((GRAD_IN, 2), (GRAD_OUT, 3))
        if source:
            tasks.append(Task(recv[0], RECV, i, slot=recv[1]))
        deps = (len(tasks) - 1,) if source else ()
        tasks.append(Task(COMPUTE, FORWARD if kind == "F" else BACKWARD, i, deps))
        if out:
            tasks.append(Task(send[0], SEND, i, (len(tasks) - 1,), slot=send[1]))
    last = max(index for index, task in enumerate(tasks) if task.stream == COMPUTE)
    early = [index for index, task in enumerate(tasks) if task.work == BACKWARD][-reductions - 1 :]
    tasks += [Task(REDUCE, SCATTER, -1, (early[i] if i < len(early) else last,), slot=4) for i in range(reductions)]
    return TaskList(tuple(tasks), STREAMS)


def pipeline(*, stages: int, replicas: int, microbatches: int, reductions: int = 0, nics: bool = False) -> Lowered:
    """``replicas`` unfolded pipelines; their ranks of one stage reduce together."""
    groups: list[Group] = []
    slots: list[list[int]] = [[-1] * 5 for _ in range(stages * replicas)]
    for replica in range(replicas):
        for stage in range(stages - 1):
            here = replica * stages + stage
            for lower, upper in ((1, 0), (2, 3)):
                slots[here][lower] = slots[here + 1][upper] = len(groups)
                groups.append(Group("pp", (here, here + 1), 2, 2, 1))
    for stage in range(stages):
        for replica in range(replicas):
            slots[replica * stages + stage][4] = len(groups)
        loads = tuple((replica, 1.0) for replica in range(replicas * nics))
        groups.append(Group("dp", tuple(range(stage, stages * replicas, stages)), replicas, replicas, 1, loads))
    ranks = tuple(SimRank(i, 1, (), i % stages, tuple(slots[i])) for i in range(stages * replicas))
    lists = tuple(stage_list(stage, stages, microbatches, reductions) for stage in range(stages))
    return Lowered(WORKS, lists, ranks, tuple(groups), tuple(f"nic {i}" for i in range(replicas * nics)))


def demands(message_units: float, reduction_units: float) -> tuple[Demand, ...]:
    def one(duration: float, kind: TimeKind, units: float, network: float = 0.0) -> Demand:
        return Demand(duration, ((kind, duration),), sm_share=units, network_share=network)

    return (
        one(1.0e-3, TimeKind.COMPUTE, 1.0),
        one(2.1e-3, TimeKind.COMPUTE, 1.0),
        one(0.1e-3, TimeKind.PP, message_units),
        one(0.1e-3, TimeKind.PP, message_units),
        one(5e-3, TimeKind.DP_REDUCE, reduction_units, 0.5),
    )


def measure(label: str, lowered: Lowered, prices: tuple[Demand, ...]) -> None:
    begin = time.perf_counter()
    trace = run(lowered, prices)
    took = time.perf_counter() - begin
    begin = time.perf_counter()
    trace.frame()
    framed = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{label:34} {lowered.task_count:9,} tasks {took:6.2f} s {lowered.task_count / took:9,.0f} tasks/s; "
        f"frame {framed:5.2f} s; step {trace.step_time:.6f} s; peak {peak:.2f} GiB",
        flush=True,
    )


def main() -> None:
    long = pipeline(stages=8, replicas=1, microbatches=2000)
    measure("8 ranks, 1F1B", long, demands(0.0, 0.0))
    measure("8 ranks, 1F1B, contended units", long, demands(0.02, 0.0))
    wide = pipeline(stages=8, replicas=512, microbatches=48, reductions=8)
    measure("4,096 ranks", wide, demands(0.0, 0.08))
    met = pipeline(stages=8, replicas=512, microbatches=48, reductions=8, nics=True)
    measure("4,096 ranks, contended NICs", met, demands(0.0, 0.08))


if __name__ == "__main__":
    main()
