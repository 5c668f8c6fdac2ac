"""Pieces -> Demands: the one place where shapes, devices and links meet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from simtrain.cost import attention, collectives, experts, layers, newton_schulz, offload, wire
from simtrain.cost.collectives import Transfer
from simtrain.cost.compute import Constants, Device
from simtrain.cost.layers import Pass, Shapes
from simtrain.cost.memory import fold_pieces
from simtrain.cost.ops import MatMul, Op, launches
from simtrain.program.demand import EXPOSED_COMMUNICATION, Demand, TimeKind
from simtrain.program.lowered import Lowered, Piece, PieceKind, Span
from simtrain.program.shards import copies_axis
from simtrain.scenario.hardware import Precision
from simtrain.scenario.model import BlockKind, Part
from simtrain.scenario.scenario import Dispatch, Scenario, Zero
from simtrain.scenario.tuning import Fp8Kernels

K = PieceKind

_PASSES: dict[PieceKind, tuple[Pass, ...]] = {
    K.FORWARD: (Pass.FORWARD,),
    K.RECOMPUTE: (Pass.FORWARD,),
    K.BACKWARD: (Pass.INPUT_GRAD, Pass.WEIGHT_GRAD),
    K.INPUT_GRAD: (Pass.INPUT_GRAD,),
    K.WEIGHT_GRAD: (Pass.WEIGHT_GRAD,),
}
_COLLECTIVES = (K.ALL_REDUCE, K.ALL_GATHER, K.REDUCE_SCATTER, K.ALL_TO_ALL)
_UNIT_AXES = ("dp", "shard", "secondary", "edp", "edp_shard")
"""Process groups that gather or scatter units of ZeRO-3."""
_LOSS_CALLS = 3
"""All-reduces of the vocabulary-parallel loss (Megatron cross_entropy.py): maximum, target logit, exponentials."""


@dataclass(frozen=True, slots=True)
class _Price:
    """A Demand without its memory, by kind of time."""

    split: dict[TimeKind, float]
    flops: float = 0.0
    hbm_bytes: float = 0.0
    wire_bytes: float = 0.0
    sm_share: float = 0.0
    network_share: float = 0.0


class Pricer:
    """Prices the pieces of one scenario; equal pieces are priced once."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.shapes = Shapes.of(scenario)
        device = scenario.cluster.accelerator
        self.device = Device(device, Constants.of(device), scenario.training.attention)
        self._known: dict[object, _Price] = {}

    def ops(self, piece: Piece) -> tuple[Op, ...]:
        """Ops of a compute piece."""
        if piece.kind is K.RECOMPUTE and self.scenario.selective_ops:
            return tuple(layers.repeated(self.shapes, piece.part))
        block = self._block(piece)
        frozen = self._frozen(piece)
        passes = _PASSES[piece.kind]
        return tuple(op for which in passes for op in layers.ops(self.shapes, which, piece.part, block, frozen=frozen))

    def _frozen(self, piece: Piece) -> bool:
        return self.scenario.training.trainable.is_frozen(piece.part, piece.layer)

    def _block(self, piece: Piece) -> BlockKind:
        return self.scenario.model.block_kind(max(piece.layer, 0))

    def price(self, pieces: Iterable[Piece], beside: tuple[Piece, ...] = ()) -> Demand:
        """The price of pieces that run back to back: their sum, and the largest share of what they hold.

        ``beside`` run woven into them.
        """
        if beside:
            return self._together(tuple(pieces), beside)
        pieces = tuple(pieces)
        split: dict[TimeKind, float] = {}
        flops = hbm = wire = sm = network = 0.0
        for piece in pieces:
            price = self._piece(piece)
            for kind, seconds in price.split.items():
                split[kind] = split.get(kind, 0.0) + seconds
            flops, hbm, wire = flops + price.flops, hbm + price.hbm_bytes, wire + price.wire_bytes
            sm, network = max(sm, price.sm_share), max(network, price.network_share)
        keeps, frees, transient = fold_pieces(self.scenario, pieces)
        kinds = tuple(split.items())
        duration = sum(seconds for _, seconds in kinds)
        return Demand(duration, kinds, flops, hbm, wire, sm, network, keeps, frees, transient, self._sent(pieces))

    def _sent(self, pieces: Iterable[Piece]) -> tuple[tuple[TimeKind, float], ...]:
        """Bytes sent by kind, where there are several kinds."""
        sent: dict[TimeKind, float] = {}
        for piece in pieces:
            if moved := self._piece(piece).wire_bytes:
                way = _kind_of(piece)
                sent[way] = sent.get(way, 0.0) + moved
        return tuple(sent.items()) if len(sent) > 1 else ()

    def _together(self, first: tuple[Piece, ...], second: tuple[Piece, ...]) -> Demand:
        """The price of two passes woven into one another: compute adds up, communication runs beside the other's.

        Of each communication, what is longer than the other's compute is exposed, and the compute beside the rest slows
        down by the compute units that it holds (DeepSeek-V3, section 3.2.1 and figure 4).
        """
        parts = (self.price(first), self.price(second))
        sides = [sum(seconds for kind, seconds in part.split if kind in EXPOSED_COMMUNICATION) for part in parts]
        split: dict[TimeKind, float] = {}
        network = 0.0
        for at, (part, pieces) in enumerate(zip(parts, (first, second), strict=True)):
            other = parts[1 - at].duration - sides[1 - at]
            holds = max((self._piece(piece).sm_share for piece in pieces if piece.axis), default=0.0)
            hidden = min(sides[at], other) if self.scenario.parallelism.overlap else 0.0
            exposed = sides[at] - hidden + hidden * holds / (1.0 - holds)
            for kind, seconds in part.split:
                scale = exposed / sides[at] if kind in EXPOSED_COMMUNICATION and sides[at] else 1.0
                split[kind] = split.get(kind, 0.0) + scale * seconds
            network += part.network_share * sides[at]
        duration = sum(split.values())
        keeps, frees, transient = fold_pieces(self.scenario, (*first, *second))
        return Demand(
            duration,
            tuple(split.items()),
            flops=sum(part.flops for part in parts),
            hbm_bytes=sum(part.hbm_bytes for part in parts),
            wire_bytes=sum(part.wire_bytes for part in parts),
            sm_share=max(part.sm_share for part in parts),
            network_share=min(1.0, network / duration) if duration else 0.0,  # spread over the whole pair
            keeps=keeps,
            frees=frees,
            transient=transient,
            sent=self._sent((*first, *second)),
        )

    def _piece(self, piece: Piece) -> _Price:
        inner = piece.layer if piece.part is Part.SAVED else min(piece.layer, 0)
        moe = self.scenario.model.is_moe(max(piece.layer, 0))
        key = (piece._replace(layer=inner, releases=0.0), self._block(piece), moe, self._frozen(piece))
        price = self._known.get(key)
        if price is None:
            price = self._known[key] = self._price(piece)
        return price

    def _price(self, piece: Piece) -> _Price:
        if piece.kind in _PASSES:
            return self._compute(piece)
        if piece.kind in (K.TO_HOST, K.FROM_HOST, K.HOST_OPTIMIZER):
            return self._host(piece)
        if piece.kind is K.OPTIMIZER:
            return self._optimizer(piece)
        if piece.kind in _COLLECTIVES:
            return self._collective(piece)
        if piece.kind is K.DISPATCH:
            return _Price({TimeKind.HOST: self._list_operators(piece) * self.scenario.stack.host_seconds_per_op})
        return self._ring(piece) if piece.kind is K.RING else self._message(piece)

    def _compute(self, piece: Piece) -> _Price:
        ops = self.ops(piece)
        busy = sum(self.device.seconds(op) for op in ops)
        host = sum(launches(op) for op in ops) * self.scenario.stack.host_seconds_per_op
        kind = TimeKind.RECOMPUTE if piece.kind is K.RECOMPUTE else TimeKind.COMPUTE
        split = {kind: busy}
        gather = self._saved_input_gather(piece, ops)
        if gather:
            split[TimeKind.TP] = gather
        if host > busy:
            split[TimeKind.HOST] = host - busy
        return _Price(split, sum(op.flops for op in ops), sum(op.hbm_bytes for op in ops), sm_share=1.0)

    def _saved_input_gather(self, piece: Piece, ops: tuple[Op, ...]) -> float:
        """Sequence parallelism saves 1/tp of a layer's input and gathers it again for the weight gradient.

        It runs beside the input gradient's product (Korthikanti 2022, section 4.2.2).
        """
        tp, c = self.scenario.parallelism.layout.tp, self.shapes
        gathered = (Part.ATTENTION, Part.MLP, Part.HEAD, *([Part.ROUTER] if self.scenario.model.experts_shared else []))
        weight = piece.kind in (K.BACKWARD, K.WEIGHT_GRAD) and piece.part in gathered
        if not weight or not self.scenario.parallelism.sequence_parallel or tp == 1:
            return 0.0
        payload = self._gather_bytes(piece.part) * c.tokens * self.scenario.model.hidden
        transfer = collectives.collective(K.ALL_GATHER, payload, self._tensor_span(), self.scenario.cluster)
        return self._beside_product(transfer, ops)

    def _beside_product(self, transfer: Transfer, ops: Iterable[Op]) -> float:
        """Exposed seconds of a collective that runs beside the first product of ``ops``.

        The product loses the SMs that the collective holds meanwhile; what is longer than the product is exposed whole.
        """
        if not self.scenario.parallelism.overlap:
            return transfer.seconds
        beside = next((self.device.seconds(op) for op in ops if isinstance(op, MatMul)), 0.0)
        slowed = min(transfer.seconds, beside) * transfer.sm_share / (1.0 - transfer.sm_share)
        return slowed + max(0.0, transfer.seconds - beside)

    def _tensor_span(self) -> Span:
        tp, per_machine = self.scenario.parallelism.layout.tp, self.scenario.cluster.devices_per_machine
        return Span(tp, -(-tp // per_machine), min(tp, per_machine))

    def _optimizer(self, piece: Piece) -> _Price:
        """One pass of gradient preparation and one of the update, over the shard of this rank."""
        scenario, n = self.scenario, piece.elements
        training, stack, row = scenario.training, scenario.stack, scenario.training.optimizer
        mixed = self.shapes.e < 4.0
        copies = mixed and row.master_bytes > 0 and not stack.fp32_shards
        moved = row.read_write_bytes - (0.0 if copies else 6.0)  # no low-precision copy to write (read 4, write 2)
        if stack.low_precision and mixed and row.master_bytes:  # every operand but an 8-bit state has half the bytes
            own = 2.0 * row.state_bytes if row.quantised_state else 0.0
            moved = own + (moved - own) / 2.0
        if copies and stack.grad_bytes < 4.0:
            moved += 2.0 + 4.0  # gradient to fp32
        if training.precision is Precision.FP16:
            moved += 8.0  # unscale and look for infinities
        if not training.optimizer_in_backward:
            moved += 4.0 + 8.0  # norm, then clip
        hbm = moved * n
        products, flops = self._newton_schulz(piece)
        seconds = hbm / self.device.hbm + self.device.constants.sweep_seconds + products
        host = (2.0 + row.launches * self._tensors(piece)) * stack.host_seconds_per_op
        split = {TimeKind.OPTIMIZER: seconds}
        if host > seconds:
            split[TimeKind.HOST] = host - seconds
        return _Price(split, flops=flops, hbm_bytes=hbm, sm_share=1.0)

    def _newton_schulz(self, piece: Piece) -> tuple[float, float]:
        """(seconds, FLOP) of Muon's iterations: this rank's share, by parameters, of all matrices of the model."""
        row, model = self.scenario.training.optimizer, self.scenario.model
        if not row.newton_schulz:
            return 0.0, 0.0
        seconds = flops = 0.0
        for moe, blocks in Counter(map(model.is_moe, range(model.layers))).items():
            ops = tuple(newton_schulz.block(model, row.newton_schulz, self.shapes.core, moe=moe))
            seconds += blocks * sum(self.device.seconds(op) for op in ops)
            flops += blocks * sum(op.flops for op in ops)
        share = piece.elements / model.parameters()
        return share * seconds, share * flops

    def _tensors(self, piece: Piece) -> float:
        """Parameter tensors that a step covers, roughly: twelve a block of its stages; an adapter has two."""
        trainable, layers_here = self.scenario.training.trainable, self.scenario.model.layers
        inner = (Part.ATTENTION, Part.MLP)
        each = 2.0 * sum(len(trainable.adapters(part)) for part in inner) if trainable.lora else 12.0
        each *= 2.0 if self.scenario.held_twice else 1.0
        if piece.layer >= 0:
            return each
        return each * layers_here / self.scenario.parallelism.layout.pp if not self._early else 2.0

    @property
    def _early(self) -> bool:
        return self.scenario.training.optimizer_in_backward

    def _host(self, piece: Piece) -> _Price:
        """A transfer to or from the host, or the host's optimizer step."""
        scenario = self.scenario
        host = offload.Host.of(scenario.cluster, scenario.training.offload.nvme_bandwidth)
        if piece.kind is K.HOST_OPTIMIZER:
            return _Price({TimeKind.OFFLOAD: offload.step_seconds(scenario, piece.elements, host)})
        moved = offload.moved_bytes(scenario, piece)
        return _Price({TimeKind.OFFLOAD: offload.transfer_seconds(scenario, piece, host)}, 0.0, moved, moved)

    def _payload(self, piece: Piece) -> tuple[float, int]:
        """(bytes of the whole tensor, calls) of a collective."""
        scenario, c = self.scenario, self.shapes
        if piece.part is Part.NORM:
            return 4.0, 1
        if piece.part is Part.GRADIENT:
            return wire.reduce_bytes(scenario) * piece.elements, piece.calls
        if piece.part is Part.PARAMETER:
            each = wire.gather_bytes(scenario, piece.layer, copies_axis(piece.axis))
            return each * piece.elements, piece.calls
        if piece.axis == "cp":
            return c.e * piece.elements, 1
        if piece.part is Part.LOGITS:
            return c.e * c.tokens * scenario.model.padded_vocab(c.tp), 1
        if piece.part is Part.HEAD and piece.kind is K.ALL_REDUCE and not piece.backward:
            return 4.0 * c.tokens, _LOSS_CALLS
        if piece.part is Part.EXPERTS:
            return experts.payload(scenario, piece, c.e), 1
        width = self._gather_bytes(piece.part) if piece.kind is K.ALL_GATHER else c.e
        return width * c.tokens * scenario.model.hidden, 1

    def _gather_bytes(self, part: Part) -> float:
        """Bytes an element of what sequence parallelism gathers for a product: fp8 where the cast comes first.

        Transformer Engine casts inputs and output gradients of linear layers before it gathers them.
        """
        inner = part in (Part.ATTENTION, Part.CROSS_ATTENTION, Part.MLP)
        narrow = self.scenario.training.fp8 is not None and self.scenario.stack.fp8 is Fp8Kernels.TRANSFORMER_ENGINE
        return 1.0 if inner and narrow else self.shapes.e

    def _transfer(self, piece: Piece, payload: float) -> Transfer:
        span, cluster, scenario = piece.span or Span(1, 1, 1), self.scenario.cluster, self.scenario
        if piece.axis != "ep" or scenario.parallelism.dispatch is not Dispatch.DEDUPLICATED:
            return collectives.collective(piece.kind, payload, span, cluster)
        model = scenario.model
        reached = experts.machines_of_a_token(span.machines, model.experts_per_token, model.route_machines)
        away = reached * (1.0 - 1.0 / span.machines)
        return collectives.all_to_all(payload, span, cluster, between=payload / model.experts_per_token * away)

    def _collective(self, piece: Piece) -> _Price:
        payload, calls = self._payload(piece)
        payload /= piece.calls
        transfer = self._transfer(piece, payload)
        copy = calls * self._flat_copy(piece, payload)
        copies = self._list_operators(piece) / 2.0 if piece.part in (Part.PARAMETER, Part.GRADIENT) else 0.0
        seconds = calls * transfer.seconds + copy / self.device.hbm + copies * self.device.constants.sweep_seconds
        if piece.axis == "tp":
            seconds = self._tensor_seconds(piece, transfer, seconds)
        # every byte received is written, every byte sent is read, a reduction reads the local operand too
        hbm = calls * transfer.wire_bytes * (2.0 if piece.kind in (K.ALL_GATHER, K.ALL_TO_ALL) else 3.0) + copy
        return _Price(
            {_kind_of(piece): seconds}, 0.0, hbm, calls * transfer.wire_bytes, transfer.sm_share, transfer.network_share
        )

    def _tensor_seconds(self, piece: Piece, transfer: Transfer, alone: float) -> float:
        """Exposed seconds of a tensor-parallel collective, next to the products that it may run beside."""
        scenario, block = self.scenario, self._block(piece)
        inner = piece.part in (Part.ATTENTION, Part.CROSS_ATTENTION, Part.MLP)
        if scenario.parallelism.tp_overlap and scenario.parallelism.overlap and inner:
            which = Pass.INPUT_GRAD if piece.backward else Pass.FORWARD
            ops = layers.ops(self.shapes, which, piece.part, block, frozen=self._frozen(piece))
            products = [op for op in ops if isinstance(op, MatMul)]
            beside = products[0 if piece.kind is K.ALL_GATHER else -1]
            return wire.chunked_seconds(transfer.seconds, beside, self.shapes.tp, self.device)
        beside_weight_grad = piece.backward and not piece.split and piece.kind is not K.ALL_GATHER
        if beside_weight_grad and scenario.stack.overlap_tp_backward:
            ops = layers.ops(self.shapes, Pass.WEIGHT_GRAD, piece.part, block, frozen=self._frozen(piece))
            return self._beside_product(transfer, ops)
        return alone

    def _list_operators(self, piece: Piece) -> float:
        """Host operators of the calls of a collective over lists of tensors."""
        return self.scenario.stack.list_collective_ops * (piece.span.size if piece.span else 1) * piece.calls

    def _flat_copy(self, piece: Piece, payload: float) -> float:
        """HBM bytes of copies that the layout of one call costs.

        FSDP's out of the gathered and into the reduced flat buffer, casts, quantisation; the reordering of chunks of a
        gathered sequence, and the packing before and unpacking behind an all-to-all of heads.
        """
        if piece.axis == "cp":
            return (4.0 if piece.kind is K.ALL_TO_ALL else 2.0) * payload
        elements = piece.elements / piece.calls
        if piece.part not in (Part.PARAMETER, Part.GRADIENT) or self.shapes.xla:
            return 0.0
        shards = piece.span.size if piece.span else 1
        moved = wire.quantisation_bytes(self.scenario, piece.part, elements, self.shapes.e, shards)
        if piece.axis not in _UNIT_AXES or self.scenario.parallelism.zero is not Zero.PARAMETERS:
            return moved
        if piece.part is Part.PARAMETER:
            return moved + 2.0 * self.shapes.e * elements
        return moved + (self.shapes.e + self.scenario.stack.reduce_bytes) * elements

    def _ring(self, piece: Piece) -> _Price:
        """Hops of a ring of context ranks, each beside one kernel of the core: what is longer than it is exposed.

        Forward: n - 1 hops of K and V. Backward: n hops, the first with K and V, the last with their gradients, those
        between with both (Transformer Engine, ``context_parallel.py``).
        """
        scenario, c, span = self.scenario, self.shapes, piece.span or Span(1, 1, 1)
        causal = self._block(piece) is not BlockKind.ENCODER
        step = attention.ring_step(scenario, e=c.e, backward=piece.backward, causal=causal)
        hidden = self.device.seconds(step) if scenario.parallelism.overlap else 0.0
        payload, n = c.e * piece.elements, span.size
        sizes = [payload] * (n - 1) if not piece.backward else [payload, *[2 * payload] * (n - 2), payload]
        hops = [collectives.message(size, span, scenario.cluster) for size in sizes]
        exposed = sum(max(0.0, hop.seconds - hidden) for hop in hops)
        sent = sum(hop.wire_bytes for hop in hops)
        rings = scenario.parallelism.layout.cp // n
        share = min(1.0, rings * max(hop.network_share for hop in hops))
        return _Price({TimeKind.CP: exposed}, 0.0, 2 * sent, sent, 0.0, share)

    def _message(self, piece: Piece) -> _Price:
        """A boundary activation; each tensor rank carries its share where the stack scatters, and gathers it after."""
        scenario, c = self.scenario, self.shapes
        whole, tp = c.e * c.tokens * scenario.model.hidden, scenario.parallelism.layout.tp
        split = scenario.parallelism.sequence_parallel or scenario.stack.scatter_gather_p2p
        transfer = collectives.message(whole / tp if split else whole, piece.span or Span(2, 1, 2), scenario.cluster)
        seconds = transfer.seconds
        if scenario.stack.scatter_gather_p2p and not scenario.parallelism.sequence_parallel:
            seconds += collectives.collective(K.ALL_GATHER, whole, self._tensor_span(), scenario.cluster).seconds
        return _Price(
            {TimeKind.PP: seconds}, 0.0, 2 * whole, transfer.wire_bytes, transfer.sm_share, transfer.network_share
        )


def _kind_of(piece: Piece) -> TimeKind:
    if piece.kind in (K.SEND, K.RECV):
        return TimeKind.PP
    if piece.axis in ("tp", "model"):
        return TimeKind.TP if piece.axis == "tp" else TimeKind.OPTIMIZER
    if piece.axis == "cp":
        return TimeKind.CP
    if piece.axis in ("ep", "etp"):
        return TimeKind.EP
    return TimeKind.DP_GATHER if piece.part is Part.PARAMETER else TimeKind.DP_REDUCE


def price(lowered: Lowered, scenario: Scenario) -> tuple[Demand, ...]:
    """Price every work of a lowered job.

    Returns
    -------
    tuple of Demand
        By work index; a merged work costs the sum of its pieces.
    """
    pricer = Pricer(scenario)
    return tuple(pricer.price(work.pieces, work.beside) for work in lowered.works)


def price_piece(scenario: Scenario, piece: Piece) -> Demand:
    """Price one piece; a collective says in ``piece.span`` how its group lies."""
    return Pricer(scenario).price((piece,))
