"""Fused attention under masks and context parallelism: which query-key pairs each rank computes, in which kernels.

A causal token sees itself and what came before it in its own document, no further back than the sliding window. Kernels
skip blocks that are masked in full, so the work is the number of visible pairs. Ranks of a ring or of a gather own
chunk r and 2 n - 1 - r of 2 n equal chunks, which makes a causal mask's work equal on all (zig-zag: Megatron and torch;
same idea as the striped order of Brandon 2023, section 3): the first kernel of a ring is causal over the rank's own
chunks, each later one sees half of the queries or half of the keys, without mask (Transformer Engine,
``context_parallel.py``). On a ring packed documents are split chunk by chunk each; a gather splits the whole sequence
(Llama 3, section 3.3.2), so that its ranks differ and the slowest sets the pace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from simtrain.cost.ops import FusedAttention, Op, Sweep
from simtrain.scenario.model import Model
from simtrain.scenario.scenario import ContextKind, Scenario


def causal_pairs(length: int, window: int = 0) -> int:
    """Query-key pairs that a causal mask with a sliding window lets through.

    L (L + 1) / 2 - (L - w)(L - w + 1) / 2: token i sees min(i + 1, w) keys, itself included.

    Parameters
    ----------
    length
        Tokens of one document.
    window
        Keys that a token sees at most; 0 = all.

    >>> causal_pairs(4), causal_pairs(4, 2)
    (10, 7)
    """
    hidden = max(0, length - window) if window else 0
    return (length * (length + 1) - hidden * (hidden + 1)) // 2


def chunk_pairs(start: int, stop: int, lengths: Sequence[int], window: int = 0) -> int:
    """Visible pairs whose query lies in positions ``start`` to ``stop`` (exclusive) of a sequence of documents."""
    total = 0
    for end, length in zip(accumulate(lengths), lengths, strict=True):
        first = end - length
        low, high = max(start, first) - first, min(stop, end) - first
        if low < high:
            total += causal_pairs(high, window) - causal_pairs(low, window)
    return total


def balanced_pairs(seq_len: int, ranks: int, lengths: Sequence[int], window: int = 0) -> int:
    """Visible pairs of the busiest of ``ranks`` that own chunks r and 2 n - 1 - r of the whole sequence."""
    edges = [seq_len * i // (2 * ranks) for i in range(2 * ranks + 1)]
    chunks = [chunk_pairs(a, b, lengths, window) for a, b in pairwise(edges)]
    return max(chunks[r] + chunks[-1 - r] for r in range(ranks))


def counted_keys(scenario: Scenario) -> float:
    """Keys a query by the convention of model FLOPs: its whole document, or the window; causality not halved."""
    training, window = scenario.training, scenario.model.sliding_window
    if not training.documents:
        return float(min(training.seq_len, window) if window else training.seq_len)
    return sum(n * (min(n, window) if window else n) for n in training.documents) / training.seq_len


def kernels(scenario: Scenario, *, e: float, backward: bool, causal: bool) -> Iterator[Op]:
    """Kernels of one fused self-attention core on one rank, forward or backward, for one microbatch.

    Parameters
    ----------
    scenario
        What runs: documents, window, kind of context parallelism.
    e
        Bytes of an element.
    backward
        The backward reads q, k, v, o, do and writes dq (accumulated in fp32), dk, dv: three times the bytes.
    causal
        False: every token sees its whole document.
    """
    training, parallelism = scenario.training, scenario.parallelism
    ring = parallelism.sequence_split
    if ring > 1 and parallelism.cp_kind is not ContextKind.ALL_GATHER:
        yield from _ring(scenario, e=e, backward=backward, causal=causal)
        return
    heads, kv = _heads(scenario)
    queries, keys, window = training.seq_len // ring, counted_keys(scenario), scenario.model.sliding_window
    narrow = bool(window) and window < max(training.lengths)
    pairs = None
    if training.documents or narrow:
        pairs = queries * keys
        if causal:
            pairs = float(balanced_pairs(training.seq_len, ring, training.lengths, window))
    width = _width(scenario.model)
    moved = 2 * (heads * queries + kv * training.seq_len) * width * e * (3.0 if backward else 1.0)
    yield FusedAttention(
        backward,
        heads,
        queries,
        max(1, round(keys)),
        width,
        causal and not narrow,  # a band has no triangle: its rate is that of full attention over the window
        moved,
        pairs,
        None if pairs is None else queries * keys,
    )


def ring_step(scenario: Scenario, *, e: float, backward: bool, causal: bool, first: bool = False) -> FusedAttention:
    """Kernel of one step of a ring: causal over the rank's own tokens first, then half a square."""
    training, ring = scenario.training, scenario.parallelism.sequence_split
    heads, kv = _heads(scenario)
    own = training.seq_len // ring
    triangle = causal and first
    half = 0.5 if causal else 1.0
    keys = counted_keys(scenario) / ring * (1.0 if triangle else half)
    read = own * (1.0 if triangle else half)
    pairs = half * sum((length / ring) ** 2 for length in training.lengths)
    width = _width(scenario.model)
    moved = 2 * (heads * own + kv * read) * width * e * (3.0 if backward else 1.0)
    counted = own * counted_keys(scenario) / ring
    return FusedAttention(backward, heads, own, max(1, round(keys)), width, triangle, moved, pairs, counted)


def _ring(scenario: Scenario, *, e: float, backward: bool, causal: bool) -> Iterator[Op]:
    """All steps of a ring, and the sweeps that add each partial result to the sum: two reads and a write."""
    steps = scenario.parallelism.sequence_split
    yield ring_step(scenario, e=e, backward=backward, causal=causal, first=True)
    for _ in range(steps - 1):
        yield ring_step(scenario, e=e, backward=backward, causal=causal)
    (heads, kv), model = _heads(scenario), scenario.model
    gradients = heads * model.qk_head_dim + kv * (model.qk_head_dim + model.value_head_dim)
    elements = (gradients if backward else heads * model.value_head_dim) * (scenario.training.seq_len // steps)
    yield Sweep(3 * e * elements * (steps - 1), (2.0 if backward else 1.0) * (steps - 1))


def _width(model: Model) -> int:
    """Mean width of a head's two products: latent attention scores over one width and sums values over another."""
    return (model.qk_head_dim + model.value_head_dim) // 2


def _heads(scenario: Scenario) -> tuple[int, int]:
    """(query heads, key-value heads) of one rank's core, times sequences of a microbatch."""
    model, split = scenario.model, scenario.parallelism.layout.tp * scenario.parallelism.head_split
    batch = scenario.training.micro_batch
    return batch * max(1, model.heads // split), batch * max(1, model.kv_heads // split)
