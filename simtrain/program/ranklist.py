"""The lowered list of one pipeline rank: compute, messages, shard gathers, gradient reductions, the optimizer step.

Runs of pieces merge into one task where no other stream can interact with them. That is decided statically: compute
stays merged while none of the rank's gathers or overlapped reductions can be in flight; elsewhere it is cut at every
collective and at every piece that another stream waits for. Two compute pieces in a row hold the same shares, so
joining them is exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from simtrain.program.actions import Action, ActionKind, Pair, Step, actions_of, flat
from simtrain.program.emitter import Emitter, Line, Slot
from simtrain.program.gathering import GRADIENT_ACTIONS, Gather, GatheredUnits, first, last, last_backwards, touches
from simtrain.program.homes import Homes, is_forward
from simtrain.program.lowered import ALONE, Piece, PieceKind, Span, Stream, TaskList, Work
from simtrain.program.offloading import HostTraffic, Moves
from simtrain.program.recipe import Passes, Recipe
from simtrain.program.shards import Unit, buckets, by_axis, elements, split, wrap_units
from simtrain.scenario.model import Part
from simtrain.scenario.scenario import Scenario, Zero

K = PieceKind


@dataclass(frozen=True, slots=True)
class Surroundings:
    """How the process groups of a rank lie on the machines: what decides the price of its collectives."""

    axes: tuple[tuple[str, Span], ...]
    channels: tuple[tuple[int, Span], ...]
    """By pipeline rank of the neighbour."""
    joint: frozenset[str]
    """Process groups inside a pass (tp, cp, ep, etp) that meet others: fellow members that are simulated too, or
    traffic between machines."""


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
        replicated = any(scenario.copies(axis) > 1 for axis in ("dp", "edp"))
        self.scenario = scenario
        self.steps = steps
        self.actions = tuple(flat(steps))
        self.stages = tuple(sorted({action.stage for action in self.actions}))
        self.here, self.homes = here, homes
        self.spans, self.channels = dict(around.axes), dict(around.channels)
        self.joint = around.joint
        self.merge = merge
        expert, expert_tensor = (self.spans.get(axis, ALONE) for axis in ("ep", "etp"))
        self.passes = Passes(
            Recipe(scenario, self.spans["tp"], self.spans["cp"], expert=expert, expert_tensor=expert_tensor)
        )
        self.out = Emitter(works)
        self.lines: dict[tuple[object, ...], Line] = {}
        """Of whole passes and messages, which recur every microbatch."""
        self.replicated = replicated
        self.zero3 = replicated and parallelism.zero is Zero.PARAMETERS
        self.sharded = replicated and parallelism.zero in (Zero.OPTIMIZER, Zero.GRADIENTS)
        self.host = HostTraffic(scenario, self.out)
        self.early = scenario.training.optimizer_in_backward
        self.fetching = self.zero3 or self.host.fetches
        spread = parallelism.overlap and stack.overlap_grad_reduce if replicated else scenario.training.offload.overlap
        self.overlap_reduce = self.early or (spread and (replicated or self.host.steps))
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
        self.latest: tuple[int, ...] = ()
        """Last compute task so far."""
        self.reductions: list[int] = []
        self.behind: list[tuple[Unit, int]] = []
        """With the optimizer in backward: reduced units that are not updated yet."""
        self.scattered: list[int] = []
        """Reductions of ZeRO-3 units inside their shard group."""
        self.finals = last_backwards(self.actions)
        self.gathered = GatheredUnits(scenario, self.finals) if self.fetching else None

    def build(self) -> tuple[TaskList, tuple[Slot, ...]]:
        """The list, and what each of its slots is used for."""
        reducing = self._reducing()
        gathering = self._first_forwards() if self.overlap_gather else set()
        for step in self.steps:
            actions = actions_of(step)
            deps = tuple(dep for action in actions for dep in self._receive(action))
            reduce = (self.overlap_reduce or self.zero3) and any(action in reducing for action in actions)
            busy = self.fetching or bool(gathering) or reduce or (self.overlap_reduce and bool(self.reductions))
            busy = busy or any(self.host.runs(action) for action in actions)
            gather = self.fetching or any(action in gathering for action in actions)
            if isinstance(step, Pair):
                end = self._pair(step, deps, gather=gather, reduce=reduce)
            elif self.merge and not busy and not self._is_interrupted(step):
                end = self._whole(step, deps)
            else:
                end = self._cut(step, deps, gather=gather, reduce=reduce, busy=busy)
            for action in actions:
                gathering.discard(action)
                self.ends[action] = end
                self._send(action, end, block=not isinstance(step, Pair))
                if action in reducing and not reduce:
                    for unit in by_axis(self.scenario, "gradients", self.scenario.parts(action.stage)):
                        self._reduce(unit, end, final=action in self.finals)
                    self.awaited += self.reductions[-1:]
        self._update()
        return self.out.finish()

    # -- compute --------------------

    def _whole(self, action: Action, deps: tuple[int, ...]) -> int:
        key = (action.kind, action.stage)
        if key not in self.lines:
            self.lines[key] = self._line(action, self.passes[action], action.kind.value)
        return self._compute(self.lines[key], action, deps)

    def _cut(self, action: Action, deps: tuple[int, ...], *, gather: bool, reduce: bool, busy: bool) -> int:
        """One task a run of compute pieces and one a collective, with gathers before and reductions behind them.

        While no other stream is busy, a collective that meets nobody stays in its run.
        """
        pieces, needs = self._needs(action, gather=gather)
        leaves = {last(pieces, need.unit) for need in needs.values()}
        ready: dict[int, list[Unit]] = {}
        for unit in self._reduced(action) if reduce else ():
            ready.setdefault(last(pieces, unit), []).append(unit)
        moves = Moves(self.host, action, pieces, self.latest)
        cuts = {0, len(pieces), *needs, *moves.starts} | {i + 1 for i in leaves | set(ready) | set(moves.stops)}
        apart = None if busy else self.joint
        cuts |= {j for i, piece in enumerate(pieces) if _stands_apart(piece, apart, self.merge) for j in (i, i + 1)}
        edges = sorted(cuts)
        end = -1
        for at, after in pairwise(edges):
            if at in needs:
                deps = (*deps, self._gather(needs[at], action))
            deps += moves.before(at)
            run = pieces[at:after]
            end = self._compute(self._line(action, run, f"{_place(run)} {action.kind.value}"), action, deps)
            deps = ()
            if after - 1 in leaves:
                self.unit_ends.append(end)
            moves.behind(after - 1, end)
            self._scatter(ready.get(after - 1, ()), end, action)
            if self.early:
                self._step_behind(lag=int(self.replicated))
        return end

    def _is_interrupted(self, action: Action) -> bool:
        """Whether a pass meets others on its way; a tensor-parallel group on one machine marches as one all along."""
        interrupts = self.joint if self.spans["tp"].machines > 1 else self.joint - {"tp"}
        return bool(interrupts) and any(piece.axis in interrupts for piece in self.passes[action])

    def _pair(self, pair: Pair, deps: tuple[int, ...], *, gather: bool, reduce: bool) -> int:
        """One task for a forward and a backward woven into one another; gathers before and reductions behind it.

        It meets one group, the one of widest reach, which weighs most on the network; the same on every rank.
        """
        runs, units = [], 0
        for action in pair:
            pieces, needs = self._needs(action, gather=gather and (self.fetching or action is pair.forward))
            deps += tuple(self._gather(needs[at], action) for at in sorted(needs))
            runs.append(pieces)
            units += len(needs)
        layout = self.scenario.parallelism.layout
        met = sorted({piece.axis for pieces in runs for piece in pieces if piece.axis})
        axis = max(met, key=lambda axis: layout.stride(axis) * layout.degree(axis), default="")
        slot = Slot(axis, "compute") if axis in self.joint else None
        stage = pair.forward.stage
        line = self.out.line(Stream.COMPUTE, runs[0], "F&B", stage=stage, slot=slot, beside=runs[1])
        end = self._compute(line, pair.forward, deps)
        self.unit_ends += [end] * units
        self._scatter(self._reduced(pair.backward) if reduce else (), end, pair.backward)
        return end

    def _needs(self, action: Action, *, gather: bool) -> tuple[tuple[Piece, ...], dict[int, Gather]]:
        """Pieces of an action with what they release, and the gathers by index of the piece that waits for them."""
        pieces, made = self.passes[action], self.scenario
        units = [u for u in wrap_units(made, action.stage) if touches(pieces, u)] if gather else []
        if not self.host.fetches:
            units = [unit for unit in units if made.shards(unit.axis) > 1]
        if self.gathered:
            return self.gathered.through(units, pieces, action)
        return pieces, {
            first(pieces, unit): Gather(unit, made.shard_axis(unit.axis), unit.trained, unit.calls)
            for unit in units
            if unit.trained
        }

    def _reduced(self, action: Action) -> list[Unit]:
        """What is reduced, or leaves for the host or the optimizer, together in the stage of an action."""
        alone = self.host.steps or self.early
        units = (wrap_units if self.zero3 or alone else buckets)(self.scenario, action.stage)
        return [unit for unit in units if unit.trained and (alone or self.scenario.copies(unit.axis) > 1)]

    def _scatter(self, units: Iterable[Unit], end: int, action: Action) -> None:
        """Reduce gradients of an action as soon as ``end`` is done."""
        for unit in units:
            if self.scenario.copies(unit.axis) > 1:
                self._dispatch(self.scenario.shard_axis(unit.axis), unit.calls, action)
            self._reduce(unit, end, final=action in self.finals)
            if not self.overlap_reduce:
                self.awaited += self.reductions[-1:]

    def _dispatch(self, axis: str, calls: int, action: Action) -> None:
        """Host work of collectives over lists of tensors, in front of the compute that is launched behind it."""
        if self.scenario.stack.list_collective_ops:
            piece = Piece(K.DISPATCH, Part.PARAMETER, span=self.spans[axis], calls=calls)
            self._compute(self.out.line(Stream.COMPUTE, (piece,), "dispatch", stage=action.stage), action, ())

    def _line(self, action: Action, run: tuple[Piece, ...], name: str) -> Line:
        axis = next((piece.axis for piece in run if piece.axis in self.joint), "")
        slot = Slot(axis, "compute") if axis else None
        return self.out.line(Stream.COMPUTE, run, name, stage=action.stage, slot=slot)

    def _compute(self, line: Line, action: Action, deps: tuple[int, ...]) -> int:
        if self.awaited:
            deps += tuple(self.awaited)
            self.awaited = []
        end = self.out.emit(line, action.microbatch, deps)
        self.latest = (end,)
        return end

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
        if not (self.replicated or self.host.steps or self.early):
            return set()
        if self.scenario.training.sync_every_microbatch:
            return {a for a in self.actions if a.kind in GRADIENT_ACTIONS}
        return self.finals

    def _first_forwards(self) -> set[Action]:
        forwards = [action for action in self.actions if action.kind is ActionKind.FORWARD]
        return set({action.stage: action for action in reversed(forwards)}.values())

    def _gather(self, need: Gather, action: Action) -> int:
        """ZeRO-3 gathers run ``prefetch`` units ahead of compute, ZeRO-1/2 gathers queue up at the start."""
        parallelism = self.scenario.parallelism
        ahead = parallelism.prefetch if action.kind is ActionKind.FORWARD else parallelism.backward_prefetch
        ahead = ahead if parallelism.overlap else 0
        if self.host.fetches:
            ahead = min(ahead, self.host.ahead)
        bound = tuple(self.unit_ends[-1 - ahead :][:1]) if self.fetching and len(self.unit_ends) > ahead else ()
        unit = need.unit._replace(elements=need.elements, calls=need.calls)
        if self.host.fetches and need.axis != "secondary":
            bound = (self.host.fetch(unit, bound),)
            if self.scenario.shards(unit.axis) == 1:
                return bound[0]
        gathered = self._collective(Stream.GATHER, K.ALL_GATHER, Part.PARAMETER, need.axis, unit, bound)
        self._dispatch(need.axis, need.calls, action)
        return gathered

    def _reduce(self, unit: Unit, after: int, *, final: bool = True) -> None:
        """Reduce gradients; with hybrid sharding scatter them in the shard group, then all-reduce between groups.

        Then on to the host that steps them, or into the queue of the optimizer in backward.
        """
        made, done = self.scenario, after
        unit = unit._replace(elements=unit.trained)
        if not unit.trained:
            return
        if made.copies(unit.axis) > 1 and not (self.zero3 or self.sharded):
            done = self._collective(Stream.REDUCE, K.ALL_REDUCE, Part.GRADIENT, unit.axis, unit, (after,))
        elif made.copies(unit.axis) > 1:
            shards = made.shards(unit.axis)
            if shards > 1:
                axis = made.shard_axis(unit.axis)
                done = self._collective(Stream.REDUCE, K.REDUCE_SCATTER, Part.GRADIENT, axis, unit, (after,))
                self.scattered.append(done)
            if made.is_hybrid and (final or made.parallelism.replica_sync_every_microbatch):
                shard, axis = unit._replace(elements=unit.elements / shards, calls=1), made.replica_axis(unit.axis)
                done = self._collective(Stream.REPLICA, K.ALL_REDUCE, Part.GRADIENT, axis, shard, (done,))
        if self.host.steps:
            done = self.host.gradients(unit, done)
        if self.early:
            self.behind.append((unit, done))
        if done != after:
            self.reductions.append(done)
        if self.zero3 and len(self.scattered) > 1:  # FSDP2 post_backward: compute waits for the scatter before this one
            self.awaited.append(self.scattered[-2])

    def _step_behind(self, *, lag: int) -> None:
        """Update the units whose gradients are complete, but for the last ``lag`` of them, still in flight."""
        count = max(0, len(self.behind) - lag)
        for unit, after in self.behind[:count]:
            piece = self._optimizer(unit, unit.parts[0][1])
            self.out.emit(self.out.line(Stream.COMPUTE, (piece,), f"optimizer {unit.name}"), deps=(after,))
        del self.behind[:count]

    def _optimizer(self, unit: Unit, layer: int = -1) -> Piece:
        """Update of this rank's share of a unit; spread experts are marked as such."""
        part = Part.EXPERTS if unit.axis == "edp" else Part.PARAMETER
        return Piece(K.OPTIMIZER, part, layer, elements=unit.trained / split(self.scenario, unit.axis))

    def _collective(
        self, stream: Stream, kind: PieceKind, part: Part, axis: str, unit: Unit, deps: tuple[int, ...]
    ) -> int:
        layer = unit.parts[0][1] if unit.parts else -1
        piece = Piece(kind, part, layer, axis=axis, elements=unit.elements, span=self.spans[axis], calls=unit.calls)
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
        owned = by_axis(self.scenario, "weights", [part for at in self.stages for part in self.scenario.parts(at)])
        if "mirror" in self.spans:
            both = Unit("gradients of both copies", (), sum(step.elements for step in self._steps(owned)))
            deps = (self._collective(Stream.REDUCE, K.ALL_REDUCE, Part.GRADIENT, "mirror", both, deps),)
        norms = ("model", self.scenario.shard_axis()) if self.sharded or self.zero3 else ("model",)
        for axis in norms[1:] if self.scenario.parallelism.post_validation else norms:
            if self.spans[axis].size > 1:
                deps = (self._collective(Stream.REDUCE, K.ALL_REDUCE, Part.NORM, axis, Unit("norm", (), 1.0), deps),)
        self._step_behind(lag=0)
        done = self._step(owned, (*deps, *self.awaited))
        for unit in owned if self.sharded and not self.overlap_gather else ():
            if self.scenario.shards(unit.axis) > 1:
                weights = unit._replace(parts=(), elements=unit.trained)
                axis = self.scenario.shard_axis(unit.axis)
                self._collective(Stream.GATHER, K.ALL_GATHER, Part.PARAMETER, axis, weights, (done,))

    def _step(self, owned: tuple[Unit, ...], deps: tuple[int, ...]) -> int:
        """The update of all that was not updated in backward: one kernel sequence, or unit by unit on the host.

        Spread experts have an optimizer of their own (Megatron chains the two).
        """
        if self.host.steps:
            units = tuple(unit for stage in self.stages for unit in wrap_units(self.scenario, stage) if unit.trained)
            self.host.step(units, deps)
        elif not self.early:
            return self.out.emit(self.out.line(Stream.COMPUTE, self._steps(owned), "optimizer"), deps=deps)
        return len(self.out.tasks) - 1

    def _steps(self, owned: tuple[Unit, ...]) -> tuple[Piece, ...]:
        return tuple(self._optimizer(unit) for unit in owned if unit.trained or unit.axis == "dp")


def _stands_apart(piece: Piece, axes: frozenset[str] | None, merge: bool) -> bool:
    """Whether a piece is a task of its own: any collective, or those of ``axes`` alone."""
    return not merge or (bool(piece.axis) if axes is None else piece.axis in axes)


def _source(action: Action) -> int:
    """Stage whose output an action needs."""
    return action.stage - 1 if action.kind is ActionKind.FORWARD else action.stage + 1


def _feeds(kind: ActionKind) -> tuple[ActionKind, ...]:
    return (ActionKind.FORWARD,) if kind is ActionKind.FORWARD else (ActionKind.BACKWARD, ActionKind.INPUT_GRAD)


def _place(run: tuple[Piece, ...]) -> str:
    first = run[0]
    return first.part.value if first.layer < 0 else f"block {first.layer}"
