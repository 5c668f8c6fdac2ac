"""The compute order of PyTorch's pipeline schedules, as PyTorch runs them; needs torch.

``python -m tests.golden.schedules.torch_grids`` writes the CSV files beside this one.

Single-stage schedules: the stage is a recorder, and the schedule itself calls it. (The list that ``Schedule1F1B``
prints about itself, ``_get_pipeline_order``, is off by one in the last stage and is not used.) Multi-stage schedules:
torch's runtime executes ``pipeline_order``, which is taken without its idle cells.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

FOLDER = Path(__file__).parent
CASES = {
    "gpipe": ((2, 3, 1), (4, 8, 1), (4, 2, 1), (8, 32, 1)),
    "1f1b": ((2, 3, 1), (4, 4, 1), (4, 8, 1), (8, 32, 1)),
    "interleaved": ((2, 4, 2), (4, 4, 2), (4, 8, 3), (8, 32, 2), (2, 2, 4)),
    "looped-bfs": ((2, 3, 2), (4, 8, 3), (8, 16, 2)),
    "zb-h1": ((2, 3, 1), (4, 8, 1), (8, 32, 1), (4, 2, 1), (4, 10, 2), (4, 8, 3)),
    "zb-v": ((2, 2, 2), (4, 8, 2), (4, 20, 2), (8, 16, 2)),
    "dualpipe-v": ((2, 4, 2), (4, 10, 2), (3, 7, 2), (8, 20, 2)),
}
"""Name in ``SCHEDULES`` -> (ranks, microbatches, virtual stages)."""


def path(name: str, case: tuple[int, int, int]) -> Path:
    """Golden file of a case."""
    return FOLDER / f"{name}_{'x'.join(map(str, case))}.csv"


def _stage(index: int, ranks: int, stages: int) -> Any:
    stage = MagicMock()
    stage.stage_index, stage.num_stages, stage.group_size, stage.group_rank = index, stages, ranks, index % ranks
    stage.is_first, stage.is_last, stage.has_backward = index == 0, index == stages - 1, True
    for ops in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        getattr(stage, ops).return_value = []
    return stage


def _executed(schedule_class: Any, rank: int, ranks: int, microbatches: int) -> list[str]:
    import torch

    done: list[str] = []
    stage = _stage(rank, ranks, ranks)

    def forward(m: int, *_: Any, **__: Any) -> torch.Tensor:
        done.append(f"{rank}F{m}")
        return torch.zeros(1)

    stage.forward_one_chunk.side_effect = forward
    stage.backward_one_chunk.side_effect = lambda m, **_: done.append(f"{rank}B{m}")
    schedule = schedule_class(stage, microbatches, loss_fn=lambda output, target: output)
    schedule._initialize_stage = lambda *_: None
    schedule._step_microbatches([()] * microbatches, [{}] * microbatches, [torch.zeros(1)] * microbatches, [])
    return done


def grid(name: str, case: tuple[int, int, int]) -> list[list[str]]:
    """Actions of each rank, in the order in which torch runs them."""
    from torch.distributed.pipelining import schedules

    ranks, microbatches, virtual = case
    single = {"gpipe": schedules.ScheduleGPipe, "1f1b": schedules.Schedule1F1B}
    if name in single:
        return [_executed(single[name], rank, ranks, microbatches) for rank in range(ranks)]
    several = {
        "interleaved": schedules.ScheduleInterleaved1F1B,
        "looped-bfs": schedules.ScheduleLoopedBFS,
        "zb-h1": schedules.ScheduleInterleavedZeroBubble,
        "zb-v": schedules.ScheduleZBVZeroBubble,
        "dualpipe-v": schedules.ScheduleDualPipeV,
    }
    local = [_stage(chunk * ranks, ranks, ranks * virtual) for chunk in range(virtual)]
    schedule = several[name](local, microbatches, loss_fn=lambda output, target: output)
    return [[str(action) for action in schedule.pipeline_order[rank] if action] for rank in range(ranks)]


def main() -> None:
    """Write every golden file."""
    import torch

    for name, cases in CASES.items():
        for case in cases:
            head = (
                f"# PyTorch {torch.__version__.split('+')[0]}, {name}, ranks x microbatches x virtual stages = {case}\n"
            )
            made = "# written by: python -m tests.golden.schedules.torch_grids\n"
            path(name, case).write_text(head + made + "".join(",".join(row) + "\n" for row in grid(name, case)))


if __name__ == "__main__":
    main()
