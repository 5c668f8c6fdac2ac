"""What the backward pass needs of the forward: bytes saved by each sub-layer of one microbatch, on one tensor rank.

The rule is that of automatic differentiation: a tensor counts once, at its own element size, if some operation's
backward reads it. For 16-bit GPT with dropout and fused kernels this gives the equations of Korthikanti 2022, "Reducing
Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), to the byte: attention 11 s b h + 5 a s^2 b,
MLP 19 s b h, the two layer norms 4 s b h (section 4.1, eq. 1). Statistics of norms (8 bytes a token) are left out, as
there.
"""

from __future__ import annotations

from dataclasses import dataclass

from simtrain.scenario.hardware import Precision
from simtrain.scenario.model import Family
from simtrain.scenario.scenario import Attention, Scenario, Zero

FP32 = 4.0
"""byte; softmax and loss are computed in fp32 whatever the matrix precision."""
MASK = 1.0
"""byte an element of a dropout mask."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Extents of one microbatch on one tensor rank (elements), and the choices that decide what is saved."""

    tokens: float
    """s b (of one context rank)."""
    rows: float
    """Tokens of a full-width tensor that a rank keeps: s b / tp with sequence parallelism, else s b."""
    hidden: float
    query: float
    """Width of Q, and of the attention output: a d / tp."""
    key: float
    """Width of K and of V: kv_heads d / tp, one head at least."""
    scores: float
    """Elements of all s x s matrices: a s^2 b / tp."""
    statistics: float
    """Rows of those matrices: a s b / tp (log-sum-exp of fused attention)."""
    ffn: float
    vocab: float
    """Columns of the logits that the loss works on: the padded vocabulary / tp, or all of it."""
    element: float
    """byte of an activation."""
    residual: float
    """byte of an element of the residual stream (4 under autocast)."""
    dropout: bool
    gated: bool
    fused_attention: bool
    fused_softmax: bool
    fused_elementwise: bool
    fused_norm: bool
    fused_loss: bool
    """The loss is compiled with the whole graph: it and its gradient follow from the logits alone."""
    in_place_loss: bool
    """Megatron's vocabulary-parallel loss, which overwrites one fp32 copy of the logits."""
    gathered_input: bool
    """Sequence parallelism: inputs of column-parallel products are gathered while they are needed."""
    head_transform: bool
    """BERT: dense, GeLU and norm before the vocabulary projection."""


def element_bytes(precision: Precision) -> float:
    """Bytes of a stored activation or compute-precision weight. fp8 products keep 16-bit tensors between them."""
    return 4.0 if precision in (Precision.FP32, Precision.TF32) else 2.0


def is_autocast(scenario: Scenario) -> bool:
    """Whether fp32 weights are cast op by op (torch autocast), which leaves the residual stream and norms in fp32."""
    shards, zero = scenario.stack.fp32_shards, scenario.parallelism.zero
    return shards and zero is not Zero.PARAMETERS and element_bytes(scenario.training.precision) < FP32


def sizes(scenario: Scenario) -> Sizes:
    """Return the extents of one microbatch of ``scenario`` on one tensor rank."""
    model, training, stack, layout = scenario.model, scenario.training, scenario.stack, scenario.parallelism.layout
    tokens = training.micro_batch * training.seq_len / layout.cp
    heads = model.heads / layout.tp
    sequence = scenario.parallelism.sequence_parallel and layout.tp > 1
    fused = training.attention is not Attention.UNFUSED
    key_heads = max(1.0, model.kv_heads / layout.tp) if fused else heads
    element = element_bytes(training.precision)
    return Sizes(
        tokens=tokens,
        rows=tokens / layout.tp if sequence else tokens,
        hidden=model.hidden,
        query=heads * model.head_dim,
        key=key_heads * model.head_dim,
        scores=heads * tokens * training.seq_len,
        statistics=heads * tokens,
        ffn=model.ffn_hidden / layout.tp,
        vocab=model.padded_vocab(layout.tp) / (layout.tp if scenario.parallelism.vocab_parallel_loss else 1),
        element=element,
        residual=FP32 if is_autocast(scenario) else element,
        dropout=model.dropout,
        gated=model.gated_mlp,
        fused_attention=fused,
        fused_softmax=stack.fused_softmax or stack.compiled,
        fused_elementwise=stack.fused_elementwise or stack.compiled,
        fused_norm=stack.fused_norm or stack.compiled or not model.rms_norm,
        fused_loss=stack.compiled and stack.host_seconds_per_op == 0,
        in_place_loss=stack.fused_elementwise,
        gathered_input=sequence,
        head_transform=model.family is Family.BERT,
    )


def boundary(z: Sizes) -> float:
    """Input of a block, the checkpoint of full recomputation: 2 s b h bytes (Korthikanti 2022, section 5)."""
    return z.residual * z.rows * z.hidden


def dropout_mask(z: Sizes) -> float:
    """Mask of a residual (or embedding) dropout: s b h bytes (Korthikanti 2022, section 4.1)."""
    return MASK * z.rows * z.hidden if z.dropout else 0.0


def norm(z: Sizes) -> float:
    """Input of a norm: 2 s b h bytes (Korthikanti 2022, section 4.1).

    An RMS norm written out in framework operations saves an fp32 copy instead, and the normalised value.
    """
    return (z.residual if z.fused_norm else FP32 + z.element) * z.rows * z.hidden


def core(z: Sizes) -> float:
    """Attention core, what selective recomputation drops: 5 a s^2 b bytes (Korthikanti 2022, section 4.1).

    That is the softmax output (2), its dropout mask (1) and dropout output (2). Without dropout the first is the last.
    An unfused softmax works in fp32 and its result is cast. Fused attention keeps the log-sum-exp of each row alone
    (Dao 2022, algorithm 2).
    """
    if z.fused_attention:
        return FP32 * z.statistics
    softmax = z.element if z.fused_softmax else FP32
    same = not z.dropout and softmax == z.element
    return z.scores * (softmax + (MASK if z.dropout else 0.0) + (0.0 if same else z.element))


def attention(z: Sizes) -> float:
    """Attention sub-layer: norm input, QKV input, Q, K, V, core, projection input, mask: 13 s b h + 5 a s^2 b bytes."""
    qkv = z.element * z.tokens * (z.query + 2 * z.key)
    inputs = z.element * (z.rows * z.hidden + z.tokens * z.query)
    return norm(z) + inputs + qkv + core(z) + dropout_mask(z)


def mlp(z: Sizes) -> float:
    """MLP sub-layer: norm input, up input, GeLU input, down input, mask: 21 s b h bytes.

    Gated (SwiGLU): gate, up and their product; unfused also the activated gate.
    """
    widths = 2 + (z.gated and 1) + (z.gated and not z.fused_elementwise and 1)
    return norm(z) + z.element * (z.rows * z.hidden + widths * z.tokens * z.ffn) + dropout_mask(z)


def embedding(z: Sizes) -> float:
    """Embedding: its dropout mask (Korthikanti 2022, section 4.3); BERT also normalises. Its output is block 0's."""
    return dropout_mask(z) + (norm(z) if z.head_transform else 0.0)


def head(z: Sizes) -> float:
    """Final norm input and vocabulary projection input: 4 s b h bytes (Korthikanti 2022, section 4.3)."""
    transform = 2 * z.element * z.rows * z.hidden if z.head_transform else 0.0
    return norm(z) + z.element * z.rows * z.hidden + transform


def logits(z: Sizes) -> float:
    """What the loss keeps: 4 s b v bytes of fp32 softmax (Korthikanti 2022, section 4.3), or compiled the logits."""
    return (z.element if z.fused_loss else FP32) * z.tokens * z.vocab


def logits_transient(z: Sizes, *, backward: bool) -> float:
    """Loss tensors beside the kept ones.

    Megatron's vocabulary-parallel loss works in place on one fp32 copy, so only the 16-bit logits (or their gradient)
    come on top. Framework operations hold the logits and their fp32 copy in forward; in backward the fp32 gradients of
    the log-softmax's output and input (measured by MemTracker: twice s b v x 4 bytes at the peak).
    """
    cells, low = z.tokens * z.vocab, z.element < FP32
    if z.fused_loss:
        return z.element * cells if backward else 0.0
    if z.in_place_loss:
        return z.element * cells if low else 0.0
    if backward:
        return 2 * FP32 * cells
    return cells * (z.element + (FP32 if low else 0.0))


def attention_gradients(z: Sizes) -> float:
    """Output gradients of an attention's products: of the sub-layer's output, of Q, K and V."""
    return z.residual * z.rows * z.hidden + z.element * z.tokens * (z.query + 2 * z.key)


def attention_transient(z: Sizes) -> float:
    """What an attention backward holds beside them: gradients of projection input, of scores and probabilities."""
    cells = 0.0 if z.fused_attention else z.scores * (z.element + (z.element if z.fused_softmax else FP32))
    return z.element * z.tokens * z.query + cells + gathered(z, copies=2)


def mlp_gradients(z: Sizes) -> float:
    """Output gradients of an MLP's products: of the sub-layer's output and of the up (and gate) projection."""
    return z.residual * z.rows * z.hidden + z.element * z.tokens * (2 if z.gated else 1) * z.ffn


def mlp_transient(z: Sizes) -> float:
    """What an MLP backward holds beside them: the gradient of the down projection's input."""
    return z.element * z.tokens * z.ffn + gathered(z, copies=2)


def head_gradients(z: Sizes) -> float:
    """Output gradient of the vocabulary projection; in full precision and fused it takes the place of the softmax."""
    return min(z.element * z.tokens * z.vocab, logits_transient(z, backward=True))


def attention_inputs(z: Sizes) -> float:
    """Inputs of an attention's products: of QKV and of the output projection, 4 s b h bytes."""
    return z.element * (z.rows * z.hidden + z.tokens * z.query)


def mlp_inputs(z: Sizes) -> float:
    """Inputs of an MLP's products: of the up (and gate) and of the down projection, 10 s b h bytes."""
    return z.element * (z.rows * z.hidden + z.tokens * z.ffn)


def head_inputs(z: Sizes) -> float:
    """Input of the vocabulary projection; BERT's transform has one too."""
    return (2 if z.head_transform else 1) * z.element * z.rows * z.hidden


def gathered(z: Sizes, *, copies: int = 1) -> float:
    """Full-sequence copies that sequence parallelism makes for a product: input, in backward also output gradient."""
    return copies * z.element * z.tokens * z.hidden if z.gathered_input else 0.0
