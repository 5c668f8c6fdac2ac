"""What a forward and a backward pass of one stage consist of: pieces in execution order.

Tensor-parallel collectives stand where Megatron has them: one all-reduce behind each sub-layer in forward (g) and
backward (f), or an all-gather before and a reduce-scatter behind it with sequence parallelism (Shoeybi 2019, Fig. 4;
Korthikanti 2022, Fig. 5). Recomputation repeats forward pieces before the backward that needs them.
"""

from __future__ import annotations

from collections.abc import Iterator

from simtrain.program.lowered import Piece, PieceKind, Span
from simtrain.scenario.model import Part
from simtrain.scenario.scenario import Recompute, Scenario

K = PieceKind


class Recipe:
    """Pieces of the passes of each stage of a scenario; ``tensor`` says how the tensor-parallel group lies."""

    def __init__(self, scenario: Scenario, tensor: Span) -> None:
        self._scenario = scenario
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
            if layer in runs and layer != seen:
                seen = layer
                pieces += self._recompute(runs[layer], stage)
            pieces += self._backward_part(kind, part, layer)
        return tuple(pieces)

    def weight_grad(self, stage: int) -> tuple[Piece, ...]:
        """Pieces of the weight-gradient half of a split backward."""
        return tuple(Piece(K.WEIGHT_GRAD, part, layer) for part, layer in reversed(self._scenario.parts(stage)))

    def _recompute(self, run: tuple[int, ...], stage: int) -> Iterator[Piece]:
        for part, layer in self._scenario.parts(stage):
            if layer in run:
                yield from self._forward_part(K.RECOMPUTE, part, layer)

    def _forward_part(self, kind: PieceKind, part: Part, layer: int) -> Iterator[Piece]:
        if self._sequence and part is not Part.EMBEDDING:
            yield self._collective(K.ALL_GATHER, part, layer)
        yield Piece(kind, part, layer)
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
        if self._sequence and part is not Part.HEAD:
            yield self._collective(K.ALL_GATHER, part, layer, backward=True)
        if part is Part.ATTENTION and self._scenario.training.recompute is Recompute.SELECTIVE:
            yield Piece(K.RECOMPUTE, Part.CORE, layer)
        yield Piece(kind, part, layer)
        if self._tensor.size > 1 and part is not Part.EMBEDDING:
            reduce = K.REDUCE_SCATTER if self._sequence else K.ALL_REDUCE
            yield self._collective(reduce, part, layer, backward=True)._replace(split=kind is K.INPUT_GRAD)

    def _collective(self, kind: PieceKind, part: Part, layer: int, *, backward: bool = False) -> Piece:
        return Piece(kind, part, layer, axis="tp", span=self._tensor, backward=backward)
