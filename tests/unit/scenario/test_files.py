from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from simtrain.errors import InputError
from simtrain.scenario import files, shipped, yamltext
from simtrain.scenario.hardware import Precision
from simtrain.scenario.scenario import Attention, Recompute, Scenario, Zero
from tests.unit.scenario.examples import GOOD, spoiled, write


def load(tmp_path: Path, text: str = GOOD, *overrides: str) -> Scenario:
    return files.load(write(tmp_path, text), overrides=overrides)


def test_a_file_becomes_records(tmp_path: Path) -> None:
    scenario = load(tmp_path)
    cluster, model, training, parallelism = scenario.cluster, scenario.model, scenario.training, scenario.parallelism
    assert (scenario.name, scenario.seed, scenario.stages, scenario.microbatches) == ("small", 0, 2, 8)
    assert (cluster.devices, cluster.devices_per_machine, cluster.machines, cluster.nics_per_machine) == (32, 8, 4, 8)
    assert (cluster.network_name, cluster.network_is_default) == ("ib_hdr", False)
    assert (model.kv_heads, model.head_dim, model.ffn_hidden, model.max_positions) == (16, 128, 8192, 2048)
    assert (model.bias, model.rms_norm, model.tied_embeddings, model.dropout) == (True, False, True, True)
    assert (training.precision, training.recompute, training.attention) == (
        Precision.BF16, Recompute.NONE, Attention.CUDNN
    )  # fmt: skip
    assert (parallelism.layout.dp, parallelism.zero, parallelism.schedule) == (4, Zero.NONE, "1f1b")
    assert parallelism.sequence_parallel
    assert parallelism.stage_layers == (12, 12)


def test_defaults_are_listed_and_given_keys_are_not(tmp_path: Path) -> None:
    defaults = load(tmp_path).defaults
    assert {"seed", "stack", "training.optimizer", "parallelism.zero", "model.kv_heads"} <= set(defaults)
    assert not {"parallelism.tp", "training.precision", "cluster.network", "model.layers"} & set(defaults)
    assert "cluster.network" in load(tmp_path, spoiled(network="")).defaults


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        (spoiled(dp="  dp: auto"), (4, 2, 4)),
        (spoiled(dp=""), (4, 2, 4)),
        (spoiled(nodes=""), (4, 2, 4)),
        (spoiled(nodes="  devices: 16", dp=""), (4, 2, 2)),
    ],
    ids=["auto", "left out", "devices follow", "dp follows"],
)
def test_auto_layout(tmp_path: Path, text: str, layout: tuple[int, int, int]) -> None:
    found = load(tmp_path, text).parallelism.layout
    assert (found.tp, found.pp, found.dp) == layout


@pytest.mark.parametrize(
    ("lines", "batch"),
    [
        ("global_batch: 64\n  micro_batch: auto", (64, 1, 16)),
        ("global_batch: 64\n  accumulation: 4", (64, 4, 4)),
        ("micro_batch: 2\n  accumulation: 3", (24, 2, 3)),
        ("micro_batch: 2", (8, 2, 1)),
    ],
)
def test_batch_identity(tmp_path: Path, lines: str, batch: tuple[int, int, int]) -> None:
    scenario = load(tmp_path, spoiled(global_batch="", micro_batch=f"  {lines}"))
    assert (scenario.training.global_batch, scenario.training.micro_batch, scenario.microbatches) == batch


@pytest.mark.parametrize(
    ("said", "mode", "layers"),
    [
        ("full", Recompute.FULL, 0),
        ("selective", Recompute.SELECTIVE, 0),
        ("{blocks: 3}", Recompute.BLOCKS, 3),
        ("{every: 4}", Recompute.EVERY, 4),
        ("{every: sqrt}", Recompute.EVERY, 3),
    ],
)
def test_recompute_forms(tmp_path: Path, said: str, mode: Recompute, layers: int) -> None:
    """The square root is that of the 12 blocks of a stage: sqrt(12) = 3.46."""
    training = load(tmp_path, GOOD, f"training.recompute={said}").training
    assert (training.recompute, training.recompute_layers) == (mode, layers)


def test_attention_falls_back_where_the_default_kernel_cannot_run(tmp_path: Path) -> None:
    text = spoiled(machine="  accelerator: T4", network="", precision="")
    scenario = load(tmp_path, text, "parallelism.tp=4")
    assert scenario.training.attention is Attention.UNFUSED
    assert scenario.training.precision is Precision.FP16


def test_fsdp_stacks_shard_by_default(tmp_path: Path) -> None:
    scenario = load(tmp_path, GOOD + "stack: torchtitan-2024\n")
    assert scenario.parallelism.zero is Zero.PARAMETERS
    assert scenario.training.sync_every_microbatch
    assert not scenario.parallelism.reshard_after_forward, (
        "with a pipeline, parameters stay gathered between microbatches"
    )


def test_sequence_parallelism_needs_tensor_ranks(tmp_path: Path) -> None:
    text = spoiled(tp="  tp: 1\n  sequence_parallel: true", dp="")
    assert not load(tmp_path, text).parallelism.sequence_parallel


# ---- extends ----


def test_extends_adds_to_another_file(tmp_path: Path) -> None:
    write(tmp_path, GOOD + "measured: {step_time: 1 s}\n", "base.yaml")
    child = write(tmp_path, "extends: base.yaml\ntraining: {micro_batch: 1}\nmodel: {layers: 12}\n", "child.yaml")
    scenario = files.load(child)
    assert (scenario.name, scenario.training.micro_batch, scenario.model.layers, scenario.model.hidden) == (
        "child",
        1,
        12,
        2048,
    )
    assert scenario.measured == {}, "the result of another run is none of this one's"


def test_extends_replaces_alternatives(tmp_path: Path) -> None:
    write(tmp_path, spoiled(dp="  dp: auto"), "base.yaml")
    cluster = "cluster: {devices: 16, network: {bandwidth: 100 GB/s}}"
    text = f"extends: base.yaml\n{cluster}\nmodel: gpt2-xl\ntraining: {{seq_len: 1024}}\n"
    scenario = files.load(write(tmp_path, text, "child.yaml"), overrides=("parallelism.tp=1",))
    assert (scenario.cluster.devices, scenario.model.name) == (16, "gpt2-xl")
    assert (scenario.cluster.network_name, scenario.cluster.scale_out.bandwidth) == ("ib_hdr (changed)", 1e11)


def test_an_error_in_the_extended_file_names_that_file(tmp_path: Path) -> None:
    write(tmp_path, spoiled(tp="  tp: 3"), "base.yaml")
    with pytest.raises(InputError, match=r"base\.yaml:18:3: parallelism\.tp: "):
        files.load(write(tmp_path, "extends: base.yaml\n", "child.yaml"))


def test_extends_a_shipped_scenario(tmp_path: Path) -> None:
    child = write(tmp_path, "extends: llm/gpt3-175b-1024xa100\ntraining: {global_batch: 768}\n")
    assert files.load(child).microbatches == 48


def test_extends_in_a_circle(tmp_path: Path) -> None:
    write(tmp_path, "name: a\nextends: b.yaml\n", "a.yaml")
    write(tmp_path, "extends: a.yaml\n", "b.yaml")
    with pytest.raises(
        InputError, match=r"b\.yaml:1:1: extends: goes round in a circle: a\.yaml -> b\.yaml -> a\.yaml"
    ):
        files.load(tmp_path / "a.yaml")
    write(tmp_path, "extends: self.yaml\n", "self.yaml")
    with pytest.raises(InputError, match=r"self\.yaml:1:1: extends: goes round in a circle"):
        files.load(tmp_path / "self.yaml")


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("none.yaml", "'none.yaml': no such file"),
        ("[a]", "must be a file name, not a list"),
        ("''", "must be a file name"),
    ],
)
def test_extends_nothing(tmp_path: Path, said: str, why: str) -> None:
    with pytest.raises(InputError) as caught:
        files.load(write(tmp_path, f"name: x\nextends: {said}\n"))
    assert f"small.yaml:2:1: extends: {why}" in str(caught.value)


# ---- overrides ----


def test_overrides_win(tmp_path: Path) -> None:
    scenario = load(tmp_path, GOOD, "training.micro_batch=4", "cluster.devices=16", "parallelism.dp=auto", "seed=7")
    assert (scenario.training.micro_batch, scenario.cluster.devices, scenario.seed) == (4, 16, 7)
    assert load(tmp_path, GOOD, "training.micro_batch=4", "training.micro_batch=1").training.micro_batch == 1


def test_override_of_a_part_of_a_network(tmp_path: Path) -> None:
    cluster = load(tmp_path, GOOD, "cluster.network.latency=9 us").cluster
    assert (cluster.scale_out.latency, cluster.scale_out.bandwidth) == (9e-6, 25e9)


def test_override_of_a_preset_s_size(tmp_path: Path) -> None:
    text = "model: llama3-8b\ncluster: {machine: DGX-H100, nodes: 1}\ntraining: {micro_batch: 1}\n"
    model = load(tmp_path, text, "model.layers=4").model
    assert (model.name, model.layers, model.hidden) == ("llama3-8b (changed)", 4, 4096)


def test_errors_name_the_override(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        load(
            tmp_path,
            GOOD,
            "training.micro_batch=x",
            "parallelism.tpp=2",
            "parallelism.stage_layers=[1, b]",
            "nothing.at=all",
        )
    assert str(caught.value).splitlines() == [
        "-o nothing.at=all: nothing: unknown key (choose from name, extends, stack, seed, cluster, model, training,"
        " parallelism, input, job, measured, defaults)",
        "-o parallelism.stage_layers=[1, b]: parallelism.stage_layers.1: must be a whole number, not 'b'",
        "-o parallelism.tpp=2: parallelism.tpp: unknown key (did you mean 'tp'?)",
        "-o training.micro_batch=x: training.micro_batch: must be a whole number, not 'x'",
    ]


@pytest.mark.parametrize(
    "text", ["training", "=3", "a..b=3", "training.micro_batch=[1", "a=*x", "extends=x.yaml", "a=!!x 1"]
)
def test_what_is_no_override(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match=r"^-o "):
        load(tmp_path, GOOD, text)


def test_an_override_that_changes_the_run_drops_its_measurement(tmp_path: Path) -> None:
    text = GOOD + "measured: {step_time: 2 s, source: us}\n"
    assert load(tmp_path, text).measured == {"step_time": 2.0, "source": "us"}
    assert load(tmp_path, text, "seed=3").measured
    assert load(tmp_path, text, "training.micro_batch=1").measured == {}


# ---- rows of one's own ----


def row(name: str, bandwidth: str) -> str:
    cells = "efficiency: {value: 90 %, src: [us]}\n  latency: {value: 2 us, src: [us]}"
    return f"sources: {{us: {{title: here}}}}\n{name}:\n  bandwidth: {{value: {bandwidth}, src: [us]}}\n  {cells}\n"


def test_rows_beside_the_file_and_in_a_folder(tmp_path: Path) -> None:
    beside, other = tmp_path / "hardware_specs", tmp_path / "other"
    beside.mkdir()
    other.mkdir()
    (beside / "networks.yaml").write_text(row("homemade", "1 GB/s"))
    path = write(tmp_path, spoiled(network="  network: homemade"))
    assert files.load(path).cluster.scale_out.bandwidth == 1e9
    (other / "networks.yaml").write_text(row("homemade", "2 GB/s"))
    assert files.load(path, specs=(other,)).cluster.scale_out.bandwidth == 2e9, "--specs wins over the folder beside"


# ---- mappings, resolved files, schema ----


def test_resolved_files_and_documents_give_the_same_scenario(tmp_path: Path) -> None:
    extra = (
        "cluster.network={row: ib_hdr, bandwidth: 33 GB/s, latency: 3 us, efficiency: 0.5}",
        "training.recompute={every: sqrt}",
        "cluster.jitter.sigma=0.02",
        "measured={step_time: 1.1 s, peak_memory: 71 GiB}",
    )
    for overrides in ((), extra):
        scenario = load(tmp_path, GOOD, *overrides)
        again = files.load(write(tmp_path, files.resolved_yaml(scenario), "resolved.yaml"))
        assert again == scenario
        assert again.defaults == scenario.defaults
        assert files.from_mapping(scenario.document) == scenario
        assert files.resolved_yaml(again) == files.resolved_yaml(scenario)


def test_a_resolved_file_remembers_what_nobody_chose(tmp_path: Path) -> None:
    scenario = load(tmp_path)
    path = write(tmp_path, files.resolved_yaml(scenario), "resolved.yaml")
    assert {"training.optimizer", "model.kv_heads", "seed"} <= set(scenario.defaults)
    changed = files.load(path, overrides=("training.optimizer=sgd", "model.kv_heads=4")).defaults
    assert set(scenario.defaults) - set(changed) == {"training.optimizer", "model.kv_heads"}
    child = write(
        tmp_path, "extends: resolved.yaml\nmodel: {preset: gpt2-small, layers: 24, heads: 16, head_dim: 48}\n", "c.yaml"
    )
    chosen = set(scenario.defaults) - set(files.load(child, overrides=("training.seq_len=1024",)).defaults)
    assert chosen == {key for key in scenario.defaults if key.startswith("model.")}


@pytest.mark.parametrize("name", sorted(shipped.scenarios()))
def test_shipped_scenarios_load_and_reload(tmp_path: Path, name: str) -> None:
    scenario = files.load(name)
    assert files.load(write(tmp_path, files.resolved_yaml(scenario))) == scenario
    assert set(scenario.measured) >= {"step_time", "source"} or not name.startswith("published/")


def test_shipped_names() -> None:
    path = "llm/gpt3-175b-1024xa100"
    expected = files.load(path)
    for name in (f"{path}.yaml", f"scenarios/{path}.yaml", "gpt3-175b-1024xa100"):
        assert files.load(name) == expected
    assert (expected.cluster.devices, expected.microbatches, expected.parallelism.layout.tp) == (1024, 96, 8)


@pytest.mark.parametrize(
    "text", ["x: 1", "true", "1e9", "on", "null", "a b", "", "12:30", "-", "ü", "0o7", "'", '"', "x #y"]
)
def test_resolved_text_stays_text(tmp_path: Path, text: str) -> None:
    scenario = files.from_mapping(mapping() | {"measured": {"step_time": "1 s", "source": text}})
    assert files.load(write(tmp_path, files.resolved_yaml(scenario))).measured["source"] == text


def mapping() -> dict[str, Any]:
    return copy.deepcopy(yamltext.parse(GOOD).data)


def test_a_mapping_is_left_alone_and_reports_keys() -> None:
    data = mapping()
    files.from_mapping(data, overrides=("training.micro_batch=1", "model.layers=8"))
    assert data == mapping()
    data["parallelism"]["tp"] = 3
    with pytest.raises(InputError) as caught:
        files.from_mapping(data)
    assert str(caught.value).startswith("parallelism.tp: tp 3 x pp 2")


def test_a_mapping_may_extend_a_shipped_scenario() -> None:
    data = {"extends": "llm/gpt3-175b-1024xa100", "parallelism": {"virtual_stages": 2, "schedule": "interleaved"}}
    assert files.from_mapping(data).stages == 16


def test_mappings_read_no_file_again(monkeypatch: pytest.MonkeyPatch) -> None:
    data = files.load("llm/gpt3-175b-1024xa100").document
    preset = mapping() | {"model": "gpt3-175b"}
    files.from_mapping(preset)
    monkeypatch.setattr(Path, "read_bytes", lambda self: pytest.fail(f"read {self}"))
    assert files.from_mapping(data).stages == 8
    assert files.from_mapping(preset).model.name == "gpt3-175b"


@pytest.mark.parametrize("data", [None, 3, "x", [1]])
def test_what_is_no_mapping(data: Any) -> None:
    with pytest.raises(InputError, match="a scenario must be a mapping"):
        files.from_mapping(data)


def test_json_schema_knows_every_key_and_is_json() -> None:
    schema = json.loads(json.dumps(files.json_schema()))
    assert set(schema["properties"]) == {
        *("name", "extends", "stack", "seed", "cluster", "model", "training", "parallelism", "input", "job"),
        *("measured", "defaults"),
    }
    assert schema["additionalProperties"] is False
    assert {"placement", "degraded", "slice"} <= set(schema["$defs"]["ClusterSpec"]["properties"])
    assert {"shard_size", "cp_kind", "mesh_order"} <= set(schema["$defs"]["ParallelismSpec"]["properties"])


def test_reading_scenarios_needs_no_heavy_library() -> None:
    heavy = ["numpy", "pandas", "matplotlib", "simpy", "pyarrow", "scipy", "torch"]
    code = f"import sys, simtrain.scenario.files; sys.exit(any(name in sys.modules for name in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_rows_of_the_caller_win_over_those_beside_the_file(tmp_path: Path) -> None:
    """``--specs``, then ``hardware_specs/`` beside the scenario, then shipped; the folders that win are told once."""
    row = "ib_hdr: {{source: s, bandwidth: {} GB/s, efficiency: 90 %, latency: 3 us}}\n"
    beside, given = tmp_path / "hardware_specs", tmp_path / "given"
    for folder, rate in ((beside, 41), (given, 42)):
        folder.mkdir()
        (folder / "networks.yaml").write_text(row.format(rate), encoding="utf-8")
    path = write(tmp_path)
    assert files.spec_folders(path) == (beside,)
    assert files.spec_folders(path, files.spec_folders(path, (given,))) == (beside, given)
    for specs, rate in (((), 41e9), ((given,), 42e9), (files.spec_folders(path, (given,)), 42e9)):
        assert files.load(path, specs=specs).cluster.scale_out.bandwidth == rate


def test_links_in_a_circle_are_said_to_be(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").symlink_to("b.yaml")
    (tmp_path / "b.yaml").symlink_to("a.yaml")
    with pytest.raises(InputError, match=r"a\.yaml: cannot be read: Too many levels of symbolic links"):
        files.load(tmp_path / "a.yaml")
