"""Scenario files <-> ``Scenario``: layers of keys, checks, errors with their place.

Keys come in layers, later ones win: the files a scenario ``extends``, the file, the overrides. ``measured`` belongs to
one run alone: it is not inherited, and an override of anything that changes the run drops it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from simtrain.errors import InputError, Problem, did_you_mean
from simtrain.scenario import shipped, yamltext
from simtrain.scenario.problems import Layer, Problems
from simtrain.scenario.resolve import resolve
from simtrain.scenario.schema import ScenarioFile
from simtrain.scenario.tables import load_tables
from simtrain.scenario.yamltext import Path_

if TYPE_CHECKING:
    from simtrain.scenario.scenario import Scenario

SECTIONS = ("cluster", "training", "parallelism")
_SHORT = {("model",): "preset", ("cluster", "network"): "row", ("cluster", "scale_up"): "row"}
"""Where plain text stands for a mapping with this one key."""
_BASES = ("preset", "config", "op_table", "family", "row")
"""A mapping that says one of these starts anew; without them it adds to the layer below."""
_ALTERNATIVES = ("nodes", "devices", "slice")
_SAME_RUN = ("name", "seed", "measured")
"""Overrides of these leave the run what it was."""


def load(path: str | Path, *, specs: tuple[Path, ...] = (), overrides: tuple[str, ...] = ()) -> Scenario:
    """Read a scenario file.

    Parameters
    ----------
    path
        A file, or the name of a shipped scenario (``llm/gpt3-175b-1024xa100``) if there is no such file.
    specs
        Folders of hardware rows that win over ``hardware_specs/`` beside the file and over the shipped rows.
    overrides
        ``section.key=value`` with a YAML value; they win over the file.

    Raises
    ------
    InputError
        With everything that is wrong and its place.
    """
    file = _find(str(path))
    return _build(_chain(file), specs=spec_folders(file, specs), overrides=overrides, stem=file.stem)


def spec_folders(path: Path, specs: tuple[Path, ...] = ()) -> tuple[Path, ...]:
    """Folders of hardware rows of a scenario file in order of growing weight: beside the file, then ``specs``."""
    beside = path.parent / "hardware_specs"
    return (beside, *specs) if beside not in specs and os.path.isdir(beside) else specs


def from_mapping(
    mapping: Mapping[str, Any], *, name: str = "scenario", specs: tuple[Path, ...] = (), overrides: tuple[str, ...] = ()
) -> Scenario:
    """A scenario from Python data with the keys of a file (``Scenario.document`` is such a mapping).

    ``name`` is used where the mapping has none. Parameters, errors: see ``load``; problems carry keys and no lines.
    """
    if not isinstance(mapping, Mapping):
        raise InputError(f"a scenario must be a mapping, not {yamltext.describe(mapping)}")
    layers = [Layer("", _anchored({str(k): v for k, v in mapping.items()}, Path()), {})]
    if mapping.get("extends") is not None:
        layers = [*_chain(_find(str(mapping["extends"]))), *layers]
    return _build(layers, specs=specs, overrides=overrides, stem=name)


def json_schema() -> dict[str, Any]:
    """JSON Schema of a scenario file, for editors."""
    return ScenarioFile.model_json_schema()


def resolved_yaml(scenario: Scenario) -> str:
    """The filled-in file of a scenario; loading it with the same tables gives an equal scenario with equal defaults."""
    cluster = scenario.cluster
    network = f" (network between machines: {cluster.network_name})" if cluster.network_is_default else ""
    text = yamltext.dump(dict(scenario.document))
    return f"# Everything this run depends on, beside the hardware rows it names{network}.\n{text}"


def _find(name: str, folder: Path = Path(), said: Problem | None = None) -> Path:
    """The file, or the shipped scenario of that name. ``said``: where another file names this one."""
    file = folder / name
    found: Path | None = file
    try:
        os.lstat(file)
    except PermissionError:
        pass  # reading it says so
    except (OSError, ValueError):
        found = shipped.scenario(name)
    if found is None:
        what = f"no such file, and no shipped scenario of that name{did_you_mean(name, shipped.scenarios())}"
        problem = replace(said, message=f"{name[:200]!r}: {what}") if said else Problem(name[:200], message=what)
        raise InputError([problem])
    return found


def _chain(file: Path, seen: tuple[Path, ...] = (), said: Problem | None = None) -> list[Layer]:
    """The file and what it extends, the farthest first. ``said``: where the file before named this one."""
    real = Path(os.path.realpath(file))  # resolve() would not take a circle of links
    if real in seen:
        cycle = " -> ".join(path.name for path in (*seen, real))
        raise InputError([replace(said or Problem(str(file)), message=f"goes round in a circle: {cycle}")])
    document = yamltext.read(file)
    layer = Layer(document.file, _anchored(document.data, file.parent), document.places)
    parent = document.data.get("extends")
    if parent is None:
        return [layer]
    place = Problem(document.file, *document.position(("extends",)), key="extends")
    if not isinstance(parent, str) or not parent:
        raise InputError([replace(place, message=f"must be a file name, not {yamltext.describe(parent)}")])
    return [*_chain(_find(parent, file.parent, place), (*seen, real), place), layer]


def _anchored(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Data with files that it names relative to the folder of its file instead of the current one."""
    for section, key, ending in (("model", "config", ""), ("parallelism", "schedule", ".csv")):
        held = data.get(section)
        if isinstance(held, dict) and isinstance(name := held.get(key), str) and name.endswith(ending):
            data = data | {section: held | {key: str(folder / name)}}
    return data


def _override(text: str) -> Layer:
    key, sign, value = text.partition("=")
    path: Path_ = tuple(part.strip() for part in key.split("."))
    label = f"-o {text if len(text) <= 80 else text[:77] + '...'}"
    if not sign or not all(path) or path[0] == "extends":
        what = "cannot be overridden" if path[0] == "extends" else "not an override (expected section.key=value)"
        raise InputError([Problem(label, message=what)])
    data: Any = yamltext.parse_value(value, label)
    for part in reversed(path):
        data = {part: data}
    return Layer(label, data, {path: (0, 0)})


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of two layers; see ``_BASES`` and ``_ALTERNATIVES``."""
    merged = dict(below)
    if isinstance(listed := below.get("defaults"), list):
        merged["defaults"] = [key for key in listed if not (isinstance(key, str) and _says(above, key.split(".")))]
    for key, value in above.items():
        if key in (*SECTIONS, "model"):
            merged[key] = _merge_section((key,), merged.get(key), value)
        else:
            merged[key] = value
    return merged


def _says(data: Any, path: list[str]) -> bool:
    """A layer sets a key, or all that is around it."""
    if not isinstance(data, Mapping) or not path or any(data.get(base) is not None for base in _BASES):
        return True
    return path[0] in data and _says(data[path[0]], path[1:])


def _merge_section(path: tuple[str, ...], below: Any, above: Any) -> Any:
    if short := _SHORT.get(path):
        below, above = ({short: side} if isinstance(side, str) else side for side in (below, above))
    if not isinstance(above, Mapping) or not isinstance(below, Mapping):
        return below if above is None and path[0] in SECTIONS and len(path) == 1 else above
    if short and any(above.get(base) is not None for base in _BASES):
        return above
    merged = dict(below)
    if path == ("cluster",) and any(above.get(key) is not None for key in _ALTERNATIVES):
        merged = {key: value for key, value in merged.items() if key not in _ALTERNATIVES}
    for key, value in above.items():
        inner = (*path, key)
        merged[key] = _merge_section(inner, merged.get(key), value) if inner in _SHORT else value
    return merged


def _build(layers: list[Layer], *, specs: tuple[Path, ...], overrides: tuple[str, ...], stem: str) -> Scenario:
    data: dict[str, Any] = {}
    for layer in layers:
        data = _merge({k: v for k, v in data.items() if k not in ("measured", "name")}, layer.data)
    for layer in _overrides(overrides):
        layers = [*layers, layer]
        data = _merge(data, layer.data)
        if next(iter(layer.data)) not in _SAME_RUN:
            data.pop("measured", None)
    problems = Problems(layers)
    spec = _validate({k: {} if k in (*SECTIONS, "model") and v is None else v for k, v in data.items()}, problems)
    scenario = None
    if spec is not None:
        scenario = resolve(spec, name=spec.name or _safe(stem), tables=load_tables(specs), problems=problems)
    if scenario is None or problems.found:
        raise InputError(problems.found)
    return scenario


def _overrides(texts: tuple[str, ...]) -> list[Layer]:
    layers: list[Layer] = []
    problems: list[Problem] = []
    for text in texts:
        try:
            layers.append(_override(text))
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(problems)
    return layers


def _validate(data: dict[str, Any], problems: Problems) -> ScenarioFile | None:
    """The checked file; values at fault are noted and left out, so that the rest is judged in the same run."""
    try:
        return ScenarioFile.model_validate(data)
    except ValidationError as error:
        for path in problems.invalid(error):
            data = _without(data, path)
    try:
        return ScenarioFile.model_validate(data)
    except ValidationError:
        return None


def _without(data: Any, path: Path_) -> Any:
    """Copy without the value at a path (the whole list where the path leads into one)."""
    if not isinstance(data, Mapping) or path[0] not in data:
        return data
    rest = {key: value for key, value in data.items() if key != path[0]}
    if len(path) == 1 or not isinstance(data[path[0]], Mapping):
        return rest
    return {**rest, path[0]: _without(data[path[0]], path[1:])}


def _safe(stem: str) -> str:
    """A name that can be a folder, from a file's stem."""
    plain = "".join(c if c.isascii() and (c.isalnum() or c in " ._+-") else "-" for c in stem)
    return plain.lstrip(" ._+-")[:100] or "scenario"
