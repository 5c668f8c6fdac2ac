"""FLOPs of a step by convention, and what they would take at a flat efficiency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from simtrain.cost.attention import counted_keys
from simtrain.cost.compute import matrix_peak
from simtrain.program.demand import Demand
from simtrain.program.lowered import Lowered
from simtrain.scenario.model import BlockKind, Family, Model, Part
from simtrain.scenario.scenario import Scenario
from simtrain.scenario.tuning import adapter_parameters, linear_shapes

CONVENTION = (
    "model FLOPs / (devices x dense peak x step time); attention in full, "
    "no recomputation (PaLM appendix B; Korthikanti 2022, appendix A)"
)
"""What MFU counts."""
NAIVE_EFFICIENCY = 0.45
"""Of the dense peak, whatever the shape: the baseline that a model has to beat."""


def block_flops(model: Model, layer: int, keys: float) -> float:
    """Forward matrix FLOPs of one block for one token: 2 an element of every matrix, 4 a score and head dimension.

    ``keys`` is how many keys a query has (``attention.counted_keys``). Of a mixture of experts those that the token
    passes through count, and the router.
    """
    hidden, width, kv = model.hidden, model.heads * model.head_dim, model.kv_heads * model.head_dim
    attention = 2.0 * hidden * (2 * width + 2 * kv) + 4.0 * keys * width
    if model.kv_lora_rank:
        attention = 2.0 * latent_matrices(model) + 2.0 * keys * model.heads * (model.qk_head_dim + model.v_head_dim)
    cross = attention if model.block_kind(layer) is BlockKind.CROSS else 0.0
    matrices, mlp = 3 if model.gated_mlp else 2, model.ffn_hidden
    if model.is_moe(layer):
        mlp = (model.experts_per_token + model.experts_shared) * model.expert_ffn_hidden
        attention += 2.0 * hidden * model.experts
    return attention + cross + 2.0 * hidden * mlp * matrices


def latent_matrices(model: Model) -> float:
    """Elements of the matrices of one latent attention (DeepSeek-V2, equations 9 to 19)."""
    queries, rank = model.heads * model.qk_head_dim, model.q_lora_rank
    into = model.hidden * rank + rank * queries if rank else model.hidden * queries
    keys = model.hidden * (model.kv_lora_rank + model.qk_rope_head_dim)
    up = model.kv_lora_rank * model.heads * (model.qk_nope_head_dim + model.v_head_dim)
    return float(into + keys + up + model.heads * model.v_head_dim * model.hidden)


def model_flops(scenario: Scenario) -> float:
    """FLOPs of a step of the whole job: 3 (forward and both gradients) times the forward products.

    For a GPT this is Korthikanti's appendix A, 72 B L s h^2 (1 + s / 6h + V / 12hL). The vocabulary is not padded.

    Returns
    -------
    float
        FLOP. Attention counts in full over a document (or the window), causal or not; nothing that is recomputed
        counts, nor do gradients that frozen weights do without.
    """
    model, keys = scenario.model, counted_keys(scenario)
    if not scenario.training.trainable.everything:
        return scenario.tokens * tuned_flops(scenario)
    head = 2.0 * model.hidden * model.vocab + (2.0 * model.hidden**2 if model.family is Family.BERT else 0.0)
    blocks = sum(block_flops(model, layer, keys) for layer in range(model.layers))
    return 3.0 * scenario.tokens * (blocks + head)


def tuned_flops(scenario: Scenario) -> float:
    """FLOPs a token and step where parts are frozen: 2 an element forward, 2 for the input gradient where one passes,
    2 for the weight gradient where the weight is trained; adapters 6 a parameter.
    """
    model, trainable, keys = scenario.model, scenario.training.trainable, counted_keys(scenario)
    total = 0.0
    for stage in range(scenario.stages):
        for part, layer in scenario.parts(stage):
            shapes = linear_shapes(replace(model, vocab_multiple=1), part, 1).values()
            alike = model.experts_per_token if part is Part.EXPERTS else 1
            matrices = (
                alike * sum(out * inp for out, inp in shapes) + (part is Part.ROUTER) * model.hidden * model.experts
            )
            back = scenario.has_backward(part, layer)
            total += 2.0 * (1 + back + (back and not trainable.is_frozen(part, layer))) * matrices
            if trainable.lora:
                total += 6.0 * alike * adapter_parameters(trainable.lora, model, part, 1)
            if part in (Part.ATTENTION, Part.CROSS_ATTENTION):
                total += 2.0 * (1 + 2 * back) * keys * model.heads * (model.qk_head_dim + model.value_head_dim)
    return total


def hardware_flops(
    lowered: Lowered, demands: Sequence[Demand], sim_rank: NDArray[np.int32], task: NDArray[np.int32]
) -> float:
    """FLOPs that all ranks execute in a step, recomputation and vocabulary padding included, in the convention above.

    Parameters
    ----------
    lowered
        The job.
    demands
        By work index.
    sim_rank, task
        (spans,) Which rank ran which task.
    """
    total = 0.0
    for index, rank in enumerate(lowered.ranks):
        works = np.array([entry.work for entry in lowered.lists[rank.tasks].tasks], dtype=np.int64)
        flops = np.array([demand.flops for demand in demands])
        total += rank.multiplicity * float(flops[works[task[sim_rank == index]]].sum())
    return total


def peak(scenario: Scenario) -> float:
    """Dense matrix peak of one device at the training precision, FLOP/s."""
    return matrix_peak(scenario.cluster.accelerator, scenario.training.precision)


def naive_step_time(scenario: Scenario, executed: float) -> float:
    """What ``executed`` FLOPs (recomputation included) take at 0.45 of the dense peak on all devices, s."""
    return executed / (scenario.cluster.devices * NAIVE_EFFICIENCY * peak(scenario))
