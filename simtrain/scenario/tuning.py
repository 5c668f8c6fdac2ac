"""What is trained, in which 8-bit format, and where state lives: fp8 recipes, adapters, frozen parts, offloading."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from simtrain.scenario.model import Model, Part


class Fp8Recipe(StrEnum):
    """How a linear layer's operands are scaled to fp8 (Transformer Engine, ``common.recipe``)."""

    DELAYED = "delayed"
    """One scale a tensor, from the largest values of earlier steps: a cast is one pass."""
    CURRENT = "current"
    """One scale a tensor, from its own largest value: one more reading pass before the cast."""
    BLOCK = "block"
    """A scale for 1 x 128 activations and 128 x 128 weights (DeepSeek-V3, section 3.3.2)."""
    MXFP8 = "mxfp8"
    """A scale of one byte for 32 elements (OCP microscaling), in hardware from Blackwell on."""


class Fp8Kernels(StrEnum):
    """Which library computes fp8 linear layers."""

    NONE = "none"
    TRANSFORMER_ENGINE = "transformer_engine"
    """Weights keep fp8 copies, cast once a step; the saved input of a linear layer is its fp8 copy."""
    TORCHAO = "torchao"
    """Weights and inputs are cast at every use; the saved input stays in the activation format."""
    XLA = "xla"
    """As torchao, fused into the producers."""


@dataclass(frozen=True, slots=True)
class Fp8:
    """fp8 training of the linear layers inside blocks; attention, norms, embedding and head stay in bf16."""

    recipe: Fp8Recipe
    primary: bool = False
    """Weights live in fp8 alone (Transformer Engine ``fp8_model_init``) and are gathered in it (torchao too)."""


class Place(StrEnum):
    """Where a state lives between uses."""

    DEVICE = "device"
    CPU = "cpu"
    NVME = "nvme"


@dataclass(frozen=True, slots=True)
class Offload:
    """What leaves the device."""

    optimizer: Place = Place.DEVICE
    """Master weights and moments; the step runs on the host (ZeRO-Offload, Ren 2021)."""
    parameters: Place = Place.DEVICE
    """Fetched a unit at a time before use (ZeRO-Infinity, Rajbhandari 2021)."""
    activations: Place = Place.DEVICE
    """What a block keeps for its backward leaves after its forward and returns before its backward."""
    overlap: bool = True
    """Transfers run beside compute."""
    nvme_bandwidth: float = 0.0
    """byte/s of one machine's drives; 0 where nothing lives there."""

    @property
    def active(self) -> bool:
        """Whether anything leaves the device."""
        return any(place is not Place.DEVICE for place in (self.optimizer, self.parameters, self.activations))


class BaseFormat(StrEnum):
    """Storage of frozen linear weights under adapters."""

    BF16 = "bf16"
    NF4 = "nf4"
    """4 bits and an fp32 scale for 64 weights."""
    NF4_DOUBLE = "nf4-double"
    """4 bits and scales that are quantised again: an 8-bit scale for 64 and an fp32 one for 64 x 256 weights."""


LINEARS: dict[Part, tuple[str, ...]] = {
    Part.ATTENTION: ("q", "k", "v", "o", "q_a", "q_b", "kv_a", "kv_b"),
    Part.CROSS_ATTENTION: ("q", "k", "v", "o"),
    Part.MLP: ("gate", "up", "down"),
    Part.ROUTER: ("gate", "up", "down"),
    Part.EXPERTS: ("gate", "up", "down"),
    Part.HEAD: ("output",),
}
"""Names of the linear layers of a part: q_a to kv_b of latent attention; ROUTER's are the shared experts'."""


@dataclass(frozen=True, slots=True)
class Lora:
    """Low-rank adapters (Hu 2021): W + (alpha / rank) B A, with A [rank, in] and B [out, rank]; W stays frozen."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """Names in ``LINEARS``."""
    base: BaseFormat = BaseFormat.BF16
    """Format of the linear weights inside blocks (QLoRA, Dettmers 2023); embedding, head and norms stay 16 bit."""


@dataclass(frozen=True, slots=True)
class Trainable:
    """Which parameters get gradients and optimizer state."""

    lora: Lora | None = None
    frozen: tuple[str, ...] = ()
    """Parts that keep their weights: ``embedding``, ``attention``, ``mlp``, ``head``."""
    frozen_blocks: int = 0
    """Leading blocks that keep their weights."""

    @property
    def everything(self) -> bool:
        """Full training."""
        return self.lora is None and not self.frozen and not self.frozen_blocks

    def is_frozen(self, part: Part, layer: int) -> bool:
        """Whether a part's own weights are fixed (an adapter may still be trained beside them)."""
        if self.lora is not None:
            return True
        if not self.frozen and not self.frozen_blocks:
            return False
        inside = {Part.CROSS_ATTENTION: Part.ATTENTION, Part.ROUTER: Part.MLP, Part.EXPERTS: Part.MLP}
        return inside.get(part, part).value in self.frozen or 0 <= layer < self.frozen_blocks

    def is_trained(self, part: Part, layer: int) -> bool:
        """Whether a part holds anything that is trained."""
        return bool(self.adapters(part)) if self.lora else not self.is_frozen(part, layer)

    def adapters(self, part: Part) -> tuple[str, ...]:
        """Linear layers of a part that carry an adapter."""
        return tuple(name for name in LINEARS.get(part, ()) if self.lora and name in self.lora.targets)

    def learns_input(self, part: Part, names: tuple[str, ...], layer: int) -> bool:
        """Whether any of these linear layers needs its input again for a weight gradient, its own or an adapter's."""
        return any(name in self.adapters(part) for name in names) or not self.is_frozen(part, layer)


def linear_shapes(model: Model, part: Part, tp: int) -> dict[str, tuple[float, float]]:
    """(out, in) of the linear layers of a part on one tensor rank; key and value heads no further than one a rank.

    Of EXPERTS those of one expert, and ``tp`` is how many ranks share it.
    """
    query = model.heads * model.head_dim / tp
    key = max(1.0, model.kv_heads / tp) * model.head_dim
    match part:
        case Part.ATTENTION if model.kv_lora_rank:
            return _latent_shapes(model, tp)
        case Part.ATTENTION | Part.CROSS_ATTENTION:
            inner = {"q": (query, model.hidden), "k": (key, model.hidden), "v": (key, model.hidden)}
            return {**inner, "o": (model.hidden, query)}
        case Part.MLP | Part.ROUTER | Part.EXPERTS:
            widths = {Part.MLP: model.ffn_hidden, Part.ROUTER: model.experts_shared * model.expert_ffn_hidden}
            width = widths.get(part, model.expert_ffn_hidden) / tp
            up = {"up": (width, model.hidden), "down": (model.hidden, width)}
            return {} if not width else {"gate": (width, model.hidden), **up} if model.gated_mlp else up
        case Part.HEAD:
            return {"output": (model.padded_vocab(tp) / tp, model.hidden)}
    return {}


def _latent_shapes(model: Model, tp: int) -> dict[str, tuple[float, float]]:
    """Of multi-head latent attention (DeepSeek-V2, section 2.1); every tensor rank compresses by itself."""
    queries, rank = model.heads * model.qk_head_dim / tp, model.q_lora_rank
    into = {"q_a": (rank, model.hidden), "q_b": (queries, rank)} if rank else {"q": (queries, model.hidden)}
    keys, values = (model.heads * width / tp for width in (model.qk_nope_head_dim, model.v_head_dim))
    return {
        **into,
        "kv_a": (model.kv_lora_rank + model.qk_rope_head_dim, model.hidden),
        "kv_b": (keys + values, model.kv_lora_rank),
        "o": (model.hidden, values),
    }


def adapter_parameters(lora: Lora, model: Model, part: Part, tp: int) -> float:
    """Parameters of the adapters of one part on one tensor rank: r (in + out) a linear layer (Hu 2021, section 4.1).

    Of EXPERTS those of one expert.

    The factor on the tensor-parallel side is split as the layer is; the other one is held by every rank.
    """
    shapes = linear_shapes(model, part, tp)
    chosen = (name for name in shapes if name in lora.targets)
    return sum(lora.rank * sum(shapes[name]) for name in chosen)
