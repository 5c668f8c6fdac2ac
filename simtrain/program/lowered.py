"""The lowered list: what the engine runs.

Every simulated rank has streams (compute, gradient reduction, parameter gather, one per point-to-point channel). A
*task* runs on one stream, after its predecessor on that stream and after its ``deps``. A task with a ``slot`` is one
party of a joint activity (a collective or a message): it starts when all parties are ready and ends for all at once.
The n-th task of a slot meets the n-th task of the same group's slot on the other parties, and one slot is used from
one stream alone.

Ranks that run the same tasks share one list; only their slot -> group table differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from simtrain.scenario.model import Part


class PieceKind(StrEnum):
    """What a piece does. The first five are compute, the rest communicate or update."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT_GRAD = "input_grad"
    WEIGHT_GRAD = "weight_grad"
    RECOMPUTE = "recompute"
    OPTIMIZER = "optimizer"
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    RING = "ring"
    """Steps of a ring beside the attention core, each a message to the next rank; takes what the core does not hide."""
    SEND = "send"
    RECV = "recv"
    TO_HOST = "to_host"
    FROM_HOST = "from_host"
    HOST_OPTIMIZER = "host_optimizer"
    """The optimizer step of some parameters on the host's cores."""
    DISPATCH = "dispatch"
    """The host issues the operators of a collective over lists of tensors; what is launched behind them waits."""


class Span(NamedTuple):
    """How one process group lies on the machines."""

    size: int
    """Ranks in the group."""
    machines: int
    """Machines that it spans."""
    members: int
    """Largest number of its ranks on one machine."""


ALONE = Span(1, 1, 1)
"""A group of one rank."""


class Piece(NamedTuple):
    """Smallest priced piece of work: a sub-layer's compute, or one collective."""

    kind: PieceKind
    part: Part
    layer: int = -1
    """Block number in the model; -1 where none applies."""
    axis: str = ""
    """Process group of a collective: tp, cp, dp, shard, secondary, replica (of hybrid sharding), model (tp x cp x pp),
    embedding (first and last stage), mirror (the two ranks that hold the same stages), ep, etp, edp, edp_shard,
    edp_replica (of experts); empty = none. A transfer to or from the host, and the step there, say along which group
    the copies of their parameters lie."""
    elements: float = 0.0
    """Parameters a tensor rank, for optimizer steps and for GRADIENT and PARAMETER collectives (before sharding).

    Context collectives (axis cp): elements of the whole tensor of a gather, of one rank's tensor in an all-to-all, of
    one rank's keys and values on a ring.
    """
    span: Span | None = None
    """How the process group of a collective or message lies on the machines."""
    backward: bool = False
    """A collective of the backward pass, or a message that carries a gradient.

    Tensor-parallel collectives carry a whole boundary activation (s b h); the forward ALL_REDUCE of HEAD alone is
    small: the maximum, the target logit and the sum of the vocabulary-parallel loss.
    """
    split: bool = False
    """A collective of an input-gradient pass, beside which no weight gradient runs."""
    calls: int = 1
    """Collective calls into which ``elements`` fall."""
    releases: float = 0.0
    """Gathered parameters (a tensor rank) that are freed once this piece is done."""


class Work(NamedTuple):
    """What one task does: a run of pieces executed back to back (one piece where unmerged)."""

    pieces: tuple[Piece, ...]
    stage: int
    name: str
    """What a reader sees: ``F``, ``B``, ``block 3 forward``, ``reduce bucket 2``."""
    beside: tuple[Piece, ...] = ()
    """The backward of a pair: woven into ``pieces``, a forward, so that each hides the communication of the other."""

    @property
    def kind(self) -> PieceKind:
        """Kind of the first piece that computes; of the first piece where all communicate.

        A merged pass computes, even where it begins with the gather of its input.
        """
        return next((piece.kind for piece in self.pieces if not piece.axis), self.pieces[0].kind)


class Stream(StrEnum):
    """Classes of streams; a rank may have several of SEND and RECV, one per channel."""

    COMPUTE = "compute"
    GATHER = "gather"
    REDUCE = "reduce"
    REPLICA = "replica_reduce"
    """All-reduces of gradient shards between shard groups."""
    SEND = "send"
    RECV = "recv"
    TO_HOST = "to_host"
    FROM_HOST = "from_host"
    HOST = "host"


class Task(NamedTuple):
    """One entry of a lowered list."""

    stream: int
    """Index into ``TaskList.streams``."""
    work: int
    """Index into ``Lowered.works``; all parties of a joint activity have works of equal duration."""
    microbatch: int
    """-1 where none applies (gathers, reductions, optimizer)."""
    deps: tuple[int, ...] = ()
    """Indices of earlier tasks in the same list."""
    slot: int = -1
    """Local group slot; -1 = alone."""


@dataclass(frozen=True, slots=True)
class TaskList:
    """Tasks in issue order, shared by all ranks that run them."""

    tasks: tuple[Task, ...]
    streams: tuple[Stream, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """A process group, or a class of identical ones when folded."""

    axis: str
    """tp, cp, dp (with cp: those that reduce gradients), model (tp x cp x pp), those of hybrid sharding and of experts
    (``Piece.axis``), embedding, mirror, pp (a channel)."""
    parties: tuple[int, ...]
    """Simulated ranks that take part, each once, ascending."""
    size: int
    """Real ranks in one process group."""
    machines: int
    """Machines that one process group spans."""
    members_per_machine: int
    """Largest number of its ranks on one machine."""
    loads: tuple[tuple[int, float], ...] = ()
    """(resource, how many real groups like this one use that direction of one such machine's NICs at once)."""


@dataclass(frozen=True, slots=True)
class SimRank:
    """A simulated rank; when folded it stands for ``multiplicity`` identical ones."""

    rank: int
    """Global rank of the representative."""
    multiplicity: int
    coordinate: tuple[tuple[str, int], ...]
    tasks: int
    """Index into ``Lowered.lists``."""
    groups: tuple[int, ...]
    """slot -> index into ``Lowered.groups``."""
    slowdown: float = 1.0
    """Factor on compute durations (jitter: the largest draw among the ranks it stands for)."""


@dataclass(frozen=True, slots=True)
class Lowered:
    """A whole job, ready to price and run."""

    works: tuple[Work, ...]
    lists: tuple[TaskList, ...]
    ranks: tuple[SimRank, ...]
    groups: tuple[Group, ...]
    resources: tuple[str, ...] = ()
    """Names of the shared network resources (NIC pools of machines); capacity 1 each."""
    rolling: bool = False
    """Steps flow into one another: a rank begins the next as soon as it is done, whoever else is not."""

    @property
    def task_count(self) -> int:
        """Tasks over all simulated ranks."""
        return sum(len(self.lists[rank.tasks].tasks) for rank in self.ranks)
