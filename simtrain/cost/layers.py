"""Which ops a piece of a transformer is made of, on one rank.

Byte counts follow the kernels that the stack launches: every operand of an unfused element-wise kernel is read and
written in HBM, a fused chain reads its inputs and writes its result once. ``e`` is the bytes of an activation element.
Token-wise work between tensor-parallel regions (norm, dropout, residual) is split over tp ranks under sequence
parallelism (Korthikanti 2022, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum

from simtrain.cost import adapters, attention, experts, fp8
from simtrain.cost.ops import MatMul, Op, Sweep
from simtrain.scenario.hardware import AcceleratorKind, Precision
from simtrain.scenario.model import BlockKind, Family, Part
from simtrain.scenario.scenario import Attention, Scenario

_FP32 = 4.0


class Pass(Enum):
    """The three computations of a layer: dgrad and wgrad are products of their own shapes."""

    FORWARD = "forward"
    INPUT_GRAD = "input_grad"
    WEIGHT_GRAD = "weight_grad"


@dataclass(frozen=True, slots=True)
class Shapes:
    """Sizes that the layers of one rank share, derived once a scenario."""

    scenario: Scenario
    tokens: int
    """Of one microbatch on one context-parallel rank."""
    local_tokens: int
    """The share of ``tokens`` between tensor-parallel regions."""
    tp: int
    e: float
    """Bytes of an activation element."""
    linear: Precision
    """Input format of the linear layers' products."""
    core: Precision
    """Of attention and head (fp8 training leaves them at bf16)."""
    xla: bool
    """A whole-graph compiler that fuses element-wise work into the neighbouring product."""

    @staticmethod
    def of(scenario: Scenario) -> Shapes:
        """Derive the sizes of a scenario."""
        training, layout = scenario.training, scenario.parallelism.layout
        tokens = training.micro_batch * training.seq_len // layout.cp
        wide = training.precision in (Precision.FP32, Precision.TF32)
        return Shapes(
            scenario=scenario,
            tokens=tokens,
            local_tokens=tokens // layout.tp if scenario.parallelism.sequence_parallel else tokens,
            tp=layout.tp,
            e=4.0 if wide else 2.0,
            linear=training.precision,
            core=Precision.BF16 if training.precision is Precision.FP8 else training.precision,
            xla=scenario.cluster.accelerator.kind is AcceleratorKind.TPU,
        )


def _linear(c: Shapes, which: Pass, tokens: int, out: int, inp: int, *, normed: bool = False) -> Iterator[Op]:
    """A linear layer [tokens, inp] -> [tokens, out] with both sizes those of one tensor rank; fp8 casts included.

    ``normed``: the input comes straight from a norm, which may write it in fp8.
    """
    narrow = c.linear is Precision.FP8
    in_bytes = 1.0 if narrow else c.e
    if which is Pass.FORWARD:
        if narrow:
            if not (normed and fp8.norm_casts(c)):
                yield from fp8.cast(c, tokens * inp)
            yield from fp8.weight_cast(c, out * inp)
        yield MatMul(tokens, out, inp, c.linear, in_bytes=in_bytes, out_bytes=c.e)
    elif which is Pass.INPUT_GRAD:
        if narrow:
            yield from fp8.cast(c, tokens * out)
        yield MatMul(tokens, inp, out, c.linear, in_bytes=in_bytes, out_bytes=c.e)
    else:
        yield from _weight_grad(c, c.linear, tokens, out, inp, in_bytes)


def _weight_grad(c: Shapes, precision: Precision, tokens: int, out: int, inp: int, in_bytes: float) -> Iterator[Op]:
    """dW[out, inp] and its accumulation into the gradient buffer: in the product's epilogue or a pass after it."""
    stack, elements = c.scenario.stack, out * inp
    grad = _FP32 if c.e == _FP32 else stack.grad_bytes
    if c.xla or stack.fused_grad_accumulation:
        epilogue = (2.0 * grad - c.e) * elements if c.scenario.microbatches > 1 or not c.xla else 0.0
        yield MatMul(out, inp, tokens, precision, in_bytes=in_bytes, out_bytes=c.e, epilogue_bytes=epilogue)
        return
    yield MatMul(out, inp, tokens, precision, in_bytes=in_bytes, out_bytes=c.e)
    if c.scenario.microbatches > 1 or stack.grad_buffer:
        yield Sweep((c.e + 2.0 * grad) * elements)


def _bias_grad(c: Shapes, tokens: int, width: int) -> Iterator[Op]:
    """Sum of a gradient over tokens, unless the compiler folds it into its producer."""
    if not c.xla:
        yield Sweep(c.e * tokens * width)


def _norm(c: Shapes, which: Pass, width: int) -> Iterator[Op]:
    """Layer norm or RMS norm over the last axis. Composite RMS norm runs in fp32, one kernel an operator."""
    elements, stack, rms = c.local_tokens * width, c.scenario.stack, c.scenario.model.rms_norm
    if which is Pass.WEIGHT_GRAD:
        return
    forward = which is Pass.FORWARD
    if c.xla:  # the statistics are one read, the scaling is fused into the product behind it
        yield Sweep((1 if forward else 2) * c.e * elements)
    elif stack.compiled:  # fused with the residual addition before it: read there, written here
        yield Sweep((1 if forward else 4) * c.e * elements, 1.0 if forward else 2.0)
    elif stack.fused_norm or not rms:
        yield Sweep((2 if forward else 5) * c.e * elements, 1.0 if forward else 2.0)
    else:
        cast = c.e + _FP32
        yield Sweep((2 * cast + 3 * _FP32 + 2 * c.e) * elements * (1 if forward else 2), 6.0 if forward else 12.0)


def _residual(c: Shapes, which: Pass) -> Iterator[Op]:
    """Bias, dropout (with a mask of one byte) and residual addition, fused or one kernel each."""
    model, stack = c.scenario.model, c.scenario.stack
    if c.xla or which is Pass.WEIGHT_GRAD:
        if model.bias and which is Pass.WEIGHT_GRAD:
            yield from _bias_grad(c, c.local_tokens, model.hidden)
        return
    elements = c.local_tokens * model.hidden
    mask = 1.0 if model.dropout else 0.0
    if which is Pass.INPUT_GRAD:  # through the dropout, then the sum of the two branches' gradients
        dropout = 2 * c.e + mask if model.dropout else 0.0
        yield Sweep((dropout + 3 * c.e) * elements, 1.0 + mask)
    elif stack.fused_elementwise or stack.compiled:
        yield Sweep((3 * c.e + mask) * elements)
    else:
        parts = [3 * c.e] + [2 * c.e] * model.bias + [2 * c.e + mask] * model.dropout
        yield Sweep(sum(parts) * elements, float(len(parts)))


def _activation(c: Shapes, which: Pass, width: int) -> Iterator[Op]:
    """GeLU with its bias, or SiLU times gate, over ``width`` columns of one rank."""
    model, stack = c.scenario.model, c.scenario.stack
    elements = c.tokens * width
    if which is Pass.WEIGHT_GRAD:
        if model.bias:
            yield from _bias_grad(c, c.tokens, width)
        return
    if c.xla:
        return
    forward, fused = which is Pass.FORWARD, stack.fused_elementwise or stack.compiled
    if model.gated_mlp:
        passes = (3 if fused else 5) if forward else (5 if fused else 9)
    else:
        passes = (2 if fused or not model.bias else 4) if forward else 3
    kernels = 1.0 if fused else 2.0 if forward else 3.0
    yield Sweep(passes * c.e * elements, kernels)


def _qkv_extras(c: Shapes, which: Pass, width: int) -> Iterator[Op]:
    """Bias, rotary embedding and layout changes between the QKV product and the core."""
    model, stack = c.scenario.model, c.scenario.stack
    if c.xla:
        return
    bias = model.bias or model.qkv_bias
    if which is Pass.WEIGHT_GRAD:
        if bias:
            yield from _bias_grad(c, c.tokens, width)
        return
    if which is Pass.FORWARD and bias and not (stack.fused_linear_bias or stack.compiled):
        yield Sweep(2 * c.e * c.tokens * width)
    if which is Pass.INPUT_GRAD:  # the gradients of q, k and v are concatenated
        yield Sweep(2 * c.e * c.tokens * width)
    if model.family in (Family.LLAMA, Family.MOE) and not model.max_positions:
        rotated = c.tokens * (model.heads + model.kv_heads) * model.head_dim / c.tp
        fused = stack.fused_elementwise or stack.compiled
        # eager: to fp32 and back around a complex product (read 2, write 4; read 4, write 4; read 4, write 2)
        yield Sweep((2 * c.e if fused else 20.0) * rotated, 2.0 if fused else 6.0)


def core(c: Shapes, which: Pass, block: BlockKind, cross: bool = False) -> Iterator[Op]:
    """Attention core of one block: scores, softmax, dropout, weighted sum."""
    if which is Pass.WEIGHT_GRAD:
        return
    training, model = c.scenario.training, c.scenario.model
    heads = training.micro_batch * max(1, model.heads // c.tp)
    causal = block is not BlockKind.ENCODER and not cross
    if training.attention is not Attention.UNFUSED:
        yield from attention.kernels(c.scenario, e=c.e, backward=which is Pass.INPUT_GRAD, causal=causal)
        return
    # scores are computed in full, whatever window or document the mask then hides
    yield from _unfused_core(c, which, heads, (training.seq_len, training.seq_len), causal)


def _unfused_core(c: Shapes, which: Pass, heads: int, span: tuple[int, int], causal: bool) -> Iterator[Op]:
    """Attention that writes its scores: batched products around HBM-bound softmax and dropout.

    The fused scale-mask-softmax kernel reads only the lower triangle of a causal mask; the products do all the work.
    """
    model, stack = c.scenario.model, c.scenario.stack
    (queries, keys), d = span, (model.qk_head_dim + model.value_head_dim) // 2
    scores, mask = float(heads * queries * keys), 1.0 if model.dropout else 0.0
    read = 0.5 if causal and stack.fused_softmax else 1.0
    fused = stack.fused_softmax or stack.compiled or c.xla

    def product(m: int, n: int, k: int) -> MatMul:
        return MatMul(m, n, k, c.core, batch=heads, in_bytes=c.e, out_bytes=c.e, scores=True)

    def over_scores(bytes_each: float, launches: float = 1.0) -> Sweep:
        return Sweep(bytes_each * scores, launches, scores=True)

    composite = 4 * c.e + 2 * (c.e + _FP32)  # scale, mask, cast to fp32 and back
    layout = Sweep(2 * c.e * heads * queries * d)  # heads beside each other again
    dropout = [over_scores(2 * c.e + mask)] if model.dropout and not c.xla else []
    if which is Pass.FORWARD:
        yield product(queries, keys, d)
        yield over_scores((read + 1) * c.e) if fused else over_scores(composite + 2 * _FP32, 5.0)
        yield from dropout
        yield product(queries, d, keys)
        yield layout
        return
    yield layout
    yield product(queries, keys, d)  # dP = dO V'
    yield product(keys, d, queries)  # dV = P' dO
    yield from dropout
    yield over_scores((2 * read + 1) * c.e) if fused else over_scores(composite + 3 * _FP32, 5.0)
    yield product(queries, d, keys)  # dQ = dS K
    yield product(keys, d, queries)  # dK = dS' Q


def _attention(c: Shapes, which: Pass, block: BlockKind, cross: bool = False) -> Iterator[Op]:
    model = c.scenario.model
    width = model.heads * model.head_dim // c.tp
    kv_width = 2 * max(1, model.kv_heads // c.tp) * model.head_dim
    yield from _norm(c, which, model.hidden)
    if cross:  # queries from the decoder, keys and values from the encoder's output
        yield from _linear(c, which, c.tokens, width, model.hidden, normed=True)
        yield from _linear(c, which, c.tokens, kv_width, model.hidden)
    else:
        yield from _linear(c, which, c.tokens, width + kv_width, model.hidden, normed=True)
    yield from _qkv_extras(c, which, width + kv_width)
    yield from core(c, which, block, cross)
    yield from _linear(c, which, c.tokens, model.hidden, width)
    yield from _residual(c, which)


def _mlp(c: Shapes, which: Pass, _block: BlockKind) -> Iterator[Op]:
    model = c.scenario.model
    width = model.ffn_hidden // c.tp
    yield from _norm(c, which, model.hidden)
    yield from _linear(c, which, c.tokens, width * (2 if model.gated_mlp else 1), model.hidden, normed=True)
    yield from _activation(c, which, width)
    yield from _linear(c, which, c.tokens, model.hidden, width)
    yield from _residual(c, which)


def _latent_attention(c: Shapes, which: Pass, block: BlockKind) -> Iterator[Op]:
    """Multi-head latent attention: compress, normalise, expand, attend (DeepSeek-V2, section 2.1).

    Each tensor rank compresses all tokens that it holds by itself and expands its own heads (Megatron core
    ``multi_latent_attention.py``: down projections are duplicated).
    """
    model, heads = c.scenario.model, c.scenario.model.heads // c.tp
    queries, keys = heads * model.qk_head_dim, heads * (model.qk_nope_head_dim + model.v_head_dim)
    compressed = model.kv_lora_rank + model.qk_rope_head_dim
    yield from _norm(c, which, model.hidden)
    if model.q_lora_rank:
        yield from _linear(c, which, c.local_tokens, model.q_lora_rank, model.hidden)
        yield from _norm(c, which, model.q_lora_rank)
    yield from _linear(c, which, c.tokens, queries, model.q_lora_rank or model.hidden, normed=bool(model.q_lora_rank))
    yield from _linear(c, which, c.local_tokens, compressed, model.hidden)
    yield from _norm(c, which, model.kv_lora_rank)
    yield from _linear(c, which, c.tokens, keys, model.kv_lora_rank, normed=True)
    if which is not Pass.WEIGHT_GRAD and not c.xla:  # rotate; join the rotated part to q and (shared) to k; copy v
        yield Sweep(2 * c.e * c.tokens * (2 * queries + heads * model.v_head_dim), 5.0)
    yield from core(c, which, block)
    yield from _linear(c, which, c.tokens, model.hidden, heads * model.v_head_dim)
    yield from _residual(c, which)


def _router(c: Shapes, which: Pass, _block: BlockKind) -> Iterator[Op]:
    """Norm, router, shared experts, permutation. The router's product runs in the activations' format."""
    model = c.scenario.model
    yield from _norm(c, which, model.hidden)
    rows, width = (c.local_tokens, model.experts), model.experts_shared * model.expert_ffn_hidden // c.tp
    if which is Pass.WEIGHT_GRAD:
        yield from _weight_grad(c, c.core, rows[0], rows[1], model.hidden, c.e)
    else:
        n, k = (rows[1], model.hidden) if which is Pass.FORWARD else (model.hidden, rows[1])
        yield MatMul(rows[0], n, k, c.core, in_bytes=c.e, out_bytes=c.e)
        yield from experts.router(c.scenario, which is Pass.FORWARD, c.e)
    if width:
        yield from _linear(c, which, c.tokens, width * (2 if model.gated_mlp else 1), model.hidden)
        yield from _activation(c, which, width)
        yield from _linear(c, which, c.tokens, model.hidden, width)


def _experts(c: Shapes, which: Pass, _block: BlockKind) -> Iterator[Op]:
    """Routed experts: grouped products and activation over the rows that reached this rank, the way back, residual."""
    model, (local, rows) = c.scenario.model, experts.expert_rows(c.scenario)
    width = model.expert_ffn_hidden // c.scenario.parallelism.layout.expert_tensor
    up = width * (2 if model.gated_mlp else 1)
    for op in (*_linear(c, which, rows, up, model.hidden), *_linear(c, which, rows, model.hidden, width)):
        yield experts.grouped(c.scenario, op)
    yield from _activation(replace(c, tokens=rows * local), which, width)
    if which is not Pass.WEIGHT_GRAD:
        yield from experts.unpermute(c.scenario, which is Pass.FORWARD, c.e)
    yield from _residual(c, which)


def repeated(c: Shapes, part: Part) -> Iterator[Op]:
    """What a block computes again under torch's operator-level selective checkpointing (``memory.by_operator``).

    Attention and every other product of the block were kept; norms, activations and the other products run again:
    keys, output and up projection of a gated block, output and down projection of one with a joint QKV product. Of
    router and experts nothing is kept.
    """
    model, forward = c.scenario.model, Pass.FORWARD
    if part in (Part.ROUTER, Part.EXPERTS):
        yield from _PARTS[part](c, forward, BlockKind.DECODER)
        return
    width, kv_width = model.heads * model.head_dim // c.tp, max(1, model.kv_heads // c.tp) * model.head_dim
    ffn = model.ffn_hidden // c.tp
    yield from _norm(c, forward, model.hidden)
    if part is Part.MLP:
        if model.gated_mlp:
            yield from _linear(c, forward, c.tokens, ffn, model.hidden)
        yield from _activation(c, forward, ffn)
        if not model.gated_mlp:
            yield from _linear(c, forward, c.tokens, model.hidden, ffn)
        return
    if model.gated_mlp:
        yield from _linear(c, forward, c.tokens, kv_width, model.hidden)
        yield from _qkv_extras(c, forward, width + 2 * kv_width)
    yield from _linear(c, forward, c.tokens, model.hidden, width)
    yield from _residual(c, forward)


def _embedding(c: Shapes, which: Pass, _block: BlockKind) -> Iterator[Op]:
    """Gather, position, dropout; backward scatters into a dense gradient of the whole table."""
    model = c.scenario.model
    elements = c.tokens * model.hidden
    adds = (1 if model.max_positions else 0) + (1 if model.token_types else 0)
    mask = 1.0 if model.dropout else 0.0
    if which is Pass.FORWARD:
        yield Sweep((2 + 3 * adds + 2 * mask) * c.e * elements + mask * elements, 1.0 + adds + mask)
    elif which is Pass.WEIGHT_GRAD:
        table = model.padded_vocab(c.tp) / c.tp * model.hidden
        accumulate = c.scenario.microbatches > 1 or c.scenario.stack.grad_buffer
        yield Sweep((3 * c.e + 2 * mask * c.e + mask) * elements, 2.0 + mask)
        yield Sweep((c.e + (c.e + 2 * c.scenario.stack.grad_bytes if accumulate else 0.0)) * table, 2.0)


def _head(c: Shapes, which: Pass, _block: BlockKind) -> Iterator[Op]:
    """Final norm, vocabulary projection, cross entropy in fp32."""
    model, stack = c.scenario.model, c.scenario.stack
    columns = model.padded_vocab(c.tp) // c.tp
    logits = float(c.tokens * columns) * (1 if c.scenario.parallelism.vocab_parallel_loss else c.tp)
    yield from _norm(c, which, model.hidden)
    if model.family is Family.BERT:  # the masked-language-model transform: dense, GeLU, norm
        yield from _linear(c, which, c.tokens, model.hidden, model.hidden)
        yield from _norm(c, which, model.hidden)
    if which is Pass.WEIGHT_GRAD:
        yield from _weight_grad(c, c.core, c.tokens, columns, model.hidden, c.e)
        return
    narrow = c.e if c.e < _FP32 else 0.0
    fused = stack.compiled or c.xla
    if which is Pass.FORWARD:
        yield MatMul(c.tokens, columns, model.hidden, c.core, in_bytes=c.e, out_bytes=c.e)
        cast = narrow + _FP32 if narrow else 0.0
        if fused:  # two reads: maximum, then sum of exponentials
            yield Sweep(2 * c.e * logits)
        else:  # Megatron's loss, one kernel each: cast, maximum, subtract, exponential, sum, divide
            yield Sweep((cast + (1 + 2 + 2 + 1 + 2) * _FP32) * logits, 6.0)
    else:
        bytes_each = 2 * c.e if fused else 2 * _FP32 + (_FP32 + narrow if narrow else 0.0)
        yield Sweep(bytes_each * logits, 1.0 if fused else 3.0)
        yield MatMul(c.tokens, model.hidden, columns, c.core, in_bytes=c.e, out_bytes=c.e)


_PARTS: dict[Part, Callable[[Shapes, Pass, BlockKind], Iterator[Op]]] = {
    Part.EMBEDDING: _embedding,
    Part.ATTENTION: lambda c, which, block: (_latent_attention if c.scenario.model.kv_lora_rank else _attention)(
        c, which, block
    ),
    Part.CORE: core,
    Part.CROSS_ATTENTION: lambda c, which, block: _attention(c, which, block, cross=True),
    Part.MLP: _mlp,
    Part.ROUTER: _router,
    Part.EXPERTS: _experts,
    Part.HEAD: _head,
}


def ops(c: Shapes, which: Pass, part: Part, block: BlockKind, *, frozen: bool = False) -> tuple[Op, ...]:
    """Ops of one part of the model on one rank for one microbatch.

    Parameters
    ----------
    c
        Sizes of the scenario.
    which
        Forward, input gradient or weight gradient.
    part
        EMBEDDING, ATTENTION, CORE, CROSS_ATTENTION, MLP, ROUTER, EXPERTS or HEAD.
    block
        Kind of block; it decides the mask.
    frozen
        The part's own weights get no gradient; adapters beside them may.

    Raises
    ------
    KeyError
        For a part that computes nothing.
    """
    own = () if frozen and which is Pass.WEIGHT_GRAD else _PARTS[part](c, which, block)
    return (*own, *adapters.ops(c, which, part))
