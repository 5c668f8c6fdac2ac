"""Visible pairs against masks that are really drawn, and the split of a core over context ranks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simtrain.cost.attention import balanced_pairs, causal_pairs, chunk_pairs, counted_keys, kernels, ring_step
from simtrain.cost.flops import model_flops
from simtrain.cost.ops import FusedAttention, Sweep
from simtrain.scenario.scenario import Attention, ContextKind, Scenario
from tests.factories import GPT, scenario


def mask(lengths: tuple[int, ...], window: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Who sees whom: [query, key], drawn token by token."""
    document = np.repeat(np.arange(len(lengths)), lengths)
    query, key = np.indices((len(document), len(document)))
    seen = (document[query] == document[key]) & (key <= query)
    return seen & (query - key < window) if window else seen


@given(st.lists(st.integers(1, 24), min_size=1, max_size=6), st.integers(0, 30))
def test_pairs_are_those_of_the_drawn_mask(lengths: list[int], window: int) -> None:
    drawn = mask(tuple(lengths), window)
    assert sum(causal_pairs(n, window) for n in lengths) == drawn.sum()
    edges = sorted({0, len(drawn) // 3, len(drawn) // 2, len(drawn)})
    for start, stop in pairwise(edges):
        assert chunk_pairs(start, stop, lengths, window) == drawn[start:stop].sum()


@given(st.integers(1, 8), st.integers(1, 6), st.integers(0, 40), st.booleans())
def test_the_busiest_rank_of_a_gather(ranks: int, width: int, window: int, packed: bool) -> None:
    tokens = 2 * ranks * width
    lengths = (tokens - tokens // 3, tokens // 3) if packed and tokens > 3 else (tokens,)
    rows = mask(lengths, window).sum(axis=1).reshape(2 * ranks, width).sum(axis=1)
    work = [int(rows[r] + rows[-1 - r]) for r in range(ranks)]
    assert balanced_pairs(tokens, ranks, lengths, window) == max(work)
    if len(lengths) == 1 and not window:
        assert min(work) == max(work) == tokens * (tokens + 1) // 2 // ranks  # zig-zag is balanced to the pair


def core(made: Scenario, *, backward: bool = False, causal: bool = True) -> list[FusedAttention]:
    return [op for op in kernels(made, e=2.0, backward=backward, causal=causal) if isinstance(op, FusedAttention)]


def flash(**changes: Any) -> Scenario:
    return scenario(attention=Attention.FLASH2, max_positions=0, **changes)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("kind", list(ContextKind))
def test_all_ranks_together_do_the_work_of_one(kind: ContextKind, backward: bool, causal: bool) -> None:
    inner = 2 if kind is ContextKind.A2A_P2P else 1
    whole = core(flash(seq_len=4096), backward=backward, causal=causal)
    split = core(flash(seq_len=4096, cp=4, cp_kind=kind, cp_inner=inner), backward=backward, causal=causal)
    assert 4 * sum(op.executed_flops for op in split) == pytest.approx(sum(op.executed_flops for op in whole))
    assert 4 * sum(op.flops for op in split) == pytest.approx(sum(op.flops for op in whole))


def test_a_balanced_ring_step_by_step() -> None:
    """s = 8192, n = 4: own tokens 2048; every step does 2048^2 / 2 pairs, the first one behind a causal mask."""
    ops = core(flash(seq_len=8192, cp=4))
    assert [op.causal for op in ops] == [True, False, False, False]
    assert [op.pairs for op in ops] == [2048**2 / 2] * 4
    assert [(op.queries, op.keys) for op in ops] == [(2048, 2048)] + [(2048, 1024)] * 3
    sweeps = [op for op in kernels(flash(seq_len=8192, cp=4), e=2.0, backward=False, causal=True) if type(op) is Sweep]
    assert [op.hbm_bytes for op in sweeps] == [3 * 3 * 2.0 * 2048 * 1024]  # partial, sum in, sum out, three times
    assert ring_step(flash(seq_len=8192, cp=4), e=2.0, backward=False, causal=True) == ops[1]


def test_ulysses_sees_the_whole_sequence_with_some_heads() -> None:
    (op,) = core(flash(seq_len=8192, cp=4, tp=2, cp_kind=ContextKind.A2A))
    assert (op.heads, op.queries, op.keys, op.causal) == (2, 8192, 8192, True)


def test_packed_and_windowed_attention_do_less() -> None:
    """Eight documents of 1024: 8 x 1024 x 1025 / 2 pairs. A window of 1024: every later token sees 1024 keys."""
    (packed,) = core(flash(seq_len=8192, documents=(1024,) * 8))
    assert packed.pairs == 8 * 1024 * 1025 / 2
    assert packed.counted == 8192 * 1024
    (band,) = core(flash(seq_len=8192, sliding_window=1024))
    assert band.pairs == 1024 * 1025 / 2 + 7168 * 1024
    assert band.counted == 8192 * 1024
    (uneven,) = core(flash(seq_len=8192, documents=(6144, 2048)))
    assert uneven.counted == 6144**2 + 2048**2
    (bidirectional,) = core(flash(seq_len=8192, documents=(6144, 2048)), causal=False)
    assert bidirectional.pairs == 6144**2 + 2048**2


def test_a_window_that_never_bites_changes_nothing() -> None:
    assert core(flash(seq_len=2048, sliding_window=4096)) == core(flash(seq_len=2048))


def test_documents_on_a_ring_are_cut_one_by_one() -> None:
    made = flash(seq_len=4096, documents=(3072, 1024), cp=4)
    assert [op.pairs for op in core(made)] == [(768**2 + 256**2) / 2] * 4


def test_documents_unbalance_a_gather() -> None:
    """Two ranks, chunks 0 and 3 or 1 and 2 of 1024 tokens; documents of 2048: the second chunks see twice and more."""
    (op,) = core(flash(seq_len=4096, documents=(2048, 2048), cp=2, cp_kind=ContextKind.ALL_GATHER))
    first, second = 1024 * 1025 / 2, 2048 * 2049 / 2 - 1024 * 1025 / 2
    assert op.pairs == first + second  # chunks 0 (first half) and 3 (second half); 1 and 2 the other way round
    (odd,) = core(flash(seq_len=4096, documents=(1024, 3072), cp=2, cp_kind=ContextKind.ALL_GATHER))
    assert odd.pairs == max(first + (3072 * 3073 - 2048 * 2049) / 2, first + (2048 * 2049 - 1024 * 1025) / 2)


@given(st.lists(st.integers(1, 50), min_size=2, max_size=5), st.integers(0, 60))
@settings(max_examples=30)
def test_keys_that_the_convention_counts(lengths: list[int], window: int) -> None:
    """Keys a query: its document (or the window), causality not halved; model FLOPs count them in every block."""
    made = flash(seq_len=sum(lengths), documents=tuple(lengths), sliding_window=window)
    squares = sum(n * (min(n, window) if window else n) for n in lengths)
    assert counted_keys(made) == pytest.approx(squares / sum(lengths))
    dense = flash(seq_len=sum(lengths))
    fewer = model_flops(dense) - model_flops(made)
    skipped = sum(lengths) - counted_keys(made)
    assert fewer == pytest.approx(3 * made.tokens * made.model.layers * 4 * skipped * GPT.hidden, abs=1e3)
