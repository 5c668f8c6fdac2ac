"""Context parallelism and packing in scenario files: names, defaults, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from simtrain.errors import InputError
from simtrain.scenario import files
from simtrain.scenario.scenario import ContextKind, Scenario
from tests.unit.scenario.examples import write

LONG = """\
cluster: {machine: DGX-H100, nodes: 1}
model: llama3-8b
training: {global_batch: 4, micro_batch: 1, seq_len: 16384}
parallelism:
  tp: 1
  cp: 8
"""


def loaded(folder: Path, *overrides: str, text: str = LONG) -> Scenario:
    return files.load(write(folder, text), overrides=overrides)


def refusal(folder: Path, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        loaded(folder, *overrides)
    return "\n".join(map(str, caught.value.problems))


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("p2p", ContextKind.P2P),
        ("ring", ContextKind.P2P),
        ("all_gather", ContextKind.ALL_GATHER),
        ("allgather", ContextKind.ALL_GATHER),
        ("a2a", ContextKind.A2A),
        ("ulysses", ContextKind.A2A),
        ("a2a+p2p", ContextKind.A2A_P2P),
    ],
)
def test_names_of_the_kinds(tmp_path: Path, said: str, kind: ContextKind) -> None:
    made = loaded(tmp_path, f"parallelism.cp_kind={said}")
    assert made.parallelism.cp_kind is kind
    assert "parallelism.cp_kind" not in made.defaults
    again = tmp_path / "again.yaml"
    again.write_text(files.resolved_yaml(made), encoding="utf-8")
    assert files.load(again) == made


def test_the_usual_kind_is_that_of_the_stack(tmp_path: Path) -> None:
    ring, gather = loaded(tmp_path), loaded(tmp_path, "stack=torchtitan-2024")
    assert (ring.parallelism.cp_kind, gather.parallelism.cp_kind) == (ContextKind.P2P, ContextKind.ALL_GATHER)
    assert "parallelism.cp_kind" in ring.defaults
    assert "parallelism.cp_kind" not in loaded(tmp_path, "parallelism.cp=1", "training.global_batch=8").defaults


def test_two_levels_by_default_swap_as_many_heads_as_divide(tmp_path: Path) -> None:
    made = loaded(tmp_path, "parallelism.cp_kind=a2a+p2p")
    assert (made.parallelism.head_split, made.parallelism.sequence_split) == (4, 2)
    assert loaded(tmp_path, "parallelism.cp_kind=a2a+p2p", "parallelism.cp_inner=2").parallelism.sequence_split == 4


def test_documents(tmp_path: Path) -> None:
    assert loaded(tmp_path, "training.packed_length=4096").training.documents == (4096,) * 4
    uneven = loaded(tmp_path, "training.packed_length=6000", "parallelism.cp_kind=a2a")
    assert uneven.training.documents == (6000, 6000, 4384)
    assert loaded(tmp_path, "training.packed_length=[12288, 4096]").training.documents == (12288, 4096)
    whole = [loaded(tmp_path, f"training.packed_length={said}") for said in ("auto", "16384", "99999", "[16384]")]
    assert {made.training.documents for made in whole} == {()}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["parallelism.cp_kind=rong"],
            "parallelism.cp_kind: unknown kind of context parallelism 'rong'; known: p2p, all_gather, a2a, a2a+p2p",
        ),
        (
            ["training.seq_len=16392"],
            "parallelism.cp: seq_len 16392 cannot be cut into 16 equal chunks (2 x cp); e.g. 16400 can",
        ),
        (
            ["training.seq_len=16380", "parallelism.cp_kind=a2a"],
            "parallelism.cp: seq_len 16380 cannot be cut into 8 equal chunks (cp); e.g. 16384 can",
        ),
        (
            ["parallelism.tp=2", "parallelism.cp_kind=a2a", "cluster.nodes=2"],
            "parallelism.cp_kind: a2a shares 32 heads and 8 kv_heads out over tp 2 x 8 context ranks",
        ),
        (
            ["model.sliding_window=4096"],
            "parallelism.cp_kind: no ring with a sliding window (Transformer Engine refuses p2p); all_gather or a2a",
        ),
        (
            ["training.packed_length=1000"],
            "training.packed_length: a ring of 8 cuts every document into 16 chunks: 1000 tokens do not divide;"
            " pad to 1008",
        ),
        (["training.packed_length=[8192]"], "training.packed_length: adds up to 8192 tokens, but seq_len is 16384"),
        (["training.packed_length=0"], "training.packed_length: must be a mean length or a list of lengths, in tokens"),
        (["training.packed_length=[8192, 1.5]"], "training.packed_length: must be a mean length or a list of lengths"),
        (["training.packed_length=true"], "in tokens from 1 to 16777216, not the truth value true"),
        (
            ["training.packed_length=1"],
            "training.packed_length: more than 10,000 documents of 1 tokens in a sequence of 16384",
        ),
        (["parallelism.cp_inner=2"], "parallelism.cp_inner: cp_inner belongs to cp_kind a2a+p2p, not to p2p"),
        (
            ["parallelism.cp_kind=a2a+p2p", "parallelism.cp_inner=3"],
            "parallelism.cp_inner: 3 does not split cp 8 in two levels; choose from 2, 4",
        ),
        (
            ["parallelism.cp_kind=a2a+p2p", "model.kv_heads=1"],
            "parallelism.cp_kind: no part of cp 8 divides the heads for the all-to-all of a2a+p2p; use p2p",
        ),
        (
            ["training.attention=unfused"],
            "training.attention: context parallelism (cp 8) needs a fused kernel; choose flash2 or cudnn",
        ),
        (
            ["model=deepseek-v3", "parallelism.cp_kind=a2a"],
            "parallelism.cp_kind: no a2a of latent attention (Transformer Engine refuses it); choose p2p or a2a+p2p",
        ),
        (["model=t5-11b", "training.seq_len=512"], "parallelism.cp: cross-attention is not context-parallel"),
    ],
)
def test_what_is_refused(tmp_path: Path, overrides: list[str], said: str) -> None:
    assert said in refusal(tmp_path, *overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.sliding_window=4096", "parallelism.cp_kind=a2a"],
        ["model.sliding_window=4096", "parallelism.cp_kind=all_gather", "training.packed_length=1000"],
        ["model.sliding_window=99999"],
        ["training.seq_len=16392", "parallelism.cp_kind=a2a"],
        ["parallelism.tp=2", "parallelism.cp=4", "parallelism.cp_kind=a2a"],
    ],
)
def test_what_frameworks_allow_works(tmp_path: Path, overrides: list[str]) -> None:
    loaded(tmp_path, *overrides)
