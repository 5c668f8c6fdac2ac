"""Collects everything wrong with a scenario and says where it stands: file and line, or the override that said it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from simtrain.errors import Problem, did_you_mean
from simtrain.scenario.schema import ScenarioFile
from simtrain.scenario.yamltext import Path_, Place, describe


@dataclass(frozen=True, slots=True)
class Layer:
    """One source of keys: a file, a mapping from Python, or one override."""

    label: str
    """File name, or the text of the override; empty for a mapping from Python."""
    data: dict[str, Any]
    places: Mapping[Path_, Place]
    """Place of each path; an override has its own path alone, at (0, 0)."""


@dataclass(slots=True)
class Problems:
    """Problems found so far. Later layers win over earlier ones, so they are asked first for the place of a key."""

    layers: list[Layer]
    found: list[Problem] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    """Dotted keys with a problem; what depends on them is not judged."""

    def add(self, key: str, message: str, path: Path_ | None = None) -> None:
        """Note a problem of a dotted key; a second one of the same key is most likely a consequence and dropped."""
        if key in self.broken:
            return
        self.broken.add(key)
        label, place = self._place(path or tuple(key.split(".")))
        self.found.append(Problem(label, *place, key=key, message=message))

    def sound(self, *keys: str) -> bool:
        """No problem stands on any of these keys, or on the sections around them."""
        return not any(key in self.broken or key.split(".", 1)[0] in self.broken for key in keys)

    def _place(self, path: Path_) -> tuple[str, Place]:
        for length in range(len(path), 0, -1):
            for layer in reversed(self.layers):
                if path[:length] in layer.places:
                    return layer.label, layer.places[path[:length]]
        for layer in reversed(self.layers):
            if path[0] in layer.data and not layer.places.get((), None):
                return layer.label, (0, 0)
        first = self.layers[0]
        return first.label, (1, 1) if first.places else (0, 0)

    def invalid(self, error: ValidationError) -> list[Path_]:
        """Note what pydantic found; return the paths of the values at fault."""
        paths = []
        for item in error.errors(include_url=False, include_context=True):
            path: Path_ = item["loc"]
            key = ".".join(map(str, path))
            if item["type"] == "extra_forbidden":
                choices = _keys(path[:-1])
                if path[-1] == "<<":
                    self.add(key, "merge keys are no part of YAML 1.2; use extends, or write the keys out", path)
                    paths.append(path)
                    continue
                hint = did_you_mean(str(path[-1]), choices)
                self.add(key, f"unknown key{hint or ' (choose from ' + ', '.join(choices) + ')'}", path)
                if hint:
                    self.broken.add(".".join(map(str, (*path[:-1], hint.split("'")[1]))))
            else:
                self.add(key, message(item), path)
            paths.append(path)
        return paths


def choices_text(word: str, choices: Iterable[str]) -> str:
    """End of a message about an unknown name: did you mean, and what there is."""
    listed = list(choices)
    return f"{did_you_mean(word, listed)}; known: {', '.join(listed) if listed else 'none'}"


def _keys(path: Path_) -> list[str]:
    """Keys that the schema knows at a path."""
    model: type[BaseModel] = ScenarioFile
    for part in path:
        annotation = model.model_fields[str(part)].annotation
        candidates = (annotation, *get_args(annotation))
        model = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return list(model.model_fields)


def message(item: Any) -> str:
    """Our words for a pydantic error."""
    got, kind, context = describe(item["input"]), item["type"], item.get("ctx", {})
    if kind.startswith("int_"):
        return f"must be a whole number, not {got}"
    if kind in ("float_type", "finite_number"):
        return f"must be a finite number, not {got}"
    if kind == "bool_type":
        return f"must be true or false, not {got}"
    if kind == "string_type":
        return f"must be text, not {got}"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"must be a mapping (key: value), not {got}"
    if kind == "list_type":
        return f"must be a list, not {got}"
    bound = {"greater_than": "above", "greater_than_equal": "at least", "less_than_equal": "at most"}.get(kind)
    if bound:
        return f"must be {bound} {next(iter(context.values())):.15g}, not {got}"
    if kind in ("string_too_short", "too_short"):
        return "must not be empty"
    if kind in ("string_too_long", "too_long"):
        what = "characters" if kind == "string_too_long" else "entries"
        return f"must have at most {context['max_length']} {what}, not {got}"
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", context["expected"])
        return f"must be {context['expected']}, not {got}{did_you_mean(str(item['input'])[:100], choices)}"
    if kind == "string_pattern_mismatch":
        return f"must start with a letter or digit and hold only letters, digits, blanks and . _ + -, not {got}"
    return str(item["msg"]) + ("" if kind in ("quantity", "choice") else f", not {got}")
