"""Whatever stands in a file, loading it ends with a scenario or with InputError, and soon."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simtrain.errors import InputError
from simtrain.scenario import files, yamltext
from simtrain.scenario.schema import ScenarioFile
from tests.unit.scenario.examples import GOOD

QUICK = settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
SNIPPETS = [
    *(": ", "{", "}", "[", "]", "- ", "? ", "&a ", "*a", "!!int ", "<<: ", "---\n", "#", "|", ">", "'", '"'),
    *("\t", "\n", "\0", "\ud7ff", "0x", ".inf", "1e999", "~", "null", "true", "auto", "-1"),
]


def attempt(text: str) -> None:
    with contextlib.suppress(InputError):
        files.from_mapping(yamltext.parse(text).data)


@QUICK
@given(data=st.data())
def test_mutated_text(data: st.DataObject) -> None:
    text = GOOD
    for _ in range(data.draw(st.integers(1, 6))):
        start = data.draw(st.integers(0, len(text)))
        stop = data.draw(st.integers(start, min(len(text), start + 12)))
        text = text[:start] + data.draw(st.sampled_from(SNIPPETS) | st.text(max_size=6)) + text[stop:]
    attempt(text)


@QUICK
@given(raw=st.binary(max_size=300))
def test_bytes_from_anywhere(raw: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = Path(tmp_path_factory.getbasetemp()) / "raw.yaml"
    path.write_bytes(raw)
    with contextlib.suppress(InputError):
        files.load(path)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["auto", "1 s", "3 GB/s", "gpt2-xl", "T4", "v4-8", "full", 2**200, -1, 0, 1e308]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
PATHS = [(key,) for key in ScenarioFile.model_fields if key != "extends"] + [
    (section, key)
    for section in ("cluster", "model", "training", "parallelism", "measured")
    for key in files.json_schema()["$defs"][f"{section.capitalize()}Spec"]["properties"]
]


@settings(QUICK, max_examples=400)
@given(changes=st.dictionaries(st.sampled_from(PATHS), VALUES, min_size=1, max_size=4))
def test_any_value_at_any_key(changes: dict[tuple[str, ...], Any]) -> None:
    data = yamltext.parse(GOOD).data
    for path, value in changes.items():
        if len(path) == 1:
            data[path[0]] = value
        elif isinstance(data.setdefault(path[0], {}), dict):
            data[path[0]][path[1]] = value
    with contextlib.suppress(InputError):
        scenario = files.from_mapping(data)
        assert files.from_mapping(scenario.document) == scenario
        assert sum(scenario.parallelism.stage_layers) == scenario.model.layers
        layout = scenario.parallelism.layout
        assert layout.world == scenario.cluster.devices
        assert scenario.training.micro_batch * scenario.microbatches * layout.dp == scenario.training.global_batch


@QUICK
@given(
    texts=st.lists(st.sampled_from([".".join(path) for path in PATHS]), min_size=1, max_size=3),
    value=st.text(max_size=12),
)
def test_any_override(texts: list[str], value: str) -> None:
    with contextlib.suppress(InputError):
        files.load("llm/bert-large-t4", overrides=tuple(f"{text}={value}" for text in texts))
