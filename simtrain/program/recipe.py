"""What a forward and a backward pass of one stage consist of: pieces in execution order.

Tensor-parallel collectives stand where Megatron has them: one all-reduce behind each sub-layer in forward (g) and
backward (f), or an all-gather before and a reduce-scatter behind it with sequence parallelism (Shoeybi 2019, Fig. 4;
Korthikanti 2022, Fig. 5). Recomputation repeats forward pieces before the backward that needs them.
"""

from __future__ import annotations

from collections.abc import Iterator

from simtrain.program.actions import Action, ActionKind
from simtrain.program.context import Exchange
from simtrain.program.lowered import ALONE, Piece, PieceKind, Span
from simtrain.scenario.model import Part
from simtrain.scenario.scenario import Dispatch, Recompute, Scenario

K = PieceKind


class Recipe:
    """Pieces of the passes of each stage of a scenario.

    ``tensor`` and ``context`` say how these groups lie, ``expert`` and ``expert_tensor`` those of the experts.
    """

    def __init__(
        self,
        scenario: Scenario,
        tensor: Span,
        context: Span = ALONE,
        *,
        expert: Span = ALONE,
        expert_tensor: Span = ALONE,
    ) -> None:
        self._scenario = scenario
        self._context = Exchange(scenario, context)
        self._expert, self._expert_tensor = expert, expert_tensor
        self._tensor = tensor
        self._sequence = scenario.parallelism.sequence_parallel and tensor.size > 1

    def forward(self, stage: int) -> tuple[Piece, ...]:
        """Pieces of the forward pass of a stage."""
        return tuple(
            piece for part, layer in self._scenario.parts(stage) for piece in self._forward_part(K.FORWARD, part, layer)
        )

    def backward(self, stage: int, kind: PieceKind = K.BACKWARD) -> tuple[Piece, ...]:
        """Pieces of the backward pass of a stage, recomputation included (``kind`` BACKWARD or INPUT_GRAD)."""
        runs = {run[-1]: run for run in self._scenario.recompute_groups(stage)}
        pieces: list[Piece] = []
        seen = -1
        for part, layer in reversed(self._scenario.parts(stage)):
            if not self._scenario.has_backward(part, layer):
                break
            if layer in runs and layer != seen:
                seen = layer
                pieces += self._recompute(runs[layer], stage)
            pieces += self._backward_part(kind, part, layer)
        return tuple(pieces)

    def weight_grad(self, stage: int) -> tuple[Piece, ...]:
        """Pieces of the weight-gradient half of a split backward."""
        parts = (one for one in reversed(self._scenario.parts(stage)) if self._scenario.has_backward(*one))
        return tuple(Piece(K.WEIGHT_GRAD, part, layer) for part, layer in parts)

    def _recompute(self, run: tuple[int, ...], stage: int) -> Iterator[Piece]:
        for part, layer in self._scenario.parts(stage):
            if layer in run:
                yield from self._forward_part(K.RECOMPUTE, part, layer)

    def _experts(self, kind: PieceKind, layer: int, *, backward: bool = False) -> Iterator[Piece]:
        """Tokens to their experts, through them, and back; the backward makes the same journeys.

        As Megatron core's dispatchers (``token_dispatcher.py``): over ep, then a gather over the ranks that share each
        expert's matrices; behind the experts a reduce-scatter over these, then over ep.
        """
        gathers = self._scenario.parallelism.dispatch is Dispatch.ALLGATHER
        there, back = (K.ALL_GATHER, K.REDUCE_SCATTER) if gathers else (K.ALL_TO_ALL, K.ALL_TO_ALL)
        ep, etp = self._expert, self._expert_tensor
        if ep.size > 1:
            yield Piece(there, Part.EXPERTS, layer, axis="ep", span=ep, backward=backward)
        if etp.size > 1:
            yield Piece(K.ALL_GATHER, Part.EXPERTS, layer, axis="etp", span=etp, backward=backward)
        yield Piece(kind, Part.EXPERTS, layer)
        if etp.size > 1:
            yield Piece(K.REDUCE_SCATTER, Part.EXPERTS, layer, axis="etp", span=etp, backward=backward)
        if ep.size > 1:
            yield Piece(back, Part.EXPERTS, layer, axis="ep", span=ep, backward=backward)

    def _is_local(self, part: Part) -> bool:
        """A router works on the tokens of its own rank; shared experts behind it are tensor-parallel."""
        return part is Part.ROUTER and not self._scenario.model.experts_shared

    def _forward_part(self, kind: PieceKind, part: Part, layer: int) -> Iterator[Piece]:
        if part is Part.EXPERTS:
            yield from self._experts(kind, layer)
            return
        if self._is_local(part):
            yield Piece(kind, part, layer)
            return
        if self._sequence and part is not Part.EMBEDDING:
            yield self._collective(K.ALL_GATHER, part, layer)
        yield from self._context.around(Piece(kind, part, layer))
        if self._tensor.size == 1:
            return
        if part is Part.HEAD:
            parallel = self._scenario.parallelism.vocab_parallel_loss
            kind, what = (K.ALL_REDUCE, part) if parallel else (K.ALL_GATHER, Part.LOGITS)
            yield self._collective(kind, what, layer)
        elif self._sequence:
            yield self._collective(K.REDUCE_SCATTER, part, layer)
        else:
            yield self._collective(K.ALL_REDUCE, part, layer)

    def _backward_part(self, kind: PieceKind, part: Part, layer: int) -> Iterator[Piece]:
        if part is Part.EXPERTS:
            yield from self._experts(kind, layer, backward=True)
            return
        if self._is_local(part):
            yield Piece(kind, part, layer)
            return
        if self._sequence and part is not Part.HEAD:
            yield self._collective(K.ALL_GATHER, part, layer, backward=True)
        selective = self._scenario.training.recompute is Recompute.SELECTIVE and not self._scenario.selective_ops
        if part is Part.ATTENTION and selective:
            yield from self._context.around(Piece(K.RECOMPUTE, Part.CORE, layer))
        yield from self._context.around(Piece(kind, part, layer))
        if self._tensor.size > 1 and part is not Part.EMBEDDING:
            reduce = K.REDUCE_SCATTER if self._sequence else K.ALL_REDUCE
            yield self._collective(reduce, part, layer, backward=True)._replace(split=kind is K.INPUT_GRAD)

    def _collective(self, kind: PieceKind, part: Part, layer: int, *, backward: bool = False) -> Piece:
        return Piece(kind, part, layer, axis="tp", span=self._tensor, backward=backward)


class Passes:
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
