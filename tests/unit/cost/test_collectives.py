from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simtrain.cost import collectives
from simtrain.cost.collectives import collective, message, node_nics, step_seconds
from simtrain.program.lowered import PieceKind, Span
from simtrain.scenario.hardware import Cluster, Link
from simtrain.scenario.tables import load_tables
from tests.factories import A100

PLAIN = Link("plain", 100e9, 0.5, 1e-6, base_latency=5e-6)
NIC = Link("nic", 10e9, 1.0, 4e-6)
CLUSTER = Cluster(A100, 64, 8, PLAIN, NIC, 8)
INSIDE = Span(8, 1, 8)


def test_ring_all_reduce_equals_its_closed_form() -> None:
    cost = collective(PieceKind.ALL_REDUCE, 8e9, INSIDE, CLUSTER)
    assert cost.seconds == pytest.approx(5e-6 + 14 * (1e-6 + 1e9 / 50e9))
    assert cost.wire_bytes == pytest.approx(2 * 7 / 8 * 8e9)
    assert cost.network_share == 0.0


@pytest.mark.parametrize("kind", [PieceKind.ALL_GATHER, PieceKind.REDUCE_SCATTER])
def test_gather_and_scatter_are_half_an_all_reduce(kind: PieceKind) -> None:
    cost = collective(kind, 8e9, INSIDE, CLUSTER)
    assert cost.seconds == pytest.approx(5e-6 + 7 * (1e-6 + 1e9 / 50e9))
    assert cost.wire_bytes == pytest.approx(7e9)


def test_half_bytes_is_where_half_the_rate_is_reached() -> None:
    assert step_seconds(1e6, 1e9, 1e6) == pytest.approx(2e-3)
    assert step_seconds(1e6, 1e9, 0.0) == pytest.approx(1e-3)
    assert step_seconds(0.0, 1e9, 1e6) == 0.0


def test_a_lone_member_leaves_by_one_nic_and_eight_members_by_all() -> None:
    assert [node_nics(CLUSTER, members) for members in (1, 2, 8)] == [1, 2, 8]
    shared = replace(CLUSTER, nics_per_machine=4)
    assert [node_nics(shared, members) for members in (1, 2, 4, 8)] == [1, 1, 2, 4]


def test_across_machines_the_nics_bind_and_their_pool_is_shared() -> None:
    lone = collective(PieceKind.ALL_GATHER, 8e9, Span(8, 8, 1), CLUSTER)
    assert lone.seconds == pytest.approx(7 * 4e-6 + 7e9 / 10e9)
    assert lone.network_share == pytest.approx(1 / 8)
    whole = collective(PieceKind.ALL_GATHER, 64e9, Span(64, 8, 8), CLUSTER)
    assert whole.seconds == pytest.approx(56 * 1e-6 + 7 * 4e-6 + 63e9 / 50e9)  # the links inside: 50 of 80 GB/s
    assert whole.network_share == pytest.approx(50 / 80)


def test_a_small_all_reduce_over_many_machines_takes_the_tree() -> None:
    cost = collective(PieceKind.ALL_REDUCE, 4.0, Span(64, 64, 1), CLUSTER)
    assert cost.seconds == pytest.approx(2 * 6 * 4e-6, rel=1e-3)


def test_a_tree_moves_what_its_links_carry() -> None:
    """k machines are joined by k - 1 links a tree, up and down: 2 (k - 1) / k P through the NICs of each."""
    few = replace(CLUSTER, nics_per_machine=2)
    for machines, share in ((2, 1.0), (4, 1.5)):
        cost = collective(PieceKind.ALL_REDUCE, 8e9, Span(8 * machines, machines, 8), few)
        assert cost.seconds == pytest.approx(share * 8e9 / (2 * 10e9), rel=1e-3)


EFA = {
    # awsome-distributed-training, micro-benchmarks/nccl-tests/README.md, and ml-engineering, network/README.md:
    # machine, nodes, bytes of the all-reduce, seconds
    "p4de.24xlarge": (2, ((1048576, 309.4e-6), (67108864, 2644.6e-6), (268435456, 7201.7e-6), (2147483648, 51.406e-3))),
    "p5en.48xlarge": (16, ((17179869184, 92.173e-3),)),
    "p6-b200.48xlarge": (4, ((1048576, 378e-6), (16777216, 505e-6), (1073741824, 5.747e-3), (17179869184, 87.18e-3))),
}


@pytest.mark.parametrize("machine", EFA)
def test_all_reduces_between_few_efa_nodes_take_what_was_measured(machine: str) -> None:
    nodes, rows = EFA[machine]
    tables = load_tables()
    held = tables.machines[machine]
    cluster = replace(
        CLUSTER,
        devices=8 * nodes,
        scale_up=tables.networks.find(held.scale_up),
        scale_out=tables.networks.find(held.network),
        nics_per_machine=held.nics,
    )
    span = Span(8 * nodes, nodes, 8)
    errors = [collective(PieceKind.ALL_REDUCE, nbytes, span, cluster).seconds / took - 1 for nbytes, took in rows]
    assert max(map(abs, errors)) < 0.15, errors


def test_the_switch_reduces_for_five_ranks_and_more() -> None:
    cluster = replace(CLUSTER, scale_up=replace(PLAIN, nvls_efficiency=1.0))
    assert collective(PieceKind.ALL_REDUCE, 8e9, INSIDE, cluster).seconds == pytest.approx(19e-6 + 14e9 / 100e9)
    four = Span(4, 1, 4)
    by_switch, by_ring = (collective(PieceKind.ALL_REDUCE, 8e9, four, c).seconds for c in (cluster, CLUSTER))
    assert by_switch == by_ring
    gathers = [collective(PieceKind.ALL_GATHER, 8e9, INSIDE, c).seconds for c in (cluster, CLUSTER)]
    assert gathers[0] == gathers[1]


def test_messages_inside_and_between_machines() -> None:
    assert message(50e9, Span(2, 1, 2), CLUSTER).seconds == pytest.approx(6e-6 + 1.0)
    between = message(10e9, Span(2, 2, 1), CLUSTER)
    assert between.seconds == pytest.approx(4e-6 + 1.0)
    assert between.network_share == pytest.approx(1 / 8)


def test_nothing_to_send_costs_nothing() -> None:
    assert collective(PieceKind.ALL_REDUCE, 1e9, Span(1, 1, 1), CLUSTER) == collectives.NOTHING
    assert message(0.0, Span(2, 1, 2), CLUSTER) == collectives.NOTHING


@given(
    payload=st.floats(1.0, 1e12),
    n=st.integers(2, 8),
    machines=st.integers(1, 8),
    kind=st.sampled_from([PieceKind.ALL_REDUCE, PieceKind.ALL_GATHER, PieceKind.REDUCE_SCATTER]),
)
def test_a_faster_or_nearer_link_is_never_slower(payload: float, n: int, machines: int, kind: PieceKind) -> None:
    span = Span(n * machines, machines, n)
    slow = collective(kind, payload, span, CLUSTER).seconds
    for changes in ({"bandwidth": 2.0}, {"latency": 0.5}):
        links: dict[str, Any] = {}
        for level in ("scale_up", "scale_out"):
            link = getattr(CLUSTER, level)
            links[level] = replace(link, **{key: getattr(link, key) * by for key, by in changes.items()})
        assert collective(kind, payload, span, replace(CLUSTER, **links)).seconds <= slow


@pytest.mark.parametrize(("nbytes", "busbw"), [(33.6e6, 160.0e9), (268e6, 215.2e9)], ids=["34 MB", "268 MB"])
def test_all_reduce_of_eight_a100_is_near_the_measured_bus_bandwidth(nbytes: float, busbw: float) -> None:
    tables = load_tables()
    cluster = replace(CLUSTER, scale_up=tables.networks.find("nvlink3"))
    predicted = 2 * 7 / 8 * nbytes / collective(PieceKind.ALL_REDUCE, nbytes, INSIDE, cluster).seconds
    assert predicted == pytest.approx(busbw, rel=0.15)


def test_the_table_of_collective_constants_is_what_the_code_uses() -> None:
    from simtrain.scenario import yamltext
    from simtrain.scenario.tables import shipped

    row = yamltext.read(shipped("hardware_specs/collectives.yaml")).data
    share = {key: float(row["sm_share"][key]["value"].split()[0]) / 100 for key in ("scale_up", "scale_out")}
    assert share == {"scale_up": collectives.SM_SHARE_SCALE_UP, "scale_out": collectives.SM_SHARE_SCALE_OUT}
    assert int(row["nvls"]["from"]["value"].split()[0]) == collectives.NVLS_FROM
