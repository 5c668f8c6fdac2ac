from __future__ import annotations

from dataclasses import replace

import pytest

from simtrain.cost.attention import counted_keys
from simtrain.cost.flops import block_flops, hardware_flops, model_flops, naive_step_time, peak
from simtrain.cost.pricing import price
from simtrain.engine.run import run
from simtrain.program.lowering import lower
from simtrain.scenario.files import load
from simtrain.scenario.hardware import Precision
from simtrain.scenario.model import Family
from simtrain.scenario.scenario import Attention, Recompute, Scenario
from simtrain.scenario.tables import shipped
from tests.factories import GPT, scenario


def executed(held: Scenario, *, fold: bool = True) -> float:
    lowered = lower(held, fold=fold)
    demands = price(lowered, held)
    trace = run(lowered, demands)
    return hardware_flops(lowered, demands, trace.sim_rank, trace.task)


def test_model_flops_equal_korthikanti_appendix_a() -> None:
    held = load(shipped("scenarios/llm/gpt3-175b-1024xa100.yaml"))
    model, seq = held.model, held.training.seq_len
    h, layers, vocab = model.hidden, model.layers, model.vocab
    formula = 72 * held.tokens * layers * h**2 * (1 + seq / (6 * h) + vocab / (12 * h * layers))
    assert model_flops(held) == pytest.approx(formula, rel=1e-12)


def test_a_gated_grouped_query_block() -> None:
    model = replace(GPT, family=Family.LLAMA, gated_mlp=True, kv_heads=4, ffn_hidden=3000)
    matrices = 1024 * (1024 + 2 * 256) + 1024 * 1024 + 3 * 1024 * 3000
    assert block_flops(model, 0, 2048) == 2 * matrices + 4 * 2048 * 1024
    windowed = scenario(model=model, sliding_window=512)
    assert block_flops(model, 0, counted_keys(windowed)) == 2 * matrices + 4 * 512 * 1024


@pytest.mark.parametrize("attention", [Attention.UNFUSED, Attention.FLASH2])
def test_without_recomputation_the_hardware_runs_the_model_flops(attention: Attention) -> None:
    held = scenario(tp=2, pp=2, dp=2, attention=attention)
    assert executed(held) == pytest.approx(model_flops(held), rel=1e-12)
    assert executed(held, fold=False) == pytest.approx(executed(held), rel=1e-12)


def test_full_recomputation_repeats_the_forward_of_the_blocks() -> None:
    held = scenario(pp=2, recompute=Recompute.FULL)
    blocks = sum(block_flops(held.model, layer, 2048) for layer in range(8))
    assert executed(held) == pytest.approx(model_flops(held) + held.tokens * blocks, rel=1e-12)


def test_naive_baseline() -> None:
    held = scenario(tp=8, precision=Precision.TF32)
    assert peak(held) == 156e12
    assert naive_step_time(held, 1e15) == pytest.approx(1e15 / (8 * 0.45 * 156e12))
