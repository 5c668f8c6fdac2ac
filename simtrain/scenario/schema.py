"""The scenario file as pydantic models: keys, types and bounds, with no meaning across keys.

Every key is optional in form: ``None`` (left out, null, or ``auto``) stands for a value that ``resolve`` derives or
fills with a documented default. Unknown keys are refused. Quantities carry a unit and become SI floats.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, GroupedMetadata, Le
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints
from pydantic_core import PydanticCustomError

from simtrain import units
from simtrain.scenario.yamltext import describe

EVERY_SQRT = 0
"""``recompute: {every: sqrt}`` before the number of layers is known."""


def _auto(value: object) -> object:
    return None if value == "auto" else value


def _quantity(dimension: units.Dimension) -> BeforeValidator:
    def convert(value: object) -> float | None:
        if value is None or value == "auto":
            return None
        try:
            amount = units.parse(value, dimension)
        except ValueError as error:
            raise PydanticCustomError("quantity", "{why}", {"why": str(error)}) from None
        if amount <= 0:
            raise PydanticCustomError("quantity", "{why}", {"why": f"must be above zero, not {describe(value)}"})
        return amount

    return BeforeValidator(convert, json_schema_input_type=str | None)


@dataclass(frozen=True)
class Count(GroupedMetadata):
    """Bounds of a whole number that may be left out (``auto``)."""

    most: int
    least: int = 1

    def __iter__(self) -> Iterator[object]:
        yield Ge(self.least)
        yield Le(self.most)
        form = Annotated[int, Field(ge=self.least, le=self.most)] | Literal["auto"] | None
        yield BeforeValidator(_auto, json_schema_input_type=form)


def _section(key: str, spec: type[BaseModel]) -> BeforeValidator:
    """Let plain text stand for a mapping with one key: ``model: gpt2-xl``."""
    form: Any = str | spec
    return BeforeValidator(lambda value: {key: value} if isinstance(value, str) else value, json_schema_input_type=form)


MAX_DEVICES = 2_000_000
MAX_TOKENS = 16_777_216
"""Of a sequence."""
Degree = Annotated[int | None, Count(1_000_000)]
Layers = Annotated[int | None, Count(2_500)]
Width = Annotated[int | None, Count(10_000_000)]
Batch = Annotated[int | None, Count(1_000_000_000)]
Flag = Annotated[bool | None, BeforeValidator(_auto, json_schema_input_type=bool | Literal["auto"] | None)]
Name = Annotated[
    Annotated[str, StringConstraints(min_length=1, max_length=100)] | None,
    BeforeValidator(_auto, json_schema_input_type=str | None),
]
FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._+-]*$", max_length=100)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Bandwidth = Annotated[float | None, _quantity(units.Dimension.BANDWIDTH)]
Time = Annotated[float | None, _quantity(units.Dimension.TIME)]
Data = Annotated[float | None, _quantity(units.Dimension.DATA)]


class Section(BaseModel):
    """Base of all sections: frozen, strict about types, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, ser_json_inf_nan="strings")


class NetworkSpec(Section):
    """A network row, or a row with figures of its own."""

    row: Name = None
    bandwidth: Bandwidth = None
    latency: Time = None
    efficiency: Fraction | None = None


class JitterSpec(Section):
    """Run-to-run variation of device speed."""

    sigma: Annotated[float, Field(ge=0, le=1)] | None = None


Network = Annotated[NetworkSpec | None, BeforeValidator(_auto), _section("row", NetworkSpec)]


class ClusterSpec(Section):
    """Devices and how they are joined. Give one of nodes, devices and slice."""

    accelerator: Name = None
    machine: Name = None
    nodes: Degree = None
    devices: Annotated[int | None, Count(MAX_DEVICES)] = None
    slice: Name = None
    devices_per_machine: Annotated[int | None, Count(1024)] = None
    nics_per_machine: Annotated[int | None, Count(1024)] = None
    network: Network = None
    scale_up: Network = None
    placement: Any = None
    degraded: Any = None
    jitter: JitterSpec | None = None


class ModelSpec(Section):
    """A preset, a Hugging Face configuration, an operator table, or the sizes themselves; sizes win over a preset's."""

    preset: Name = None
    config: Annotated[str, StringConstraints(min_length=1, max_length=4096)] | None = None
    op_table: str | None = None
    name: Annotated[str, StringConstraints(min_length=1, max_length=100)] | None = None
    family: Literal["gpt", "llama", "bert", "t5", "moe"] | None = None
    layers: Layers = None
    hidden: Width = None
    heads: Annotated[int | None, Count(100_000)] = None
    kv_heads: Annotated[int | None, Count(100_000)] = None
    head_dim: Annotated[int | None, Count(100_000)] = None
    ffn_hidden: Width = None
    gated_mlp: Flag = None
    vocab: Width = None
    tied_embeddings: Flag = None
    max_positions: Annotated[int | None, Count(100_000_000, 0)] = None
    bias: Flag = None
    qkv_bias: Flag = None
    rms_norm: Flag = None
    dropout: Flag = None
    encoder_layers: Annotated[int | None, Count(10_000, 0)] = None
    token_types: Annotated[int | None, Count(1_000, 0)] = None
    experts: Annotated[int | None, Count(100_000, 0)] = None
    experts_per_token: Annotated[int | None, Count(100_000, 0)] = None
    experts_shared: Annotated[int | None, Count(100_000, 0)] = None
    expert_ffn_hidden: Annotated[int | None, Count(10_000_000, 0)] = None
    dense_layers: Annotated[int | None, Count(10_000, 0)] = None
    moe_every: Layers = None
    route_machines: Annotated[int | None, Count(100_000, 0)] = None
    q_lora_rank: Annotated[int | None, Count(10_000_000, 0)] = None
    kv_lora_rank: Annotated[int | None, Count(10_000_000, 0)] = None
    qk_nope_head_dim: Annotated[int | None, Count(100_000, 0)] = None
    qk_rope_head_dim: Annotated[int | None, Count(100_000, 0)] = None
    v_head_dim: Annotated[int | None, Count(100_000, 0)] = None
    sliding_window: Annotated[int | None, Count(100_000_000, 0)] = None
    vocab_multiple: Annotated[int | None, Count(1_000_000)] = None


RECOMPUTE_FORMS = "none, selective, full, {blocks: n} or {every: k} (k a number of layers, or sqrt)"


def _recompute(value: object) -> object:
    if value is None or value == "auto":
        return None
    if isinstance(value, str) and value in ("none", "selective", "full"):
        return (value, 0)
    if isinstance(value, dict) and len(value) == 1:
        mode, number = next(iter(value.items()))
        if mode == "every" and number == "sqrt":
            return (mode, EVERY_SQRT)
        if mode in ("blocks", "every") and type(number) is int and 1 <= number <= 10_000:
            return (mode, number)
    got = describe(value)
    if isinstance(value, dict) and 1 <= len(value) <= 3:
        got = "{" + ", ".join(f"{str(mode)[:20]}: {describe(number)}" for mode, number in value.items()) + "}"
    raise PydanticCustomError("choice", "{why}", {"why": f"must be {RECOMPUTE_FORMS}, not {got}"})


RecomputeForm = Annotated[
    tuple[str, int] | None,
    BeforeValidator(
        _recompute,
        json_schema_input_type=Literal["auto", "none", "selective", "full"]
        | dict[Literal["blocks", "every"], int | Literal["sqrt"]]
        | None,
    ),
]


def _packed(value: object) -> object:
    if value is None or value == "auto":
        return None
    lengths = value if isinstance(value, list) and value else [value]
    if all(type(length) is int and 1 <= length <= MAX_TOKENS for length in lengths):
        return value
    got = describe(next(length for length in lengths if not (type(length) is int and 1 <= length <= MAX_TOKENS)))
    why = f"must be a mean length or a list of lengths, in tokens from 1 to {MAX_TOKENS}, not {got}"
    raise PydanticCustomError("choice", "{why}", {"why": why})


PackedLength = Annotated[
    int | list[int] | None,
    BeforeValidator(_packed, json_schema_input_type=int | list[int] | Literal["auto"] | None),
]
"""Mean length of the documents packed into a sequence, or their lengths (``auto`` = one document)."""


def _imbalance(value: object) -> object:
    if value is None or value == "auto":
        return None
    form = value["sigma"] if isinstance(value, dict) and list(value) == ["sigma"] else value
    if isinstance(form, int | float) and not isinstance(form, bool):
        if form is not value and 0 <= form <= 5:
            return ("sigma", float(form))
        if form is value and 1 <= form <= 100_000:
            return ("factor", float(form))
    why = f"must be a factor of at least 1 (largest over mean) or {{sigma: 0 to 5}}, not {describe(value)}"
    raise PydanticCustomError("choice", "{why}", {"why": why})


Imbalance = Annotated[
    tuple[str, float] | None,
    BeforeValidator(_imbalance, json_schema_input_type=float | dict[Literal["sigma"], float] | Literal["auto"] | None),
]
"""How unevenly tokens fall on experts."""
Dispatch = Literal["alltoall", "allgather", "deduplicated"]
Kernel = Literal["unfused", "flash2", "flash3", "cudnn", "xla"]


class OptimizerSpec(Section):
    """An optimizer row, and when it runs."""

    name: Name = None
    in_backward: Flag = None


class Fp8Spec(Section):
    """How linear layers scale to fp8, and whether their weights live in fp8 alone."""

    recipe: Literal["delayed", "current", "block", "mxfp8"] | None = None
    primary: Flag = None


class LoraSpec(Section):
    """Low-rank adapters; targets by our names or those of Hugging Face models."""

    rank: Annotated[int, Field(ge=1, le=100_000)] = 8
    alpha: Annotated[float, Field(gt=0, le=1e6)] | Annotated[int, Field(gt=0, le=1_000_000)] | None = None
    targets: list[str] | str | None = None
    base: Literal["bf16", "nf4", "nf4-double"] | None = None


class TrainableSpec(Section):
    """What is trained: adapters (``qlora`` is ``lora`` over 4-bit weights), or all but some parts."""

    lora: LoraSpec | None = None
    qlora: LoraSpec | None = None
    frozen: list[Literal["embedding", "attention", "mlp", "head"]] | None = None
    frozen_blocks: Annotated[int | None, Count(10_000)] = None


PlaceName = Literal["device", "cpu", "nvme"]


class OffloadSpec(Section):
    """What lives outside the device between uses."""

    optimizer: PlaceName | None = None
    parameters: PlaceName | None = None
    activations: PlaceName | None = None
    overlap: Flag = None
    storage: Name = None
    nvme_bandwidth: Bandwidth = None


def _trainable(value: object) -> object:
    return None if value in ("all", "auto") else value


def _offload(value: object) -> object:
    if value in ("none", "auto", False):
        return None
    return {value: "cpu"} if isinstance(value, str) else value


class TrainingSpec(Section):
    """How the job trains; batches in sequences."""

    global_batch: Batch = None
    micro_batch: Batch = None
    accumulation: Batch = None
    seq_len: Annotated[int | None, Count(MAX_TOKENS)] = None
    precision: Literal["fp32", "tf32", "fp16", "bf16", "fp8"] | None = None
    optimizer: Annotated[OptimizerSpec | None, BeforeValidator(_auto), _section("name", OptimizerSpec)] = None
    fp8: Annotated[Fp8Spec | None, BeforeValidator(_auto), _section("recipe", Fp8Spec)] = None
    recompute: RecomputeForm = None
    attention: Annotated[
        Kernel | None, BeforeValidator(_auto, json_schema_input_type=Kernel | Literal["auto"] | None)
    ] = None
    trainable: Annotated[
        TrainableSpec | None,
        BeforeValidator(_trainable, json_schema_input_type=TrainableSpec | Literal["all", "auto"] | None),
    ] = None
    offload: Annotated[
        OffloadSpec | None,
        BeforeValidator(
            _offload,
            json_schema_input_type=OffloadSpec
            | Literal["none", "auto", "optimizer", "parameters", "activations"]
            | Literal[False]
            | None,
        ),
    ] = None
    sync_every_microbatch: Flag = None
    packed_length: PackedLength = None
    capacity_factor: Annotated[float, Field(gt=0, le=1000)] | None = None
    imbalance: Imbalance = None


def _schedule(value: object) -> object:
    """A name or a CSV file, or the lines of such a file."""
    if value is None or value == "auto":
        return None
    if isinstance(value, str) and 0 < len(value) <= 4096:
        return value
    if isinstance(value, list) and value and all(isinstance(line, str) for line in value):
        return value
    raise PydanticCustomError("choice", "{why}", {"why": f"must be {SCHEDULE_FORMS}, not {describe(value)}"})


SCHEDULE_FORMS = "the name of a schedule, a CSV file in PyTorch's notation, or a list of the lines of one"
ScheduleForm = Annotated[
    str | list[str] | None, BeforeValidator(_schedule, json_schema_input_type=str | list[str] | None)
]
StageList = Annotated[
    Annotated[list[Annotated[int, Field(ge=0, le=10_000)]], Field(min_length=1, max_length=10_000)] | None,
    BeforeValidator(_auto, json_schema_input_type=list[int] | Literal["auto"] | None),
]


_WIRE = Literal["fp32", "bf16", "fp16", "int8", "int4"]
Wire = Annotated[_WIRE | None, BeforeValidator(_auto, json_schema_input_type=_WIRE | Literal["auto"] | None)]
Reshard = Annotated[
    bool | Annotated[int, Field(ge=1, le=1_000_000)] | None,
    BeforeValidator(_auto, json_schema_input_type=bool | int | Literal["auto"] | None),
]
"""Yes, no, or the ranks over which the copy that stays after a forward is spread."""


class ParallelismSpec(Section):
    """How the job is split."""

    dp: Degree = None
    tp: Degree = None
    pp: Degree = None
    cp: Degree = None
    ep: Degree = None
    etp: Degree = None
    dispatch: Annotated[
        Dispatch | None, BeforeValidator(_auto, json_schema_input_type=Dispatch | Literal["auto"] | None)
    ] = None
    zero: Annotated[int | None, Count(3, 0)] = None
    shard_size: Degree = None
    sequence_parallel: Flag = None
    virtual_stages: Annotated[int | None, Count(10_000)] = None
    schedule: ScheduleForm = None
    post_validation: Flag = None
    stage_layers: StageList = None
    cp_kind: Name = None
    cp_inner: Degree = None
    mesh_order: list[Literal["tp", "cp", "dp", "pp"]] | None = None
    overlap: Flag = None
    reshard_after_forward: Reshard = None
    reshard_after_backward: Flag = None
    reshard_root: Flag = None
    prefetch: Annotated[int | None, Count(1_000, 0)] = None
    backward_prefetch: Annotated[int | None, Count(1_000, 0)] = None
    wrap_blocks: Layers = None
    wrap_ends: Flag = None
    replica_sync_every_microbatch: Flag = None
    gather_dtype: Wire = None
    reduce_dtype: Wire = None
    tp_overlap: Flag = None
    vocab_parallel_loss: Flag = None


class MeasuredSpec(Section):
    """Published result of this very run."""

    step_time: Time = None
    tokens_per_s: Annotated[float, Field(gt=0, le=1e15)] | None = None
    mfu: Fraction | None = None
    peak_memory: Data = None
    source: str | None = None


class ScenarioFile(Section):
    """A scenario file."""

    name: FileName | None = None
    extends: Annotated[str, StringConstraints(min_length=1, max_length=4096)] | None = None
    stack: Name = None
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    cluster: ClusterSpec = ClusterSpec()
    model: Annotated[ModelSpec, _section("preset", ModelSpec)] = ModelSpec()
    training: TrainingSpec = TrainingSpec()
    parallelism: ParallelismSpec = ParallelismSpec()
    input: Any = None
    job: Any = None
    measured: MeasuredSpec | None = None
    defaults: Annotated[list[str], Field(max_length=1000)] | None = None
    """In a resolved file: dotted keys that nobody chose. Whoever changes one takes it off the list, or overrides it."""
