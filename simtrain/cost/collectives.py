"""Collectives on a two-level hierarchy, alpha-beta per link (Hockney 1994; Thakur 2005).

n ranks on k machines, P bytes of payload (the whole, gathered or reduced, tensor of one rank):

    ring all-reduce       2 (n - 1) steps of P / n bytes
    all-gather, reduce-scatter  half of it
    tree all-reduce       2 (k - 1) / k P bytes through the NICs of a machine in a pipeline (NCCL's double binary tree:
                          k - 1 links a tree, up and down), 2 (n / k - 1) + 2 log2 k hops

Across machines a group leaves its machine through the NICs of its members alone; its bandwidth is bound by them and by
the links inside. How much of the machine's NIC pool that takes is the group's network share.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2, sqrt

from simtrain.program.lowered import PieceKind, Span
from simtrain.scenario.hardware import Cluster, Link

NVLS_FROM = 5
"""Smallest group that reduces in the NVLink switch (H200: from 5 ranks up; ml-engineering, network/README.md)."""
SM_SHARE_SCALE_UP = 0.15
SM_SHARE_SCALE_OUT = 0.02
"""Share of the compute units that a running collective holds (calculon systems/a100_80g.json, ``sm_share``)."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """What a collective or message costs one rank."""

    seconds: float
    wire_bytes: float
    """Bytes one rank sends."""
    network_share: float
    """Share of one machine's NIC pool that this group uses."""
    sm_share: float


NOTHING = Transfer(0.0, 0.0, 0.0, 0.0)


def step_seconds(size: float, bandwidth: float, half_bytes: float) -> float:
    """Time of moving ``size`` bytes as one step, s: the rate rises as 1 / (1 + sqrt(half / size)).

    The square root is the shape of NCCL's bus bandwidth over the size (8 A100: 0.22, 0.5, 0.73, 0.92 of the limit at
    steps of 16 KB, 262 KB, 4.2 MB, 34 MB; aiconfigurator tables): protocol, channels, chunks change with the size.
    """
    return size / bandwidth * (1.0 + sqrt(half_bytes / size)) if size > 0 else 0.0


def _bandwidth(cluster: Cluster, span: Span, *, reduce: bool) -> tuple[float, float, float]:
    """(byte/s that a ring of the group sustains, half_bytes of that link, share of the NIC pool)."""
    inside = cluster.scale_up
    ring = inside.achieved
    if span.machines == 1:
        in_switch = reduce and inside.nvls_efficiency and span.size >= NVLS_FROM
        return (inside.bandwidth * inside.nvls_efficiency if in_switch else ring), inside.half_bytes, 0.0
    nics = node_nics(cluster, span.members)
    node = nics * cluster.scale_out.achieved
    share = nics / cluster.nics_per_machine
    if span.members > 1 and ring < node:
        return ring, inside.half_bytes, share * ring / node
    return node, cluster.scale_out.half_bytes, share


def node_nics(cluster: Cluster, members: int) -> float:
    """NICs through which the members of one group leave a machine; a lone member uses one whole NIC."""
    return min(
        max(1.0, members * cluster.nics_per_machine / cluster.devices_per_machine), float(cluster.nics_per_machine)
    )


def _hops(cluster: Cluster, span: Span) -> tuple[float, float]:
    """Latency of one turn round the ring, and of one way through the tree, s."""
    inside, outside, k = cluster.scale_up.latency, cluster.scale_out.latency, span.machines
    if k == 1:
        return (span.size - 1) * inside, float("inf")
    ring = (span.size - k) * inside + (k - 1) * outside
    return ring, (span.size / k - 1) * inside + log2(k) * outside


def _base(cluster: Cluster, span: Span) -> float:
    link: Link = cluster.scale_up if span.machines == 1 else cluster.scale_out
    return link.base_latency


def _tree_seconds(payload: float, span: Span, cluster: Cluster) -> float:
    """What a tree all-reduce moves, s: through each NIC, or inside the machines where that takes longer."""
    k, m = span.machines, span.members
    nics = node_nics(cluster, m)
    outside = step_seconds(2 * (k - 1) / k * payload / nics, cluster.scale_out.achieved, cluster.scale_out.half_bytes)
    inside, half, _ = _bandwidth(cluster, Span(m, 1, m), reduce=True)
    return max(outside, step_seconds(2 * (m - 1) / m * payload, inside, half))


def collective(kind: PieceKind, payload: float, span: Span, cluster: Cluster) -> Transfer:
    """Cost of one collective call.

    Parameters
    ----------
    kind
        ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER or ALL_TO_ALL.
    payload
        byte; the whole tensor, of which an all-gather's rank contributes 1 / size. All-to-all: the tensor of one rank,
        of which it keeps 1 / size.
    span
        How the group lies on the machines.
    cluster
        Its two levels of link.

    Returns
    -------
    Transfer
        Zero for a group of one.
    """
    n = span.size
    if n <= 1 or payload <= 0:
        return NOTHING
    if kind is PieceKind.ALL_TO_ALL:
        return all_to_all(payload, span, cluster)
    reduce = kind is PieceKind.ALL_REDUCE
    bandwidth, half, share = _bandwidth(cluster, span, reduce=reduce)
    ring_hops, tree_hops = _hops(cluster, span)
    turns, base = (2 if reduce else 1), _base(cluster, span)
    moved = turns * (n - 1) / n * payload
    ring = base + turns * ring_hops + turns * (n - 1) * step_seconds(payload / n, bandwidth, half)
    seconds = ring
    if reduce and span.machines > 1:
        seconds = min(ring, base + 2 * tree_hops + _tree_seconds(payload, span, cluster))
    sm = SM_SHARE_SCALE_UP if span.machines == 1 or span.members > 1 else SM_SHARE_SCALE_OUT
    return Transfer(seconds, moved, share, sm)


def all_to_all(payload: float, span: Span, cluster: Cluster, *, between: float | None = None) -> Transfer:
    """Cost of an all-to-all: every rank sends 1 / size of its payload to every other, inside and between at once.

    Of n ranks, m on a machine: (m - 1) / n of the payload goes to fellows over the scale-up links, (n - m) / n over the
    rank's share of the NICs, and the slower of the two ends it. All messages are in flight at once (NCCL groups sends
    and receives), so a part costs one latency and its ramp sees the sum of its messages.

    Parameters
    ----------
    payload
        byte that one rank sends, its own share included.
    span
        How the group lies on the machines.
    cluster
        Its two levels of link.
    between
        byte that one rank sends to other machines, where tokens for several experts there travel once; each is then
        passed on inside the machine (None = (n - m) / n of the payload).
    """
    n, m = span.size, span.members
    if n <= 1 or payload <= 0:
        return NOTHING
    inside, outside = cluster.scale_up, cluster.scale_out
    near, far = payload * (m - 1) / n, payload * (n - m) / n
    if between is not None and span.machines > 1:
        near, far = payload * (m - 1) / m, min(between, far)
    seconds = inside.latency + step_seconds(near, inside.achieved, inside.half_bytes) if m > 1 else 0.0
    share = 0.0
    if span.machines > 1:
        nics = node_nics(cluster, m)
        wire = outside.latency + step_seconds(far, nics * outside.achieved / m, outside.half_bytes)
        share = nics / cluster.nics_per_machine * min(1.0, wire / max(wire, seconds))
        seconds = max(seconds, wire)
    sm = SM_SHARE_SCALE_UP if m > 1 else SM_SHARE_SCALE_OUT
    return Transfer(_base(cluster, span) + seconds, near + far, share, sm)


def message(payload: float, span: Span, cluster: Cluster) -> Transfer:
    """Cost of one point-to-point message of ``payload`` bytes between two ranks."""
    if payload <= 0:
        return NOTHING
    if span.machines == 1:
        link, bandwidth, share = cluster.scale_up, cluster.scale_up.achieved, 0.0
    else:
        nics = node_nics(cluster, 1)
        link, bandwidth, share = cluster.scale_out, nics * cluster.scale_out.achieved, nics / cluster.nics_per_machine
    seconds = link.base_latency + link.latency + step_seconds(payload, bandwidth, link.half_bytes)
    return Transfer(seconds, payload, share, 0.0)
