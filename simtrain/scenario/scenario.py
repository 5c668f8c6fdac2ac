"""Everything a run depends on, resolved to SI floats. Equal scenarios give equal traces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import Any

from simtrain.scenario.hardware import Cluster, Precision
from simtrain.scenario.layout import Layout
from simtrain.scenario.model import BlockKind, Model, Part
from simtrain.scenario.pipelines import GRID, RULES, grid_stages, rank_stages
from simtrain.scenario.tuning import Fp8, Fp8Kernels, Offload, Trainable, adapter_parameters


class Recompute(StrEnum):
    """Activation recomputation in the backward pass."""

    NONE = "none"
    SELECTIVE = "selective"
    """The attention core alone (Korthikanti 2022)."""
    FULL = "full"
    """Every block keeps its input alone."""
    BLOCKS = "blocks"
    """The first n blocks of each stage recompute in full, the others not (Megatron ``block`` method)."""
    EVERY = "every"
    """One checkpoint every k blocks (Megatron ``uniform`` method; k = sqrt(N) gives Chen 2016)."""


class Zero(IntEnum):
    """ZeRO stage (Rajbhandari 2020): what is sharded over data-parallel ranks."""

    NONE = 0
    OPTIMIZER = 1
    GRADIENTS = 2
    PARAMETERS = 3


class WireType(StrEnum):
    """Number format of a collective's payload."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def bytes(self) -> float:
        """Bytes an element."""
        return {"fp32": 4.0, "int8": 1.0, "int4": 0.5}.get(self.value, 2.0)

    @property
    def is_quantised(self) -> bool:
        """Integers with a scale a block."""
        return self in (WireType.INT8, WireType.INT4)


class Attention(StrEnum):
    """Attention kernel generation."""

    UNFUSED = "unfused"
    FLASH2 = "flash2"
    FLASH3 = "flash3"
    CUDNN = "cudnn"
    XLA = "xla"


class ContextKind(StrEnum):
    """How context-parallel ranks see each other's keys and values; the names of Megatron's ``--cp-comm-type``."""

    P2P = "p2p"
    """Ring attention: K and V go round, one step of the core a hop (Liu 2023), balanced in 2 cp chunks."""
    ALL_GATHER = "all_gather"
    """K and V are gathered before the core (Llama 3, section 3.3.2; torch's default)."""
    A2A = "a2a"
    """All-to-all of heads against sequence before and behind the core (DeepSpeed-Ulysses, Jacobs 2023)."""
    A2A_P2P = "a2a+p2p"
    """All-to-all over ``cp_inner`` neighbours, a ring over the rest (USP, Fang 2024; Transformer Engine)."""


class Dispatch(StrEnum):
    """How tokens reach their experts (Megatron core ``--moe-token-dispatcher-type``)."""

    ALLTOALL = "alltoall"
    """Every token travels once to each of its experts."""
    ALLGATHER = "allgather"
    """All tokens of the expert-parallel group travel to all of its ranks; results are reduced and scattered."""
    DEDUPLICATED = "deduplicated"
    """A token travels once to each machine with experts of its own, and on inside (DeepEP; Megatron ``flex``)."""


class Loss(StrEnum):
    """How the cross entropy is computed, which decides what it holds a logit."""

    IN_PLACE = "in_place"
    """Megatron's vocabulary-parallel loss: everything in one fp32 copy of the logits."""
    EAGER = "eager"
    """Framework operations: log-softmax and its gradients in fp32, one tensor each."""
    COMPILED = "compiled"
    """Loss and gradient follow from the logits alone."""
    CHUNKED = "chunked"
    """As compiled, and the gradient a few tokens at a time."""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer row (``hardware_specs/optimizers.yaml``)."""

    name: str
    state_bytes: float
    """Bytes of state a parameter, without the fp32 master copy."""
    master_bytes: float
    """Bytes of fp32 master weight a parameter in mixed precision (0 where the row keeps none)."""
    read_write_bytes: float
    """HBM bytes moved a parameter in one step of the optimizer, mixed precision, gradients and weights included."""
    launches: float
    """Kernel launches a step for each parameter tensor (0.0 = fused multi-tensor, negligible)."""
    temporary_bytes: float = 0.0
    """Bytes a parameter that the step holds beside the state (foreach kernels write whole intermediate lists)."""
    quantised_state: bool = False
    """State keeps its own 8-bit format whatever the parameters'; else moments of 16-bit parameters without a master
    copy are 16-bit too."""
    newton_schulz: float = 0.0
    """Newton-Schulz iterations a step on every matrix inside blocks (Muon)."""
    vector_state_bytes: float = 0.0
    """State of what is no matrix inside a block, which such a row leaves to AdamW; read with ``newton_schulz``."""


@dataclass(frozen=True, slots=True)
class Stack:
    """What a software stack does (``stacks.yaml``): choices that its code or documents show, each with source."""

    name: str
    fused_softmax: bool
    """Scale, mask and softmax of unfused attention in one kernel."""
    fused_elementwise: bool
    """Bias+GeLU and bias+dropout+residual each in one kernel."""
    fused_norm: bool
    """Layer norm or RMS norm in one kernel."""
    compiled: bool
    """Element-wise chains fused by a compiler (XLA, torch.compile)."""
    attention: Attention
    """Default kernel."""
    overlap_grad_reduce: bool
    """Gradient reduction overlaps the last backward, in buckets."""
    overlap_param_gather: bool
    """ZeRO-1/2 parameter gathers overlap the next forward."""
    overlap_p2p: bool
    """Pipeline sends run beside compute (interleaved schedules); otherwise they block the stream."""
    scatter_gather_p2p: bool
    """Each tensor rank sends 1/tp of a boundary activation and the receivers gather it (SC21, section 4.1)."""
    grad_bytes: float
    """Bytes of the gradient kept a parameter in mixed precision (2 or 4)."""
    reduce_bytes: float
    """Bytes a gradient element on the wire."""
    fp32_shards: bool
    """Parameters are fp32 shards with low-precision gathered copies (FSDP), not low-precision weights plus master."""
    bucket_bytes: float
    """Gradient bucket, byte."""
    host_seconds_per_op: float
    """Host time a launched kernel, s; 0 where the host never limits (compiled whole-graph)."""
    runtime_bytes: float = 0.0
    """CUDA context and libraries a device, byte; NCCL's communicators come on top (``memory.states``)."""
    reserve_fraction: float = 0.0
    """Allocator reserve over the allocated peak."""
    fused_grad_accumulation: bool = False
    """The weight-gradient product accumulates into the gradient buffer (Megatron ``gradient_accumulation_fusion``)."""
    grad_buffer: bool = False
    """Gradients are added to a contiguous buffer after every microbatch, the first included (Megatron's local DDP)."""
    overlap_tp_backward: bool = False
    """The tensor-parallel reduction of a column-parallel layer's input gradient runs beside its weight gradient."""
    fused_linear_bias: bool = True
    """The bias of a linear layer is added in the product's epilogue."""
    loss: Loss = Loss.IN_PLACE
    fp32_logits: bool = False
    """The model hands its logits over in fp32, whatever the loss."""
    selective_ops: bool = False
    """``recompute: selective`` is torch's by operator: attention and every other product are kept (torchtitan "op")."""
    repeats_kv: bool = False
    """Keys and values of grouped-query attention are repeated to all heads before the attention kernel."""
    keeps_buckets: bool = False
    """The reduction bucket is held all step, whatever the ZeRO stage (DeepSpeed's contiguous gradients)."""
    fp16_grad_bytes: float = 0.0
    """``grad_bytes`` and ``reduce_bytes`` in fp16 training, which loss scaling keeps in range; 0 = as in bf16."""
    grad_copy_bytes: float = 0.0
    """Bytes a parameter of a low-precision gradient that stays beside the fp32 one it is added to."""
    fp8: Fp8Kernels = Fp8Kernels.NONE
    """Library of fp8 linear layers."""
    loads_gathered: bool = False
    """A checkpoint is loaded with all parameters gathered on every rank (FSDP's full state dictionary)."""
    low_precision: bool = False
    """Weights, gradients and moments all stay in the 16-bit format: no fp32 copy anywhere (torchtune, lit-gpt)."""
    tp_overlap: bool = False
    """Tensor-parallel gathers and scatters are split into chunks beside the products (Transformer Engine user buffers,
    async tensor parallelism), where the sequence is split."""
    gather_by_module: bool = False
    """ZeRO-3 gathers each weight matrix by itself as its module runs, and again after recomputation."""
    list_collective_ops: float = 0.0
    """Host operators a rank of the group in each gather or scatter (collectives over lists of tensors: one view and one
    copy a rank), which hold up what is launched behind them; 0 = one flat tensor."""
    source: str = ""

    def at(self, precision: Precision) -> Stack:
        """The stack as it runs at a precision."""
        if precision is not Precision.FP16 or not self.fp16_grad_bytes:
            return self
        half = self.fp16_grad_bytes
        return replace(self, grad_bytes=half, reduce_bytes=half, grad_copy_bytes=0.0)


@dataclass(frozen=True, slots=True)
class Training:
    """How the job trains. Batch sizes in sequences."""

    global_batch: int
    micro_batch: int
    seq_len: int
    precision: Precision
    optimizer: Optimizer
    recompute: Recompute
    attention: Attention
    recompute_layers: int = 0
    """k of ``EVERY``, n of ``BLOCKS``."""
    sync_every_microbatch: bool = False
    """Gradients reduce after every microbatch (accumulation without no-sync)."""
    capacity_factor: float = 0.0
    """Experts drop above and pad up to this times the mean number of tokens; 0 = dropless."""
    imbalance: float = 1.0
    """Tokens of the most loaded rank of an expert-parallel group over the mean, where no draw is asked for."""
    imbalance_sigma: float = 0.0
    """Spread of the logarithm of the experts' popularity: the imbalance is drawn from the scenario's seed."""
    documents: tuple[int, ...] = ()
    """Tokens of the documents packed into one sequence, which do not attend to one another; empty = one document."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document of a sequence; they sum to ``seq_len``."""
        return self.documents or (self.seq_len,)

    fp8: Fp8 | None = None
    """Recipe where ``precision`` is fp8."""
    trainable: Trainable = field(default_factory=Trainable)
    offload: Offload = field(default_factory=Offload)
    optimizer_in_backward: bool = False
    """Each unit is updated, and its gradient freed, as soon as its gradient is complete."""


@dataclass(frozen=True, slots=True)
class Parallelism:
    """How the job is split."""

    layout: Layout
    zero: Zero
    sequence_parallel: bool
    schedule: str
    """Key of ``program.schedules.SCHEDULES``, or ``grid``."""
    virtual_stages: int
    """Model chunks a pipeline rank (1 = not interleaved)."""
    stage_layers: tuple[int, ...]
    """Blocks of each of the pp x virtual_stages stages, in model order."""
    overlap: bool
    """Communication may overlap compute at all; false serialises every collective."""
    reshard_after_forward: bool = True
    """ZeRO-3: free gathered parameters after forward and gather again in backward (in part, if ``layout.near``)."""
    prefetch: int = 1
    """ZeRO-3: units gathered ahead of compute."""
    backward_prefetch: int = 1
    """The same in backward."""
    reshard_after_backward: bool = True
    """ZeRO-3: free gathered parameters after every backward, not after the last microbatch's alone."""
    reshard_root: bool = False
    """ZeRO-3: embedding and head reshard after forward as the blocks do; FSDP2 keeps its root."""
    wrap_blocks: int = 1
    """ZeRO-3: blocks a wrap unit."""
    wrap_ends: bool = True
    """ZeRO-3: embedding and head are units of their own; otherwise they are one, the root."""
    gather_dtype: WireType | None = None
    """Parameters on the wire; None = as computed with. int8 and int4 are quantised in blocks (ZeRO++ qwZ)."""
    reduce_dtype: WireType | None = None
    """Gradients on the wire; None = what the stack reduces in. int8 and int4: hierarchical all-to-all (ZeRO++ qgZ)."""
    replica_sync_every_microbatch: bool = True
    """Hybrid sharding: gradient shards are all-reduced between groups whenever they are scattered; in MiCS once."""
    tp_overlap: bool = False
    """Sequence-parallel gathers and scatters run chunk by chunk beside the products that need or feed them."""
    vocab_parallel_loss: bool = True
    """The loss works on the vocabulary share of each tensor rank; otherwise logits are gathered."""
    post_validation: bool = False
    """The optimizer does not wait for the gradient norm over all stages (checked afterwards), so steps flow into one
    another (Qi et al. 2023, section 4)."""
    grid: tuple[str, ...] = ()
    """Lines of a schedule that is written out, in PyTorch's CSV notation."""
    grid_file: str = field(default="", compare=False)
    """Where it comes from, for messages."""
    dispatch: Dispatch = Dispatch.ALLTOALL
    cp_kind: ContextKind = ContextKind.P2P
    cp_inner: int = 1
    """``A2A_P2P``: neighbouring context ranks that exchange heads; the ring goes over cp / cp_inner."""

    @property
    def head_split(self) -> int:
        """Context ranks that share out the heads of an attention core (1 = every rank has all of its tensor rank's)."""
        if self.cp_kind is ContextKind.A2A:
            return self.layout.cp
        return self.cp_inner if self.cp_kind is ContextKind.A2A_P2P else 1

    @property
    def sequence_split(self) -> int:
        """Context ranks that share out the query positions of an attention core: cp / head_split."""
        return self.layout.cp // self.head_split


@dataclass(frozen=True, slots=True)
class Scenario:
    """One training step of one job on one cluster."""

    name: str
    seed: int
    cluster: Cluster
    model: Model
    training: Training
    parallelism: Parallelism
    stack: Stack
    measured: Mapping[str, Any] = field(default_factory=dict)
    """Published result of this very run: ``step_time`` s, ``tokens_per_s``, ``mfu``, ``peak_memory`` byte, source."""
    document: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The file's keys with all defaults filled in: what ``scenario.resolved.yaml`` holds."""
    defaults: tuple[str, ...] = field(default=(), compare=False)
    """Keys that the file left out and a documented default filled."""

    @property
    def microbatches(self) -> int:
        """Microbatches a data-parallel replica and step."""
        return self.training.global_batch // (self.training.micro_batch * self.parallelism.layout.dp)

    @property
    def stages(self) -> int:
        """Pipeline stages: pp x virtual_stages."""
        return len(self.parallelism.stage_layers)

    @property
    def tokens(self) -> int:
        """Tokens a step."""
        return self.training.global_batch * self.training.seq_len

    def rank_stages(self, pp_rank: int) -> tuple[int, ...]:
        """Stages of a pipeline rank, in model order."""
        plan = self.parallelism
        if plan.schedule == GRID:
            return grid_stages(plan.grid)[pp_rank]
        return rank_stages(RULES[plan.schedule].placement, pp_rank, plan.layout.pp, self.stages)

    @property
    def held_twice(self) -> bool:
        """Two pipeline ranks hold each stage, and reduce its gradients between them (DualPipe)."""
        ranks = range(self.parallelism.layout.pp)
        return sum(len(self.rank_stages(rank)) for rank in ranks) == 2 * self.stages

    def mirror(self, pp_rank: int) -> int:
        """The other pipeline rank that holds the same stages; -1 where there is none."""
        mine = self.rank_stages(pp_rank)
        others = (rank for rank in range(self.parallelism.layout.pp) if rank != pp_rank)
        return next((rank for rank in others if self.rank_stages(rank) == mine), -1)

    def stage_range(self, stage: int) -> range:
        """Blocks of one pipeline stage."""
        first = sum(self.parallelism.stage_layers[:stage])
        return range(first, first + self.parallelism.stage_layers[stage])

    def recompute_groups(self, stage: int) -> tuple[tuple[int, ...], ...]:
        """Runs of blocks of a stage that share one checkpoint and are recomputed together, in model order.

        Blocks that appear in no run keep all their activations (or, with selective recomputation, all but the core's).
        """
        blocks, mode = self.stage_range(stage), self.training.recompute
        if mode is Recompute.FULL or self.selective_ops:
            return tuple((block,) for block in blocks)
        if mode is Recompute.BLOCKS:
            return tuple((block,) for block in blocks[: self.training.recompute_layers])
        if mode is Recompute.EVERY:
            step = max(1, self.training.recompute_layers)
            return tuple(tuple(blocks[i : i + step]) for i in range(0, len(blocks), step))
        return ()

    def parts(self, stage: int) -> tuple[tuple[Part, int], ...]:
        """Parts of one pipeline stage in forward order, each with its block number (-1 for embedding and head)."""
        found: list[tuple[Part, int]] = [(Part.EMBEDDING, -1)] if stage == 0 else []
        for layer in self.stage_range(stage):
            found.append((Part.ATTENTION, layer))
            if self.model.block_kind(layer) is BlockKind.CROSS:
                found.append((Part.CROSS_ATTENTION, layer))
            found += ((part, layer) for part in self.model.mlp_parts(layer))
        if stage == self.stages - 1:
            found.append((Part.HEAD, -1))
        return tuple(found)

    def part_parameters(self, part: Part, layer: int) -> float:
        """Parameters of a part on one tensor rank; a tied head holds a copy where pipelining separates it."""
        layout, tp = self.parallelism.layout, self.parallelism.layout.tp
        if part is Part.EXPERTS:
            return self.model.part_parameters(part, layer, layout.ep * layout.expert_tensor)
        count = self.model.part_parameters(part, layer, tp)
        if part is Part.HEAD and self.has_tied_copy:
            count += self.model.padded_vocab(tp) / tp * self.model.hidden
        return count

    def adapter_parameters(self, part: Part, layer: int) -> float:
        """Low-rank adapter parameters of a part on one tensor rank; 0 without LoRA."""
        lora, (ranks, alike) = self.training.trainable.lora, self.linear_split(part)
        return alike * adapter_parameters(lora, self.model, part, ranks) if lora else 0.0

    def linear_split(self, part: Part) -> tuple[int, int]:
        """(Ranks that share each linear layer of a part, layers alike that a rank holds: its experts, else 1)."""
        layout = self.parallelism.layout
        return (layout.expert_tensor, self.model.experts // layout.ep) if part is Part.EXPERTS else (layout.tp, 1)

    def trainable_parameters(self, part: Part, layer: int) -> float:
        """Parameters of a part on one tensor rank that get a gradient and optimizer state."""
        own = 0.0 if self.training.trainable.is_frozen(part, layer) else self.part_parameters(part, layer)
        return own + self.adapter_parameters(part, layer)

    def has_backward(self, part: Part, layer: int) -> bool:
        """Whether a gradient reaches a part: it, or a part before it in the model, is trained."""
        trainable = self.training.trainable
        if trainable.everything or trainable.is_trained(Part.EMBEDDING, -1):
            return True
        for stage in range(self.stages):
            for other in self.parts(stage):
                if trainable.is_trained(*other):
                    return True
                if other == (part, layer):
                    return False
        return False

    @property
    def selective_ops(self) -> bool:
        """Whether selective recomputation is torch's by operator: blocks run again without what was kept."""
        return self.training.recompute is Recompute.SELECTIVE and self.stack.selective_ops

    @property
    def has_tied_copy(self) -> bool:
        """Tied embeddings live twice: on the first and on the last pipeline rank, kept equal by an all-reduce.

        Not where one rank holds the first and the last stage, as in a V.
        """
        pp = self.parallelism.layout.pp
        return self.model.tied_embeddings and pp > 1 and self.stages - 1 not in self.rank_stages(0)

    @property
    def replicas(self) -> int:
        """Ranks that hold the same parameters and reduce gradients together: data times context parallel."""
        return self.parallelism.layout.dp * self.parallelism.layout.cp

    def gradient_axis(self, part: Part) -> str:
        """Process group that holds copies of a part and reduces its gradients: dp, or edp where experts are spread."""
        return "edp" if part is Part.EXPERTS and self.parallelism.layout.experts_apart else "dp"

    def copies(self, axis: str) -> int:
        """Ranks that hold the same parameters, by ``gradient_axis``."""
        return self.parallelism.layout.expert_data if axis == "edp" else self.replicas

    def shards(self, axis: str = "dp") -> int:
        """Ranks over which ZeRO spreads states: all that hold copies, or the shard group of hybrid sharding.

        Experts have as many replicas as all else (Megatron core ``num_distributed_optimizer_instances``, torchtitan
        ``dp_replicate``).
        """
        return self.copies(axis) // self.parallelism.layout.replica

    @property
    def is_hybrid(self) -> bool:
        """States are sharded in groups of ranks and replicated between the groups (HSDP, MiCS)."""
        return self.parallelism.layout.replica > 1

    def shard_axis(self, axis: str = "dp") -> str:
        """Process group over which ZeRO spreads states."""
        return {"dp": "shard", "edp": "edp_shard"}[axis] if self.is_hybrid else axis

    def replica_axis(self, axis: str = "dp") -> str:
        """Process group of the replicas of a shard."""
        return {"dp": "replica", "edp": "edp_replica"}[axis]
