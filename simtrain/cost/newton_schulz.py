"""Newton-Schulz iterations of Muon (Jordan et al. 2024): orthogonalising the momentum of every matrix.

For X [n, m], n <= m, each of five iterations is A = X X', B = b A + c A A, X = a X + B X: 4 n^2 m + 2 n^3 FLOP.
"""

from __future__ import annotations

from collections.abc import Iterator

from simtrain.cost.ops import MatMul, Op
from simtrain.scenario.hardware import Precision
from simtrain.scenario.model import Model, Part
from simtrain.scenario.tuning import linear_shapes


def iteration(rows: int, columns: int, precision: Precision) -> Iterator[MatMul]:
    """Products of one iteration on one matrix, whichever side is longer."""
    n, m = min(rows, columns), max(rows, columns)
    yield MatMul(n, n, m, precision)
    yield MatMul(n, n, n, precision, epilogue_bytes=2.0 * n * n)
    yield MatMul(n, m, n, precision, epilogue_bytes=2.0 * n * m)


def block(model: Model, iterations: float, precision: Precision, *, moe: bool = False) -> Iterator[Op]:
    """Products of all matrices of one block, unsharded: a rank that holds shards gathers what it orthogonalises.

    The experts of a block go as one batch.
    """
    for part in (Part.ATTENTION, Part.ROUTER, Part.EXPERTS) if moe else (Part.ATTENTION, Part.MLP):
        alike = model.experts if part is Part.EXPERTS else 1
        for out, inp in linear_shapes(model, part, 1).values():
            for _ in range(round(iterations)):
                for op in iteration(int(out), int(inp), precision):
                    yield op._replace(batch=alike, epilogue_bytes=alike * op.epilogue_bytes)
