"""Transfers between a device and its host in one rank's list: gradients out, parameters in, activations out and back.

Two streams, one a direction of the PCIe link (it is full duplex), and the host's cores as a third:

- optimizer (Ren 2021, ZeRO-Offload, section 4): gradients leave as backward completes them, the host steps unit by
  unit, updated weights return;
- parameters (Rajbhandari 2021, ZeRO-Infinity, section 5): a unit comes before its use, ahead by ``prefetch`` units;
- activations: what a block keeps leaves behind its forward and returns before its backward; the forward runs at most
  ``1 + prefetch`` blocks ahead of the transfers (Transformer Engine's and torchtune's bounded stash).
"""

from __future__ import annotations

from simtrain.program.actions import Action, ActionKind
from simtrain.program.emitter import Emitter
from simtrain.program.lowered import Piece, PieceKind, Stream
from simtrain.program.shards import Unit, split
from simtrain.scenario.model import Part
from simtrain.scenario.scenario import Scenario
from simtrain.scenario.tuning import Place

K = PieceKind
Run = tuple[int, ...]


class HostTraffic:
    """What one rank exchanges with its host."""

    def __init__(self, scenario: Scenario, out: Emitter) -> None:
        offload = scenario.training.offload
        self.scenario, self.out = scenario, out
        self.steps = offload.optimizer is not Place.DEVICE
        self.fetches = offload.parameters is not Place.DEVICE
        self.ahead = scenario.parallelism.prefetch if offload.overlap else 0
        self._saved: dict[tuple[int, int, Run], int] = {}
        """(stage, microbatch, run) -> the task that moved it out."""
        self._order: list[int] = []

    def fetch(self, unit: Unit, deps: tuple[int, ...]) -> int:
        """Bring this rank's share of a unit's parameters."""
        return self._move(K.FROM_HOST, Part.PARAMETER, unit, unit.elements, deps)

    def gradients(self, unit: Unit, after: int) -> int:
        """Send this rank's share of a unit's gradients."""
        return self._move(K.TO_HOST, Part.GRADIENT, unit, unit.trained, (after,))

    def step(self, units: tuple[Unit, ...], deps: tuple[int, ...]) -> None:
        """The host's step on each unit, and its new weights back unless they live on the host."""
        for unit in units:
            elements = unit.trained / split(self.scenario, unit.axis)
            piece = Piece(K.HOST_OPTIMIZER, Part.PARAMETER, _layer(unit), axis=unit.axis, elements=elements)
            done = self.out.emit(self.out.line(Stream.HOST, (piece,), f"host step {unit.name}"), deps=deps)
            if not self.fetches:
                self._move(K.FROM_HOST, Part.PARAMETER, unit, unit.trained, (done,))

    def save(self, action: Action, run: Run, after: int) -> None:
        """Move out what a run of blocks keeps."""
        saved = self._activation(Stream.TO_HOST, K.TO_HOST, action, run, (after,))
        self._saved[action.stage, action.microbatch, run] = saved
        self._order.append(saved)

    def room(self) -> tuple[int, ...]:
        """The transfer that must be through before another block may run forward."""
        return tuple(self._order[-1 - self.ahead :][:1]) if len(self._order) > self.ahead else ()

    def restore(self, action: Action, run: Run, bound: tuple[int, ...]) -> int:
        """Bring back what a run of blocks kept."""
        deps = (self._saved[action.stage, action.microbatch, run], *bound)
        return self._activation(Stream.FROM_HOST, K.FROM_HOST, action, run, deps)

    def runs(self, action: Action) -> tuple[Run, ...]:
        """Runs of blocks of an action whose activations leave or return."""
        return () if action.kind is ActionKind.WEIGHT_GRAD else saved_runs(self.scenario, action.stage)

    def _activation(self, stream: Stream, kind: PieceKind, action: Action, run: Run, deps: tuple[int, ...]) -> int:
        piece = Piece(kind, Part.SAVED, run[0])
        line = self.out.line(stream, (piece,), f"{kind.value} block {run[0]}", stage=action.stage)
        return self.out.emit(line, action.microbatch, deps)

    def _move(self, kind: PieceKind, part: Part, unit: Unit, elements: float, deps: tuple[int, ...]) -> int:
        """``elements`` of the whole unit, of which a rank moves its share."""
        stream = Stream.TO_HOST if kind is K.TO_HOST else Stream.FROM_HOST
        piece = Piece(kind, part, _layer(unit), axis=unit.axis, elements=elements / split(self.scenario, unit.axis))
        return self.out.emit(self.out.line(stream, (piece,), f"{kind.value} {unit.name}"), deps=deps)


class Moves:
    """Where in the pieces of an action activations leave the device or return to it."""

    def __init__(self, host: HostTraffic, action: Action, pieces: tuple[Piece, ...], before: tuple[int, ...]) -> None:
        self._host, self._action, self._before = host, action, before
        self._forward = action.kind is ActionKind.FORWARD
        places = {run: [i for i, piece in enumerate(pieces) if piece.layer in run] for run in host.runs(action)}
        self.starts = {places[run][0]: run for run in places}
        self.stops = {places[run][-1]: run for run in places}
        self._ends: list[int] = []

    def before(self, at: int) -> tuple[int, ...]:
        """What the piece at ``at`` waits for: in forward room for one more block, in backward its activations."""
        if at not in self.starts:
            return ()
        if self._forward:
            return self._host.room()
        ahead = self._host.ahead
        bound = tuple(self._ends[-1 - ahead :][:1]) if len(self._ends) > ahead else self._before
        return (self._host.restore(self._action, self.starts[at], bound),)

    def behind(self, last: int, end: int) -> None:
        """Once the piece at ``last`` has run, as task ``end``."""
        if last not in self.stops:
            return
        if self._forward:
            self._host.save(self._action, self.stops[last], end)
        else:
            self._ends.append(end)


def saved_runs(scenario: Scenario, stage: int) -> tuple[Run, ...]:
    """Runs of blocks of a stage whose activations leave: all but the model's last one, which would return at once."""
    if scenario.training.offload.activations is Place.DEVICE:
        return ()
    grouped = {layer: run for run in scenario.recompute_groups(stage) for layer in run}
    runs = dict.fromkeys(grouped.get(layer, (layer,)) for layer in scenario.stage_range(stage))
    last = scenario.model.layers - 1
    ends = {run: (scenario.model.mlp_parts(run[-1])[-1], run[-1]) for run in runs if last not in run}
    return tuple(run for run, end in ends.items() if scenario.has_backward(*end))


def _layer(unit: Unit) -> int:
    return unit.parts[0][1] if unit.parts else -1
