"""From a scenario to the lowered list, over all ranks; ``ranklist`` builds the list of one.

Ranks of one pipeline position whose groups lie alike on the machines share one list.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from simtrain.program.actions import Program
from simtrain.program.emitter import Slot
from simtrain.program.homes import Homes
from simtrain.program.jitter import slowdowns
from simtrain.program.limits import bound_tasks
from simtrain.program.lowered import Group, Lowered, SimRank, Span, TaskList, Work
from simtrain.program.placement import Placement, place
from simtrain.program.ranklist import RankList, Surroundings
from simtrain.program.schedules import build, written
from simtrain.scenario.pipelines import GRID
from simtrain.scenario.scenario import Scenario


def pipeline_program(scenario: Scenario) -> Program:
    """The schedule list of a scenario: for each pipeline rank its actions in issue order."""
    parallelism = scenario.parallelism
    if parallelism.schedule == GRID:
        return written(parallelism.grid, scenario.stages, scenario.microbatches, file=parallelism.grid_file)
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
    homes = Homes(program, scenario.stages)
    mirrors = [scenario.mirror(rank) for rank in range(len(program))] if scenario.held_twice else []
    placement = place(
        scenario.parallelism.layout,
        scenario.cluster,
        fold=fold,
        slowdowns=slowdowns(scenario),
        channels={(here, there) for here, beside in enumerate(homes.neighbours) for there in beside},
        mirrors=mirrors,
    )
    return _Lowering(scenario, program, homes, placement, merge).run()


@dataclass(slots=True)
class _Lowering:
    scenario: Scenario
    program: Program
    homes: Homes
    placement: Placement
    merge: bool
    works: dict[Work, int] = field(default_factory=dict)
    tasks: int = 0
    """Of all ranks so far."""
    groups: dict[tuple[int, Slot], int] = field(default_factory=dict)
    """(placement group, use) -> lowered group: two uses of one process group are two groups to the engine."""

    def run(self) -> Lowered:
        lists: dict[tuple[int, Surroundings], tuple[int, TaskList, tuple[Slot, ...]]] = {}
        ranks = []
        for index, rank in enumerate(self.placement.ranks):
            here = self._pipeline_rank(index)
            around = self._surroundings(index, here, self.homes.neighbours[here])
            if (here, around) not in lists:
                builder = RankList(
                    self.scenario,
                    self.program[here],
                    here=here,
                    homes=self.homes,
                    around=around,
                    works=self.works,
                    merge=self.merge,
                )
                lists[here, around] = (len(lists), *builder.build())
            number, listed, slots = lists[here, around]
            self.tasks += len(listed.tasks)
            bound_tasks(self.tasks)
            groups = tuple(self._group(index, here, slot) for slot in slots)
            ranks.append(SimRank(rank.rank, rank.multiplicity, rank.coordinate, number, groups, rank.slowdown))
        return Lowered(
            works=tuple(self.works),
            lists=tuple(tasks for _, tasks, _ in lists.values()),
            ranks=tuple(ranks),
            groups=tuple(self.placement.groups[number] for number, _ in self.groups),
            resources=self.placement.resources,
            rolling=self.scenario.parallelism.post_validation,
        )

    def _pipeline_rank(self, index: int) -> int:
        return dict(self.placement.ranks[index].coordinate)["pp"]

    def _surroundings(self, index: int, here: int, neighbours: list[int]) -> Surroundings:
        axes = ["tp", "cp", "dp", "model"]
        experts = self.scenario.parallelism.layout.has_expert_groups
        if experts:
            axes += ["etp", "ep", "edp"]
        if self.scenario.has_tied_copy and here in (0, self.scenario.parallelism.layout.pp - 1):
            axes.append("embedding")
        if self.scenario.held_twice:
            axes.append("mirror")
        if self.scenario.is_hybrid:
            axes += ["shard", "replica", *(["edp_shard", "edp_replica"] if experts else [])]
        if self.scenario.parallelism.layout.secondary:
            axes.append("secondary")
        found = {axis: self.placement.groups[self.placement.group(axis, index)] for axis in axes}
        channels = {there: self.placement.groups[self.placement.channel(index, there)] for there in neighbours}
        return Surroundings(
            axes=tuple((axis, _span(group)) for axis, group in found.items()),
            channels=tuple((there, _span(group)) for there, group in channels.items()),
            joint=frozenset(axis for axis in ("tp", "cp") if _meets(found[axis]))
            | (frozenset(group.axis for group in self.placement.groups if _meets(group)) & {"ep", "etp"}),
        )

    def _group(self, index: int, here: int, slot: Slot) -> int:
        if slot.axis != "pp":
            number = self.placement.group(slot.axis, index)
        elif slot.source == here:
            number = self.placement.channel(index, slot.target)
        else:
            number = self.placement.channel(self.placement.partner(index, slot.source), slot.target)
        return self.groups.setdefault((number, slot), len(self.groups))


def _meets(group: Group) -> bool:
    """Whether a group has members or traffic that another list can interact with."""
    return len(group.parties) > 1 or group.machines > 1


def _span(group: Group) -> Span:
    return Span(group.size, group.machines, group.members_per_machine)
