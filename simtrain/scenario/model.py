"""The shape of a network: it knows parameters and layer structure, and no times.

A model is a sequence of *blocks*, an embedding before and a head behind. Parameter counts follow the published
implementations (biases, norms, learned positions included) and are checked against the published totals.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Family(StrEnum):
    """Architecture family; it decides norms, biases, positions and attention mask."""

    GPT = "gpt"
    LLAMA = "llama"
    BERT = "bert"
    T5 = "t5"
    MOE = "moe"


class BlockKind(StrEnum):
    """What one transformer block is made of."""

    DECODER = "decoder"
    """Causal self-attention and MLP."""
    ENCODER = "encoder"
    """Bidirectional self-attention and MLP."""
    CROSS = "cross"
    """Causal self-attention, cross-attention to the encoder, MLP (T5 decoder)."""


class Part(StrEnum):
    """Which part of the model a piece belongs to."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    """Norm, QKV projection, attention core, output projection, dropout, residual."""
    CORE = "core"
    """The attention core alone: scores, softmax, dropout, weighted sum (what selective recomputation repeats)."""
    CROSS_ATTENTION = "cross_attention"
    MLP = "mlp"
    """Norm, up (and gate) projection, activation, down projection, dropout, residual."""
    HEAD = "head"
    """Final norm, vocabulary projection, loss."""
    BOUNDARY = "boundary"
    """The activation (or its gradient) between two stages."""
    GRADIENT = "gradient"
    """Parameter gradients (``elements`` of them a tensor rank)."""
    PARAMETER = "parameter"
    """Parameters (``elements`` of them a tensor rank)."""
    NORM = "norm"
    """The scalar of gradient clipping."""


@dataclass(frozen=True, slots=True)
class Model:
    """A transformer. Sizes are counts of elements."""

    name: str
    family: Family
    layers: int
    """Number of blocks in all (encoder and decoder together for T5)."""
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_hidden: int
    gated_mlp: bool
    vocab: int
    """Vocabulary as published, before padding."""
    tied_embeddings: bool
    max_positions: int
    """Learned position embeddings; 0 for rotary or relative positions."""
    bias: bool
    """Linear layers carry a bias."""
    rms_norm: bool
    """RMSNorm (no bias, no mean) instead of LayerNorm."""
    dropout: bool
    """Residual and attention dropout are on in training."""
    qkv_bias: bool = False
    """Bias on the query, key and value projections alone (Qwen2), where ``bias`` is false."""
    encoder_layers: int = 0
    """Leading encoder blocks (T5, BERT); the rest are decoder (or cross) blocks."""
    token_types: int = 0
    """Segment embeddings (BERT: 2)."""
    experts: int = 0
    experts_per_token: int = 0
    experts_shared: int = 0
    expert_ffn_hidden: int = 0
    sliding_window: int = 0
    """Attention window in tokens; 0 = none."""
    vocab_multiple: int = 128
    """The framework pads the vocabulary to a multiple of this times tp (Megatron: make-vocab-size-divisible-by)."""

    def block_kind(self, layer: int) -> BlockKind:
        """Kind of block number ``layer`` (0-based)."""
        if layer < self.encoder_layers:
            return BlockKind.ENCODER
        return BlockKind.CROSS if self.encoder_layers else BlockKind.DECODER

    def padded_vocab(self, tp: int) -> int:
        """Vocabulary padded to a multiple of ``vocab_multiple x tp``."""
        step = self.vocab_multiple * tp
        return -(-self.vocab // step) * step

    def part_parameters(self, part: Part, layer: int, tp: int) -> float:
        """Parameters that one tensor rank holds of one part.

        ``part`` is EMBEDDING, ATTENTION, CROSS_ATTENTION, MLP or HEAD. Matrices are divided
        by ``tp``; norms and the biases of row-parallel layers are replicated; the vocabulary is padded.
        """
        raise NotImplementedError

    def parameters(self) -> int:
        """Parameters of the whole model as published (vocabulary not padded, tied embeddings counted once)."""
        raise NotImplementedError
