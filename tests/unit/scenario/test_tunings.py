"""``trainable``, ``offload``, ``fp8`` and optimizers in scenario files: what they mean, and what is refused and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from simtrain.errors import InputError
from simtrain.scenario import files
from simtrain.scenario.scenario import Scenario
from simtrain.scenario.tuning import BaseFormat, Fp8Recipe, Place
from tests.unit.scenario.examples import write

LLAMA = """\
name: tuned
stack: torchtitan-2024
cluster:
  machine: DGX-H100
  nodes: 1
model: llama3-8b
training:
  global_batch: 8
  micro_batch: 1
  seq_len: 2048
"""


def load(tmp_path: Path, *overrides: str) -> Scenario:
    return files.load(write(tmp_path, LLAMA), overrides=overrides)


def refused(tmp_path: Path, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        load(tmp_path, *overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (("training.precision=fp8", "cluster.machine=DGX-A100"), "training.precision", "no fp8 matrix rate"),
        (("training.precision=fp8", "stack=pytorch-fsdp-2023"), "training.precision", "has no fp8 linear layers"),
        (("training.precision=fp8", "training.fp8=mxfp8"), "training.fp8", "needs Blackwell's matrix units"),
        (("training.fp8=delayed",), "training.fp8", "a recipe without precision fp8 (it is bf16)"),
        (("training.precision=fp8", "training.fp8=hourly"), "training.fp8.recipe", "hourly"),
        (
            ("training.trainable={lora: {targets: [q, w9]}}",),
            "training.trainable.lora",
            "no linear layer 'w9' in llama3-8b; choose from",
        ),
        (("training.trainable={lora: {}, qlora: {}}",), "training.trainable", "give one of lora, qlora, and frozen"),
        (("training.trainable={frozen_blocks: 40}",), "training.trainable", "but the model has 32 layers"),
        (
            ("training.trainable={frozen: [embedding, attention, mlp, head]}",),
            "training.trainable",
            "nothing is left to train",
        ),
        (("training.trainable={frozen: [nose]}",), "training.trainable.frozen", "nose"),
        (("training.offload={optimizer: nvme}",), "training.offload", "nvme needs a rate: give nvme_bandwidth"),
        (
            ("training.offload={parameters: cpu}",),
            "training.offload",
            "parameters off the device need the optimizer off it too",
        ),
        (
            ("training.offload={optimizer: cpu, parameters: cpu}", "parallelism.zero=1"),
            "training.offload",
            "parameters leave the device under ZeRO-3 alone (zero is 1)",
        ),
        (("training.offload=optimizer", "parallelism.zero=0"), "training.offload", "choose parallelism.zero 1, 2 or 3"),
        (("training.offload=optimizer", "training.optimizer=muon"), "training.offload", "no host version of muon"),
        (
            ("training.offload=activations", "parallelism.pp=2", "parallelism.schedule=dualpipe"),
            "training.offload",
            "schedule dualpipe weaves a forward into a backward on the device alone",
        ),
        (
            (
                "training.offload=optimizer",
                "training.global_batch=16",
                "parallelism.shard_size=4",
                "parallelism.replica_sync_every_microbatch=false",
            ),
            "training.offload",
            "cannot wait there for the reduction between shard groups",
        ),
        (
            ("training.trainable={qlora: {}}", "parallelism.gather_dtype=int8"),
            "parallelism.gather_dtype",
            "parameters are gathered as they are stored, nf4-double",
        ),
        (
            ("training.optimizer={name: adamw, in_backward: true}", "training.global_batch=16"),
            "training.optimizer",
            "gradients cannot accumulate over 2 microbatches",
        ),
        (
            ("training.optimizer={name: adamw, in_backward: true}", "training.offload=optimizer"),
            "training.optimizer",
            "in_backward steps on the device; the optimizer is offloaded",
        ),
        (
            ("training.precision=fp8", "training.trainable={qlora: {}}"),
            "training.trainable",
            "fp8 products over 4-bit weights",
        ),
        (("model=gpt2", "training.seq_len=1024", "training.trainable={frozen: [head]}"), "training.trainable", "ties"),
        (
            (
                "training.trainable={frozen: [embedding], frozen_blocks: 16}",
                "parallelism.pp=2",
                "training.global_batch=32",
            ),
            "training.trainable",
            "stage 0 (16 blocks) would have no backward at all",
        ),
    ],
)
def test_refused_with_the_reason(tmp_path: Path, overrides: tuple[str, ...], key: str, said: str) -> None:
    message = refused(tmp_path, *overrides)
    assert key in message
    assert said in message


def test_names_of_other_libraries_mean_the_same_layers(tmp_path: Path) -> None:
    for said in ("[q_proj, v_proj]", "[q, v]"):
        lora = load(tmp_path, f"training.trainable={{lora: {{rank: 16, targets: {said}}}}}").training.trainable.lora
        assert lora is not None
        assert (lora.rank, lora.alpha, lora.targets, lora.base) == (16, 32.0, ("q", "v"), BaseFormat.BF16)
    lora = load(tmp_path, "training.trainable={qlora: {targets: all-linear}}").training.trainable.lora
    assert lora is not None
    assert lora.targets == ("q", "k", "v", "o", "gate", "up", "down")
    assert lora.base is BaseFormat.NF4_DOUBLE


def test_shorthands(tmp_path: Path) -> None:
    made = load(tmp_path, "training.offload=activations", "training.optimizer=lion")
    assert made.training.offload.activations is Place.CPU
    assert made.training.offload.optimizer is Place.DEVICE
    assert made.training.optimizer.name == "lion"
    assert load(tmp_path, "training.offload=none", "training.trainable=all").training == load(tmp_path).training
    row = load(
        tmp_path, "training.offload={optimizer: nvme, storage: local_nvme_p4d}", "training.sync_every_microbatch=true"
    )
    assert row.training.offload.nvme_bandwidth == 16e9


def test_usual_recipes(tmp_path: Path) -> None:
    """torchao scales by the tensor at hand, Transformer Engine by history, Blackwell by block of 32."""
    for stack, machine, recipe in (
        ("torchtitan-2024", "DGX-H100", Fp8Recipe.CURRENT),
        ("megatron-core-2024", "DGX-H100", Fp8Recipe.DELAYED),
        ("megatron-core-2024", "DGX-B200", Fp8Recipe.MXFP8),
    ):
        made = load(tmp_path, "training.precision=fp8", f"stack={stack}", f"cluster.machine={machine}")
        assert made.training.fp8 is not None
        assert made.training.fp8.recipe is recipe
        assert "training.fp8" in made.defaults


@pytest.mark.parametrize(
    "overrides",
    [
        ("training.trainable={qlora: {rank: 4, targets: all-linear}}",),
        ("training.trainable={frozen: [embedding, attention], frozen_blocks: 3}",),
        ("training.offload={optimizer: nvme, parameters: cpu, activations: cpu, nvme_bandwidth: 5 GB/s}",),
        ("training.optimizer={name: adamw-8bit, in_backward: true}",),
        ("training.precision=fp8", "training.fp8={recipe: block, primary: true}"),
    ],
)
def test_a_resolved_file_loads_to_an_equal_scenario(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    made = load(tmp_path, *overrides)
    again = files.load(write(tmp_path, files.resolved_yaml(made), "resolved.yaml"))
    assert again == made
