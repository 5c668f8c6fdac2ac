"""The keys of sharding: what is refused and why, what follows, and that a resolved file says the same."""

from __future__ import annotations

import re
from typing import Any

import pytest

from simtrain.errors import InputError
from simtrain.scenario.files import from_mapping
from simtrain.scenario.scenario import Scenario, WireType


def load(parallelism: dict[str, Any], stack: str = "torchtitan-2024") -> Scenario:
    return from_mapping(
        {
            "name": "small",
            "stack": stack,
            "cluster": {"machine": "DGX-H100", "nodes": 4},
            "model": "llama3-8b",
            "training": {"micro_batch": 1, "accumulation": 2, "seq_len": 2048},
            "parallelism": parallelism,
        }
    )


@pytest.mark.parametrize(
    ("parallelism", "said"),
    [
        ({"shard_size": 5}, "shard_size: dp 32 cannot be split into groups of 5; choose 2, 4, 8, 16, 32"),
        ({"shard_size": 8, "zero": 0}, "shard_size: 8, but zero is 0: nothing is sharded"),
        ({"shard_size": 1}, "shard_size: 1, but a group of one shards nothing: say zero: 0"),
        ({"shard_size": 8, "reshard_after_forward": 3}, "reshard_after_forward: 3 ranks cannot hold a copy"),
        ({"gather_dtype": "int8", "zero": 0}, "gather_dtype: zero is 0"),
        ({"tp_overlap": True}, "tp_overlap: needs sequence_parallel with tp above 1"),
        ({"tp": 4, "sequence_parallel": False, "tp_overlap": True}, "tp_overlap: needs sequence_parallel"),
        ({"vocab_parallel_loss": False}, "vocab_parallel_loss: the vocabulary is whole"),
        ({"gather_dtype": "int2"}, "gather_dtype"),
        ({"reshard_after_forward": 0}, "reshard_after_forward"),
        ({"pp": 2, "schedule": "zb-h1", "reshard_after_forward": 4}, "zb-h1 splits the backward"),
    ],
)
def test_refused(parallelism: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        load(parallelism)


def test_hybrid_sharding_by_its_keys() -> None:
    made = load({"shard_size": 8, "reshard_after_forward": 4, "reduce_dtype": "bf16"})
    assert (made.shards(), made.replicas, made.is_hybrid) == (8, 32, True)
    assert made.parallelism.layout.secondary == 4
    assert made.parallelism.reduce_dtype is WireType.BF16
    whole = load({"shard_size": 32, "reshard_after_forward": 32})
    assert not whole.is_hybrid
    assert whole.parallelism == load({}).parallelism


def test_a_pipeline_keeps_parameters_until_its_last_backward() -> None:
    """torch.distributed.pipelining: ``set_reshard_after_backward`` of the last backward alone."""
    piped = load({"pp": 2}).parallelism
    assert (piped.reshard_after_forward, piped.reshard_after_backward) == (False, False)


def test_a_split_backward_keeps_parameters_without_being_told() -> None:
    assert not load({"schedule": "zb-h1"}).parallelism.reshard_after_forward


@pytest.mark.parametrize(
    "parallelism",
    [
        {"shard_size": 8, "reshard_after_forward": 2, "wrap_blocks": 4, "wrap_ends": False, "gather_dtype": "int8"},
        {"tp": 2, "tp_overlap": True, "vocab_parallel_loss": False, "backward_prefetch": 3},
        {"shard_size": 4, "zero": 1, "replica_sync_every_microbatch": False, "reduce_dtype": "fp32"},
        {"pp": 2, "reshard_after_backward": True},
        {"pp": 2, "schedule": "zb-h1", "shard_size": 4, "post_validation": True, "reduce_dtype": "int4"},
    ],
)
def test_a_resolved_file_says_the_same(parallelism: dict[str, Any]) -> None:
    made = load(parallelism)
    again = from_mapping(made.document)
    assert again.parallelism == made.parallelism
    assert again == made
