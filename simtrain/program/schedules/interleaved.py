"""Interleaved 1F1B: several model chunks a rank, for a bubble divided by their number."""

from __future__ import annotations

from simtrain.program.actions import Action, ActionKind, Program
from simtrain.program.schedules.weave import weave


def interleaved(ranks: int, microbatches: int, virtual: int) -> Program:
    """Rank r runs the stages r, r + ranks, ...; microbatches go through them in rounds of ``ranks``, depth first.

    Needs ``microbatches % ranks == 0``.

    Source: Narayanan et al., SC21, section 2.2 and figure 4; the order is that of Megatron-LM's
    ``forward_backward_pipelining_with_interleaving`` and of PyTorch's ``ScheduleInterleaved1F1B``.
    """
    chunks = range(virtual)
    rounds = range(0, microbatches, ranks)

    def actions(rank: int) -> tuple[Action, ...]:
        def order(kind: ActionKind, chunk_order: range) -> list[Action]:
            return [
                Action(chunk * ranks + rank, kind, m)
                for first in rounds
                for chunk in chunk_order
                for m in range(first, first + ranks)
            ]

        lead = (virtual - 1) * ranks + 2 * (ranks - 1 - rank)
        return weave(order(ActionKind.FORWARD, chunks), order(ActionKind.BACKWARD, chunks[::-1]), lead=lead)

    return tuple(actions(rank) for rank in range(ranks))
