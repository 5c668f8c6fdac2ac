"""The lowered list of one pipeline rank: compute, messages, shard gathers, gradient reductions, the optimizer step.

Runs of pieces merge into one task where no other stream can interact with them. That is decided statically: compute
stays merged while none of the rank's gathers or overlapped reductions can be in flight; elsewhere it is cut at every
collective and at every piece that another stream waits for. Two compute pieces in a row hold the same shares, so
joining them is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from simtrain.program.actions import Action, ActionKind, Pair, Step, actions_of, flat
from simtrain.program.emitter import Emitter, Line, Slot
from simtrain.program.homes import Homes, is_forward
from simtrain.program.lowered import Piece, PieceKind, Span, Stream, TaskList, Work
from simtrain.program.recipe import Recipe
from simtrain.program.shards import Unit, buckets, elements, wrap_units
from simtrain.scenario.model import Part
from simtrain.scenario.scenario import Scenario, Zero

K = PieceKind


@dataclass(frozen=True, slots=True)
class Surroundings:
    """How the process groups of a rank lie on the machines: what decides the price of its collectives."""

    axes: tuple[tuple[str, Span], ...]
    channels: tuple[tuple[int, Span], ...]
    """By pipeline rank of the neighbour."""
    tensor_joint: bool
    """The tensor-parallel group meets others: fellow members that are simulated too, or traffic between machines."""


class RankList:
    """Builds the list of one pipeline rank."""

    def __init__(
        self,
        scenario: Scenario,
        steps: tuple[Step, ...],
        *,
        here: int,
        homes: Homes,
        around: Surroundings,
        works: dict[Work, int],
        merge: bool,
    ) -> None:
        parallelism, stack = scenario.parallelism, scenario.stack
        replicated = scenario.replicas > 1
        self.scenario = scenario
        self.steps = steps
        self.actions = tuple(flat(steps))
        self.stages = tuple(sorted({action.stage for action in self.actions}))
        self.here, self.homes = here, homes
        self.spans, self.channels = dict(around.axes), dict(around.channels)
        self.tensor_joint = around.tensor_joint
        self.merge = merge
        self.passes = _Passes(Recipe(scenario, self.spans["tp"]))
        self.out = Emitter(works)
        self.lines: dict[tuple[object, ...], Line] = {}
        """Of whole passes and messages, which recur every microbatch."""
        self.replicated = replicated
        self.zero3 = replicated and parallelism.zero is Zero.PARAMETERS
        self.sharded = replicated and parallelism.zero in (Zero.OPTIMIZER, Zero.GRADIENTS)
        self.overlap_reduce = replicated and parallelism.overlap and stack.overlap_grad_reduce
        self.overlap_gather = self.sharded and parallelism.overlap and stack.overlap_param_gather
        self.overlap_messages = parallelism.overlap and stack.overlap_p2p
        self.ends: dict[Action, int] = {}
        """Last compute task of each action so far."""
        self.arriving: dict[tuple[int, bool, int], Iterator[int]] = {}
        """(stage, forward, its rank) -> microbatches whose messages are still to be received, in order."""
        self.received: dict[tuple[int, bool, int], int] = {}
        """(stage, forward, microbatch) -> receiving task of the message that is not used yet."""
        self.awaited: list[int] = []
        """What the next compute task waits for besides its inputs: blocking sends and reductions."""
        self.unit_ends: list[int] = []
        """Last compute task of each gathered unit, in order: they bound how far ahead gathers run."""
        self.reductions: list[int] = []

    def build(self) -> tuple[TaskList, tuple[Slot, ...]]:
        """The list, and what each of its slots is used for."""
        reducing = self._reducing()
        gathering = self._first_forwards() if self.overlap_gather else set()
        for step in self.steps:
            actions = actions_of(step)
            deps = tuple(dep for action in actions for dep in self._receive(action))
            reduce = self.overlap_reduce and any(action in reducing for action in actions)
            busy = self.zero3 or bool(gathering) or reduce or (self.overlap_reduce and bool(self.reductions))
            whole = self.merge and not busy and not (self.tensor_joint and self.spans["tp"].machines > 1)
            gather = self.zero3 or any(action in gathering for action in actions)
            if isinstance(step, Pair):
                end = self._pair(step, deps, gather=gather, reduce=reduce)
            else:
                end = self._whole(step, deps) if whole else self._cut(step, deps, gather=gather, reduce=reduce)
            for action in actions:
                gathering.discard(action)
                self.ends[action] = end
                self._send(action, end, block=not isinstance(step, Pair))
                if action in reducing and not reduce:
                    parts = self.scenario.parts(action.stage)
                    self._reduce(Unit("gradients", parts, elements(self.scenario, parts)), end)
                    self.awaited.append(self.reductions[-1])
        self._update()
        return self.out.finish()

    # -- compute --------------------

    def _whole(self, action: Action, deps: tuple[int, ...]) -> int:
        key = (action.kind, action.stage)
        if key not in self.lines:
            self.lines[key] = self._line(action, self.passes[action], action.kind.value)
        return self._compute(self.lines[key], action, deps)

    def _cut(self, action: Action, deps: tuple[int, ...], *, gather: bool, reduce: bool) -> int:
        """One task a run of compute pieces and one a collective, with gathers before and reductions behind them."""
        pieces = self.passes[action]
        units = wrap_units(self.scenario, action.stage) if gather else ()
        needs = {_first(pieces, unit): unit for unit in units if self._is_gathered(unit, action)}
        leaves = {_last(pieces, unit) for unit in needs.values()}
        shards = wrap_units(self.scenario, action.stage) if self.zero3 else buckets(self.scenario, action.stage)
        ready: dict[int, list[Unit]] = {}
        for unit in shards if reduce else ():
            ready.setdefault(_last(pieces, unit), []).append(unit)
        cuts = {0, len(pieces), *needs} | {i + 1 for i in leaves | set(ready)}
        cuts |= {j for i, piece in enumerate(pieces) if piece.axis or not self.merge for j in (i, i + 1)}
        edges = sorted(cuts)
        end = -1
        for at, after in pairwise(edges):
            if at in needs:
                deps = (*deps, self._gather(needs[at]))
            run = pieces[at:after]
            end = self._compute(self._line(action, run, f"{_place(run)} {action.kind.value}"), action, deps)
            deps = ()
            if after - 1 in leaves:
                self.unit_ends.append(end)
            for unit in ready.get(after - 1, ()):
                self._reduce(unit, end)
        return end

    def _pair(self, pair: Pair, deps: tuple[int, ...], *, gather: bool, reduce: bool) -> int:
        """One task for a forward and a backward woven into one another; gathers before and reductions behind it."""
        forward, backward = self.passes[pair.forward], self.passes[pair.backward]
        units = [(action, unit) for action in pair for unit in wrap_units(self.scenario, action.stage) if gather]
        needs = [unit for action, unit in units if self._is_gathered(unit, action)]
        deps += tuple(self._gather(unit) for unit in needs)
        slot = Slot("tp", "compute") if self.tensor_joint and self.spans["tp"].size > 1 else None
        stage = pair.forward.stage
        line = self.out.line(Stream.COMPUTE, forward, "F&B", stage=stage, slot=slot, beside=backward)
        end = self._compute(line, pair.forward, deps)
        self.unit_ends += [end] * len(needs)
        stage = pair.backward.stage
        for unit in (wrap_units if self.zero3 else buckets)(self.scenario, stage) if reduce else ():
            self._reduce(unit, end)
        return end

    def _line(self, action: Action, run: tuple[Piece, ...], name: str) -> Line:
        joint = self.tensor_joint and any(piece.axis == "tp" for piece in run)
        slot = Slot("tp", "compute") if joint else None
        return self.out.line(Stream.COMPUTE, run, name, stage=action.stage, slot=slot)

    def _compute(self, line: Line, action: Action, deps: tuple[int, ...]) -> int:
        if self.awaited:
            deps += tuple(self.awaited)
            self.awaited = []
        return self.out.emit(line, action.microbatch, deps)

    # -- messages between stages --------------------

    def _receive(self, action: Action) -> tuple[int, ...]:
        """The task that brings the input of an action: a message, or the neighbouring stage's compute on this very
        rank.
        """
        there = self.homes.source(action)
        if there < 0:
            return ()
        stage, forward = _source(action), is_forward(action)
        if there == self.here:
            feeding = (Action(stage, kind, action.microbatch) for kind in _feeds(action.kind))
            return tuple(self.ends[fed] for fed in feeding if fed in self.ends)
        key = (stage, forward, there)
        if key not in self.arriving:
            self.arriving[key] = iter(self.homes.sent[stage, forward, there, self.here])
        wanted = (stage, forward, action.microbatch)
        while wanted not in self.received:
            m = next(self.arriving[key])
            task = self._message(Stream.RECV, stage, action._replace(microbatch=m), there, self.here, ())
            self.received[stage, forward, m] = task
        return (self.received.pop(wanted),)

    def _send(self, action: Action, end: int, *, block: bool) -> None:
        there = self.homes.target(action)
        if there in (-1, self.here):
            return
        sent = self._message(Stream.SEND, action.stage, action, self.here, there, (end,))
        if block and not self.overlap_messages:
            self.awaited.append(sent)

    def _message(
        self, stream: Stream, stage: int, action: Action, source: int, target: int, deps: tuple[int, ...]
    ) -> int:
        """Send or receive the output of ``stage``."""
        key = (stream, stage, action.kind, source, target)
        if key not in self.lines:
            forward = action.kind is ActionKind.FORWARD
            border = self.scenario.stage_range(stage if forward else stage - 1).stop
            span = self.channels[target if stream is Stream.SEND else source]
            kind = K.SEND if stream is Stream.SEND else K.RECV
            piece = Piece(kind, Part.BOUNDARY, border, axis="pp", span=span, backward=not forward)
            slot = Slot("pp", "F" if forward else "B", stage, source, target)
            name = f"{stream.value} {'activation' if forward else 'gradient'}"
            self.lines[key] = self.out.line(stream, (piece,), name, stage=stage, slot=slot)
        return self.out.emit(self.lines[key], action.microbatch, deps)

    # -- data parallelism --------------------

    def _reducing(self) -> set[Action]:
        """Actions whose gradients are reduced: the last backward of each stage, or all of them without no-sync."""
        if not self.replicated:
            return set()
        grads = [a for a in self.actions if a.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD)]
        if self.scenario.training.sync_every_microbatch:
            return set(grads)
        return set({action.stage: action for action in grads}.values())

    def _first_forwards(self) -> set[Action]:
        forwards = [action for action in self.actions if action.kind is ActionKind.FORWARD]
        return set({action.stage: action for action in reversed(forwards)}.values())

    def _is_gathered(self, unit: Unit, action: Action) -> bool:
        """Forward needs every unit; backward again the blocks that were freed after forward (root units stay)."""
        if action.kind is ActionKind.FORWARD:
            return True
        again = self.zero3 and self.scenario.parallelism.reshard_after_forward and unit.is_block
        return again and action.kind is not ActionKind.WEIGHT_GRAD

    def _gather(self, unit: Unit) -> int:
        """ZeRO-3 gathers run ``prefetch`` units ahead of compute, ZeRO-1/2 gathers queue up at the start."""
        ahead = self.scenario.parallelism.prefetch if self.scenario.parallelism.overlap else 0
        bound = self.unit_ends[-1 - ahead :][:1] if self.zero3 and len(self.unit_ends) > ahead else []
        return self._collective(Stream.GATHER, K.ALL_GATHER, Part.PARAMETER, "dp", unit, tuple(bound))

    def _reduce(self, unit: Unit, after: int) -> None:
        kind = K.REDUCE_SCATTER if self.zero3 or self.sharded else K.ALL_REDUCE
        self.reductions.append(self._collective(Stream.REDUCE, kind, Part.GRADIENT, "dp", unit, (after,)))

    def _collective(
        self, stream: Stream, kind: PieceKind, part: Part, axis: str, unit: Unit, deps: tuple[int, ...]
    ) -> int:
        layer = unit.parts[0][1] if unit.parts else -1
        piece = Piece(kind, part, layer, axis=axis, elements=unit.elements, span=self.spans[axis])
        line = self.out.line(stream, (piece,), f"{kind.value} {unit.name}", slot=Slot(axis, stream.value))
        return self.out.emit(line, deps=deps)

    # -- the end of the step --------------------

    def _update(self) -> None:
        """Tied embeddings, gradient norm, optimizer, gather of sharded weights."""
        deps: tuple[int, ...] = (self.ends[self.actions[-1]], *self.reductions[-1:])
        if self.scenario.has_tied_copy and "embedding" in self.spans:
            tied = ((Part.EMBEDDING, -1),)
            unit = Unit("tied embedding", tied, elements(self.scenario, tied))
            deps = (self._collective(Stream.REDUCE, K.ALL_REDUCE, Part.GRADIENT, "embedding", unit, deps),)
        owned = sum(elements(self.scenario, self.scenario.parts(stage)) for stage in self.stages)
        shard = owned / self.scenario.replicas if self.sharded or self.zero3 else owned
        if "mirror" in self.spans:
            both = Unit("gradients of both copies", (), shard)
            deps = (self._collective(Stream.REDUCE, K.ALL_REDUCE, Part.GRADIENT, "mirror", both, deps),)
        norms = ("model", "dp") if self.sharded or self.zero3 else ("model",)
        for axis in norms[1:] if self.scenario.parallelism.post_validation else norms:
            if self.spans[axis].size > 1:
                deps = (self._collective(Stream.REDUCE, K.ALL_REDUCE, Part.NORM, axis, Unit("norm", (), 1.0), deps),)
        step = Piece(K.OPTIMIZER, Part.PARAMETER, elements=shard)
        done = self.out.emit(self.out.line(Stream.COMPUTE, (step,), "optimizer"), deps=(*deps, *self.awaited))
        if self.sharded and not self.overlap_gather:
            self._collective(Stream.GATHER, K.ALL_GATHER, Part.PARAMETER, "dp", Unit("weights", (), owned), (done,))


class _Passes:
    """Pieces of an action, made once a stage and kind."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._made: dict[tuple[ActionKind, int], tuple[Piece, ...]] = {}

    def __getitem__(self, action: Action) -> tuple[Piece, ...]:
        key = (action.kind, action.stage)
        if key not in self._made:
            self._made[key] = self._make(action)
        return self._made[key]

    def _make(self, action: Action) -> tuple[Piece, ...]:
        match action.kind:
            case ActionKind.FORWARD:
                return self._recipe.forward(action.stage)
            case ActionKind.BACKWARD:
                return self._recipe.backward(action.stage)
            case ActionKind.INPUT_GRAD:
                return self._recipe.backward(action.stage, K.INPUT_GRAD)
            case ActionKind.WEIGHT_GRAD:
                return self._recipe.weight_grad(action.stage)


def _source(action: Action) -> int:
    """Stage whose output an action needs."""
    return action.stage - 1 if action.kind is ActionKind.FORWARD else action.stage + 1


def _feeds(kind: ActionKind) -> tuple[ActionKind, ...]:
    return (ActionKind.FORWARD,) if kind is ActionKind.FORWARD else (ActionKind.BACKWARD, ActionKind.INPUT_GRAD)


def _first(pieces: tuple[Piece, ...], unit: Unit) -> int:
    return next(i for i, piece in enumerate(pieces) if (piece.part, piece.layer) in unit.parts)


def _last(pieces: tuple[Piece, ...], unit: Unit) -> int:
    return max(i for i, piece in enumerate(pieces) if (piece.part, piece.layer) in unit.parts)


def _place(run: tuple[Piece, ...]) -> str:
    first = run[0]
    return first.part.value if first.layer < 0 else f"block {first.layer}"
