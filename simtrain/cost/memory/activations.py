"""What the backward pass needs of the forward: bytes saved by each sub-layer of one microbatch, on one tensor rank.

The rule is that of automatic differentiation: a tensor counts once, at its own element size, if some operation's
backward reads it. For 16-bit GPT with dropout and fused kernels this gives the equations of Korthikanti 2022, "Reducing
Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), to the byte: attention 11 s b h + 5 a s^2 b,
MLP 19 s b h, the two layer norms 4 s b h (section 4.1, eq. 1). Statistics of norms (8 bytes a token) are left out, as
there.
"""

from __future__ import annotations

from dataclasses import dataclass

from simtrain.cost import experts
from simtrain.scenario.hardware import Precision
from simtrain.scenario.model import Family, Part
from simtrain.scenario.scenario import Attention, Loss, Scenario, Zero

FP32 = 4.0
"""byte; softmax and loss are computed in fp32 whatever the matrix precision."""
MASK = 1.0
"""byte an element of a dropout mask."""
CHUNKS = 8
"""Pieces of a chunked loss (torchtune ``CEWithChunkedOutputLoss``, num_output_chunks)."""


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
    """Width of K and of V as attention reads them: kv_heads d / tp, one head at least; all heads where repeated."""
    projected: float
    """Width of K and of V as projected."""
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
    loss: Loss
    logit: float
    """byte of an element of the logits as the model returns them."""
    separate_qkv: bool
    """Queries, keys and values are three products (Llama), not one."""
    gathered_input: bool
    """Sequence parallelism: inputs of column-parallel products are gathered while they are needed."""
    head_transform: bool
    """BERT: dense, GeLU and norm before the vocabulary projection."""
    value: float = 0.0
    """Width of V and of the attention output where latent attention sets them apart from those of Q and K; else 0."""
    compressed: float = 0.0
    """Widths of latent attention's compressed query, and of its key and value, together."""
    routed: float = 0.0
    """Rows that a rank sends to experts: tokens x experts a token."""
    experts: float = 0.0
    """Experts of a layer: the width of the router's logits."""
    expert_rows: float = 0.0
    """Rows through the experts of the most loaded rank."""
    expert_ffn: float = 0.0
    """Width of one expert on one rank."""
    shared_ffn: float = 0.0
    """Width of the shared experts on one tensor rank."""


def element_bytes(precision: Precision) -> float:
    """Bytes of a stored activation or compute-precision weight. fp8 products keep 16-bit tensors between them."""
    return 4.0 if precision in (Precision.FP32, Precision.TF32) else 2.0


def is_autocast(scenario: Scenario) -> bool:
    """Whether fp32 weights are cast op by op (torch autocast), which leaves the residual stream and norms in fp32."""
    shards, zero = scenario.stack.fp32_shards, scenario.parallelism.zero
    shards = shards and not scenario.stack.low_precision
    return shards and zero is not Zero.PARAMETERS and element_bytes(scenario.training.precision) < FP32


def sizes(scenario: Scenario) -> Sizes:
    """Return the extents of one microbatch of ``scenario`` on one tensor rank."""
    model, training, stack, layout = scenario.model, scenario.training, scenario.stack, scenario.parallelism.layout
    tokens = training.micro_batch * training.seq_len / layout.cp
    heads = model.heads / layout.tp
    sequence = scenario.parallelism.sequence_parallel and layout.tp > 1
    fused = training.attention is not Attention.UNFUSED
    kv_heads = max(1.0, model.kv_heads / layout.tp)
    key_heads = kv_heads if fused and not stack.repeats_kv else heads
    widths = {"query": heads * model.head_dim, "key": key_heads * model.head_dim} | _latent(scenario)
    element = element_bytes(training.precision)
    return Sizes(
        tokens=tokens,
        rows=tokens / layout.tp if sequence else tokens,
        hidden=model.hidden,
        projected=kv_heads * model.head_dim,
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
        loss=stack.loss,
        logit=FP32 if stack.fp32_logits else element,
        separate_qkv=model.gated_mlp,
        gathered_input=sequence,
        head_transform=model.family is Family.BERT,
        **widths,
        **_mixture(scenario),
    )


def _latent(scenario: Scenario) -> dict[str, float]:
    model, heads = scenario.model, scenario.model.heads / scenario.parallelism.layout.tp
    if not model.kv_lora_rank:
        return {}
    compressed = model.q_lora_rank + model.kv_lora_rank
    query = heads * model.qk_head_dim
    return {"query": query, "key": query, "value": heads * model.v_head_dim, "compressed": compressed}


def _mixture(scenario: Scenario) -> dict[str, float]:
    model, layout = scenario.model, scenario.parallelism.layout
    if not model.experts:
        return {}
    return {
        "routed": experts.local_tokens(scenario) * model.experts_per_token,
        "experts": model.experts,
        "expert_rows": experts.computed_rows(scenario),
        "expert_ffn": model.expert_ffn_hidden / layout.expert_tensor,
        "shared_ffn": model.experts_shared * model.expert_ffn_hidden / layout.tp,
    }


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
    value, output = (z.value, z.value) if z.value else (z.key, z.query)
    qkv = z.element * z.tokens * (z.query + z.key + value)
    inputs = z.element * (z.rows * z.hidden + z.tokens * output)
    return norm(z) + inputs + qkv + core(z) + dropout_mask(z) + compression(z)


def compression(z: Sizes) -> float:
    """Latent attention: compressed query, key and value before and behind their norms (DeepSeek-V2, section 2.1)."""
    return 2 * z.element * z.rows * z.compressed


def router(z: Sizes) -> float:
    """Router and shared experts: norm input, router input, fp32 logits and scores, routes; shared experts as an MLP.

    The probability and the place of each routed row are 4 + 8 bytes; the map from tokens to experts is one byte a pair
    (Megatron core ``moe_utils.py``).
    """
    scores = z.rows * z.experts * (2 * FP32 + MASK) + 12.0 * z.routed
    widths = 2 + (z.gated and 1) + (z.gated and not z.fused_elementwise and 1)
    return norm(z) + z.element * z.rows * z.hidden + scores + z.element * widths * z.tokens * z.shared_ffn


def routed_experts(z: Sizes) -> float:
    """Routed experts: dispatched rows, expert activations, rows as they come back (read for the probabilities)."""
    widths = 2 + (z.gated and 1) + (z.gated and not z.fused_elementwise and 1)
    through = z.expert_rows * (z.hidden + widths * z.expert_ffn)
    return z.element * (through + z.routed * z.hidden) + dropout_mask(z)


def router_gradients(z: Sizes) -> float:
    """Output gradients of the products of router and shared experts."""
    shared = (2 if z.gated else 1) * z.tokens * z.shared_ffn
    return z.residual * z.rows * z.hidden + z.element * (z.rows * z.experts + shared)


def router_transient(z: Sizes) -> float:
    """Gradient of the permuted rows that the router's backward sums, of the scores, of the shared down input."""
    copies = gathered(z, copies=2) if z.shared_ffn else 0.0
    return z.element * z.routed * z.hidden + FP32 * z.rows * z.experts + z.element * z.tokens * z.shared_ffn + copies


def expert_gradients(z: Sizes) -> float:
    """Output gradients of the experts' products: of the rows that they return and of the up (and gate) projection."""
    return z.element * z.expert_rows * (z.hidden + (2 if z.gated else 1) * z.expert_ffn)


def expert_transient(z: Sizes) -> float:
    """Beside them: the gradient of the down projection's input, and that of the rows on their way."""
    return z.element * (z.expert_rows * z.expert_ffn + z.routed * z.hidden)


def dispatched(z: Sizes) -> float:
    """Rows on their way to the experts: what is sent beside what is received."""
    return z.element * z.routed * z.hidden


def mlp(z: Sizes) -> float:
    """MLP sub-layer: norm input, up input, GeLU input, down input, mask: 21 s b h bytes.

    Gated (SwiGLU): gate, up and their product; unfused also the activated gate.
    """
    widths = 2 + (z.gated and 1) + (z.gated and not z.fused_elementwise and 1)
    return norm(z) + z.element * (z.rows * z.hidden + widths * z.tokens * z.ffn) + dropout_mask(z)


def by_operator(z: Sizes, part: Part) -> float:
    """What torch's operator-level selective checkpointing keeps of a sub-layer beside the block's input.

    torchtitan's "op" policy (``_save_list`` of its ``parallelize_llama``): the results of attention (with its
    log-sum-exp) and of every matrix product but each second one, counted through the block: of Llama's q, k, v, o,
    gate, up, down those of q, v, gate and down. Of router and experts it keeps nothing (the list of its mixtures has no
    grouped product; recalled, not opened).
    """
    if part in (Part.ROUTER, Part.EXPERTS):
        return 0.0
    wide = z.element * z.tokens
    attention = [z.query, z.projected, z.projected] if z.separate_qkv else [z.query + 2 * z.projected]
    products = [wide * width for width in attention] + [z.element * z.rows * z.hidden]
    mlp = [wide * z.ffn] * (2 if z.gated else 1) + [z.element * z.rows * z.hidden]
    first = len(products)
    if part is Part.MLP:
        return sum(size for place, size in enumerate(mlp, first) if place % 2 == 0)
    return core(z) + wide * z.query + sum(size for place, size in enumerate(products) if place % 2 == 0)


def embedding(z: Sizes) -> float:
    """Embedding: its dropout mask (Korthikanti 2022, section 4.3); BERT also normalises. Its output is block 0's."""
    return dropout_mask(z) + (norm(z) if z.head_transform else 0.0)


def head(z: Sizes) -> float:
    """Final norm input and vocabulary projection input: 4 s b h bytes (Korthikanti 2022, section 4.3)."""
    transform = 2 * z.element * z.rows * z.hidden if z.head_transform else 0.0
    return norm(z) + z.element * z.rows * z.hidden + transform


def logits(z: Sizes) -> float:
    """What the loss keeps: 4 s b v bytes of fp32 softmax (Korthikanti 2022, section 4.3), or compiled the logits."""
    return (z.logit if z.loss in (Loss.COMPILED, Loss.CHUNKED) else FP32) * z.tokens * z.vocab


def logits_transient(z: Sizes, *, backward: bool) -> float:
    """Loss tensors beside the kept ones.

    Megatron's vocabulary-parallel loss works in place on one fp32 copy, so only the 16-bit logits (or their gradient)
    come on top. Framework operations hold the logits and their fp32 copy in forward; in backward the fp32 gradients of
    the log-softmax's output and input (measured by MemTracker: twice s b v x 4 bytes at the peak). A compiled loss
    makes the gradient in one kernel, and a model that casts its logits then casts it back; chunks share that room.
    """
    cells, low = z.tokens * z.vocab, z.element < FP32
    if z.loss is Loss.COMPILED:
        return z.logit * cells if backward else 0.0
    if z.loss is Loss.CHUNKED:
        return (z.logit + FP32) * cells / CHUNKS if backward else 0.0
    if z.loss is Loss.IN_PLACE:
        return z.element * cells if low else 0.0
    if backward:
        return 2 * FP32 * cells
    return cells * (z.element + (FP32 if low else 0.0))


def attention_gradients(z: Sizes) -> float:
    """Output gradients of an attention's products: of the sub-layer's output, of Q, K and V."""
    widths = z.query + z.key + (z.value or z.key)
    return z.residual * z.rows * z.hidden + z.element * (z.tokens * widths + z.rows * z.compressed)


def attention_transient(z: Sizes) -> float:
    """What an attention backward holds beside them: gradients of projection input, of scores and probabilities."""
    cells = 0.0 if z.fused_attention else z.scores * (z.element + (z.element if z.fused_softmax else FP32))
    return z.element * z.tokens * (z.value or z.query) + cells + gathered(z, copies=2)


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
    """Inputs of an attention's products: of QKV and of the output projection, 4 s b h bytes; of latent ones' second."""
    return z.element * (z.rows * (z.hidden + z.compressed) + z.tokens * (z.value or z.query))


def mlp_inputs(z: Sizes) -> float:
    """Inputs of an MLP's products: of the up (and gate) and of the down projection, 10 s b h bytes."""
    return z.element * (z.rows * z.hidden + z.tokens * z.ffn)


def router_inputs(z: Sizes) -> float:
    """Inputs of the products of router and shared experts."""
    return z.element * (z.rows * z.hidden + z.tokens * z.shared_ffn)


def expert_inputs(z: Sizes) -> float:
    """Inputs of the experts' products: dispatched rows, and those of the down projection."""
    return z.element * z.expert_rows * (z.hidden + z.expert_ffn)


def head_inputs(z: Sizes) -> float:
    """Input of the vocabulary projection; BERT's transform has one too."""
    return (2 if z.head_transform else 1) * z.element * z.rows * z.hidden


def gathered(z: Sizes, *, copies: int = 1) -> float:
    """Full-sequence copies that sequence parallelism makes for a product: input, in backward also output gradient."""
    return copies * z.element * z.tokens * z.hidden if z.gathered_input else 0.0
