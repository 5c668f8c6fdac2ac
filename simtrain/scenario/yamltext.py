"""YAML 1.2 text <-> plain data; what was read remembers where each value stood.

The text is untrusted: size, nesting and alias expansion are bounded before anything is built, tags are refused,
a key may stand once. Whatever is wrong comes back as ``InputError`` with file, line and column.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from yamlcore import CCoreLoader, CoreDumper

from simtrain.errors import InputError, Problem

MAX_BYTES = 1 << 20
MAX_TABLE_BYTES = 1 << 24
"""A table of published runs is longer than any scenario."""
MAX_TABLE_NODES = 2_000_000
MAX_DEPTH = 50
MAX_NODES = 100_000
"""Values of a file with every alias counted as often as it is used."""
MAX_NUMBER = 64
"""Characters of a number; longer ones are slips, and Python converts them in quadratic time."""

Path_ = tuple[str | int, ...]
Place = tuple[int, int]
"""(line, column), both from 1."""
_FORBIDDEN = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufeff\uff00-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True)
class Document:
    """A file's data and the place of every key and value in it."""

    file: str
    data: dict[str, Any]
    places: Mapping[Path_, Place]
    """Path of keys and indices -> place of the key (of the value, in a list)."""

    def position(self, path: Path_) -> Place:
        """Place of a value, or of the nearest thing around it that is in the file; (1, 1) for the file itself."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, (1, 1))


def read(path: str | Path) -> Document:
    """Read a YAML file whose top level is a mapping.

    Raises
    ------
    InputError
        Unreadable, not a regular file, larger than 1 MiB, not UTF-8 text, not YAML, empty, no mapping, duplicate keys,
        tags, nested deeper than 50, or with aliases that expand to more than 100,000 values.
    """
    return parse(read_text(path), str(path))


def read_list(path: str | Path) -> list[Any]:
    """Read a table: a YAML file whose top level is a list, up to 16 MiB; otherwise as ``read``."""
    data = _Builder(read_text(path, MAX_TABLE_BYTES), str(path), MAX_TABLE_NODES).document()
    if not isinstance(data, list):
        raise _error(str(path), f"must hold a list of rows, not {describe(data)}", (1, 1))
    return data


def read_text(path: str | Path, most: int = MAX_BYTES) -> str:
    """Text of a regular UTF-8 file of at most ``most`` bytes (1 MiB); ``InputError`` otherwise."""
    file = str(path)
    try:
        status = Path(path).stat()
        if not stat.S_ISREG(status.st_mode):
            raise _error(file, "is a folder, not a file" if stat.S_ISDIR(status.st_mode) else "is not a regular file")
        if status.st_size > most:
            raise _error(file, f"is too large: {status.st_size} bytes (at most {most})")
        with Path(path).open("rb") as stream:
            raw = stream.read(most + 1)  # some files of /proc tell no size
        if len(raw) > most:
            raise _error(file, f"is too large (at most {most} bytes)")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise _error(file, f"cannot be read: {reason}") from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        place = (before.count(b"\n") + 1, error.start - (before.rfind(b"\n") + 1) + 1)
        raise _error(file, f"is not UTF-8 text (byte 0x{raw[error.start]:02x})", place) from None


def parse(text: str, file: str = "") -> Document:
    """Read YAML text whose top level is a mapping; see ``read``."""
    builder = _Builder(text, file)
    data = builder.document()
    if data is None:
        raise _error(file, "is empty", (1, 1))
    if not isinstance(data, dict):
        raise _error(file, f"must hold keys and values (name: value), not {describe(data)}", builder.places[()])
    return Document(file, data, builder.places)


def parse_value(text: str, file: str = "") -> Any:
    """Read a single YAML value, block or flow: ``2``, ``auto``, ``[1, 2]``, ``{every: sqrt}``; see ``read``."""
    return _Builder(text, file).document()


def describe(value: object) -> str:
    """Short name of a value for a message: ``'abc'``, ``a list``, ``nothing``."""
    if value is None:
        return "nothing"
    if isinstance(value, (dict, list, tuple)):
        return "a mapping" if isinstance(value, dict) else "a list"
    if isinstance(value, bool):
        return f"the truth value {str(value).lower()}"
    if isinstance(value, int) and abs(value) >= 10**20:
        return f"{float(value):.3g}" if abs(value) < 10**300 else "a number out of all bounds"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def dump(data: Any) -> str:
    """Plain data as YAML that ``parse`` reads back: text that looks like a number is quoted, a list takes one line."""
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True))


class _Dumper(CoreDumper):  # type: ignore[misc]
    """Writes lists of plain values in one line."""


def _represent_list(dumper: Any, value: list[Any]) -> yaml.SequenceNode:
    nested = any(isinstance(item, dict) for item in value)
    node: yaml.SequenceNode = dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=not nested)
    return node


def _represent_text(dumper: Any, value: str) -> yaml.ScalarNode:
    """PyYAML escapes the odd line breaks of Unicode in double quotes alone."""
    node: yaml.ScalarNode = dumper.represent_scalar(
        "tag:yaml.org,2002:str", value, style=None if value.isascii() else '"'
    )
    return node


_Dumper.add_representer(list, _represent_list)
_Dumper.add_representer(str, _represent_text)


def _error(file: str, message: str, place: Place = (0, 0)) -> InputError:
    return InputError([Problem(file, *place, message=message)])


def _place(mark: Any) -> Place:
    return (mark.line + 1, mark.column + 1)


class _Builder:
    """Builds plain data from parser events, so that bounds hold while the text is read and not after."""

    def __init__(self, text: str, file: str, most: int = MAX_NODES) -> None:
        self.file, self.text, self.most = file, text, most
        self.places: dict[Path_, Place] = {}
        self.anchors: dict[str, tuple[Any, int]] = {}
        """Anchor -> (value, number of values in it)."""
        self.nodes = 0
        self.duplicates: list[Problem] = []
        if match := _FORBIDDEN.search(text):
            before = text[: match.start()]
            place = (before.count("\n") + 1, match.start() - before.rfind("\n"))
            raise _error(file, f"is not text: control character U+{ord(match[0]):04X}", place)
        self.loader = CCoreLoader(text)

    def document(self) -> Any:
        """The one document of the text, ``None`` if there is none."""
        try:
            self._event()
            if isinstance(event := self._event(), yaml.StreamEndEvent):
                return None
            data = self._node(self._event(), (), 0)
            self._event()
            if not isinstance(event := self._event(), yaml.StreamEndEvent):
                raise _error(self.file, "a second document starts here; only one is allowed", _place(event.start_mark))
        except yaml.YAMLError as error:
            raise InputError([*self.duplicates, self._syntax(error)]) from None
        finally:
            self.loader.dispose()
        if self.duplicates:
            raise InputError(self.duplicates)
        return data

    def _syntax(self, error: yaml.YAMLError) -> Problem:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        if "cannot start any token" in what and mark and self.text.splitlines()[mark.line][mark.column :][:1] == "\t":
            what = "a tab; lines are indented with blanks"
        return Problem(self.file, *(_place(mark) if mark else (1, 1)), message=f"not valid YAML: {what}")

    def _event(self) -> Any:
        return self.loader.get_event()

    def _count(self, number: int, place: Place) -> None:
        self.nodes += number
        if self.nodes > self.most:
            raise _error(self.file, f"holds more than {self.most} values (aliases counted as often as used)", place)

    def _node(self, event: Any, path: Path_, depth: int) -> Any:
        place = _place(event.start_mark)
        self.places.setdefault(path, place)
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self.anchors:
                raise _error(self.file, f"alias *{event.anchor} has no anchor before it", place)
            value, size = self.anchors[event.anchor]
            self._count(size, place)
            return value
        if event.tag is not None:
            raise _error(self.file, f"YAML tags ({event.tag}) are not allowed", place)
        if depth > MAX_DEPTH:
            raise _error(self.file, f"nested deeper than {MAX_DEPTH} levels", place)
        before = self.nodes
        self._count(1, place)
        if isinstance(event, yaml.ScalarEvent):
            value = self._scalar(event, place)
        elif isinstance(event, yaml.SequenceStartEvent):
            value = self._sequence(path, depth)
        else:
            value = self._mapping(path, depth)
        if event.anchor is not None:
            self.anchors[event.anchor] = (value, self.nodes - before)
        return value

    def _scalar(self, event: Any, place: Place) -> Any:
        tag = self.loader.resolve(yaml.ScalarNode, event.value, event.implicit)
        if tag.endswith((":int", ":float")) and len(event.value) > MAX_NUMBER:
            raise _error(self.file, f"a number of {len(event.value)} characters (at most {MAX_NUMBER})", place)
        return self.loader.construct_object(yaml.ScalarNode(tag, event.value))

    def _sequence(self, path: Path_, depth: int) -> list[Any]:
        items: list[Any] = []
        while not isinstance(event := self._event(), yaml.SequenceEndEvent):
            items.append(self._node(event, (*path, len(items)), depth + 1))
        return items

    def _mapping(self, path: Path_, depth: int) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        while not isinstance(event := self._event(), yaml.MappingEndEvent):
            place = _place(event.start_mark)
            if not isinstance(event, yaml.ScalarEvent):
                raise _error(self.file, "a key must be plain text", place)
            key, inner = event.value, (*path, event.value)
            if key in mapping:
                first = self.places[inner][0]
                self.duplicates.append(
                    Problem(
                        self.file,
                        *place,
                        key=".".join(map(str, inner)),
                        message=f"duplicate key (first in line {first})",
                    )
                )
            self.places.setdefault(inner, place)
            mapping[key] = self._node(self._event(), inner, depth + 1)
        return mapping
