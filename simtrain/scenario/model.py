"""The shape of a network: it knows parameters and layer structure, and no times.

A model is a sequence of *blocks*, an embedding before and a head behind. Parameter counts follow the published
implementations (biases, norms, learned positions included) and are checked against the published totals.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    ROUTER = "router"
    """Head of a mixture of experts: norm, router, shared experts, permutation of the tokens."""
    EXPERTS = "experts"
    """Routed experts of a rank: grouped products and activation, unpermutation and residual."""
    HEAD = "head"
    """Final norm, vocabulary projection, loss."""
    LOGITS = "logits"
    """The output of the vocabulary projection, where tensor ranks gather it."""
    BOUNDARY = "boundary"
    """The activation (or its gradient) between two stages."""
    GRADIENT = "gradient"
    """Parameter gradients (``elements`` of them a tensor rank)."""
    PARAMETER = "parameter"
    """Parameters (``elements`` of them a tensor rank)."""
    SAVED = "saved"
    """What a block, or a run of blocks with one checkpoint, keeps for its backward."""
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
    """Width of one expert, routed or shared."""
    dense_layers: int = 0
    """Leading blocks with a dense MLP (DeepSeek: ``first_k_dense_replace``)."""
    moe_every: int = 1
    """Every k-th block is a mixture of experts, the last of each k (Llama 4: ``interleave_moe_layer_step``)."""
    route_machines: int = 0
    """A token goes to experts on at most this many machines (DeepSeek: ``topk_group``, device-limited); 0 = any."""
    q_lora_rank: int = 0
    """Multi-head latent attention: width of the compressed query; 0 = queries are not compressed."""
    kv_lora_rank: int = 0
    """Multi-head latent attention (DeepSeek-V2, section 2.1): width of the compressed key and value; 0 = none."""
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    sliding_window: int = 0
    """Attention window in tokens; 0 = none."""
    vocab_multiple: int = 128
    """The framework pads the vocabulary to a multiple of this times tp (Megatron: make-vocab-size-divisible-by)."""

    def block_kind(self, layer: int) -> BlockKind:
        """Kind of block number ``layer`` (0-based)."""
        if layer < self.encoder_layers:
            return BlockKind.ENCODER
        return BlockKind.CROSS if self.encoder_layers else BlockKind.DECODER

    def is_moe(self, layer: int) -> bool:
        """Whether the MLP of block ``layer`` is a mixture of experts."""
        return self.experts > 0 and layer >= self.dense_layers and (layer + 1) % self.moe_every == 0

    def mlp_parts(self, layer: int) -> tuple[Part, ...]:
        """Parts of a block behind its attention: a dense MLP, or router and experts."""
        return (Part.ROUTER, Part.EXPERTS) if self.is_moe(layer) else (Part.MLP,)

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim if self.kv_lora_rank else self.head_dim

    @property
    def value_head_dim(self) -> int:
        """Width of one head's value and output."""
        return self.v_head_dim if self.kv_lora_rank else self.head_dim

    def padded_vocab(self, tp: int) -> int:
        """Vocabulary padded to a multiple of ``vocab_multiple x tp``."""
        step = self.vocab_multiple * tp
        return -(-self.vocab // step) * step

    def part_parameters(self, part: Part, layer: int, tp: int) -> float:
        """Parameters that one tensor rank holds of one part.

        Matrices are divided by ``tp`` (key and value heads no further than one head a rank); norms, positions and the
        biases of row-parallel layers are replicated; the vocabulary is padded. A tied head holds its norm alone: the
        matrix belongs to the embedding, and a second copy on another pipeline stage is the caller's to add.

        Parameters
        ----------
        part
            EMBEDDING, ATTENTION, CROSS_ATTENTION, MLP, ROUTER, EXPERTS or HEAD.
        layer
            Block number; not read for EMBEDDING and HEAD.
        tp
            Tensor-parallel degree; for EXPERTS the ranks that share them, expert parallel times expert tensor parallel.

        Raises
        ------
        ValueError
            For any other part: it holds no parameters of its own.
        """
        match part:
            case Part.EMBEDDING:
                return self._embedding_parameters(tp)
            case Part.ATTENTION:
                return self._attention_parameters(tp) + self._relative_bias(layer) / tp
            case Part.CROSS_ATTENTION:
                return self._attention_parameters(tp) if self.block_kind(layer) is BlockKind.CROSS else 0.0
            case Part.MLP:
                return self._mlp_parameters(tp) + self._encoder_norm(layer)
            case Part.ROUTER:
                shared = self._gated_or_plain(self.experts_shared * self.expert_ffn_hidden) / tp
                return self.hidden * self.experts + shared + self._norm
            case Part.EXPERTS:
                return self.experts * self._gated_or_plain(self.expert_ffn_hidden) / tp
            case Part.HEAD:
                return self._head_parameters(tp)
        raise ValueError(f"{part} holds no parameters")

    @property
    def _norm(self) -> int:
        """Parameters of one normalisation: scale, and shift unless RMSNorm."""
        return self.hidden if self.rms_norm else 2 * self.hidden

    def _embedding_parameters(self, tp: int) -> float:
        norm = self._norm if self.family is Family.BERT else 0
        return self.padded_vocab(tp) / tp * self.hidden + (self.max_positions + self.token_types) * self.hidden + norm

    def _gated_or_plain(self, width: float) -> float:
        """Parameters of an expert of this width: two matrices, three if gated."""
        return self.hidden * width * (3 if self.gated_mlp else 2)

    def _latent_parameters(self, tp: int) -> float:
        """Multi-head latent attention (DeepSeek-V2, section 2.1): compressions on every rank, the rest shared."""
        query, rank = self.heads * self.qk_head_dim / tp, self.q_lora_rank
        queries = (self.hidden + 1) * rank + rank * query if rank else self.hidden * query
        keys = self.hidden * (self.kv_lora_rank + self.qk_rope_head_dim) + self.kv_lora_rank
        up = self.kv_lora_rank * self.heads * (self.qk_nope_head_dim + self.v_head_dim) / tp
        return queries + keys + up + self.heads * self.v_head_dim / tp * self.hidden + self._norm

    def _attention_parameters(self, tp: int) -> float:
        if self.kv_lora_rank:
            return self._latent_parameters(tp)
        query, key = self.heads * self.head_dim / tp, max(1.0, self.kv_heads / tp) * self.head_dim
        bias = (query + 2 * key) * (self.bias or self.qkv_bias) + self.hidden * self.bias
        return self.hidden * (2 * query + 2 * key) + bias + self._norm

    def _mlp_parameters(self, tp: int) -> float:
        up = self.ffn_hidden / tp * (2 if self.gated_mlp else 1)
        return self.hidden * (up + self.ffn_hidden / tp) + (up + self.hidden) * self.bias + self._norm

    def _head_parameters(self, tp: int) -> float:
        vocab = self.padded_vocab(tp) / tp
        matrix = 0.0 if self.tied_embeddings else vocab * self.hidden
        if self.family is Family.BERT:
            # Devlin 2019: pooler and masked-language transform (h x h with bias), norm, vocabulary bias, next sentence.
            return matrix + 2 * (self.hidden + 1) * self.hidden + self._norm + vocab + 2 * self.hidden + 2
        return matrix + self._norm

    def _relative_bias(self, layer: int) -> int:
        """T5 keeps one table of 32 buckets by head in the first encoder and the first decoder block (Raffel 2020)."""
        return 32 * self.heads if self.family is Family.T5 and layer in (0, self.encoder_layers) else 0

    def _encoder_norm(self, layer: int) -> int:
        """The norm behind the last T5 encoder block, counted with that block."""
        return self._norm if self.family is Family.T5 and layer == self.encoder_layers - 1 else 0

    def parameters(self) -> int:
        """Parameters of the whole model as published (vocabulary not padded, tied embeddings counted once)."""
        plain = replace(self, vocab_multiple=1)
        inner = (Part.ATTENTION, Part.CROSS_ATTENTION)
        blocks = sum(
            plain.part_parameters(part, layer, 1)
            for layer in range(self.layers)
            for part in (*inner, *self.mlp_parts(layer))
        )
        return round(blocks + plain.part_parameters(Part.EMBEDDING, -1, 1) + plain.part_parameters(Part.HEAD, -1, 1))

    def active_parameters(self) -> int:
        """Parameters that one token passes through: those of the experts it is routed to instead of all."""
        idle = (self.experts - self.experts_per_token) * self._gated_or_plain(self.expert_ffn_hidden)
        return self.parameters() - round(idle) * sum(self.is_moe(layer) for layer in range(self.layers))
