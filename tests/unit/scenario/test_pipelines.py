"""Schedules as a scenario names, spells out or refuses them."""

from __future__ import annotations

from pathlib import Path

import pytest

from simtrain.errors import InputError
from simtrain.program.actions import flat
from simtrain.program.grid import to_csv
from simtrain.program.lowering import pipeline_program
from simtrain.program.schedules import SCHEDULES, build
from simtrain.scenario.files import from_mapping, load, resolved_yaml
from simtrain.scenario.pipelines import RULES, Placement, rank_stages
from simtrain.scenario.scenario import Scenario
from simtrain.simulate import simulate
from tests.unit.scenario.examples import GOOD, spoiled, write


def with_grid(folder: Path, grid: str, **lines: str) -> Path:
    """The small scenario with a schedule from a file beside it."""
    (folder / "grid.csv").write_text(grid, encoding="utf-8")
    return write(folder, spoiled(**({"pp": "  pp: 2\n  schedule: grid.csv"} | lines)))


def message(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        simulate(load(path))
    return str(caught.value)


def test_every_rule_has_a_schedule_and_says_where_its_stages_are() -> None:
    assert set(RULES) == set(SCHEDULES)
    for name, rule in RULES.items():
        virtual = rule.virtual[0]
        program = build(name, 4, 8, virtual)
        held = [tuple(sorted({action.stage for action in flat(steps)})) for steps in program]
        assert held == [rank_stages(rule.placement, rank, 4, 4 * virtual) for rank in range(4)]


@pytest.mark.parametrize("name", RULES)
def test_every_schedule_runs_from_a_file(tmp_path: Path, name: str) -> None:
    virtual = 2 if 2 in RULES[name].virtual else 1
    text = spoiled(pp=f"  pp: 2\n  virtual_stages: {virtual}\n  schedule: {name}")
    made = load(write(tmp_path, text))
    assert made.parallelism.post_validation is RULES[name].rolls
    assert made.held_twice is (RULES[name].placement is Placement.MIRRORED)
    assert made.has_tied_copy is (RULES[name].placement is Placement.LOOP)
    assert simulate(made).step_time > 0


def test_a_grid_beside_the_file_is_the_schedule_it_spells_out(tmp_path: Path) -> None:
    """The same step as the named schedule, from wherever the file is loaded, and from the resolved file alone."""
    path = with_grid(tmp_path, to_csv(build("zb-v", 2, 8, 2)))
    made = load(path, overrides=("parallelism.post_validation=true",))
    assert (made.parallelism.virtual_stages, made.stages, made.has_tied_copy) == (2, 4, False)
    assert pipeline_program(made) == build("zb-v", 2, 8, 2)
    named = load(write(tmp_path, spoiled(pp="  pp: 2\n  virtual_stages: 2\n  schedule: zb-v"), "named.yaml"))
    first, second = simulate(made), simulate(named)
    assert first.step_time == second.step_time
    assert first.memory.peak(0) == second.memory.peak(0)
    (tmp_path / "elsewhere").mkdir()
    again = tmp_path / "elsewhere" / "resolved.yaml"
    again.write_text(resolved_yaml(made), encoding="utf-8")
    assert load(again) == made
    assert from_mapping(made.document) == made


def test_a_model_held_twice_can_be_written_out(tmp_path: Path) -> None:
    made = load(with_grid(tmp_path, to_csv(build("dualpipe", 2, 8))))
    named = load(write(tmp_path, spoiled(pp="  pp: 2\n  schedule: dualpipe"), "named.yaml"))
    assert made.held_twice
    assert simulate(made).step_time == simulate(named).step_time


def test_messages_are_received_in_the_order_in_which_they_were_sent(tmp_path: Path) -> None:
    """Rank 1 takes the microbatches the other way round: it waits for its first one, and nothing deadlocks."""
    straight = "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"
    crossed = "0F0,0F1,0B0,0B1\n1F1,1F0,1B1,1B0\n"
    batch = {"global_batch": "  global_batch: 16"}
    times = [simulate(load(with_grid(tmp_path, grid, **batch))).step_time for grid in (straight, crossed)]
    assert times[1] > times[0]


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        ("0F0,0B0\n1F0,x,1B0\n", "grid.csv:2:5: cell 2: not an action: 'x'"),
        ("0F0,0B0\n1B0,1F0\n", "grid.csv:2:1: cell 1: rank 1: 1B0 before 1F0"),
        ("0F0,0B0\n# second\n1F0\n", "grid.csv:3:1: cell 1: missing: 1B0"),
        ("0F0,0B0,0F0\n1F0,1B0\n", "grid.csv:1:1: cell 1: 0F0 twice"),
        ("0F0,0B0\n", "parallelism.schedule: the grid has 1 ranks (lines), but pp is 2"),
        ("0F0,0B0\n2F0,2B0\n", "parallelism.schedule: the grid names the stages 0, 2, but pp 2"),
        ("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n", "the grid runs 2 microbatches, but the batch makes 1"),
        ("# nothing\n", "parallelism.schedule: holds no action"),
        ("1F0,1B0\n0F0,0B0\n", "tied embeddings need stage 0 on the first rank"),
    ],
)
def test_a_grid_that_cannot_run_is_refused_with_its_place(tmp_path: Path, grid: str, said: str) -> None:
    assert said in message(with_grid(tmp_path, grid, global_batch="  global_batch: 8"))


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ({"pp": "  pp: 2\n  schedule: missing.csv"}, "missing.csv: cannot be read"),
        ({"pp": "  pp: 2\n  schedule: [0F0, 3]"}, "must be the name of a schedule, a CSV file"),
        ({"pp": "  pp: 2\n  schedule: zb-v"}, "zb-v runs 2 stages a rank, not 1 (1 virtual stages run with: gpipe"),
        (
            {"pp": "  pp: 2\n  schedule: dualpipe", "global_batch": "  global_batch: 24"},
            "microbatches must be even, not 3",
        ),
        ({"pp": "  pp: 2\n  schedule: dualpipe", "global_batch": "  global_batch: 16"}, "at least 2 x 2 ranks"),
        (
            {"tp": "  tp: 2", "pp": "  pp: 1\n  post_validation: true", "dp": "  dp: 16"},
            "is about the stages of a pipeline",
        ),
        ({"pp": "  pp: 2\n  stage_layers: [12, 0, 12]\n  virtual_stages: 2"}, "3 entries for pp 2 x virtual_stages 2"),
        (
            {"pp": "  pp: 2\n  stage_layers: [12, 0, 6, 6]\n  virtual_stages: 2"},
            "only the first and the last stage (embedding, head) can do without layers",
        ),
        (
            {
                "pp": "  pp: 2\n  schedule: zb-h1\n  zero: 3\n  reshard_after_forward: true",
                "name": "name: x\nstack: torchtitan-2024",
            },
            "zb-h1 splits the backward, and FSDP2 then computes wrong updates with resharding",
        ),
    ],
)
def test_what_cannot_go_together_is_refused(tmp_path: Path, lines: dict[str, str], said: str) -> None:
    assert said in message(write(tmp_path, spoiled(**lines)))


def test_torch_stacks_have_no_post_validation_by_default(tmp_path: Path) -> None:
    text = GOOD.replace("name: small", "name: small\nstack: torchtitan-2024") + "  schedule: zb-h1\n  zero: 0\n"
    made: Scenario = load(write(tmp_path, text))
    assert not made.parallelism.post_validation
    assert not simulate(made).spans.lowered.rolling


def test_end_stages_may_hold_the_embedding_or_the_head_alone(tmp_path: Path) -> None:
    layers = ", ".join(["0", *["4"] * 6, "0"])
    made = load(write(tmp_path, spoiled(pp=f"  pp: 2\n  virtual_stages: 4\n  stage_layers: [{layers}]")))
    assert [len(made.parts(stage)) for stage in (0, 7)] == [1, 1]
    assert simulate(made).step_time > 0
