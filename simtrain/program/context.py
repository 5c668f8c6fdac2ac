"""What context-parallel ranks exchange around the attention core, as pieces.

    p2p          ring beside the core: K and V forward; backward K and V, and their gradients one step behind
    all_gather   K and V whole before the core; backward again, and a reduce-scatter of their gradients behind it
    a2a          q, k, v to all positions of some heads before the core, the output back behind it; backward mirrored
    a2a+p2p      a2a over ``cp_inner`` neighbours, a ring over the groups of them; backward swaps the output again too

Transformer Engine saves the rank's own K and V alone, so the backward (and a recomputation) fetches the others again
(``attention/dot_product_attention/context_parallel.py``; its ring opened 2026-12-01). Cited from memory, not opened:
Liu 2023 (Ring Attention, arXiv 2310.01889), Brandon 2023 (Striped Attention, 2311.09431), Jacobs 2023
(DeepSpeed-Ulysses, 2309.14509), Llama 3 (2407.21783, section 3.3.2; torch's context-parallel tutorial describes its
gather), Fang 2024 (USP, 2405.07719).
"""

from __future__ import annotations

from collections.abc import Iterator

from simtrain.program.lowered import Piece, PieceKind, Span
from simtrain.scenario.model import Part
from simtrain.scenario.scenario import ContextKind, Scenario

K = PieceKind
_PARTS = (Part.ATTENTION, Part.CORE)


def query_elements(scenario: Scenario) -> float:
    """Elements of Q of one microbatch on one tensor and context rank."""
    model, layout = scenario.model, scenario.parallelism.layout
    return _tokens(scenario) * model.heads * model.qk_head_dim / layout.tp


def output_elements(scenario: Scenario) -> float:
    """Elements of the attention output; they differ from those of Q in latent attention alone."""
    model, layout = scenario.model, scenario.parallelism.layout
    return _tokens(scenario) * model.heads * model.value_head_dim / layout.tp


def key_value_elements(scenario: Scenario) -> float:
    """Elements of K and V together of one microbatch on one tensor and context rank (one head a rank at least)."""
    model, layout = scenario.model, scenario.parallelism.layout
    return _tokens(scenario) * max(1.0, model.kv_heads / layout.tp) * (model.qk_head_dim + model.value_head_dim)


def _tokens(scenario: Scenario) -> float:
    return scenario.training.micro_batch * scenario.training.seq_len / scenario.parallelism.layout.cp


def exchanges(scenario: Scenario, piece: Piece) -> bool:
    """Whether a piece needs what other context ranks hold: it computes an attention core.

    A weight gradient does not, since the core has no parameters; nor a recomputation that finds its output kept.
    """
    again = piece.kind is not K.RECOMPUTE or not scenario.selective_ops
    cores = scenario.parallelism.layout.cp > 1 and piece.part in _PARTS and not piece.axis
    return cores and again and piece.kind is not K.WEIGHT_GRAD


class Exchange:
    """Context collectives of a scenario; ``group`` says how the context-parallel group lies on the machines."""

    def __init__(self, scenario: Scenario, group: Span) -> None:
        self._scenario = scenario
        inner = scenario.parallelism.head_split
        self._kind = scenario.parallelism.cp_kind
        self._group = group
        self._inner = Span(inner, -(-inner // group.members), min(inner, group.members))
        ring = scenario.parallelism.sequence_split
        beside = max(1, min(ring, group.members // inner))
        self._ring = Span(ring, -(-ring // beside), beside)
        self._kv, self._out = key_value_elements(scenario), output_elements(scenario)
        self._projected = query_elements(scenario) + self._kv

    def around(self, piece: Piece) -> Iterator[Piece]:
        """The piece, with what its attention core exchanges before and behind it."""
        if not exchanges(self._scenario, piece):
            yield piece
            return
        backward = piece.kind in (K.BACKWARD, K.INPUT_GRAD)

        def collective(kind: PieceKind, elements: float, span: Span) -> Piece:
            return Piece(kind, Part.ATTENTION, piece.layer, axis="cp", elements=elements, span=span, backward=backward)

        if self._kind is ContextKind.ALL_GATHER:
            whole = self._kv * self._group.size
            yield collective(K.ALL_GATHER, whole, self._group)
            yield piece
            if backward:
                yield collective(K.REDUCE_SCATTER, whole, self._group)
            return
        if self._inner.size > 1:
            output = self._out * (2 if self._ring.size > 1 else 1)
            yield collective(K.ALL_TO_ALL, output if backward else self._projected, self._inner)
        if self._ring.size > 1:
            yield collective(K.RING, self._kv, self._ring)
        yield piece
        if self._inner.size > 1:
            yield collective(K.ALL_TO_ALL, self._projected if backward else self._out, self._inner)
