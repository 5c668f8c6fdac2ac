"""From a scenario to the lowered list, over all ranks; ``ranklist`` builds the list of one.

Ranks of one pipeline position whose groups lie alike on the machines share one list.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from simtrain.program.actions import Action, Program
from simtrain.program.emitter import Slot
from simtrain.program.jitter import slowdowns
from simtrain.program.lowered import Group, Lowered, SimRank, Span, TaskList, Work
from simtrain.program.placement import Placement, place
from simtrain.program.ranklist import RankList, Surroundings
from simtrain.program.schedules import build
from simtrain.scenario.scenario import Scenario


def pipeline_program(scenario: Scenario) -> Program:
    """The schedule list of a scenario: for each pipeline rank its actions in issue order."""
    parallelism = scenario.parallelism
    return build(parallelism.schedule, parallelism.layout.pp, scenario.microbatches, parallelism.virtual_stages)


def lower(scenario: Scenario, *, fold: bool = True, merge: bool = True) -> Lowered:
    """Lower a scenario's program.

    Parameters
    ----------
    scenario
        What to run.
    fold
        Simulate ranks that are identical by symmetry once.
    merge
        Join runs of pieces that no other stream can interact with; ``False`` keeps one task a piece.

    Returns
    -------
    Lowered
        Task lists, simulated ranks, process groups, distinct works.
    """
    program = pipeline_program(scenario)
    stage_rank = {action.stage: rank for rank, actions in enumerate(program) for action in actions}
    neighbours = tuple(_neighbours(here, actions, stage_rank) for here, actions in enumerate(program))
    placement = place(
        scenario.parallelism.layout,
        scenario.cluster,
        fold=fold,
        slowdowns=slowdowns(scenario),
        channels={(here, there) for here, beside in enumerate(neighbours) for there in beside},
    )
    return _Lowering(scenario, program, stage_rank, neighbours, placement, merge).run()


@dataclass(slots=True)
class _Lowering:
    scenario: Scenario
    program: Program
    stage_rank: dict[int, int]
    neighbours: tuple[list[int], ...]
    """By pipeline rank: those that it exchanges messages with."""
    placement: Placement
    merge: bool
    works: dict[Work, int] = field(default_factory=dict)
    groups: dict[tuple[int, Slot], int] = field(default_factory=dict)
    """(placement group, use) -> lowered group: two uses of one process group are two groups to the engine."""

    def run(self) -> Lowered:
        lists: dict[tuple[int, Surroundings], tuple[int, TaskList, tuple[Slot, ...]]] = {}
        ranks = []
        for index, rank in enumerate(self.placement.ranks):
            here = self._pipeline_rank(index)
            around = self._surroundings(index, here, self.neighbours[here])
            if (here, around) not in lists:
                builder = RankList(
                    self.scenario,
                    self.program[here],
                    stage_rank=self.stage_rank,
                    around=around,
                    works=self.works,
                    merge=self.merge,
                )
                lists[here, around] = (len(lists), *builder.build())
            number, _, slots = lists[here, around]
            groups = tuple(self._group(index, here, slot) for slot in slots)
            ranks.append(SimRank(rank.rank, rank.multiplicity, rank.coordinate, number, groups, rank.slowdown))
        return Lowered(
            works=tuple(self.works),
            lists=tuple(tasks for _, tasks, _ in lists.values()),
            ranks=tuple(ranks),
            groups=tuple(self.placement.groups[number] for number, _ in self.groups),
            resources=self.placement.resources,
        )

    def _pipeline_rank(self, index: int) -> int:
        return dict(self.placement.ranks[index].coordinate)["pp"]

    def _surroundings(self, index: int, here: int, neighbours: list[int]) -> Surroundings:
        axes = ["tp", "dp", "model"]
        if self.scenario.has_tied_copy and here in (0, self.scenario.parallelism.layout.pp - 1):
            axes.append("embedding")
        if self.scenario.is_hybrid:
            axes += ["shard", "replica"]
        if self.scenario.parallelism.layout.secondary:
            axes.append("secondary")
        found = {axis: self.placement.groups[self.placement.group(axis, index)] for axis in axes}
        channels = {there: self.placement.groups[self.placement.channel(index, there)] for there in neighbours}
        return Surroundings(
            axes=tuple((axis, _span(group)) for axis, group in found.items()),
            channels=tuple((there, _span(group)) for there, group in channels.items()),
            tensor_joint=len(found["tp"].parties) > 1 or found["tp"].machines > 1,
        )

    def _group(self, index: int, here: int, slot: Slot) -> int:
        if slot.axis != "pp":
            number = self.placement.group(slot.axis, index)
        elif slot.source == here:
            number = self.placement.channel(index, slot.target)
        else:
            number = self.placement.channel(self.placement.partner(index, slot.source), slot.target)
        return self.groups.setdefault((number, slot), len(self.groups))


def _neighbours(here: int, actions: tuple[Action, ...], stage_rank: dict[int, int]) -> list[int]:
    """Pipeline ranks that hold a stage next to one of ours."""
    beside = {action.stage + step for action in actions for step in (-1, 1)}
    return sorted({stage_rank[stage] for stage in beside if stage in stage_rank} - {here})


def _span(group: Group) -> Span:
    return Span(group.size, group.machines, group.members_per_machine)
