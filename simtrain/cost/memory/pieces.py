"""Allocations and releases of each piece of a lowered list.

A forward keeps what its backward needs, the backward frees it. A checkpointed block keeps its input, recomputation the
rest. ZeRO-3: a parameter gather keeps the full unit; the list says which piece releases how much of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from simtrain.cost.memory import activations as act
from simtrain.cost.memory import context, inputs, states
from simtrain.program.context import exchanges
from simtrain.program.demand import Memory, MemoryBytes
from simtrain.program.lowered import Piece, PieceKind
from simtrain.program.shards import copies_axis
from simtrain.scenario.model import BlockKind, Part
from simtrain.scenario.scenario import Recompute, Scenario, Zero
from simtrain.scenario.tuning import Place

K = PieceKind
_Bytes = dict[Memory, float]
_Deltas = tuple[_Bytes, _Bytes, _Bytes]

_SAVED: dict[Part, Callable[[act.Sizes], float]] = {
    Part.EMBEDDING: act.embedding,
    Part.ATTENTION: act.attention,
    Part.CROSS_ATTENTION: act.attention,
    Part.MLP: act.mlp,
    Part.ROUTER: act.router,
    Part.EXPERTS: act.routed_experts,
    Part.HEAD: act.head,
}
_GRADIENTS: dict[Part, Callable[[act.Sizes], float]] = {
    Part.EMBEDDING: act.boundary,
    Part.ATTENTION: act.attention_gradients,
    Part.CROSS_ATTENTION: act.attention_gradients,
    Part.MLP: act.mlp_gradients,
    Part.ROUTER: act.router_gradients,
    Part.EXPERTS: act.expert_gradients,
    Part.HEAD: act.head_gradients,
}
"""Output gradients: what the weight-gradient half of a backward reads."""
_INPUTS: dict[Part, Callable[[act.Sizes], float]] = {
    Part.EMBEDDING: lambda z: 0.0,
    Part.ATTENTION: act.attention_inputs,
    Part.CROSS_ATTENTION: act.attention_inputs,
    Part.MLP: act.mlp_inputs,
    Part.ROUTER: act.router_inputs,
    Part.EXPERTS: act.expert_inputs,
    Part.HEAD: act.head_inputs,
}
"""Inputs of linear layers: what the weight-gradient half reads beside them."""
_TRANSIENT: dict[Part, Callable[[act.Sizes], float]] = {
    Part.EMBEDDING: lambda z: 0.0,
    Part.ATTENTION: act.attention_transient,
    Part.CROSS_ATTENTION: act.attention_transient,
    Part.MLP: act.mlp_transient,
    Part.ROUTER: act.router_transient,
    Part.EXPERTS: act.expert_transient,
    Part.HEAD: lambda z: act.logits_transient(z, backward=True) - act.head_gradients(z),
}


def piece_memory(scenario: Scenario, piece: Piece) -> tuple[MemoryBytes, MemoryBytes, MemoryBytes]:
    """Return ``(keeps, frees, transient)`` of one piece on one device, bytes by category.

    Keeps are allocated at its start and stay; frees are released at its end; transients are held while it runs.
    Over a whole step keeps and frees are equal, if a lowered list gathers and reduces what it holds.
    """
    keeps, frees, transient = _deltas(scenario, act.sizes(scenario), piece)
    return _tuple(keeps), _tuple(frees), _tuple(transient)


def fold_pieces(scenario: Scenario, pieces: Sequence[Piece]) -> tuple[MemoryBytes, MemoryBytes, MemoryBytes]:
    """Return ``(keeps, frees, transient)`` of pieces run back to back as one work.

    While it runs, the work holds the most that the pieces reach one by one, in the categories of that moment; after it,
    what they leave. So a merged list has the peak and the resting level of an unmerged one. Transients are never
    negative; a negative keep was released before that moment, a negative free is allocated after it.
    """
    z = act.sizes(scenario)
    level: _Bytes = {}
    top: _Bytes = {}
    for piece in pieces:
        keeps, frees, transient = _deltas(scenario, z, piece)
        level = _add(_add(level, keeps), dict.fromkeys(transient, 0.0))
        reached = _add(level, transient)
        if sum(reached.values()) > sum(top.values()):
            top = reached
        level = _add(level, frees, -1)
    keep = {category: min(top.get(category, 0.0), max(0.0, after)) for category, after in level.items()}
    return _tuple(keep), _tuple(_add(keep, level, -1)), _tuple(_add(top, keep, -1))


def _add(level: _Bytes, amounts: _Bytes, sign: int = 1) -> _Bytes:
    return level | {category: level.get(category, 0.0) + sign * count for category, count in amounts.items()}


def _deltas(scenario: Scenario, z: act.Sizes, piece: Piece) -> _Deltas:
    keeps, frees, transient = _own_deltas(scenario, z, piece)
    if exchanges(scenario, piece):
        transient = _add(transient, context.transient(scenario, piece.kind))
    if piece.releases:
        each = states.gathered_bytes(scenario, piece.layer, scenario.gradient_axis(piece.part))
        frees = _add(frees, {Memory.GATHERED: piece.releases * each})
    return keeps, frees, transient


def _own_deltas(scenario: Scenario, z: act.Sizes, piece: Piece) -> _Deltas:
    if piece.part in _SAVED and not piece.axis:
        match piece.kind:
            case K.FORWARD:
                return _forward(scenario, z, piece)
            case K.RECOMPUTE:
                return (
                    {Memory.WORKSPACE: _recomputed(scenario, z, piece)},
                    {},
                    {Memory.WORKSPACE: _on_the_way(z, piece)},
                )
            case K.BACKWARD | K.INPUT_GRAD | K.WEIGHT_GRAD:
                return _backward(scenario, z, piece)
    if piece.kind is K.RECOMPUTE and piece.part is Part.CORE:
        return {Memory.WORKSPACE: act.core(z)}, {}, {}
    if piece.kind in (K.SEND, K.RECV) and piece.part is Part.BOUNDARY:
        return {}, {}, {Memory.BUFFERS: act.boundary(z)}
    return _update(scenario, piece)


def _forward(scenario: Scenario, z: act.Sizes, piece: Piece) -> _Deltas:
    kept, recomputed = _kept(scenario, z, piece), _recomputed(scenario, z, piece)
    keeps = {Memory.ACTIVATIONS: kept}
    transient = {Memory.WORKSPACE: recomputed + _on_the_way(z, piece)}
    if piece.part is Part.HEAD:
        keeps[Memory.LOGITS] = act.logits(z)
        transient[Memory.LOGITS] = act.logits_transient(z, backward=False)
    return keeps, {}, transient


def _on_the_way(z: act.Sizes, piece: Piece) -> float:
    """Copies that exist while a part runs: the gathered sequence, or the rows dispatched to experts."""
    return act.dispatched(z) if piece.part is Part.EXPERTS else _gathered(z, piece)


def _gathered(z: act.Sizes, piece: Piece) -> float:
    """The gathered sequence; a weight gradient of experts sends no rows, and a router alone works on its rank's."""
    local = piece.part is Part.EXPERTS or (piece.part is Part.ROUTER and not z.shared_ffn)
    return 0.0 if local else act.gathered(z)


def _backward(scenario: Scenario, z: act.Sizes, piece: Piece) -> _Deltas:
    """A backward frees what its forward kept. Split in two, the first half keeps for the second what that reads.

    That is the inputs and the output gradients of linear layers (Qi et al. 2023, table 1: 32 s b h of 34 s b h bytes).
    """
    head = piece.part is Part.HEAD
    category = Memory.LOGITS if head else Memory.WORKSPACE
    outputs, transient = {category: _GRADIENTS[piece.part](z)}, {category: _TRANSIENT[piece.part](z)}
    split = piece.kind in (K.INPUT_GRAD, K.WEIGHT_GRAD)
    if split and not scenario.trainable_parameters(piece.part, piece.layer):  # no second half that reads anything
        outputs, transient = {}, _add(outputs, transient)
    frees = {
        Memory.ACTIVATIONS: _kept(scenario, z, piece),
        Memory.WORKSPACE: _recomputed(scenario, z, piece),
        Memory.LOGITS: act.logits(z) if head else 0.0,
    }
    keeps = {Memory.GRADIENTS: _new_gradient(scenario, piece)}
    place = Memory.WORKSPACE if _run(scenario, piece.layer) else Memory.ACTIVATIONS
    later = {place: _linear_inputs(scenario, z, piece)}
    if piece.kind is K.INPUT_GRAD:
        return outputs, _add(frees, later, -1), transient
    if piece.kind is K.WEIGHT_GRAD:
        return keeps, _add(later, outputs), {Memory.WORKSPACE: _gathered(z, piece)}
    if head:  # the loss's own tensors are gone before the weight gradient is allocated
        transient[category] = max(0.0, transient[category] - keeps[Memory.GRADIENTS])
    return keeps, frees, _add(outputs, transient)


def _linear_inputs(scenario: Scenario, z: act.Sizes, piece: Piece) -> float:
    """Bytes of saved tensors that the weight-gradient half reads."""
    if not scenario.trainable_parameters(piece.part, piece.layer):
        return 0.0
    held = _recomputed(scenario, z, piece) if _run(scenario, piece.layer) else _kept(scenario, z, piece)
    return min(held, max(0.0, _INPUTS[piece.part](z) + inputs.change(scenario, z, piece.part, piece.layer)))


def _new_gradient(scenario: Scenario, piece: Piece) -> float:
    """Bytes of parameter gradient that a backward allocates, where they are not held all step."""
    count = scenario.trainable_parameters(piece.part, piece.layer)
    if states.shards_gradients_at_once(scenario, scenario.gradient_axis(piece.part)):
        return count * states.unsharded_gradient_bytes(scenario)
    return count * states.sharded_gradient_bytes(scenario) if states.gradients_appear_late(scenario) else 0.0


def _update(scenario: Scenario, piece: Piece) -> _Deltas:
    """Parameter gathers, gradient reductions, optimizer (whose elements are this rank's shard already)."""
    zero, late = scenario.parallelism.zero, states.gradients_appear_late(scenario)
    held = piece.elements * states.sharded_gradient_bytes(scenario)
    if piece.kind is K.ALL_GATHER and piece.part is Part.PARAMETER and zero is Zero.PARAMETERS:
        each = states.gathered_bytes(scenario, piece.layer, copies_axis(piece.axis))
        return {Memory.GATHERED: piece.elements * each}, {}, {}
    if piece.kind in (K.TO_HOST, K.FROM_HOST):
        return _transfer(scenario, piece)
    if piece.kind is K.OPTIMIZER:
        ranks = scenario.shards(scenario.gradient_axis(piece.part)) if zero is Zero.OPTIMIZER else 1
        freed = held * ranks if late else 0.0
        transient = {
            Memory.GRADIENTS: piece.elements * states.master_gradient_bytes(scenario),
            Memory.WORKSPACE: piece.elements * states.temporary_bytes(scenario),
        }
        return {}, {Memory.GRADIENTS: freed}, transient
    axis = copies_axis(piece.axis)
    reduces = piece.kind is K.REDUCE_SCATTER and piece.part is Part.GRADIENT
    if reduces and states.shards_gradients_at_once(scenario, axis):
        copies = piece.elements * scenario.stack.reduce_bytes if zero is Zero.PARAMETERS else 0.0
        whole = piece.elements * states.unsharded_gradient_bytes(scenario)
        shard = held / scenario.shards(axis) if late else 0.0
        return {Memory.GRADIENTS: shard}, {Memory.GRADIENTS: whole}, {Memory.BUFFERS: copies}
    return {}, {}, {}


def _transfer(scenario: Scenario, piece: Piece) -> _Deltas:
    """Offloading: gradients are gone once they are on the host, so are activations until they return."""
    zero, offload = scenario.parallelism.zero, scenario.training.offload
    if piece.part is Part.SAVED:
        count = saved_bytes(scenario, piece.layer)
        moved = {Memory.ACTIVATIONS: count}
        return ({}, moved, {}) if piece.kind is K.TO_HOST else (moved, {}, {})
    if piece.kind is K.TO_HOST:
        copies = scenario.shards(piece.axis) if zero is Zero.OPTIMIZER else 1
        held = piece.elements * copies * states.sharded_gradient_bytes(scenario)
        return {}, {Memory.GRADIENTS: held if states.gradients_appear_late(scenario) else 0.0}, {}
    fetched = piece.elements * states.gathered_bytes(scenario, piece.layer, piece.axis)
    if offload.parameters is Place.DEVICE:
        return {}, {}, {}
    gathered = zero is Zero.PARAMETERS and scenario.shards(piece.axis) > 1
    return ({}, {}, {Memory.BUFFERS: fetched}) if gathered else ({Memory.GATHERED: fetched}, {}, {})


def saved_bytes(scenario: Scenario, layer: int) -> float:
    """Bytes that the blocks which share the checkpoint of block ``layer`` (or it alone) keep for their backward.

    Low-precision copies of weights under autocast do not move.
    """
    z = act.sizes(scenario)
    blocks = _run(scenario, layer) or (layer,)
    found = 0.0
    for block in blocks:
        for part in _block_parts(scenario, block):
            piece = Piece(K.FORWARD, part, block)
            cast = 0.0 if _run(scenario, block) else _cast_weights(scenario, z, piece)
            found += _kept(scenario, z, piece) - cast
    return found


def _cast_weights(scenario: Scenario, z: act.Sizes, piece: Piece) -> float:
    """Low-precision copies of a part's weights that autocast keeps; frozen bases of adapters are 16 bit already."""
    autocast = act.is_autocast(scenario) and piece.part is not Part.EMBEDDING and not scenario.training.trainable.lora
    return z.element * scenario.part_parameters(piece.part, piece.layer) if autocast else 0.0


def _saved(scenario: Scenario, z: act.Sizes, piece: Piece) -> float:
    """All that the backward of a part reads; under autocast also the low-precision copies of its weights."""
    change = inputs.change(scenario, z, piece.part, piece.layer)
    return _SAVED[piece.part](z) + _cast_weights(scenario, z, piece) + change


def _kept(scenario: Scenario, z: act.Sizes, piece: Piece) -> float:
    """Bytes that stay from forward to backward."""
    if not scenario.has_backward(piece.part, piece.layer):
        return 0.0
    run = _run(scenario, piece.layer)
    if run:
        some = act.by_operator(z, piece.part) if scenario.selective_ops else 0.0
        return some + (act.boundary(z) if piece.part is Part.ATTENTION and piece.layer == run[0] else 0.0)
    selective = scenario.training.recompute is Recompute.SELECTIVE and piece.part is Part.ATTENTION
    return _saved(scenario, z, piece) - (act.core(z) if selective else 0.0)


def _recomputed(scenario: Scenario, z: act.Sizes, piece: Piece) -> float:
    """Bytes that recomputation restores before the backward. A checkpoint that a norm saves anyway counts once."""
    if not scenario.has_backward(piece.part, piece.layer):
        return 0.0
    if not _run(scenario, piece.layer):
        selective = scenario.training.recompute is Recompute.SELECTIVE and piece.part is Part.ATTENTION
        return act.core(z) if selective else 0.0
    kept = _kept(scenario, z, piece)
    if scenario.selective_ops:
        return max(0.0, _saved(scenario, z, piece) - kept)
    return _saved(scenario, z, piece) - (kept if z.fused_norm else 0.0)


def _run(scenario: Scenario, layer: int) -> tuple[int, ...]:
    """Blocks that share the checkpoint of block ``layer``; empty where it is not recomputed."""
    mode = scenario.training.recompute
    if layer < 0 or mode is Recompute.NONE or (mode is Recompute.SELECTIVE and not scenario.selective_ops):
        return ()
    stage = next(stage for stage in range(scenario.stages) if layer in scenario.stage_range(stage))
    return next((run for run in scenario.recompute_groups(stage) if layer in run), ())


def _block_parts(scenario: Scenario, layer: int) -> list[Part]:
    """Parts of a block in forward order."""
    cross = [Part.CROSS_ATTENTION] if scenario.model.block_kind(layer) is BlockKind.CROSS else []
    return [Part.ATTENTION, *cross, *scenario.model.mlp_parts(layer)]


def _tuple(amounts: _Bytes) -> MemoryBytes:
    return tuple((category, count) for category, count in amounts.items() if count)
