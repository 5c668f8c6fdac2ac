from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simtrain.errors import InputError
from simtrain.scenario import files, slices
from simtrain.scenario.hardware import Cluster
from simtrain.scenario.paths import data_dir
from simtrain.scenario.tables import load_tables


def cluster(**keys: Any) -> Cluster:
    text = {"cluster": keys, "model": "bert-base", "training": {"micro_batch": 1}}
    return files.from_mapping(text).cluster


def test_a_machine_says_everything() -> None:
    found = cluster(machine="DGX-H100", nodes=3)
    row = load_tables().machines["DGX-H100"]
    assert (found.accelerator.name, found.devices, found.devices_per_machine) == ("H100-SXM5-80GB", 24, 8)
    assert (found.scale_up.name, found.network_name, found.nics_per_machine) == (row.scale_up, row.network, row.nics)
    assert found.network_is_default
    assert found.machine == row


def test_without_a_machine_the_first_row_of_the_accelerator_gives_the_network() -> None:
    found = cluster(accelerator="A100-SXM4-80GB", devices=20)
    assert (found.devices_per_machine, found.machines, found.machine) == (8, 3, None)
    first = next(m for m in load_tables().machines.values() if m.accelerator == "A100-SXM4-80GB")
    assert (found.network_name, found.nics_per_machine) == (first.network, first.nics)


def test_half_a_machine_has_half_of_its_nics_and_can_say_otherwise() -> None:
    assert cluster(accelerator="H100-SXM5-80GB", devices=8, devices_per_machine=4).nics_per_machine == 4
    assert cluster(accelerator="H100-SXM5-80GB", devices=8, nics_per_machine=2).nics_per_machine == 2


def test_one_machine_needs_no_network_to_others() -> None:
    """No machine row has an RTX-3090, so that no usual network is known."""
    alone = cluster(accelerator="RTX-3090", devices=8)
    assert (alone.machines, alone.network_name, alone.scale_out) == (1, "none", alone.scale_up)
    with pytest.raises(InputError, match=r"cluster\.network: missing: no usual network of RTX-3090 is known"):
        cluster(accelerator="RTX-3090", devices=9)


def test_nvlink_joins_no_more_devices_than_it_can() -> None:
    said = r"cluster\.devices_per_machine: nvswitch_gen3 joins at most 8 devices, not 64"
    with pytest.raises(InputError, match=said):
        cluster(accelerator="H100-SXM5-80GB", devices=64, devices_per_machine=64)
    assert cluster(accelerator="H100-SXM5-80GB", devices=8, devices_per_machine=64).devices == 8


def test_a_row_of_which_nothing_is_measured(tmp_path: Path) -> None:
    row = (data_dir("hardware_specs") / "accelerators.yaml").read_text(encoding="utf-8")
    t4 = row[row.index("\nT4:") :].split("\n\n")[0].replace("T4:", "mine:")
    sources = row[row.index("sources:") :].split("\n\n")[0]
    (tmp_path / "accelerators.yaml").write_text(f"{sources}\n{t4.lstrip()}\n", encoding="utf-8")
    text = {"cluster": {"accelerator": "mine", "devices": 1}, "model": "bert-base", "training": {"micro_batch": 1}}
    with pytest.raises(
        InputError, match=r"cluster\.accelerator: nothing is measured of mine: .*efficiencies/mine\.yaml"
    ):
        files.from_mapping(text, specs=(tmp_path,))
    (tmp_path / "efficiencies").mkdir()
    (tmp_path / "efficiencies" / "mine.yaml").write_text("same_as: T4\n")
    assert files.from_mapping(text, specs=(tmp_path,)).cluster.accelerator.name == "mine"


def test_a_named_network_is_no_default() -> None:
    found = cluster(machine="DGX-A100", nodes=1, network="eth_100")
    assert (found.network_name, found.network_is_default) == ("eth_100", False)


def test_aliases_mean_their_row() -> None:
    found = cluster(accelerator="a100-sxm4-80gb", devices=8, network="hdr")
    assert (found.accelerator.name, found.network_name) == ("A100-SXM4-80GB", "ib_hdr")
    with pytest.raises(InputError, match="'nvlink4' joins devices inside a machine, not machines"):
        cluster(machine="DGX-H100", nodes=2, network="nvlink4")


def test_a_link_inside_the_machine_may_change() -> None:
    found = cluster(machine="DGX-A100", nodes=1, scale_up={"bandwidth": "150 GB/s"})
    assert found.scale_up.bandwidth == 150e9
    assert cluster(machine="DGX-A100", nodes=1, scale_up="nvswitch_gen3").scale_up.name == "nvswitch_gen3"


def test_hosts_of_a_tpu_slice_reach_each_other_over_ici() -> None:
    found = cluster(slice="v5litepod-64")
    assert (found.accelerator.name, found.devices) == ("TPU-v5e", 64)
    assert found.scale_out == found.scale_up
    assert found.nics_per_machine == found.devices_per_machine < 64
    faster = cluster(slice="v5litepod-64", network={"bandwidth": "500 GB/s"})
    assert (faster.network_name, faster.nics_per_machine) == ("ici_v5e (changed)", found.nics_per_machine)


def test_every_accelerator_row_makes_a_cluster() -> None:
    """No row of the shipped tables lacks what a cluster needs, or says which key it wants."""
    for name in load_tables().accelerators:
        try:
            found = cluster(accelerator=name, devices=8)
        except InputError as error:
            assert "cluster.network: missing: no usual network of" in str(error)  # noqa: PT017
            found = cluster(accelerator=name, devices=8, network="eth_100")
        assert found.scale_out.achieved > 0
        assert found.scale_up.achieved > 0


def test_every_machine_row_makes_a_cluster() -> None:
    for name, row in load_tables().machines.items():
        assert cluster(machine=name, nodes=2).devices == 2 * row.devices


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("v2-8", ("TPU-v2", 4)),
        ("v3-32", ("TPU-v3", 16)),
        ("v4-8", ("TPU-v4", 4)),
        ("v5litepod-8", ("TPU-v5e", 8)),
        ("v5p-8", ("TPU-v5p", 4)),
        ("v6e-8", ("TPU-v6e", 8)),
    ],
)
def test_slice_names_count_cores_or_chips(name: str, meant: tuple[str, int]) -> None:
    assert slices.parse(name) == meant
    assert meant[0] in load_tables().accelerators


@pytest.mark.parametrize("name", ["v4", "v4-0", "v4-7", "v9-8", "v4-8-8", "v4-99999999", "4x4", "V4-8", ""])
def test_what_is_no_slice(name: str) -> None:
    with pytest.raises(ValueError, match=r"slice name|no whole number of chips"):
        slices.parse(name)
