"""Every kind of bad input: the message has file, line and column, key, reason and choice."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from simtrain.errors import InputError
from simtrain.scenario import files, yamltext
from tests.unit.scenario.examples import GOOD, spoiled, write

NETWORKS = "ib_edr, ib_hdr"


def message(tmp_path: Path, text: str, **options: object) -> str:
    with pytest.raises(InputError) as caught:
        files.load(write(tmp_path, text), **options)  # type: ignore[arg-type]
    return str(caught.value).replace(f"{tmp_path}/", "")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        # misspelt
        (
            spoiled(machine="  machin: DGX-A100"),
            "small.yaml:3:3: cluster.machin: unknown key (did you mean 'machine'?)",
        ),
        (spoiled(training="trainin:"), "small.yaml:12:1: trainin: unknown key (did you mean 'training'?)"),
        (spoiled(name="xyzzy: red"), "small.yaml:1:1: xyzzy: unknown key (choose from name, extends, stack"),
        # units
        (
            GOOD + "measured: {step_time: 3}\n",
            "small.yaml:21:12: measured.step_time: a time needs a unit: write 3 with one",
        ),
        (GOOD + "measured: {step_time: 3 GB}\n", "measured.step_time: not a time: 'GB' measures amount of data"),
        (GOOD + "measured: {step_time: -3 s}\n", "measured.step_time: must be above zero, not '-3 s'"),
        (
            spoiled(network="  network: {bandwidth: 50 GB}"),
            "small.yaml:5:13: cluster.network.bandwidth: not a bandwidth",
        ),
        # what cannot divide
        (spoiled(tp="  tp: 3"), "small.yaml:18:3: parallelism.tp: tp 3 x pp 2 x cp 1 = 6 cannot divide 32 devices"),
        (
            spoiled(dp="  dp: 8"),
            "small.yaml:20:3: parallelism.dp: tp 4 x pp 2 x cp 1 x dp 8 = 64, but there are 32 devices;"
            " dp would be 4 (or auto)",
        ),
        (
            spoiled(heads="  heads: 2\n  head_dim: 64"),
            "parallelism.tp: 4 tensor ranks cannot share heads 2 evenly; choose from 1, 2",
        ),
        (
            spoiled(heads="  heads: 16\n  kv_heads: 3"),
            "small.yaml:11:3: model.kv_heads: 3 key-value heads cannot be shared",
        ),
        (
            spoiled(heads="  heads: 24\n  head_dim: 64\n  kv_heads: 6"),
            "parallelism.tp: 4 ranks can neither share nor repeat 6 kv_heads",
        ),
        (spoiled(heads="  heads: 7"), "model.heads: 7 heads cannot divide hidden 2048; say head_dim"),
        (
            spoiled(hidden="  hidden: 2048\n  ffn_hidden: 5462"),
            "parallelism.tp: 4 tensor ranks cannot share ffn_hidden 5462",
        ),
        (
            spoiled(global_batch="  global_batch: 60"),
            "small.yaml:13:3: training.global_batch: 60 is no multiple of micro_batch 2 x dp 4 = 8; e.g. 64 is",
        ),
        (
            spoiled(micro_batch="  micro_batch: 2\n  accumulation: 4"),
            "training.global_batch: 64 is not micro_batch 2 x accumulation 4 x dp 4 = 32",
        ),
        (
            spoiled(layers="  layers: 1"),
            "small.yaml:19:3: parallelism.pp: 1 layers cannot fill 2 stages; at most 1 stages",
        ),
        (
            spoiled(pp="  pp: 2\n  virtual_stages: 13"),
            "parallelism.virtual_stages: 24 layers cannot fill 2 x 13 virtual stages",
        ),
        (
            spoiled(pp="  pp: 2\n  stage_layers: [12, 11]"),
            "parallelism.stage_layers: adds up to 23 layers, but the model has 24",
        ),
        (
            spoiled(pp="  pp: 2\n  stage_layers: [24]"),
            "parallelism.stage_layers: 1 entries for pp 2 x virtual_stages 1 = 2",
        ),
        (
            spoiled(pp="  pp: 2\n  stage_layers: [24, -1]"),
            "small.yaml:20:22: parallelism.stage_layers.1: must be at least 0, not -1",
        ),
        (
            spoiled(seq_len="  seq_len: 2047"),
            "parallelism.sequence_parallel: seq_len 2047 cannot be split over 4 tensor ranks",
        ),
        # schedules
        (
            spoiled(pp="  pp: 2\n  schedule: 1f2b"),
            "parallelism.schedule: unknown schedule '1f2b' (did you mean '1f1b'?)",
        ),
        (
            spoiled(pp="  pp: 2\n  schedule: interleaved"),
            "parallelism.schedule: interleaved needs virtual_stages of at least 2",
        ),
        (
            spoiled(pp="  pp: 2\n  virtual_stages: 2", global_batch="  global_batch: 24"),
            "parallelism.schedule: interleaved runs microbatches in rounds of pp (as Megatron does): 3",
        ),
        (
            spoiled(pp="  pp: 2\n  virtual_stages: 2\n  schedule: gpipe"),
            "parallelism.schedule: gpipe runs one stage a rank",
        ),
        (
            spoiled(pp="  pp: 1\n  virtual_stages: 2", dp="  dp: 8"),
            "parallelism.virtual_stages: 2 virtual stages need a pipeline",
        ),
        (spoiled(pp="  pp: 2\n  zero: 3"), "parallelism.zero: ZeRO-3 with a pipeline (pp 2)"),
        (
            spoiled(pp="  pp: 2\n  mesh_order: [tp, dp]"),
            "parallelism.mesh_order: must name each of tp, cp, dp, pp once",
        ),
        # names
        (
            spoiled(machine="  machine: DGX-A1000"),
            "small.yaml:3:3: cluster.machine: unknown machine 'DGX-A1000' (did you mean 'DGX-A100'?)",
        ),
        (
            spoiled(machine="  accelerator: A100-SXM4-80"),
            "small.yaml:3:3: cluster.accelerator: unknown accelerator 'A100-SXM4-80' (did you mean 'A100-SXM4-80GB'?)",
        ),
        (
            spoiled(machine="  machine: DGX-A100\n  accelerator: T4"),
            "cluster.machine: a DGX-A100 has A100-SXM4-80GB, not T4",
        ),
        (
            spoiled(machine="  devices_per_machine: 8"),
            "small.yaml:2:1: cluster.accelerator: missing: name an accelerator or a machine",
        ),
        (spoiled(network="  network: ib_hdx"), "cluster.network: unknown network 'ib_hdx' (did you mean 'ib_hdr'?)"),
        (
            spoiled(network="  network: nvswitch_gen2"),
            "small.yaml:5:3: cluster.network: 'nvswitch_gen2' joins devices inside a machine,"
            f" not machines; choose from {NETWORKS}",
        ),
        (GOOD.replace("name: small", "stack: megatron"), "small.yaml:1:1: stack: unknown stack 'megatron'"),
        (spoiled(precision="  optimizer: adamv"), "training.optimizer: unknown optimizer 'adamv'"),
        # precision and kernels
        (
            spoiled(precision="  precision: fp8"),
            "training.precision: A100-SXM4-80GB has no fp8 matrix rate; choose from fp32, tf32, fp16, bf16",
        ),
        (
            spoiled(precision="  precision: bf17"),
            "small.yaml:16:3: training.precision: must be 'fp32', 'tf32', 'fp16', 'bf16' or 'fp8',"
            " not 'bf17' (did you mean 'bf16'?)",
        ),
        (
            spoiled(machine="  accelerator: T4", network="  network: eth_25"),
            "training.precision: T4 has no bf16 matrix rate; choose from fp32, fp16",
        ),
        (
            spoiled(machine="  accelerator: V100-SXM2-32GB", precision="  precision: tf32"),
            "training.precision: V100-SXM2-32GB has no tf32 matrix rate; choose from fp32, fp16",
        ),
        (spoiled(precision="  attention: flash3"), "training.attention: flash3 needs Hopper; A100-SXM4-80GB is Ampere"),
        # absurd
        (spoiled(tp="  tp: -4"), "small.yaml:18:3: parallelism.tp: must be at least 1, not -4"),
        (spoiled(tp="  tp: 0"), "parallelism.tp: must be at least 1, not 0"),
        (spoiled(tp="  tp: true"), "parallelism.tp: must be a whole number, not the truth value true"),
        (spoiled(tp="  tp: 'four'"), "parallelism.tp: must be a whole number, not 'four'"),
        (spoiled(tp="  tp: 4.0"), "parallelism.tp: must be a whole number, not 4.0"),
        (spoiled(tp="  tp: [4]"), "parallelism.tp: must be a whole number, not a list"),
        (
            spoiled(precision="  recompute: {every: -1}"),
            "training.recompute: must be none, selective, full, {blocks: n} or {every: k}"
            " (k a number of layers, or sqrt), not {every: -1}",
        ),
        (spoiled(tp="  <<: {tp: 4}"), "small.yaml:18:3: parallelism.<<: merge keys are no part of YAML 1.2"),
        (spoiled(name="name: " + "x" * 101), "small.yaml:1:1: name: must have at most 100 characters, not 'xxx"),
        (spoiled(tp="  stage_layers: []"), "parallelism.stage_layers: must not be empty"),
        (
            spoiled(precision="  precision: BF16"),
            "training.precision: must be 'fp32', 'tf32', 'fp16', 'bf16' or 'fp8', not 'BF16' (did you mean 'bf16'?)",
        ),
        (spoiled(seq_len="  seq_len: 0"), "small.yaml:15:3: training.seq_len: must be at least 1, not 0"),
        (spoiled(layers="  layers: 1e30"), "small.yaml:8:3: model.layers: must be a whole number, not 1e+30"),
        (spoiled(layers="  layers: 1000000000000000000000000000000"), "model.layers: must be at most 2500, not 1e+30"),
        (
            spoiled(nodes="  devices: 1000000000"),
            "small.yaml:4:3: cluster.devices: must be at most 2000000, not 1000000000",
        ),
        (spoiled(nodes="  nodes: 1000000"), "small.yaml:4:3: cluster.nodes: 8000000 devices in all (at most 2000000)"),
        (
            spoiled(nodes="  nodes: 4\n  jitter: {sigma: .nan}"),
            "cluster.jitter.sigma: must be a finite number, not nan",
        ),
        (spoiled(nodes="  nodes: 4\n  jitter: {sigma: .inf}"), "cluster.jitter.sigma: must be"),
        (spoiled(nodes="  nodes: 4\n  jitter: {sigma: -0.1}"), "cluster.jitter.sigma: must be at least 0, not -0.1"),
        (GOOD + "measured: {mfu: 41}\n", "measured.mfu: must be at most 1, not 41"),
        (GOOD + "seed: -1\n", "small.yaml:21:1: seed: must be at least 0, not -1"),
        (spoiled(name="name: ../../etc/passwd"), "small.yaml:1:1: name: must start with a letter or digit"),
        (spoiled(cluster="cluster: 7\nx:"), "small.yaml:2:1: cluster: must be a mapping (key: value), not 7"),
        (
            spoiled(precision="  sync_every_microbatch: 1"),
            "training.sync_every_microbatch: must be true or false, not 1",
        ),
        (
            spoiled(precision="  recompute: {every: 0}"),
            "training.recompute: must be none, selective, full, {blocks: n} or {every: k}",
        ),
        (
            spoiled(seq_len="  seq_len: 4096", vocab="  vocab: 50257\n  max_positions: 2048"),
            "training.seq_len: 4096 tokens, but custom has 2048 learned positions",
        ),
        (
            spoiled(global_batch="  global_batch: 80000000"),
            "training.global_batch: 10000000 microbatches a step (at most 100000)",
        ),
        (
            spoiled(global_batch="  global_batch: 90000", micro_batch="  micro_batch: 1", pp="  pp: 8", dp="  dp: 1"),
            "training.global_batch: 90000 microbatches x 8 stages are more than 500,000 forward passes",
        ),
        # counting devices
        (
            spoiled(nodes="  nodes: 4\n  devices: 32"),
            "small.yaml:5:3: cluster.devices: give one of nodes, devices and slice, not nodes and devices",
        ),
        (
            spoiled(nodes="  devices_per_machine: 8", dp=""),
            "cluster: missing: give nodes, devices or slice (or parallelism.dp)",
        ),
        (
            spoiled(nodes="  nodes: 4\n  devices_per_machine: 16"),
            "cluster.devices_per_machine: a DGX-A100 has 8 devices, not 16",
        ),
        (spoiled(nodes="  slice: v4-8"), "cluster.slice: v4-8 is made of TPU-v4, not A100-SXM4-80GB"),
        (
            spoiled(machine="", nodes="  slice: v99-8"),
            "small.yaml:4:3: cluster.slice: not a TPU slice name: 'v99-8' (expected e.g.",
        ),
        (spoiled(machine="", nodes="  slice: v4-7"), "cluster.slice: 'v4-7' counts cores, 2 a chip"),
        # models
        (
            spoiled(family="  preset: gpt3-175"),
            "small.yaml:7:3: model.preset: unknown preset 'gpt3-175' (did you mean 'gpt3-175b'?)",
        ),
        (spoiled(vocab=""), "small.yaml:6:1: model.vocab: missing: a model without preset or config needs vocab"),
        (
            spoiled(family=""),
            "model.family: missing: a model without preset or config needs family (gpt, llama, bert, t5 or moe)",
        ),
        (
            spoiled(family="  family: gpd"),
            "model.family: must be 'gpt', 'llama', 'bert', 't5' or 'moe', not 'gpd' (did you mean 'gpt'?)",
        ),
        (spoiled(family="  family: gpt\n  encoder_layers: 3"), "model.encoder_layers: a gpt has no encoder blocks"),
        (
            spoiled(global_batch="", micro_batch=""),
            "small.yaml:12:1: training.global_batch: missing: give global_batch, or micro_batch",
        ),
        (spoiled(seq_len=""), "training.seq_len: missing: no usual sequence length of this model is known"),
    ],
)
def test_message(tmp_path: Path, text: str, said: str) -> None:
    said = said if said.startswith("small.yaml") else f": {said}"
    assert said in message(tmp_path, text)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("input: {reader: x}", "small.yaml:21:1: input: not modelled yet: input pipelines"),
        ("job: {days: 3}", "small.yaml:21:1: job: not modelled yet: whole jobs"),
        ("  ep: 2", "parallelism.ep: says nothing:"),
        ("  etp: 2", "parallelism.etp: says nothing:"),
        ("  dispatch: allgather", "parallelism.dispatch: says nothing:"),
    ],
)
def test_not_modelled_yet(tmp_path: Path, line: str, said: str) -> None:
    assert f"{said}" in message(tmp_path, f"{GOOD}{line}\n")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("cluster.placement=scattered", "cluster.placement"),
        ("cluster.degraded=[3]", "cluster.degraded"),
        ("model.op_table=x.csv", "model.op_table"),
    ],
)
def test_not_modelled_yet_in_an_override(tmp_path: Path, override: str, key: str) -> None:
    assert f"-o {override}: {key}: not modelled yet: " in message(tmp_path, GOOD, overrides=(override,))


def test_fp8_where_the_hardware_has_it(tmp_path: Path) -> None:
    text = spoiled(precision="  precision: fp8")
    assert "training.precision: A100-SXM4-80GB has no fp8 matrix rate; choose from" in message(tmp_path, text)
    files.load(write(tmp_path, spoiled(machine="  machine: DGX-H100", precision="  precision: fp8")))


def test_the_defaults_of_later_parts_are_no_use_of_them(tmp_path: Path) -> None:
    more = "  cp: 1\n  ep: 1\n  shard_size: 4\ninput:\njob: {}\n"
    options = ("cluster.placement=packed", "training.trainable=all", "training.offload=none", "model.experts=0")
    files.load(write(tmp_path, GOOD + more), overrides=options)


def test_all_problems_at_once(tmp_path: Path) -> None:
    text = spoiled(
        machine="  machine: DGX-A101", layers="  layers: none", precision="  precison: bf16", tp="  tp: 0"
    ) + "stack: nonesuch\nmeasured: {step_time: 3}\n"  # fmt: skip
    lines = message(tmp_path, text).splitlines()
    assert [line.split(": ")[1] for line in lines] == [
        "cluster.machine", "model.layers", "training.precison", "parallelism.tp", "stack", "measured.step_time"
    ]  # fmt: skip


def test_a_broken_key_hides_only_what_follows_from_it(tmp_path: Path) -> None:
    text = spoiled(tp="  tp: x", global_batch="  global_batch: 0", network="  network: nvswitch_gen2")
    assert message(tmp_path, text).count("\n") == 2


def test_exit_code_is_that_of_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        files.load(write(tmp_path, "a: 1"))
    assert caught.value.exit_code == 2


def test_no_such_file() -> None:
    with pytest.raises(InputError, match=r"no such file, and no shipped scenario of that name.*did you mean 'llm/gpt3"):
        files.load("llm/gpt3-175b-1024xa10")


def test_a_name_that_no_file_can_have() -> None:
    for name in ("x" * 5000, "a\0b"):
        with pytest.raises(InputError, match="no such file"):
            files.load(name)


def test_a_device_without_end_is_read_no_further_than_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of /proc say that they hold nothing."""
    path = tmp_path / "endless.yaml"
    path.write_text("x" * (yamltext.MAX_BYTES + 1))
    status = os.stat_result((stat.S_IFREG | 0o644, *[0] * 9))
    monkeypatch.setattr(Path, "stat", lambda *_, **__: status)
    with pytest.raises(InputError, match="is too large"):
        yamltext.read_text(path)
