"""The shipped tables: units and sources, the traps of common spec tables, references; and users' rows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import sqrt
from pathlib import Path
from typing import Any

import pytest

from simtrain.errors import InputError
from simtrain.scenario import paths, yamltext
from simtrain.scenario.hardware import AttentionPoint, GemmPoint, Link, Precision
from simtrain.scenario.paths import data_dir
from simtrain.scenario.tables import Kind, load_tables

SPECS = data_dir("hardware_specs")
OWN = [
    *(f"{kind}.yaml" for kind in ("accelerators", "networks", "machines", "storage", "prices")),
    *(f"efficiencies/{path.name}" for path in sorted((SPECS / "efficiencies").glob("*.yaml"))),
]
QUANTITY = re.compile(r"[0-9.]+ ?(\S.*)")
BARE = {"year", "head_dim"}
"""Keys whose numbers need no unit."""
T = load_tables()


def test_the_rows_that_the_project_promises() -> None:
    wanted = """
        T4 L4 L40S A10G V100-SXM2-16GB V100-SXM2-32GB A100-PCIE-40GB A100-PCIE-80GB A100-SXM4-40GB A100-SXM4-80GB
        H100-SXM5-80GB H100-PCIe-80GB H200-SXM-141GB H800-SXM-80GB B200-SXM-180GB GB200 MI250X MI300X RTX-3090 RTX-4090
        TPU-v2 TPU-v3 TPU-v4 TPU-v5e TPU-v5p TPU-v6e TPU-v7x"""
    assert set(wanted.split()) <= set(T.accelerators)
    networks = """
        pcie_gen3_x16 pcie_gen4_x16 pcie_gen5_x16 nvlink_cube_mesh_v100 nvswitch_gen1 nvswitch_gen2 nvswitch_gen3
        nvswitch_gen4 nvl72 xgmi_mi250x xgmi_mi300x ici_v2 ici_v3 ici_v4 ici_v5e ici_v5p ici_v6e ici_v7x
        ib_edr ib_hdr ib_ndr roce_100 roce_200 roce_400 efa_v1 efa_v2 efa_v3 efa_v4
        gcp_tcpx gcp_tcpxo gcp_rdma eth_10 eth_25 eth_100
        omni_path_100 dcn_v4 dcn_v5e dcn_v5p dcn_v6e"""
    assert set(networks.split()) <= set(T.networks)


def _cells(data: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every cell of a file: a mapping with a value or with points. Anything else that is a number is an error."""
    if isinstance(data, dict) and ("value" in data or "points" in data):
        yield path, data
    elif isinstance(data, dict):
        for key, inner in data.items():
            if key not in BARE:
                yield from _cells(inner, f"{path}.{key}")
    elif isinstance(data, list):
        for index, inner in enumerate(data):
            yield from _cells(inner, f"{path}[{index}]")
    else:
        assert isinstance(data, str), f"{path}: a bare value {data!r}"


@pytest.mark.parametrize("file", OWN)
def test_every_number_has_unit_and_source(file: str) -> None:
    data = yamltext.read(SPECS / file).data
    sources = data.pop("sources", {})
    constants = data.pop("constants", None) or {}
    found = list(_cells(data))
    for path, cell in found:
        text = f"1 {cell['unit']}" if "points" in cell else cell["value"]
        assert QUANTITY.fullmatch(str(text)), f"{file}{path}: {text!r} has no unit"
        assert set(cell["src"]), f"{file}{path} has no source"
        assert cell.get("unverified") or set(cell["src"]) - {"mem"}, f"{file}{path}: from memory, not marked unverified"
    assert found or constants or "same_as" in data
    for name, source in sources.items():
        assert set(source) <= {"title", "commit", "date", "kind"}, name
        assert len(source["title"]) > 10, name
    used = {key for cell in (*(cell for _, cell in found), *constants.values()) for key in cell["src"]}
    assert set(sources) == used, "a source unknown, or used by nothing"


@pytest.mark.parametrize("kind", list(Kind))
def test_every_row_becomes_a_record_and_prints(kind: Kind) -> None:
    rows = getattr(T, kind)
    assert len(rows) > 0
    for name in rows:
        assert rows[name] is not None
        assert T.raw(kind, name)


PEAKS = [
    ("H100-SXM5-80GB", Precision.BF16, 989e12),
    ("H100-SXM5-80GB", Precision.FP8, 1979e12),
    ("A100-SXM4-80GB", Precision.BF16, 312e12),
    ("L4", Precision.FP8, 242e12),
    ("A10G", Precision.FP16, 70e12),
    ("MI250X", Precision.BF16, 191.5e12),
    ("TPU-v3", Precision.BF16, 123e12),
    ("TPU-v4", Precision.BF16, 275e12),
    ("RTX-4090", Precision.BF16, 165.2e12),
    ("B200-SXM-180GB", Precision.BF16, 2250e12),
]


@pytest.mark.parametrize(("name", "precision", "peak"), PEAKS)
def test_peaks_are_dense_and_of_one_device(name: str, precision: Precision, peak: float) -> None:
    assert T.accelerators[name].matrix_peak[precision] == pytest.approx(peak)


def test_precisions_that_matrix_units_lack_are_absent() -> None:
    for name in ("T4", "V100-SXM2-16GB", "V100-SXM2-32GB"):
        assert set(T.accelerators[name].matrix_peak) == {Precision.FP16}
    for name, row in T.accelerators.items():
        assert (Precision.FP8 in row.matrix_peak) == (
            name[:4] in ("L4", "L40S", "H100", "H200", "H800", "B200", "GB20", "RTX-", "MI30", "TPU-")
            and name not in ("RTX-3090", "TPU-v2", "TPU-v3", "TPU-v4", "TPU-v5e")
        ), name


LINKS = [
    ("nvswitch_gen2", 300),
    ("nvswitch_gen3", 450),
    ("nvswitch_gen3_h800", 200),
    ("nvswitch_gen4", 900),
    ("nvl72", 900),
    ("nvswitch_gen1", 150),
    ("nvlink_cube_mesh_v100", 150),
    ("xgmi_mi300x", 448),
    ("pcie_gen3_x16", 15.75),
    ("pcie_gen4_x16", 31.5),
    ("pcie_gen5_x16", 63),
    ("ici_v4", 300),
    ("ici_v5e", 200),
    ("ici_v5p", 600),
    ("ici_v6e", 400),
    ("ib_edr", 12.5),
    ("ib_hdr", 25),
    ("ib_ndr", 50),
]


@pytest.mark.parametrize(("name", "gigabytes"), LINKS)
def test_links_are_one_direction(name: str, gigabytes: float) -> None:
    """Common tables print both directions together: A100 NVLink 600, H100 900, T4 PCIe 32, L4 64, v5e ICI 400."""
    assert T.networks[name].bandwidth == pytest.approx(gigabytes * 1e9)


def test_host_links_are_one_direction_and_agree_with_the_pcie_rows() -> None:
    assert T.accelerators["T4"].host_bandwidth == T.networks["pcie_gen3_x16"].bandwidth == pytest.approx(15.75e9)
    assert T.accelerators["L4"].host_bandwidth == T.networks["pcie_gen4_x16"].bandwidth == pytest.approx(31.5e9)
    assert T.accelerators["H100"].host_bandwidth == T.networks["pcie_gen5_x16"].bandwidth == pytest.approx(63e9)


def test_memory_is_of_one_device() -> None:
    expected = {"TPU-v4": 32, "TPU-v5e": 16, "TPU-v5p": 95, "MI250X": 64, "V100-SXM2-32GB": 32, "A100-SXM4-80GB": 80}
    assert {name: T.accelerators[name].memory_bytes / 2**30 for name in expected} == pytest.approx(expected)
    speeds = {"A100-SXM4-40GB": 1555, "A100-SXM4-80GB": 2039, "A100-PCIE-80GB": 1935, "MI250X": 1638.4, "H200": 4800}
    assert {name: T.accelerators[name].memory_bandwidth / 1e9 for name in speeds} == pytest.approx(speeds)


def test_tpu_peak_is_matrix_units_times_array_times_a_possible_clock() -> None:
    """Up to v5p; for v6e and v7x the published peak is more than the arrays give at any plausible clock."""
    for name in ("TPU-v2", "TPU-v3", "TPU-v4", "TPU-v5e", "TPU-v5p"):
        row = T.accelerators[name]
        clock = row.matrix_peak[Precision.BF16] / (2 * row.units * row.array_dim**2)
        assert 0.69e9 < clock < 1.8e9, name


def test_machines_fit_their_accelerators() -> None:
    for machine in T.machines.values():
        device, inside = T.accelerators[machine.accelerator], T.networks[machine.scale_up]
        assert machine.scale_up == device.scale_up, machine.name
        assert machine.devices <= inside.domain, machine.name
        assert T.networks[machine.network].domain == 0, f"{machine.name}: {machine.network} does not join machines"
        assert 1 <= machine.nics <= 72, machine.name
        assert machine.cores >= 2, machine.name
        assert machine.ram_bytes >= 10e9, machine.name


def test_the_first_machine_of_an_accelerator_is_a_usual_one() -> None:
    first: dict[str, str] = {}
    for machine in T.machines.values():
        first.setdefault(machine.accelerator, machine.name)
    assert {first[name] for name in ("A100-SXM4-80GB", "H100-SXM5-80GB", "H200-SXM-141GB", "B200-SXM-180GB")} == {
        "DGX-A100",
        "DGX-H100",
        "DGX-H200",
        "DGX-B200",
    }
    assert all(T.machines[name].devices >= 4 for name in first.values())


def test_prices_have_region_and_date_and_count_the_whole_machine() -> None:
    for name, offers in T.prices.items():
        assert name in T.machines
        assert all(offer.region and offer.date and offer.usd_per_hour > 0 for offer in offers)
    assert T.machines["p5.48xlarge"].usd_per_hour == pytest.approx(55.04)
    assert T.machines["p5.48xlarge"].price_note == "on_demand, us-east-1, 2026-07-20"
    assert T.machines["ct5lp-hightpu-8t"].usd_per_hour == pytest.approx(8 * 1.2)
    assert T.machines["DGX-A100"].usd_per_hour is None


def test_nothing_was_measured_above_its_peak() -> None:
    for name, device in T.accelerators.items():
        for point in device.efficiency.gemm:
            assert 0 < point.rate <= device.matrix_peak[point.precision], (name, point)
        for one in device.efficiency.attention:
            assert 0 < one.rate <= device.matrix_peak[Precision.FP16], (name, one)
        assert 0.6 < device.efficiency.constants.get("hbm_copy", 0.8) < 1


def test_efficiencies_are_points_with_their_shapes() -> None:
    figures = T.accelerators["A100-SXM4-80GB"].efficiency
    assert GemmPoint(8192, 65536, 8192, Precision.BF16, 295e12) in figures.gemm
    wanted = AttentionPoint("flash2", "forward_backward", head_dim=128, seq_len=2048, causal=True, rate=155e12)
    assert wanted in figures.attention
    assert T.accelerators["A100-SXM4-40GB"].efficiency == figures
    pcie, sxm = (T.accelerators[name].efficiency.gemm[0].rate for name in ("H100-PCIe-80GB", "H100-SXM5-80GB"))
    assert pcie == pytest.approx(sxm * 756 / 989)


def _bus(link: Link, ranks: int, size: float) -> float:
    """Bus bandwidth of a ring all-reduce by the law at the head of networks.yaml."""
    steps, piece = 2 * (ranks - 1), size / ranks
    seconds = link.base_latency + steps * (link.latency + (piece + sqrt(link.half_bytes * piece)) / link.achieved)
    return size * 2 * (ranks - 1) / ranks / seconds


NCCL_TESTS = [
    ("nvswitch_gen2", 8, {2**21: 68.3, 2**24: 106.16, 2**26: 171.54, 2**28: 194.07, 2**30: 229.04, 2**34: 234.89}),
    ("nvswitch_gen3", 4, {2**17: 17.1, 2**21: 114.3, 2**25: 291.2, 2**28: 340.5}),
    ("xgmi_mi300x", 8, {2**16: 8.05, 2**20: 64.64, 2**22: 138.6, 2**26: 271.51, 2**28: 304.96, 2**30: 313.66}),
    ("nvlink_cube_mesh_v100", 8, {2**16: 2.17, 2**20: 20.56, 2**24: 90.59, 2**25: 106.62, 2**27: 129.14, 2**30: 135.5}),
]


@pytest.mark.parametrize(("name", "ranks", "measured"), NCCL_TESTS)
def test_links_reproduce_microbenchmarks(name: str, ranks: int, measured: dict[int, float]) -> None:
    errors = [_bus(T.networks[name], ranks, size) / (rate * 1e9) - 1 for size, rate in measured.items()]
    assert sum(map(abs, errors)) / len(errors) < 0.10
    assert max(map(abs, errors)) < 0.25


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("h100", "H100-SXM5-80GB"),
        ("a100-80gb", "A100-SXM4-80GB"),
        ("A100-pcie-80GB", "A100-PCIE-80GB"),
        ("tpu v5e", "TPU-v5e"),
        ("v5litepod", "TPU-v5e"),
        ("v100-sxm2-16gb", "V100-SXM2-16GB"),
        ("T4", "T4"),
    ],
)
def test_aliases(said: str, meant: str) -> None:
    assert said in T.accelerators
    assert T.accelerators[said].name == T.accelerators.find(said).name == meant


def test_no_alias_means_two_rows() -> None:
    for kind in Kind:
        rows = getattr(T, kind)
        assert [names for names in rows._names.values() if len(names) > 1] == []


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("a100", ["which of A100-PCIE-40GB, A100-SXM4-40GB, A100-PCIE-80GB, A100-SXM4-80GB?"]),
        ("H100-SXM5-80GP", ["did you mean 'H100-SXM5-80GB'?", "known: T4, L4, "]),
        ("", ["known: "]),
    ],
)
def test_unknown_names(said: str, words: list[str]) -> None:
    assert said not in T.accelerators
    with pytest.raises(InputError) as caught:
        T.accelerators.find(said)
    assert [word for word in words if word not in str(caught.value)] == []


def test_raw_rows_name_their_sources() -> None:
    row = T.raw("accelerators", "h100")
    assert row["bf16"]["value"] == "989 TFLOP/s"
    assert row["bf16"]["source"][0].startswith("stas00/ml-engineering, compute/accelerator/README.md")
    assert "sparsity" in row["bf16"]["note"]
    assert T.raw("networks", "nvswitch_gen2")["achieved.copy"]["value"] == "274 GB/s"
    assert T.raw("accelerators", "H800")["vector_peak"]["note"] == "unverified"
    assert T.raw("efficiencies", "L40S")["gemm.0"]["value"].endswith("8192x8192x8192: 271.8 TFLOP/s")


def test_data_lies_in_the_wheel_or_beside_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "simtrain"
    (tmp_path / "scenarios").mkdir()
    package.mkdir()
    monkeypatch.setattr(paths, "_PACKAGE", package)
    assert data_dir("scenarios") == tmp_path / "scenarios"
    (package / "_data" / "scenarios").mkdir(parents=True)
    assert data_dir("scenarios") == package / "_data" / "scenarios"
    with pytest.raises(Exception, match="lacks its folder hardware_specs/"):
        data_dir("hardware_specs")
