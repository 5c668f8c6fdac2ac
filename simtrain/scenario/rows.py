"""One row of a table -> checked values, each of which names its source; what is wrong is reported with its place.

A field is written ``field: {value: 989 TFLOP/s, src: [mle], note: ...}``, or ``field: 989 TFLOP/s`` in a row whose own
``source`` covers it. ``src`` are keys of the ``sources`` map at the top of the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from simtrain.errors import InputError, Problem, did_you_mean
from simtrain.scenario.yamltext import Document, Path_, describe
from simtrain.units import Dimension, parse

Choice = TypeVar("Choice", bound=StrEnum)
COMMON = frozenset({"aliases", "title", "note", "source", "src", "year", "provider"})
"""Keys that any row may have and no record holds."""
_COUNT = re.compile(r"\s*(\d{1,9})\s+([A-Za-z]+)\s*")
_SHARE = re.compile(r"\s*(\d{1,4}(?:\.\d+)?)\s*%\s*")


@dataclass(frozen=True, slots=True)
class Row:
    """A row as it stands in its file."""

    name: str
    document: Document
    data: Mapping[str, Any]

    @property
    def sources(self) -> Mapping[str, Any]:
        """The ``sources`` map of its file."""
        found = self.document.data.get("sources")
        return found if isinstance(found, dict) else {}


def rows(document: Document) -> dict[str, Row]:
    """All rows of a file: its top-level keys but ``sources``."""
    wrong = [name for name, data in document.data.items() if name != "sources" and not isinstance(data, dict)]
    if wrong:
        raise InputError(
            Problem(
                document.file,
                *document.position((name,)),
                key=name,
                message=f"a row must be a mapping (field: value), not {describe(document.data[name])}",
            )
            for name in wrong
        )
    return {name: Row(name, document, data) for name, data in document.data.items() if name != "sources"}


@dataclass(slots=True)
class Reader:
    """Reads the fields of one row and remembers which were asked for; ``done`` raises everything that was wrong."""

    row: Row
    root: Path_
    """Path of the mapping inside the document."""
    data: Mapping[str, Any]
    seen: set[str] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)

    @classmethod
    def of(cls, row: Row) -> Reader:
        """Reader of a whole row."""
        return cls(row, (row.name,), row.data)

    def inner(self, key: str | int, data: Mapping[str, Any]) -> Reader:
        """Reader of a mapping inside; it shares the list of problems."""
        return Reader(self.row, (*self.root, key), data, problems=self.problems)

    def wrong(self, key: str, message: str) -> None:
        """Note a problem of a field."""
        place = self.row.document.position((*self.root, key))
        self.problems.append(Problem(self.row.document.file, *place, key=f"{self.row.name}.{key}", message=message))

    def value(self, key: str, *, required: bool, sourced: bool = True) -> Any:
        """The bare value of a field; ``None`` where it is absent or at fault."""
        self.seen.add(key)
        if key not in self.data:
            if required:
                self.wrong(key, "missing")
            return None
        cell = self.data[key]
        if isinstance(cell, dict):
            self._sources(key, cell)
            cell = cell.get("value")
            if cell is None:
                self.wrong(key, "has no value: write {value: ..., src: [...]}")
        elif sourced and not (self.row.data.get("source") or self.row.data.get("src") or self.data.get("src")):
            self.wrong(key, "has no source: write {value: ..., src: [...]}, or give the row a source")
        return cell

    def _sources(self, key: str, cell: Mapping[str, Any]) -> None:
        named = source_keys(cell)
        if not (named or self.row.data.get("source") or self.row.data.get("src")):
            self.wrong(key, "has no source: add src: [...]")
        for name in source_keys({"src": cell.get("src")}):
            if self.row.sources and name not in self.row.sources:
                self.wrong(key, f"unknown source {name!r}{did_you_mean(str(name), self.row.sources)}")

    def quantity(self, key: str, dimension: Dimension, default: float | None = None) -> float:
        """A positive quantity in SI; ``default=None`` means that the row must have it."""
        text = self.value(key, required=default is None)
        if text is None:
            return default or 0.0
        try:
            number = parse(text, dimension)
        except ValueError as error:
            self.wrong(key, str(error))
            return 0.0
        if number <= 0:
            self.wrong(key, f"must be above zero, not {text!r}")
        return number

    def share(self, key: str, default: float | None = None) -> float:
        """A percentage as a fraction: ``78.3 %`` -> 0.783."""
        text = self.value(key, required=default is None)
        if text is None:
            return default or 0.0
        match = _SHARE.fullmatch(text) if isinstance(text, str) else None
        share = float(match[1]) / 100 if match else 0.0
        if not 0 < share <= 2:
            self.wrong(key, f"must be a percentage, e.g. '78.3 %', not {describe(text)}")
        return share

    def count(self, key: str, noun: Iterable[str], default: int | None = None) -> int:
        """A positive whole number of things: ``132 SM``."""
        text, nouns = self.value(key, required=default is None), tuple(noun)
        if text is None:
            return default or 0
        match = _COUNT.fullmatch(text) if isinstance(text, str) else None
        if not match or match[2] not in nouns or int(match[1]) == 0:
            self.wrong(key, f"must be a whole number with its unit, e.g. '8 {nouns[0]}', not {describe(text)}")
            return 0
        return int(match[1])

    def text(self, key: str, default: str | None = None) -> str:
        """Plain text; it needs no source."""
        text = self.value(key, required=default is None, sourced=False)
        if text is not None and not isinstance(text, str):
            self.wrong(key, f"must be text, not {describe(text)}")
        return str(text) if text is not None else default or ""

    def name(self, key: str, choices: Iterable[str], default: str | None = None) -> str:
        """The name of a row of another table."""
        text, known = self.text(key, default), list(choices)
        if text and text not in known:
            self.wrong(key, f"unknown {text!r}{did_you_mean(text, known)}; known: {', '.join(known)}")
        return text

    def choice(self, key: str, choices: type[Choice]) -> Choice:
        """A member of an enumeration."""
        text, known = self.text(key), [str(one) for one in choices]
        if text in known:
            return choices(text)
        if text:
            self.wrong(key, f"must be one of {', '.join(known)}, not {text!r}{did_you_mean(text, known)}")
        return next(iter(choices))

    def flag(self, key: str) -> bool:
        """``true`` or ``false``."""
        found = self.value(key, required=True)
        if found is not None and not isinstance(found, bool):
            self.wrong(key, f"must be true or false, not {describe(found)}")
        return found is True

    def number(self, key: str, default: float | None = None) -> float:
        """A plain number, a percentage, or a quantity of any dimension in SI; not negative."""
        found = self.value(key, required=default is None)
        if found is None:
            return default or 0.0
        number = any_number(found)
        if number is None or number < 0:
            self.wrong(key, f"must be a number, not negative, with its unit if it has one, not {describe(found)}")
        return number or 0.0

    def done(self, also: Iterable[str] = ()) -> None:
        """Raise what was wrong, fields that nobody asked for included."""
        self.unknown(also)
        aliases = self.data.get("aliases", [])
        if not (isinstance(aliases, list) and all(isinstance(one, str) for one in aliases)):
            self.wrong("aliases", f"must be a list of names, not {describe(aliases)}")
        if self.problems:
            raise InputError(self.problems)

    def unknown(self, also: Iterable[str] = ()) -> None:
        """Note the fields that nobody asked for."""
        known = self.seen | COMMON | set(also)
        for key in self.data:
            if key not in known:
                hint = did_you_mean(key, known) or f" (choose from {', '.join(sorted(known))})"
                self.wrong(key, f"unknown field{hint}")


def any_number(found: object) -> float | None:
    """SI value of a number, ``78 %`` or a quantity of any dimension; ``None`` if it is none of these."""
    if isinstance(found, (int, float)) and not isinstance(found, bool):
        return float(found) if abs(found) < 1e300 else None  # nan is below nothing
    if isinstance(found, str) and (match := _SHARE.fullmatch(found)):
        return float(match[1]) / 100
    for dimension in Dimension:
        try:
            return parse(found, dimension)
        except ValueError:
            continue
    return None


def source_keys(cell: Mapping[str, Any]) -> list[str]:
    """What a cell or row gives as its source: keys of ``src``, or the text of ``source``."""
    found = cell.get("src") or cell.get("source") or []
    return [str(one) for one in (found if isinstance(found, list) else [found])]


def cells(row: Row) -> dict[str, dict[str, Any]]:
    """The row for printing: field -> ``{value: text, source: [titles], note, ...}``; nested fields are dotted."""
    found: dict[str, dict[str, Any]] = {}
    _flatten("", row.data, row, found)
    return found


def _flatten(prefix: str, data: Mapping[str, Any], row: Row, found: dict[str, dict[str, Any]]) -> None:
    for key, cell in data.items():
        path = f"{prefix}{key}"
        if isinstance(cell, list) and cell and isinstance(cell[0], dict):
            cell = {str(index): one for index, one in enumerate(cell)}
        if isinstance(cell, dict) and "value" not in cell and "points" not in cell:
            _flatten(f"{path}.", cell, row, found)
        elif key not in ("src", "source"):
            found[path] = _cell(cell if isinstance(cell, dict) else {"value": cell}, row)


def _cell(cell: Mapping[str, Any], row: Row) -> dict[str, Any]:
    keys = source_keys(cell) or source_keys(row.data)
    shown = {key: value for key, value in cell.items() if key not in ("src", "source", "points")}
    if isinstance(cell.get("points"), dict):
        shown["value"] = ", ".join(f"{at}: {rate}" for at, rate in cell["points"].items()) + f" {cell.get('unit', '')}"
    if cell.get("unverified"):
        shown["note"] = "; ".join(filter(None, ("unverified", str(cell.get("note") or ""))))
    return shown | {"source": [_title(key, row.sources) for key in keys]}


def _title(key: str, sources: Mapping[str, Any]) -> str:
    known = sources.get(key)
    if not isinstance(known, dict):
        return str(known or key)
    return ", ".join(str(known[part]) for part in ("title", "where", "date") if part in known)


def listed(path: Path) -> list[str]:
    """Names of the YAML files of a folder, sorted."""
    return sorted(entry.name for entry in path.glob("*.yaml"))
