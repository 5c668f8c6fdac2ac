"""Mixture of experts: how many tokens travel, how many an expert gets, and the ops of router and experts.

Every rank routes the tokens that it holds, t of them (under sequence parallelism its share of the sequence). With k
experts a token out of E, spread over ep ranks and each shared by etp ranks, a rank sends t k rows, and after the gather
over etp each of its E / ep experts has t k etp ep / E rows on the mean. The grouped product runs the tiles of all its
experts in the same waves (Gale 2022, "MegaBlocks", section 4; CUTLASS grouped GEMM), which is a batched product.

Imbalance stretches this: the most loaded rank of the group sets the pace, since all meet in the way back, so every rank
is priced as that one. With a capacity factor c each expert computes exactly c times the mean (drop and pad; Fedus 2021,
"Switch Transformer", section 2.2: capacity = tokens / experts x factor).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import ceil

import numpy as np

from simtrain.cost.ops import MatMul, Op, Sweep
from simtrain.program.lowered import Piece, PieceKind
from simtrain.scenario.scenario import Dispatch, Scenario

_FP32 = 4.0
_INDEX = 8.0
"""byte; an index of torch."""


@lru_cache(maxsize=256)
def drawn_imbalance(*, experts: int, ep: int, sigma: float, layers: int, seed: int) -> float:
    """Tokens of the most loaded rank over the mean, averaged over the layers of one draw.

    Each expert's popularity is log-normal: exp(sigma z), z standard normal, one draw an expert and layer.

    >>> drawn_imbalance(experts=64, ep=1, sigma=0.5, layers=4, seed=0)
    1.0
    """
    load = np.exp(sigma * np.random.default_rng(seed).standard_normal((layers, ep, experts // ep)))
    ranks = load.sum(axis=2)
    return float((ranks.max(axis=1) / ranks.mean(axis=1)).mean())


def imbalance(scenario: Scenario) -> float:
    """Tokens of the most loaded rank of an expert-parallel group over the mean: given, or drawn from the seed."""
    training, model, ep = scenario.training, scenario.model, scenario.parallelism.layout.ep
    if training.capacity_factor:
        return 1.0
    if not training.imbalance_sigma:
        return min(training.imbalance, float(ep))
    layers = sum(model.is_moe(layer) for layer in range(model.layers))
    sigma = training.imbalance_sigma
    return drawn_imbalance(experts=model.experts, ep=ep, sigma=sigma, layers=layers, seed=scenario.seed)


def local_tokens(scenario: Scenario) -> int:
    """Tokens of a microbatch that one rank routes."""
    training, layout = scenario.training, scenario.parallelism.layout
    tokens = training.micro_batch * training.seq_len // layout.cp
    return tokens // layout.tp if scenario.parallelism.sequence_parallel else tokens


def rows(scenario: Scenario) -> float:
    """Rows that the most loaded rank receives over ep before any gather over etp: t k, times capacity or imbalance."""
    chosen = local_tokens(scenario) * scenario.model.experts_per_token
    return chosen * (scenario.training.capacity_factor or imbalance(scenario))


def computed_rows(scenario: Scenario) -> float:
    """Rows through the experts of the most loaded rank, those of its etp fellows included."""
    return rows(scenario) * scenario.parallelism.layout.expert_tensor


def machines_of_a_token(machines: int, chosen: int, limit: int) -> float:
    """Machines that hold some of a token's ``chosen`` experts, at random choice, at most ``limit`` (0 = any).

    k (1 - (1 - 1/k)^n): the expected number of non-empty boxes out of k after n throws.

    >>> machines_of_a_token(8, 8, 4)
    4.0
    """
    expected = machines * (1.0 - (1.0 - 1.0 / machines) ** chosen)
    return min(expected, float(limit)) if limit else expected


def payload(scenario: Scenario, piece: Piece, element: float) -> float:
    """Bytes of one journey of tokens: of the whole gathered tensor, or of all rows that a rank sends and keeps."""
    layout, width = scenario.parallelism.layout, element * scenario.model.hidden
    gathers = scenario.parallelism.dispatch is Dispatch.ALLGATHER
    if piece.axis == "etp":
        return width * layout.expert_tensor * (local_tokens(scenario) * layout.ep if gathers else rows(scenario))
    return width * (local_tokens(scenario) * layout.ep if piece.kind is not PieceKind.ALL_TO_ALL else rows(scenario))


def router(scenario: Scenario, forward: bool, element: float) -> Iterator[Op]:
    """Softmax or sigmoid and top-k in fp32 over the logits, then the permutation (or its reverse) of the tokens."""
    model, tokens = scenario.model, local_tokens(scenario)
    logits, chosen = float(tokens * model.experts), float(tokens * model.experts_per_token)
    # forward: cast, scores, top-k, auxiliary loss, map of the routes; backward: through scores and scatter
    yield Sweep((element + 5 * _FP32) * logits + (_FP32 + _INDEX) * chosen, 8.0 if forward else 5.0)
    yield Sweep(element * model.hidden * (tokens + chosen))


def expert_rows(scenario: Scenario) -> tuple[int, int]:
    """(Experts of a rank, rows of each on the most loaded rank)."""
    local = scenario.model.experts // scenario.parallelism.layout.ep
    return local, max(1, ceil(computed_rows(scenario) / local - 1e-9))


def useful_share(scenario: Scenario) -> float:
    """Rows of the mean rank over rows priced: FLOPs count what the ranks compute on the mean."""
    return 1.0 / imbalance(scenario)


def grouped(scenario: Scenario, op: Op) -> Op:
    """An op of one expert, of its mean rows, made that of all experts of the rank: a product becomes a batched one."""
    local = scenario.model.experts // scenario.parallelism.layout.ep
    if isinstance(op, MatMul):
        return op._replace(batch=local, useful=useful_share(scenario), epilogue_bytes=local * op.epilogue_bytes)
    return op._replace(hbm_bytes=local * op.hbm_bytes)


def unpermute(scenario: Scenario, forward: bool, element: float) -> Iterator[Op]:
    """Sort by local expert and back, weigh by the router's probability, add the experts of a token."""
    tokens, chosen = local_tokens(scenario), local_tokens(scenario) * scenario.model.experts_per_token
    width = element * scenario.model.hidden
    if scenario.model.experts > scenario.parallelism.layout.ep:  # several experts a rank: rows sorted by expert
        yield Sweep(2 * 2 * width * computed_rows(scenario), 2.0)
    # forward reads the rows and writes the sum; backward reads the gradient and the rows, writes those of both
    yield Sweep(width * (chosen + tokens) if forward else width * (2 * chosen + tokens), 2.0)
