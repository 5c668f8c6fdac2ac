from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simtrain.errors import InputError
from simtrain.scenario import yamltext

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**15), 10**15) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(data=st.dictionaries(st.text(max_size=8), PLAIN, min_size=1, max_size=4))
def test_what_is_written_reads_back(data: dict[str, Any]) -> None:
    assert yamltext.parse(yamltext.dump(data)).data == data


def test_written_form() -> None:
    data = {
        "step_time": "18.13 s",
        "on": "no",
        "t": "12:30",
        "n": "1e9",
        "x": 9e11,
        "l": [1, "auto"],
        "m": {"a b": "true"},
    }
    assert yamltext.dump(data).splitlines() == [
        "step_time: 18.13 s",
        "on: no",
        "t: 12:30",
        "n: '1e9'",
        "x: 900000000000.0",
        "l: [1, auto]",
        "m:",
        "  a b: 'true'",
    ]


def problem(text: str) -> str:
    with pytest.raises(InputError) as caught:
        yamltext.parse(text, "f.yaml")
    return str(caught.value)


def test_yaml_1_2_core_values() -> None:
    document = yamltext.parse("a: 900e9\non: no\nt: 12:30\nn: 010\nh: 0x10\nz: ~\nb: true\nf: .5\ns: 'x'\n")
    assert document.data == {
        "a": 9e11, "on": "no", "t": "12:30", "n": 10, "h": 16, "z": None, "b": True, "f": 0.5, "s": "x"
    }  # fmt: skip


def test_positions_of_keys_items_and_what_is_missing() -> None:
    document = yamltext.parse("a: 1\nb:\n  c: {d: [5, 6]}\n", "f.yaml")
    assert document.position(("b", "c")) == (3, 3)
    assert document.position(("b", "c", "d", 1)) == (3, 14)
    assert document.position(("b", "c", "absent", "deeper")) == (3, 3)
    assert document.position(("absent",)) == (1, 1)


def test_flow_values_of_overrides() -> None:
    assert yamltext.parse_value("[1, auto, {every: sqrt}]") == [1, "auto", {"every": "sqrt"}]
    assert yamltext.parse_value("80 GiB") == "80 GiB"
    assert yamltext.parse_value("") is None


def test_anchors_are_shared_and_counted() -> None:
    assert yamltext.parse("a: &x {b: 1}\nc: *x").data == {"a": {"b": 1}, "c": {"b": 1}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "f.yaml:1:1: is empty"),
        ("# only a comment\n", "f.yaml:1:1: is empty"),
        ("- 1\n- 2\n", "f.yaml:1:1: must hold keys and values (name: value), not a list"),
        ("just text", "f.yaml:1:1: must hold keys and values (name: value), not 'just text'"),
        ("a: 1\nb: {c: 1, c: 2}\n", "f.yaml:2:11: b.c: duplicate key (first in line 2)"),
        ("a: 1\n\na: 2\n", "f.yaml:3:1: a: duplicate key (first in line 1)"),
        ("a: b: c", "f.yaml:1:5: not valid YAML: mapping values are not allowed in this context"),
        ("a: [1,\n  2", "f.yaml:3:1: not valid YAML: did not find expected"),
        ("a:\n\t- b", "f.yaml:2:1: not valid YAML: a tab; lines are indented with blanks"),
        ("a: !!python/object/apply:os.system [ls]", "f.yaml:1:4: YAML tags"),
        ("a: *b", "f.yaml:1:4: alias *b has no anchor before it"),
        ("a: &a [*a]", "f.yaml:1:8: alias *a has no anchor before it"),
        ("a: 1\n--- \nb: 2", "f.yaml:2:1: a second document starts here"),
        ("? [a]\n: b", "f.yaml:1:3: a key must be plain text"),
        ("a: x\x00y", "f.yaml:1:5: is not text: control character U+0000"),
        ("a: " + "9" * 5000, "f.yaml:1:4: a number of 5000 characters (at most 64)"),
        ("%YAML 9.9\n---\na: 1", "f.yaml:1:1: not valid YAML: found incompatible YAML document"),
    ],
)
def test_each_defect_has_its_place_and_its_words(text: str, said: str) -> None:
    assert problem(text).startswith(said)


def test_all_duplicates_at_once() -> None:
    assert problem("a: 1\na: 2\nb: {c: 1, c: 2}").count("duplicate key") == 2


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 10)}]\n" for i in range(12)
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (LAUGHS, "holds more than 100000 values"),
        ("a: " + "[" * 60, "nested deeper than 50 levels"),
        ("a: " + "[" * 500_000, "nest"),
        ("a: " + "{a: " * 200_000, "nested deeper than 50 levels"),
        ("- " * 500_000, "nested deeper than 50 levels"),
        ("? " * 500_000, "a key must be plain text"),
        ("a: [" + "1, " * 200_000 + "]", "holds more than 100000 values"),
    ],
    ids=["laughs", "deep", "brackets", "braces", "dashes", "keys", "wide"],
)
def test_bombs_end_soon(text: str, said: str) -> None:
    assert said in problem(text)


def test_fifty_levels_are_allowed() -> None:
    assert yamltext.parse("a: " + "[" * 49 + "]" * 49).data["a"]


def unreadable(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        yamltext.read(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_files_that_cannot_be_text(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"a: 1\nb: \xff\xfe\x00")
    assert unreadable(binary).endswith(":2:4: is not UTF-8 text (byte 0xff)")
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (yamltext.MAX_BYTES + 1))
    assert "is too large: 1048577 bytes (at most 1048576)" in unreadable(large)
    assert "is a folder, not a file" in unreadable(tmp_path)
    assert "cannot be read: No such file or directory" in unreadable(tmp_path / "none.yaml")
    assert "cannot be read" in unreadable(tmp_path / ("x" * 300))


def test_a_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "is not a regular file" in unreadable(tmp_path / "pipe")


def test_byte_order_mark_is_text(tmp_path: Path) -> None:
    path = tmp_path / "bom.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert yamltext.read(path).data == {"a": 1}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(tmp_path: Path) -> None:
    path = tmp_path / "closed.yaml"
    path.write_text("a: 1")
    path.chmod(0)
    assert "cannot be read: Permission denied" in unreadable(path)
