"""``parallelism.cp_kind``, ``cp_inner`` and ``training.packed_length``: their defaults, and what cannot be."""

from __future__ import annotations

from collections.abc import Sequence

from simtrain.scenario.layout import Layout
from simtrain.scenario.model import Model
from simtrain.scenario.problems import Problems, choices_text
from simtrain.scenario.scenario import Attention, ContextKind, Parallelism, Stack, Training
from simtrain.scenario.schema import ParallelismSpec

ALIASES = {"ring": "p2p", "allgather": "all_gather", "ulysses": "a2a"}
"""Other names of the kinds: of the papers, and of torch's ``context_parallel`` (``set_rotate_method``)."""
MAX_DOCUMENTS = 10_000
"""Of a sequence."""
KIND, INNER, PACKED = "parallelism.cp_kind", "parallelism.cp_inner", "training.packed_length"


def kind(said: str | None, stack: Stack | None, problems: Problems) -> ContextKind:
    """The kind of context parallelism: as said, else a gather on FSDP stacks (torch's default) and a ring on others.

    Notes a problem for an unknown name.
    """
    if said is None:
        return ContextKind.ALL_GATHER if stack and stack.fp32_shards else ContextKind.P2P
    name = ALIASES.get(said, said)
    if name not in list(ContextKind):
        names = [one.value for one in ContextKind]
        problems.add(KIND, f"unknown kind of context parallelism {said!r}{choices_text(said, names)}")
        return ContextKind.P2P
    return ContextKind(name)


def inner(spec: ParallelismSpec, how: ContextKind, layout: Layout, model: Model, problems: Problems) -> int:
    """Ranks of the inner all-to-all of ``a2a+p2p``: as said, else the most that divide cp and the heads; else 1."""
    if how is not ContextKind.A2A_P2P:
        if spec.cp_inner not in (None, 1):
            problems.add(INNER, f"cp_inner belongs to cp_kind a2a+p2p, not to {how}")
        return 1
    proper = [d for d in range(2, layout.cp) if layout.cp % d == 0]
    fits = [d for d in proper if _shares(model, layout.tp, d)]
    if spec.cp_inner is not None and spec.cp_inner not in proper:
        choices = ", ".join(map(str, proper)) or "another cp_kind: cp has no divisor between 1 and itself"
        problems.add(INNER, f"{spec.cp_inner} does not split cp {layout.cp} in two levels; choose from {choices}")
    elif not fits:
        problems.add(KIND, f"no part of cp {layout.cp} divides the heads for the all-to-all of a2a+p2p; use p2p")
    return spec.cp_inner or (fits[-1] if fits else 1)


def documents(said: int | list[int] | None, seq_len: int, problems: Problems) -> tuple[int, ...]:
    """Lengths of the documents of a sequence; empty = one document.

    A mean length stands for documents of that length, and a shorter one at the end.
    """
    if said is None:
        return ()
    if isinstance(said, int):
        if seq_len > MAX_DOCUMENTS * said:
            problems.add(PACKED, f"more than {MAX_DOCUMENTS:,} documents of {said} tokens in a sequence of {seq_len}")
            return ()
        whole, rest = divmod(seq_len, said)
        lengths = (said,) * whole + ((rest,) if rest else ())
    else:
        lengths = tuple(said)
        if sum(lengths) != seq_len:
            problems.add(PACKED, f"adds up to {sum(lengths)} tokens, but seq_len is {seq_len} (padding is a document)")
    return lengths if len(lengths) > 1 else ()


def check(model: Model, training: Training, parallelism: Parallelism, stack: Stack, problems: Problems) -> None:
    """What cannot be split over context ranks, and what no framework runs."""
    layout, how, seq_len = parallelism.layout, parallelism.cp_kind, training.seq_len
    cp, tp, ring = layout.cp, layout.tp, parallelism.sequence_split
    if cp == 1:
        return
    if training.attention is Attention.UNFUSED:
        problems.add(
            "training.attention", f"context parallelism (cp {cp}) needs a fused kernel; choose flash2 or cudnn"
        )
    if model.encoder_layers not in (0, model.layers):
        problems.add("parallelism.cp", "cross-attention is not context-parallel (Megatron refuses it for T5); use cp 1")
    chunks = cp if how is ContextKind.A2A else 2 * cp
    if seq_len % chunks:
        problems.add(
            "parallelism.cp",
            f"seq_len {seq_len} cannot be cut into {chunks} equal chunks ({'cp' if chunks == cp else '2 x cp'});"
            f" e.g. {_up(seq_len, chunks)} can",
        )
    elif parallelism.sequence_parallel and seq_len // cp % tp:
        problems.add(
            "parallelism.sequence_parallel", f"seq_len {seq_len} / cp {cp} cannot be split over {tp} tensor ranks"
        )
    split = parallelism.head_split
    if split > 1 and not _shares(model, tp, split):
        problems.add(
            KIND,
            f"{how} shares {model.heads} heads and {model.kv_heads} kv_heads out over tp {tp} x {split} context"
            " ranks, which must divide both (Transformer Engine); choose p2p or all_gather, or a smaller cp",
        )
    latent = model.qk_head_dim != model.value_head_dim
    if latent and not stack.fp32_shards and how in (ContextKind.A2A, ContextKind.ALL_GATHER):
        problems.add(KIND, f"no {how} of latent attention (Transformer Engine refuses it); choose p2p or a2a+p2p")
    if how is not ContextKind.ALL_GATHER and ring > 1:
        if 0 < model.sliding_window < seq_len:
            problems.add(KIND, f"no ring with a sliding window (Transformer Engine refuses {how}); all_gather or a2a")
        _ring_documents(training.documents, ring, problems)


def _ring_documents(lengths: Sequence[int], ring: int, problems: Problems) -> None:
    """Every packed document is cut into its own 2 x ring chunks (Transformer Engine, THD format)."""
    odd = next((n for n in lengths if n % (2 * ring)), None)
    if odd:
        problems.add(
            PACKED,
            f"a ring of {ring} cuts every document into {2 * ring} chunks: {odd} tokens do not divide;"
            f" pad to {_up(odd, 2 * ring)}, or use cp_kind all_gather or a2a",
        )


def _shares(model: Model, tp: int, split: int) -> bool:
    return model.heads % (tp * split) == 0 and model.kv_heads % (tp * split) == 0


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
