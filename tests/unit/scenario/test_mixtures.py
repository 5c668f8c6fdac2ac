"""What a scenario file may say of experts, and what it may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from simtrain.errors import InputError
from simtrain.scenario import files
from simtrain.scenario.scenario import Dispatch, Scenario

MIXTRAL = """\
name: mix
cluster: {machine: DGX-H100, nodes: 2, network: ib_ndr}
model: mixtral-8x7b
training: {global_batch: 64}
parallelism: {tp: 2, ep: 8, etp: 1}
"""


def load(tmp_path: Path, *overrides: str) -> Scenario:
    path = tmp_path / "mix.yaml"
    path.write_text(MIXTRAL, encoding="utf-8")
    return files.load(path, overrides=list(overrides))


def test_degrees_and_defaults(tmp_path: Path) -> None:
    made = load(tmp_path)
    layout = made.parallelism.layout
    assert (layout.dp, layout.ep, layout.expert_tensor, layout.expert_data) == (8, 8, 1, 2)
    assert made.parallelism.dispatch is Dispatch.ALLTOALL
    assert "parallelism.dispatch" in made.defaults
    plain = load(tmp_path, "parallelism.etp=auto", "parallelism.ep=4").parallelism.layout
    assert (plain.expert_tensor, plain.expert_data) == (2, 2)  # etp follows tp, as in Megatron
    assert files.from_mapping(made.document) == made


def test_imbalance_and_capacity(tmp_path: Path) -> None:
    assert load(tmp_path, "training.imbalance=1.5").training.imbalance == 1.5
    drawn = load(tmp_path, "training.imbalance={sigma: 0.3}")
    assert (drawn.training.imbalance, drawn.training.imbalance_sigma) == (1.0, 0.3)
    assert files.from_mapping(drawn.document) == drawn
    assert load(tmp_path, "training.capacity_factor=1.25").training.capacity_factor == 1.25


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["parallelism.ep=3"], "parallelism.ep: 3 ranks cannot share 8 experts evenly; choose from 1, 2, 4, 8"),
        (
            ["stack=torchtitan-2024", "parallelism.shard_size=2"],
            "parallelism.shard_size: ep 8 x etp 1 do not divide tp 2 x cp 1 x shard_size 2: each shard group",
        ),
        (
            ["stack=deepspeed-zero3-2021", "parallelism.zero=3"],
            "parallelism.zero: deepspeed-zero3-2021 has no ZeRO-3 with expert parallelism",
        ),
        (
            ["parallelism.zero=3", "parallelism.ep=2", "parallelism.reshard_after_forward=2"],
            "parallelism.reshard_after_forward: no partial copy of spread experts stays after a forward",
        ),
        (
            ["model.experts=64", "parallelism.ep=32"],
            "parallelism.ep: ep 32 x etp 1 = 32 cannot divide tp 2 x cp 1 x dp 8 = 16, the ranks of a stage;"
            " with this etp choose ep from 1, 2, 4, 8, 16",
        ),
        (
            ["parallelism.etp=3", "parallelism.ep=1"],
            "parallelism.etp: 3 ranks cannot share expert_ffn_hidden 14336; choose from 1, 2, 4, 7",
        ),
        (
            ["parallelism.sequence_parallel=false"],
            "parallelism.sequence_parallel: experts with tensor parallelism (tp 2) need sequence parallelism",
        ),
        (["parallelism.dispatch=ring"], "parallelism.dispatch: must be 'alltoall', 'allgather' or 'deduplicated'"),
        (["training.imbalance=0.5"], "training.imbalance: must be a factor of at least 1"),
        (["training.imbalance={sigma: 9}"], "training.imbalance: must be a factor of at least 1"),
        (["training.imbalance=true"], "training.imbalance: must be a factor of at least 1"),
        (["training.capacity_factor=0"], "training.capacity_factor"),
        (["model.experts_per_token=9"], "model.experts_per_token: 9 of 8 experts cannot be chosen"),
        (["model.dense_layers=32"], "model.dense_layers: no block of 32 is left for the experts"),
        (["model.moe_every=64"], "model.dense_layers: no block of 32 is left for the experts"),
        (["model.kv_lora_rank=512"], "model.v_head_dim: missing: multi-head latent attention (kv_lora_rank) needs it"),
        (["model.v_head_dim=128"], "model.kv_lora_rank: missing: the other sizes of latent attention say nothing"),
        (["model.experts=0"], "model.experts: missing: the family moe needs the number of experts"),
        (["model=llama3-8b", "training.imbalance=2.0"], "training.imbalance: says nothing: llama3-8b has no experts"),
        (["model=llama3-8b", "model.experts_shared=1"], "model.experts_shared: says nothing in a model without"),
        (["model=gpt3-1.3b", "model.experts=8"], "model.bias: experts have no biases here; set bias: false"),
        (["model=bert-base", "model.experts=8"], "model.experts: a bert has no experts; families with them: moe"),
    ],
)
def test_refused(tmp_path: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(InputError) as caught:
        load(tmp_path, *overrides)
    assert said in str(caught.value)
