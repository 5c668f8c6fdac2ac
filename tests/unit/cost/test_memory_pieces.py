"""Whole microbatches against a reference: PyTorch's MemTracker under FakeTensorMode (torch 2.13, run by this project).

The reference is a GPT of 12 layers, hidden 768, 12 heads, vocabulary 50,257, untied, no biases, batch 8, sequence 1024,
AdamW, and a second one of 1.3 B parameters; peaks of the second step in MiB.
"""

from __future__ import annotations

from typing import Any

import pytest

from simtrain.cost.memory import fold_pieces, piece_memory, resting
from simtrain.program.demand import Memory
from simtrain.program.lowered import Piece, PieceKind
from simtrain.scenario.hardware import Precision
from simtrain.scenario.model import Family, Part
from simtrain.scenario.scenario import Attention, Optimizer, Recompute, Scenario, Zero
from tests.factories import TORCH, scenario
from tests.unit.cost.memory_walk import forward_and_backward, walk

K = PieceKind
MIB = 2.0**20
SMALL = {
    "layers": 12,
    "hidden": 768,
    "heads": 12,
    "kv_heads": 12,
    "ffn_hidden": 3072,
    "vocab": 50257,
    "max_positions": 1024,
    "micro_batch": 8,
    "seq_len": 1024,
}
LARGE = {
    "layers": 16,
    "hidden": 2048,
    "heads": 16,
    "kv_heads": 16,
    "head_dim": 128,
    "ffn_hidden": 8192,
    "vocab": 128256,
    "max_positions": 2048,
    "micro_batch": 2,
    "seq_len": 2048,
}
PLAIN = {"vocab_multiple": 1, "tied_embeddings": False, "bias": False, "dropout": False, "microbatches": 1}
FP32 = {"precision": Precision.FP32}
FULL = {"recompute": Recompute.FULL}
BF16_WEIGHTS = {
    "fp32_shards": False,
    "grad_bytes": 2.0,
    "optimizer": Optimizer("adamw", state_bytes=4.0, master_bytes=0.0, read_write_bytes=14.0, launches=0.0),
}


def fsdp(dp: int) -> dict[str, Any]:
    return {"dp": dp, "zero": Zero.PARAMETERS}


def reference(**changes: Any) -> Scenario:
    return scenario(**{"stack": TORCH, **SMALL, **PLAIN, **changes})


def tensors(level: dict[Memory, float]) -> float:
    """What MemTracker sees: all but the runtime and its communicators."""
    return sum(count for category, count in level.items() if category is not Memory.RUNTIME)


def root(case: Scenario) -> float:
    """Gathered embedding and head. The reference resharded them after forward, which FSDP2 does not do by default."""
    sharded = case.parallelism.zero is Zero.PARAMETERS and case.parallelism.reshard_after_forward
    parameters = sum(case.part_parameters(part, -1) for part in (Part.EMBEDDING, Part.HEAD))
    return parameters * (4 if case.training.precision is Precision.FP32 else 2) * sharded


@pytest.mark.parametrize(
    ("changes", "peak"),
    [
        (FP32, 11238.7),
        ({**FP32, **FULL}, 6912.7),
        (FULL, 6974.3),
        ({**FP32, **fsdp(2)}, 10306.2),
        ({**FP32, **fsdp(8)}, 9606.9),
        ({**FP32, **fsdp(8), "reshard_after_forward": False}, 10228.6),
        (fsdp(8), 7278.1),
        ({**fsdp(8), **FULL}, 5112.9),
        ({**LARGE, **fsdp(8)}, 12058.3),
    ],
)
def test_peak_of_memtracker(changes: dict[str, Any], peak: float) -> None:
    case = reference(**changes)
    top, _ = walk(case, forward_and_backward(case))
    assert (tensors(top) - root(case)) / MIB == pytest.approx(peak, rel=5e-4)


def test_peak_of_memtracker_bf16_weights() -> None:
    """Weights and states in bf16, gradients set to none before the step (here they are held all step: subtracted)."""
    case = reference(**BF16_WEIGHTS)
    top, _ = walk(case, forward_and_backward(case))
    held = resting(case, 0)[Memory.GRADIENTS]
    assert (tensors(top) - held) / MIB == pytest.approx(7977.4, rel=5e-4)


def test_peak_of_memtracker_autocast() -> None:
    """The reference projects Q, K and V apart, and autocast casts the input of each: two copies a block are its own."""
    case = reference()
    top, _ = walk(case, forward_and_backward(case))
    copies = 2 * 12 * 8 * 1024 * 768 * 2
    assert (tensors(top) + copies) / MIB == pytest.approx(9734.3, rel=5e-4)


@pytest.mark.parametrize(
    ("changes", "kept"),
    [(FP32, 7803.1), (BF16_WEIGHTS, 4689.1), ({**FP32, **FULL}, 3477.1), (FULL, 2753.5)],
)
def test_activations_at_end_of_forward(changes: dict[str, Any], kept: float) -> None:
    """What forward keeps, and the logits themselves, which the script's output still held there."""
    case = reference(**changes)
    forwards = [piece for piece in forward_and_backward(case) if piece.kind is K.FORWARD]
    held = sum(count for piece in forwards for _, count in piece_memory(case, piece)[0])
    logits = 8 * 1024 * 50257 * (4 if case.training.precision is Precision.FP32 else 2)
    assert (held + logits) / MIB == pytest.approx(kept, rel=5e-4)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"recompute": Recompute.SELECTIVE, "tp": 2, "sequence_parallel": True},
    {"recompute": Recompute.FULL},
    {"recompute": Recompute.EVERY, "recompute_layers": 3},
    {"recompute": Recompute.BLOCKS, "recompute_layers": 2, "attention": Attention.FLASH2},
    {"stack": TORCH, "zero": Zero.PARAMETERS, "dp": 8, "microbatches": 1},
    {"stack": TORCH, "zero": Zero.PARAMETERS, "dp": 8, "reshard_after_forward": False, "sync_every_microbatch": True},
    {"zero": Zero.GRADIENTS, "dp": 8, "sync_every_microbatch": True},
    {"stack": TORCH, "zero": Zero.NONE, "dp": 4, "microbatches": 1},
    {"stack": TORCH, "zero": Zero.OPTIMIZER, "dp": 4, "microbatches": 1},
    {"stack": TORCH, "zero": Zero.PARAMETERS, "dp": 1, "microbatches": 1},
    {"family": Family.BERT, "encoder_layers": 8, "token_types": 2},
    {"family": Family.T5, "encoder_layers": 4, "zero": Zero.PARAMETERS, "dp": 4, "recompute": Recompute.SELECTIVE},
    {"family": Family.T5, "encoder_layers": 4, "recompute": Recompute.FULL},
]


@pytest.mark.parametrize("changes", VARIANTS)
@pytest.mark.parametrize("backward", [K.BACKWARD, K.INPUT_GRAD])
def test_step_ends_where_it_began(changes: dict[str, Any], backward: PieceKind) -> None:
    case = scenario(**changes)
    _, level = walk(case, forward_and_backward(case, backward=backward))
    held = resting(case, 0)
    assert {category: count for category, count in level.items() if count} == {
        category: count for category, count in held.items() if count
    }


@pytest.mark.parametrize("changes", VARIANTS)
def test_merged_pieces_have_the_peak_of_single_ones(changes: dict[str, Any]) -> None:
    """Cut a microbatch anywhere: each part's fold ends at the same level and its highest is the highest within."""
    case = scenario(**changes)
    pieces = forward_and_backward(case)
    for cut in range(0, len(pieces), 5):
        folded = level = highest = 0.0
        for run in (pieces[:cut], pieces[cut:]):
            found = fold_pieces(case, run)
            assert all(count > 0 for _, count in found[2])
            keeps, frees, transient = (sum(n for _, n in part) for part in found)
            peak, after = _highest(case, run)
            assert keeps + transient == pytest.approx(peak, rel=1e-12)
            assert keeps - frees == pytest.approx(after, rel=1e-12, abs=1)
            highest = max(highest, folded + keeps + transient)
            folded += keeps - frees
        single, level = _highest(case, pieces)
        assert highest == pytest.approx(single, rel=1e-12)
        assert folded == pytest.approx(level, abs=1)


def _highest(case: Scenario, pieces: tuple[Piece, ...]) -> tuple[float, float]:
    level = highest = 0.0
    for piece in pieces:
        keeps, frees, transient = (sum(n for _, n in part) for part in piece_memory(case, piece))
        level += keeps
        highest = max(highest, level + transient)
        level -= frees
    return highest, level


def test_transient_keeps_the_categories_of_its_moment() -> None:
    """A backward over a checkpointed block: recomputed tensors and gradients are workspace, nothing is negative."""
    case = scenario(recompute=Recompute.FULL)
    pieces = [Piece(K.RECOMPUTE, Part.ATTENTION, 3), Piece(K.RECOMPUTE, Part.MLP, 3)]
    pieces += [Piece(K.BACKWARD, Part.MLP, 3), Piece(K.BACKWARD, Part.ATTENTION, 3)]
    keeps, frees, transient = fold_pieces(case, pieces)
    assert keeps == ()
    assert frees == ((Memory.ACTIVATIONS, 2.0 * 2048 * 1024),)
    assert [category for category, _ in transient] == [Memory.WORKSPACE]
    assert all(count > 0 for _, count in transient)


def test_zero3_gathers_a_block_at_a_time() -> None:
    """Forward never holds more than the root and one block; without resharding it ends holding everything."""
    case = scenario(stack=TORCH, zero=Zero.PARAMETERS, dp=8, microbatches=1)
    sizes = [sum(case.part_parameters(part, layer) for part in (Part.ATTENTION, Part.MLP)) for layer in range(8)]
    ends = sum(case.part_parameters(part, -1) for part in (Part.EMBEDDING, Part.HEAD))
    forward = [piece for piece in forward_and_backward(case) if piece.kind in (K.ALL_GATHER, K.FORWARD)][:26]
    assert _most_gathered(case, forward) == 2 * (ends - case.part_parameters(Part.HEAD, -1) + max(sizes))
    kept = scenario(stack=TORCH, zero=Zero.PARAMETERS, dp=8, microbatches=1, reshard_after_forward=False)
    assert _most_gathered(kept, list(forward_and_backward(kept))) == 2 * (ends + sum(sizes))


def _most_gathered(case: Scenario, pieces: list[Piece]) -> float:
    level = highest = 0.0
    for piece in pieces:
        keeps, frees, _ = piece_memory(case, piece)
        level += dict(keeps).get(Memory.GATHERED, 0.0)
        highest = max(highest, level)
        level -= dict(frees).get(Memory.GATHERED, 0.0)
    return highest


def test_zero3_unsharded_gradients_live_from_backward_to_reduction() -> None:
    case = scenario(stack=TORCH, zero=Zero.PARAMETERS, dp=8, microbatches=4, sync_every_microbatch=True)
    backward = dict(piece_memory(case, Piece(K.BACKWARD, Part.MLP, 2))[0])
    count = case.part_parameters(Part.MLP, 2)
    assert backward[Memory.GRADIENTS] == 2 * count
    reduce = Piece(K.REDUCE_SCATTER, Part.GRADIENT, axis="dp", elements=count)
    keeps, frees, transient = piece_memory(case, reduce)
    assert (keeps, frees) == ((), ((Memory.GRADIENTS, 2 * count),))
    assert transient == ((Memory.BUFFERS, 4 * count),)  # flat fp32 copy for the wire


def test_messages_and_tensor_collectives() -> None:
    case = scenario(pp=2, tp=2, sequence_parallel=True)
    for kind in (K.SEND, K.RECV):
        message = piece_memory(case, Piece(kind, Part.BOUNDARY, 4, axis="pp"))
        assert message == ((), (), ((Memory.BUFFERS, 2048 * 1024 * 2 / 2),))
    assert piece_memory(case, Piece(K.ALL_GATHER, Part.MLP, 2, axis="tp")) == ((), (), ())
