"""The smallest costed units: matrix products, passes over memory, fused attention kernels.

Numbers only: an op knows its shape and its bytes, and no device. ``layers`` says which ops a piece of a model is made
of, ``compute`` how long a device takes for one.
"""

from __future__ import annotations

from typing import NamedTuple

from simtrain.scenario.hardware import Precision


class MatMul(NamedTuple):
    """``batch`` products C[m, n] = A[m, k] B[k, n]."""

    m: int
    n: int
    k: int
    precision: Precision
    batch: int = 1
    in_bytes: float = 2.0
    """Bytes an element of A and B."""
    out_bytes: float = 2.0
    """Bytes an element of C."""
    epilogue_bytes: float = 0.0
    """HBM bytes in all that the end of the kernel moves beyond one plain write of C (accumulation into a buffer)."""
    scores: bool = False
    """An operand is the score matrix of unfused attention."""
    useful: float = 1.0
    """Share of its FLOPs that the mean rank executes, where the shape is that of the most loaded one."""

    @property
    def flops(self) -> float:
        """Multiply and add counted apart: 2 m n k."""
        return 2.0 * self.batch * self.m * self.n * self.k * self.useful

    @property
    def hbm_bytes(self) -> float:
        """Each operand read once, the product written once (perfect cache reuse)."""
        operands = self.in_bytes * (self.m * self.k + self.k * self.n) + self.out_bytes * self.m * self.n
        return self.batch * operands + self.epilogue_bytes


class Sweep(NamedTuple):
    """A pass of element-wise or reducing kernels over memory."""

    hbm_bytes: float
    launches: float = 1.0
    scores: bool = False
    """Over the score matrix of unfused attention."""

    @property
    def flops(self) -> float:
        """Element-wise arithmetic is not counted as matrix FLOPs."""
        return 0.0


class FusedAttention(NamedTuple):
    """A fused (flash, splash, cuDNN) attention kernel: scores never reach HBM (Dao 2022)."""

    backward: bool
    heads: int
    """Query heads times sequences of one rank."""
    queries: int
    """Query positions of one rank."""
    keys: int
    head_dim: int
    causal: bool
    hbm_bytes: float
    pairs: float | None = None
    """Query-key pairs that the mask lets through, a head; None = all of them, half if causal."""
    counted: float | None = None
    """Pairs that the convention of model FLOPs counts, a head; None = all of them."""

    def product(self, pairs: float | None) -> float:
        """FLOPs of one product of scores and head dimension over so many pairs (None = in full)."""
        return 2.0 * self.heads * (self.queries * self.keys if pairs is None else pairs) * self.head_dim

    @property
    def flops(self) -> float:
        """FLOPs by convention: two products forward, four backward, not halved for causality."""
        return (4 if self.backward else 2) * self.product(self.counted)

    @property
    def executed_flops(self) -> float:
        """FLOPs really executed: the backward recomputes the scores, a fifth product; a causal mask skips half."""
        half = 0.5 if self.causal and self.pairs is None else 1.0
        return (5 if self.backward else 2) * self.product(self.pairs) * half


Op = MatMul | Sweep | FusedAttention


def launches(op: Op) -> float:
    """Kernels that the host launches for an op (the fused backward prepares, runs and converts: three)."""
    if isinstance(op, Sweep):
        return op.launches
    return 3.0 if isinstance(op, FusedAttention) and op.backward else 1.0
