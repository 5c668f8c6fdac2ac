"""``cluster:`` of a scenario file -> accelerator, machine, links: names looked up, defaults filled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from simtrain.scenario import slices
from simtrain.scenario.hardware import Accelerator, AcceleratorKind, Cluster, Jitter, Link, Machine
from simtrain.scenario.problems import Problems, choices_text
from simtrain.scenario.schema import MAX_DEVICES, ClusterSpec, NetworkSpec

if TYPE_CHECKING:
    from simtrain.scenario.tables import Tables

Row = TypeVar("Row")
GPUS_PER_MACHINE = 8
"""Default where a scenario names no machine: DGX, HGX and the 8-GPU cloud machines."""


def look_up(rows: Mapping[str, Row], name: str | None, key: str, what: str, problems: Problems) -> Row | None:
    """Row of that name; an unknown name is noted with what there is."""
    if name is None or not problems.sound(key):
        return None
    if name not in rows:
        problems.add(key, f"unknown {what} {name!r}{choices_text(name, rows)}")
    return rows.get(name)


@dataclass(slots=True)
class Hardware:
    """What the names of ``cluster:`` stand for; ``None`` where a name is unknown or missing."""

    accelerator: Accelerator | None
    machine: Machine | None
    usual: Machine | None
    """The machine, or the one its accelerator usually sits in, which gives the network defaults."""
    devices: int | None
    """Number of devices where nodes, devices or slice say it."""
    devices_per_machine: int
    scale_up: Link | None
    scale_out: Link | None
    network_name: str
    network_is_default: bool
    nics: int
    defaults: list[str]


def find(spec: ClusterSpec, tables: Tables, problems: Problems) -> Hardware:
    """Look up all names of the section; problems are noted."""
    defaults: list[str] = []
    machine = look_up(tables.machines, spec.machine, "cluster.machine", "machine", problems)
    sliced = _slice(spec, problems)
    accelerator = _accelerator(spec, machine, sliced, tables, problems)
    usual = machine or _usual(accelerator, tables)
    per_machine = _per_machine(spec, machine, usual, accelerator, problems, defaults)
    devices = _devices(spec, per_machine, sliced, problems)
    inside = (machine.scale_up if machine else "") or (accelerator.scale_up if accelerator else "")
    scale_up = _link(spec.scale_up, inside, "cluster.scale_up", tables, problems)
    together = min(per_machine, devices or per_machine)
    if scale_up and scale_up.domain and together > scale_up.domain:
        problems.add(
            "cluster.devices_per_machine",
            f"{scale_up.name} joins at most {scale_up.domain} devices, not {together}; between machines runs"
            " cluster.network",
        )
    alone = scale_up if devices and devices <= per_machine else None
    name, scale_out = _scale_out(spec.network, accelerator, usual, tables, problems, alone=alone)
    default_network = spec.network is None or spec.network.row is None
    if default_network:
        defaults.append("cluster.network")
    nics = spec.nics_per_machine or _nics(accelerator, usual, per_machine, scale_out)
    if spec.nics_per_machine is None and machine is None:
        defaults.append("cluster.nics_per_machine")
    return Hardware(
        accelerator, machine, usual, devices, per_machine, scale_up, scale_out, name, default_network, nics, defaults
    )


def cluster(found: Hardware, devices: int, jitter: float) -> Cluster:
    """The record, once the number of devices is known and all names were found."""
    assert found.accelerator is not None
    assert found.scale_up is not None
    assert found.scale_out is not None
    return Cluster(
        accelerator=found.accelerator,
        devices=devices,
        devices_per_machine=found.devices_per_machine,
        scale_up=found.scale_up,
        scale_out=found.scale_out,
        nics_per_machine=found.nics,
        machine=found.machine,
        network_name=found.network_name,
        network_is_default=found.network_is_default,
        jitter=Jitter(jitter),
        host=found.usual,
    )


def _slice(spec: ClusterSpec, problems: Problems) -> tuple[str, int] | None:
    if spec.slice is None:
        return None
    try:
        return slices.parse(spec.slice)
    except ValueError as error:
        problems.add("cluster.slice", str(error))
        return None


def _accelerator(
    spec: ClusterSpec, machine: Machine | None, sliced: tuple[str, int] | None, tables: Tables, problems: Problems
) -> Accelerator | None:
    implied = machine.accelerator if machine else sliced[0] if sliced else None
    found = look_up(tables.accelerators, spec.accelerator or implied, "cluster.accelerator", "accelerator", problems)
    if found is None:
        if spec.accelerator is None and implied is None and problems.sound("cluster.machine", "cluster.slice"):
            problems.add(
                "cluster.accelerator",
                f"missing: name an accelerator or a machine (accelerators: {', '.join(tables.accelerators)})",
            )
    elif machine and machine.accelerator != found.name:
        problems.add("cluster.machine", f"a {machine.name} has {machine.accelerator}, not {found.name}")
    elif sliced and sliced[0] != found.name:
        problems.add("cluster.slice", f"{spec.slice} is made of {sliced[0]}, not {found.name}")
    elif not found.efficiency.constants:
        problems.add(
            "cluster.accelerator",
            f"nothing is measured of {found.name}: its row needs a file efficiencies/{found.name}.yaml beside it,"
            " with constants, or with same_as and the name of an accelerator that has them",
        )
    return found


def _usual(accelerator: Accelerator | None, tables: Tables) -> Machine | None:
    return next((m for m in tables.machines.values() if accelerator and m.accelerator == accelerator.name), None)


def _per_machine(
    spec: ClusterSpec,
    machine: Machine | None,
    usual: Machine | None,
    accelerator: Accelerator | None,
    problems: Problems,
    defaults: list[str],
) -> int:
    """Ranks that share a machine: as said, the machine's, or 8 GPUs, or what a TPU host holds."""
    if spec.devices_per_machine is not None:
        if machine and spec.devices_per_machine > machine.devices:
            problems.add(
                "cluster.devices_per_machine",
                f"a {machine.name} has {machine.devices} devices, not {spec.devices_per_machine}",
            )
        return spec.devices_per_machine
    if machine:
        return machine.devices
    defaults.append("cluster.devices_per_machine")
    tpu = accelerator is not None and accelerator.kind is AcceleratorKind.TPU
    return usual.devices if tpu and usual else GPUS_PER_MACHINE


def _devices(spec: ClusterSpec, per_machine: int, sliced: tuple[str, int] | None, problems: Problems) -> int | None:
    said = [key for key in ("nodes", "devices", "slice") if getattr(spec, key) is not None]
    if len(said) > 1:
        problems.add(f"cluster.{said[-1]}", f"give one of nodes, devices and slice, not {' and '.join(said)}")
        return None
    count = spec.devices or (spec.nodes * per_machine if spec.nodes else sliced[1] if sliced else None)
    if count and count > MAX_DEVICES:
        problems.add(f"cluster.{said[0]}", f"{count} devices in all (at most {MAX_DEVICES})")
        return None
    return count


def _scale_out(
    spec: NetworkSpec | None,
    accelerator: Accelerator | None,
    usual: Machine | None,
    tables: Tables,
    problems: Problems,
    *,
    alone: Link | None,
) -> tuple[str, Link | None]:
    """Name and link between machines. The chips of a TPU slice reach each other over ICI across hosts as inside one.

    ``alone``: the link inside the only machine, which needs none to others.
    """
    tpu = accelerator is not None and accelerator.kind is AcceleratorKind.TPU
    default = accelerator.scale_up if tpu and accelerator else usual.network if usual else ""
    name = spec.row if spec and spec.row else default
    if not name and alone:
        return "none", alone
    if not name and accelerator and problems.sound("cluster.network"):
        problems.add(
            "cluster.network",
            f"missing: no usual network of {accelerator.name} is known; choose from " + ", ".join(between(tables)),
        )
    link = _link(spec, default, "cluster.network", tables, problems)
    if link and not tpu and link.name not in between(tables):
        problems.add(
            "cluster.network",
            f"{name!r} joins devices inside a machine, not machines; choose from " + ", ".join(between(tables)),
        )
    name = link.name if link else name
    changed = spec is not None and (spec.bandwidth or spec.latency or spec.efficiency)
    return f"{name} (changed)" if changed else name, link


def between(tables: Tables) -> list[str]:
    """Network rows that join machines: those whose row names no ``domain``, the most devices one such fabric joins."""
    return [name for name, row in tables.networks.rows.items() if "domain" not in row.data]


def _link(spec: NetworkSpec | None, default: str, key: str, tables: Tables, problems: Problems) -> Link | None:
    name = (spec.row if spec else None) or default or None
    link = look_up(tables.networks, name, key, "network", problems)
    if link is None or spec is None:
        return link
    said = {k: v for k in ("bandwidth", "latency", "efficiency") if (v := getattr(spec, k)) is not None}
    return replace(link, **said) if said else link


def _nics(accelerator: Accelerator | None, usual: Machine | None, per_machine: int, link: Link | None) -> int:
    """NICs a machine: its row's, scaled to the devices in use; one a device where ICI joins the hosts."""
    tpu = accelerator is not None and accelerator.kind is AcceleratorKind.TPU
    if usual is None or (tpu and accelerator and link and link.name == accelerator.scale_up):
        return per_machine
    return max(1, usual.nics * per_machine // usual.devices)
