"""Keys of sharding: shard and replica groups, what is wrapped, freed, gathered, and in which format it travels.

Defaults: shard_size dp; reshard_after_forward without a pipeline, unless the schedule splits the backward;
reshard_after_backward without a pipeline (torch's pipeline stages keep parameters gathered until their last backward);
reshard_root false; prefetch 1, backward_prefetch as prefetch; wrap_blocks 1; wrap_ends true;
replica_sync_every_microbatch true; gather_dtype and reduce_dtype those of the stack; tp_overlap the stack's choice;
vocab_parallel_loss true.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from simtrain.scenario.layout import Layout
from simtrain.scenario.problems import Problems
from simtrain.scenario.scenario import Stack, WireType
from simtrain.scenario.schema import ParallelismSpec

KEY = "parallelism."
Value = TypeVar("Value")


class Default(Protocol):
    """The value, or a default with a note that it was used."""

    def __call__(self, value: Value | None, key: str, default: Value) -> Value:
        """Return ``value``, or ``default`` where it is None, noted under ``key``."""
        ...


@dataclass(frozen=True, slots=True)
class Sharding:
    """What ``parallelism`` says beyond degrees and schedule."""

    layout: Layout
    fields: Mapping[str, Any]
    """Fields of ``Parallelism``."""


def resolve(
    spec: ParallelismSpec,
    layout: Layout,
    zero: int,
    *,
    gathers: bool,
    split_by: str,
    stack: Stack | None,
    fill: Default,
    problems: Problems,
) -> Sharding:
    """Check the sharding keys and fill in their defaults.

    Parameters
    ----------
    spec, layout, zero, stack
        The section, the degrees, the ZeRO stage, the software.
    gathers
        Parameters are gathered unit by unit: ZeRO-3, or parameters that live outside the device.
    split_by
        The schedule, if it splits the backward in two halves; else empty.
    fill
        Gives a value or its default.
    problems
        Takes what is wrong.
    """
    _check(spec, layout, zero, problems)
    shard = fill(spec.shard_size, KEY + "shard_size", layout.dp)
    hybrid = shard < layout.dp and layout.dp % shard == 0
    flat = layout.pp == 1
    if not gathers:
        return Sharding(replace(layout, shard=shard if hybrid else 0), _fields(spec, layout, hybrid, stack, fill))
    after = fill(spec.reshard_after_forward, KEY + "reshard_after_forward", flat and not split_by)
    reshards = after is not False and (isinstance(after, bool) or after > 1)
    if zero == 3 and reshards and split_by:
        problems.add(
            KEY + "reshard_after_forward",
            f"{split_by} splits the backward, and FSDP2 then computes wrong updates with resharding (torch 2.13,"
            " silently); set it to false",
        )
    shards = shard * layout.cp
    near = 0 if zero < 3 or isinstance(after, bool) or after in (1, shards) else after // layout.cp
    if not isinstance(after, bool) and after > 1 and (shards % after or after % layout.cp):
        what = f"{shard} x cp {layout.cp} = {shards}" if layout.cp > 1 else str(shards)
        problems.add(
            KEY + "reshard_after_forward",
            f"{after} ranks cannot hold a copy of what {what} share; choose from {_choices(shards, layout.cp)}",
        )
        near = 0
    fields = _fields(spec, layout, hybrid, stack, fill) | {
        "reshard_after_forward": reshards,
        "reshard_after_backward": fill(spec.reshard_after_backward, KEY + "reshard_after_backward", flat),
        "reshard_root": fill(spec.reshard_root, KEY + "reshard_root", False),
        "wrap_blocks": fill(spec.wrap_blocks, KEY + "wrap_blocks", 1),
        "wrap_ends": fill(spec.wrap_ends, KEY + "wrap_ends", True),
    }
    return Sharding(replace(layout, shard=shard if hybrid else 0, near=near), fields)


def _fields(spec: ParallelismSpec, layout: Layout, hybrid: bool, stack: Stack | None, fill: Default) -> dict[str, Any]:
    """Fields that mean something below ZeRO-3 too; those of hybrid sharding and tensor parallelism where it is."""
    ahead = fill(spec.prefetch, KEY + "prefetch", 1)
    found: dict[str, Any] = {
        "prefetch": ahead,
        "backward_prefetch": fill(spec.backward_prefetch, KEY + "backward_prefetch", ahead),
        "gather_dtype": WireType(spec.gather_dtype) if spec.gather_dtype else None,
        "reduce_dtype": WireType(spec.reduce_dtype) if spec.reduce_dtype else None,
    }
    if hybrid:
        key = "replica_sync_every_microbatch"
        found[key] = fill(spec.replica_sync_every_microbatch, KEY + key, True)
    if layout.tp > 1:
        found["vocab_parallel_loss"] = fill(spec.vocab_parallel_loss, KEY + "vocab_parallel_loss", True)
        if spec.sequence_parallel is not False:
            found["tp_overlap"] = fill(spec.tp_overlap, KEY + "tp_overlap", bool(stack and stack.tp_overlap))
    return found


def _check(spec: ParallelismSpec, layout: Layout, zero: int, problems: Problems) -> None:
    shard = spec.shard_size
    if shard is not None and shard != layout.dp:
        if layout.dp % shard:
            choices = ", ".join(str(d) for d in range(2, layout.dp + 1) if layout.dp % d == 0)
            problems.add(KEY + "shard_size", f"dp {layout.dp} cannot be split into groups of {shard}; choose {choices}")
        elif zero == 0 or shard == 1:
            why = "zero is 0: nothing is sharded" if zero == 0 else "a group of one shards nothing: say zero: 0"
            problems.add(KEY + "shard_size", f"{shard}, but {why}")
    if spec.gather_dtype and zero == 0:
        problems.add(KEY + "gather_dtype", "zero is 0: no parameters are gathered; leave it out")
    if spec.tp_overlap and (layout.tp == 1 or spec.sequence_parallel is False):
        problems.add(
            KEY + "tp_overlap",
            "needs sequence_parallel with tp above 1 (Transformer Engine and async tensor parallelism split gathers"
            " and scatters of the sequence, not all-reduces)",
        )
    if spec.vocab_parallel_loss is False and layout.tp == 1:
        problems.add(KEY + "vocab_parallel_loss", "the vocabulary is whole without tensor parallelism; leave it out")


def _choices(shards: int, cp: int) -> str:
    return ", ".join(str(d) for d in range(max(cp, 2), min(shards, 1024) + 1) if shards % d == 0 and d % cp == 0)
