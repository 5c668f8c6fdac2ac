"""Everything a run depends on, resolved to SI floats. Equal scenarios give equal traces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

from simtrain.scenario.hardware import Cluster, Precision
from simtrain.scenario.layout import Layout
from simtrain.scenario.model import BlockKind, Model, Part
from simtrain.scenario.pipelines import GRID, RULES, grid_stages, rank_stages


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
    tp_grad_full_recompute: bool = True
    """Full recomputation repeats the forward's tensor-parallel collectives (Megatron)."""
    runtime_bytes: float = 0.0
    """Context, libraries and communicator buffers a device, byte."""
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
    tp_overlap: bool = False
    """Tensor-parallel gathers and scatters are split into chunks beside the products (Transformer Engine user buffers,
    async tensor parallelism), where the sequence is split."""
    gather_by_module: bool = False
    """ZeRO-3 gathers each weight matrix by itself as its module runs, and again after recomputation."""
    list_collective_ops: float = 0.0
    """Host operators a rank of the group in each gather or scatter (collectives over lists of tensors: one view and one
    copy a rank), which hold up what is launched behind them; 0 = one flat tensor."""
    source: str = ""


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
        if mode is Recompute.FULL:
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
