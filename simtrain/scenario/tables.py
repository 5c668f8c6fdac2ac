"""``hardware_specs/`` -> records: accelerators, networks, machines, prices, software stacks, optimizers.

Files are read and rows are built when they are first asked for. A name may be written in any case and without its
dashes, or as one of the row's aliases. Later folders win row by row over earlier ones.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import StrEnum
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints

from simtrain.errors import InputError, Problem, did_you_mean
from simtrain.scenario import yamltext
from simtrain.scenario.efficiencies import Table, efficiency
from simtrain.scenario.hardware import Accelerator, AcceleratorKind, Efficiency, Link, Machine, Precision
from simtrain.scenario.paths import data_dir
from simtrain.scenario.rows import Reader, Row, cells, listed, rows
from simtrain.scenario.scenario import Optimizer, Stack
from simtrain.units import Dimension

Record = TypeVar("Record")
_UNIT = re.compile("_(bytes|seconds|fraction)")


class Kind(StrEnum):
    """A table: the name of its file in ``hardware_specs/`` (efficiencies: of its folder)."""

    ACCELERATORS = "accelerators"
    NETWORKS = "networks"
    MACHINES = "machines"
    STORAGE = "storage"
    PRICES = "prices"
    STACKS = "stacks"
    OPTIMIZERS = "optimizers"
    EFFICIENCIES = "efficiencies"


@dataclass(frozen=True, slots=True)
class Price:
    """One offer of a machine."""

    basis: str
    """``on_demand``, ``spot``, ..."""
    usd_per_hour: float
    """USD an hour for the whole machine."""
    region: str
    date: str
    note: str = ""


class Rows(Mapping[str, Record], Generic[Record]):
    """Name -> record, built when asked for. Iteration gives the names of the rows; look-up takes aliases as well."""

    def __init__(self, kind: Kind, found: Callable[[], Mapping[str, Row]], build: Callable[[Row], Record]) -> None:
        self.kind, self._found, self._build = kind, found, build
        self._records: dict[str, Record] = {}

    @cached_property
    def rows(self) -> Mapping[str, Row]:
        """The rows as they stand in their files."""
        return self._found()

    @cached_property
    def _names(self) -> Mapping[str, set[str]]:
        """Plain form of a name or alias -> rows that it may mean."""
        names: dict[str, set[str]] = {}
        for name, row in self.rows.items():
            aliases = row.data.get("aliases")
            for alias in (name, *(aliases if isinstance(aliases, list) else ())):
                names.setdefault(_plain(str(alias)), set()).add(name)
        return names

    def resolve(self, name: str) -> str | None:
        """Name of the row that a name or alias means; ``None`` if there is none or more than one."""
        meant = {name} if name in self.rows else self._names.get(_plain(str(name)), set())
        return next(iter(meant)) if len(meant) == 1 else None

    def find(self, name: str) -> Record:
        """The record, or ``InputError`` with what the name may mean and all names."""
        if self.resolve(name) is None:
            raise self.unknown(name)
        return self[name]

    def unknown(self, name: str) -> InputError:
        """What to say of a name that means no row, or more than one."""
        begun = [row for row in self.rows if name and _plain(row).startswith(_plain(name))]
        hint = f" (which of {', '.join(begun)}?)" if begun else did_you_mean(name, self.rows)
        return InputError(f"unknown name {name!r} in {self.kind}{hint}; known: {', '.join(self.rows)}")

    def __getitem__(self, name: str) -> Record:
        resolved = self.resolve(name)
        if resolved is None:
            raise KeyError(name)
        if resolved not in self._records:
            self._records[resolved] = self._build(self.rows[resolved])
        return self._records[resolved]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.resolve(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.+]", "", name.lower())


@dataclass(frozen=True)
class Tables:
    """All tables of one list of folders, in order of growing weight."""

    folders: tuple[Path, ...]
    accelerators: Rows[Accelerator] = field(init=False, compare=False)
    networks: Rows[Link] = field(init=False, compare=False)
    machines: Rows[Machine] = field(init=False, compare=False)
    prices: Rows[tuple[Price, ...]] = field(init=False, compare=False)
    stacks: Rows[Stack] = field(init=False, compare=False)
    optimizers: Rows[Optimizer] = field(init=False, compare=False)
    storage: Rows[Mapping[str, Any]] = field(init=False, compare=False)
    efficiencies: Rows[Table] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        builders: dict[Kind, Callable[[Row], object]] = {
            Kind.ACCELERATORS: self._accelerator,
            Kind.NETWORKS: _link,
            Kind.MACHINES: self._machine,
            Kind.PRICES: self._prices,
            Kind.STACKS: lambda row: _plain_record(row, Stack),
            Kind.OPTIMIZERS: lambda row: _plain_record(row, Optimizer),
            Kind.STORAGE: cells,
            Kind.EFFICIENCIES: efficiency,
        }
        for kind, build in builders.items():
            object.__setattr__(self, kind.value, Rows(kind, lambda kind=kind: self._rows(kind), build))  # type: ignore[misc]

    def raw(self, kind: Kind | str, name: str) -> Mapping[str, Mapping[str, Any]]:
        """A row for printing: field -> ``{value: text with unit, source: [titles], note, unverified, ...}``.

        Raises
        ------
        InputError
            There is no such row.
        """
        table: Rows[Any] = getattr(self, Kind(kind).value)
        resolved = table.resolve(name)
        found: Mapping[str, Mapping[str, Any]] = cells(table.rows[resolved]) if resolved else table.find(name)
        return {field: cell for field, cell in found.items() if not field.startswith("sources.")}

    def _rows(self, kind: Kind) -> dict[str, Row]:
        found: dict[str, Row] = {}
        for folder in self.folders:
            if kind is Kind.EFFICIENCIES:
                for file in listed(folder / kind):
                    document = yamltext.read(folder / kind / file)
                    name = file.removesuffix(".yaml")
                    found[name] = Row(name, document, document.data)
            elif os.path.lexists(path := folder / f"{kind}.yaml"):
                found |= rows(yamltext.read(path))
        return found

    def _efficiency(self, device: Accelerator) -> Efficiency:
        """Measurements of the device; those of the device it names as its twin, scaled by the ratio of the peaks."""
        table = self.efficiencies.get(device.name)
        if table is None or not table.same_as:
            return table.figures if table else Efficiency()
        other = self.efficiencies.get(table.same_as)
        if table.same_as not in self.accelerators or other is None or other.same_as:
            row = self.efficiencies.rows[device.name]
            place = row.document.position(("same_as",))
            message = f"{table.same_as!r} is no accelerator with measurements of its own"
            raise InputError([Problem(row.document.file, *place, key="same_as", message=message)])
        twin = self.accelerators.find(table.same_as)
        common = device.matrix_peak.keys() & twin.matrix_peak.keys()
        ratio = {one: device.matrix_peak[one] / twin.matrix_peak[one] for one in common}
        return table.adopt(twin.efficiency, ratio)

    def _accelerator(self, row: Row) -> Accelerator:
        reader = Reader.of(row)
        kind = reader.choice("kind", AcceleratorKind)
        tpu = kind is AcceleratorKind.TPU
        keys = {Precision.FP32: "fp32_matrix"}
        peaks = {one: reader.quantity(keys.get(one, one), Dimension.COMPUTE, 0.0) for one in Precision}
        device = Accelerator(
            name=row.name,
            vendor=reader.text("vendor"),
            kind=kind,
            architecture=reader.text("architecture"),
            matrix_peak={one: peak for one, peak in peaks.items() if peak},
            vector_peak=reader.quantity("vector_peak", Dimension.COMPUTE),
            memory_bytes=reader.quantity("memory", Dimension.DATA),
            memory_bandwidth=reader.quantity("memory_bandwidth", Dimension.BANDWIDTH),
            units=reader.count("units", ("MXU",) if tpu else ("SM", "CU")),
            array_dim=reader.count("array_dim", ("lanes",), None if tpu else 0),
            l2_bytes=reader.quantity("l2", Dimension.DATA),
            host_bandwidth=reader.quantity("host_bandwidth", Dimension.BANDWIDTH),
            power=reader.quantity("power", Dimension.POWER, 0.0),
            scale_up=reader.name("scale_up", self.networks),
        )
        reader.done()
        return replace(device, efficiency=self._efficiency(device))

    def _machine(self, row: Row) -> Machine:
        reader = Reader.of(row)
        offers = self.prices.get(row.name, ())
        offer = next((one for one in offers if one.basis == "on_demand"), None)
        machine = Machine(
            name=row.name,
            accelerator=reader.name("accelerator", self.accelerators),
            devices=reader.count("devices", ("devices",)),
            scale_up=reader.name("scale_up", self.networks),
            network=reader.name("network", self.networks),
            nics=reader.count("nics", ("NICs",)),
            cores=reader.count("cores", ("cores",)),
            ram_bytes=reader.quantity("ram", Dimension.DATA),
            local_storage_bytes=reader.quantity("local_storage", Dimension.DATA, 0.0),
            usd_per_hour=offer.usd_per_hour if offer else None,
            price_note=", ".join(filter(None, (offer.basis, offer.region, offer.date, offer.note))) if offer else "",
            ram_bandwidth=reader.quantity("ram_bandwidth", Dimension.BANDWIDTH, 0.0),
            host_links=reader.count("host_links", ("links",), 0),
        )
        reader.done()
        return machine

    def _prices(self, row: Row) -> tuple[Price, ...]:
        reader, offers = Reader.of(row), []
        for basis, cell in row.data.items():
            whole = reader.quantity(basis, Dimension.PRICE)
            inner = reader.inner(basis, cell if isinstance(cell, dict) else {})
            doubt = "unverified" if inner.data.get("unverified") else ""
            note = "; ".join(filter(None, (doubt, inner.text("note", ""))))
            devices = 1
            if inner.text("per", "machine") == "device":
                machine = Reader.of(self.machines.rows[row.name]) if row.name in self.machines.rows else None
                devices = machine.count("devices", ("devices",)) if machine else 1
            offers.append(Price(basis, whole * devices, inner.text("region"), inner.text("date"), note))
            inner.done(("value", "unverified"))
        reader.done()
        return tuple(offers)


def _link(row: Row) -> Link:
    reader = Reader.of(row)
    link = Link(
        name=row.name,
        bandwidth=reader.quantity("bandwidth", Dimension.BANDWIDTH),
        efficiency=reader.share("efficiency"),
        latency=reader.quantity("latency", Dimension.TIME),
        base_latency=reader.quantity("base_latency", Dimension.TIME, 0.0),
        half_bytes=reader.quantity("half_bytes", Dimension.DATA, 0.0),
        nvls_efficiency=reader.share("nvls_efficiency", 0.0),
        domain=reader.count("domain", ("devices",), 0),
    )
    if link.efficiency > 1:
        reader.wrong("efficiency", "a link cannot reach more than its wire rate")
    reader.done(("per_link", "axes", "achieved"))
    return link


def _plain_record(row: Row, record: type[Record]) -> Record:
    """A record of flags, numbers and enumerations, by the types of its fields.

    The row may leave the unit out of a name (``bucket: 40 MB`` gives ``bucket_bytes``), and a field that has a default.
    """
    reader, hints = Reader.of(row), get_type_hints(record)
    found: dict[str, Any] = {}
    for one in fields(record):  # type: ignore[arg-type]
        kind, short = hints[one.name], _UNIT.sub("", one.name)
        key = short if short in row.data else one.name
        if one.name == "name":
            found["name"] = row.name
        elif key not in row.data and one.default is not MISSING:
            continue
        elif kind is bool:
            found[one.name] = reader.flag(key)
        elif kind is float:
            found[one.name] = reader.number(key)
        elif kind is str:
            found[one.name] = reader.text(key)
        else:
            found[one.name] = reader.choice(key, kind)
    reader.done(_UNIT.sub("", one.name) for one in fields(record))  # type: ignore[arg-type]
    return record(**found)


def load_tables(specs: tuple[Path, ...] = ()) -> Tables:
    """The shipped tables with those of other folders on top, the last one strongest.

    Tables are kept, and read again once a file of ``specs`` has changed.

    Raises
    ------
    InputError
        A folder does not exist or holds a YAML file that is no table. What is wrong inside a row is raised, with
        file, line and column, when the row is asked for.
    """
    problems, names = [], [f"{name}.yaml" for name in _FILES]
    for folder in map(Path, specs):
        try:
            held = sorted(os.listdir(folder))
        except OSError as error:
            problems.append(Problem(str(folder), message=f"is not a folder of hardware rows: {error.strerror}"))
            continue
        for file in held:
            if file.endswith(".yaml") and file not in names:
                hint = did_you_mean(file, names) or f" (choose from {', '.join(names)})"
                problems.append(Problem(str(folder / file), message=f"is no table{hint}"))
    if problems:
        raise InputError(problems)
    stamp = tuple((str(file), _changed(file)) for folder in specs for file in sorted(Path(folder).rglob("*.yaml")))
    return _load(tuple(map(Path, specs)), stamp)


def _changed(file: Path) -> int:
    """When the file last changed, ns; 0 where that cannot be told (reading the file then says why)."""
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


@lru_cache(maxsize=8)
def _load(specs: tuple[Path, ...], stamp: tuple[tuple[str, int], ...]) -> Tables:
    return Tables((data_dir("hardware_specs"), *specs))


_FILES = (*(kind.value for kind in Kind if kind is not Kind.EFFICIENCIES), "collectives", "reliability", "grid")


def shipped(path: str) -> Path:
    """A shipped file by its path in the repository: ``scenarios/llm/gpt3-175b-1024xa100.yaml``."""
    top, _, rest = path.partition("/")
    return data_dir(top) / rest
