"""What would help most: single changes to a scenario, each really simulated."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simtrain.errors import InputError
from simtrain.scenario import files
from simtrain.scenario.hardware import Precision
from simtrain.scenario.scenario import Attention, Recompute, Scenario, Zero
from simtrain.simulate import simulate
from simtrain.units import format_bytes, format_time

if TYPE_CHECKING:
    from simtrain.simulate import Result

Change = Mapping[str, Any]
"""Dotted key of the scenario file -> new value; more than one where they only make sense together (tp x pp x dp)."""

MAX_CANDIDATES = 20
MAX_WORK = 2.5
"""Candidates that would take the engine longer than this many times the original are left out ..."""
SMALL_WORK = 2000.0
"""... unless they are small anyway (in units of ``_work``)."""
NEGLIGIBLE = 1e-3
"""Share of the step time below which a gain is not worth a line."""
FIT_DEPTH = 3
"""Most changes that are combined to make a scenario fit."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One change and what it does."""

    change: str
    """In the syntax of ``-o``; separated by spaces where several belong together."""
    step_time_s: float
    gain: float
    """Share of the step time that it saves, negative where it costs time."""
    fits: bool
    peak_bytes: float
    text: str
    """One sentence for a reader."""


def advise(scenario: Scenario, result: Result, limit: int = 3, *, specs: tuple[Path, ...] = ()) -> tuple[Advice, ...]:
    """Simulate single changes to a scenario and return those that help most.

    Parameters
    ----------
    scenario
        What was run.
    result
        What ``simulate(scenario)`` returned.
    limit
        Most advices returned.
    specs
        Folders of extra hardware rows that the scenario was loaded with.

    Returns
    -------
    tuple of Advice
        Where the scenario fits: changes that fit and save time, the largest gain first.
        Where it does not: what makes it fit, see ``fit_changes``.
    """
    if not result.summary["fits"]:
        return fit_changes(scenario, result, limit, specs=specs)
    tried = (advice for _, advice in _try_all(scenario, result, {}, specs))
    useful = [advice for advice in tried if advice.fits and advice.gain > NEGLIGIBLE]
    return tuple(sorted(useful, key=lambda advice: (-advice.gain, advice.change))[:limit])


def fit_changes(
    scenario: Scenario, result: Result, limit: int = 3, *, specs: tuple[Path, ...] = ()
) -> tuple[Advice, ...]:
    """What would make a scenario fit into memory.

    Parameters and result as of ``advise``. The single changes that make it fit come first, the fastest leading. Where
    none does, the change with the lowest peak is kept and the next one tried on top of it, at most ``FIT_DEPTH`` times;
    the combination stands first, whether it fits or not, and the single changes that lower the peak follow.
    """
    made: Change = {}
    singles: list[Advice] = []
    best = float(result.summary["memory"]["peak_bytes"])
    combination: tuple[Advice, ...] = ()
    for depth in range(FIT_DEPTH):
        tried = _try_all(scenario, result, made, specs)
        if depth == 0:
            singles = sorted((a for _, a in tried if a.peak_bytes < best), key=lambda a: (a.peak_bytes, a.change))
        fitting = sorted((a for _, a in tried if a.fits), key=lambda a: (a.step_time_s, a.change))
        if fitting:
            return tuple((*fitting[:1], *singles) if depth else fitting)[:limit]
        made, lowest = min(tried, key=lambda pair: (pair[1].peak_bytes, pair[1].change), default=(made, None))
        if lowest is None or lowest.peak_bytes >= best:
            break
        best, combination = lowest.peak_bytes, (lowest,) if depth else ()
    return (*combination, *singles)[:limit]


def candidates(scenario: Scenario) -> Iterator[Change]:
    """Changes worth trying, as dotted keys and values; some may turn out to be impossible.

    Microbatch, recomputation, sequence parallelism, ZeRO stage, schedule, overlap, a factor of two moved between
    tensor, pipeline and data parallelism, attention kernel, precision.
    """
    yield from _micro_batches(scenario)
    yield from _recomputations(scenario)
    yield from _switches(scenario)
    yield from _zero_stages(scenario)
    yield from _schedules(scenario)
    yield from _degrees(scenario)
    yield from _kernels(scenario)


def _micro_batches(scenario: Scenario) -> Iterator[Change]:
    now = scenario.training.micro_batch
    yield {"training.micro_batch": 2 * now}
    if now % 2 == 0:
        yield {"training.micro_batch": now // 2}


def _recomputations(scenario: Scenario) -> Iterator[Change]:
    for mode in (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL):
        if mode is not scenario.training.recompute:
            yield {"training.recompute": mode.value}


def _switches(scenario: Scenario) -> Iterator[Change]:
    plan = scenario.parallelism
    if plan.layout.tp > 1 and not plan.sequence_parallel:
        yield {"parallelism.sequence_parallel": True}
    if not plan.overlap:
        yield {"parallelism.overlap": True}


def _zero_stages(scenario: Scenario) -> Iterator[Change]:
    if scenario.parallelism.layout.dp > 1:
        for stage in (scenario.parallelism.zero + 1, scenario.parallelism.zero - 1):
            if stage in tuple(Zero):
                yield {"parallelism.zero": int(stage)}


def _schedules(scenario: Scenario) -> Iterator[Change]:
    plan = scenario.parallelism
    if plan.layout.pp == 1:
        return
    if plan.virtual_stages == 1:
        if plan.schedule != "1f1b":
            yield {"parallelism.schedule": "1f1b"}
        chunks = [2, 4]
    else:
        yield {"parallelism.schedule": "1f1b", "parallelism.virtual_stages": 1, **_even_stages(scenario)}
        chunks = [2 * plan.virtual_stages, plan.virtual_stages // 2]
    for v in chunks:
        if v > 1 and plan.layout.pp * v <= scenario.model.layers:
            yield {"parallelism.schedule": "interleaved", "parallelism.virtual_stages": v, **_even_stages(scenario)}


def _even_stages(scenario: Scenario) -> Change:
    """Their number changes, so a list of blocks that the file spells out must go."""
    key = "parallelism.stage_layers"
    return {} if key in scenario.defaults else {key: "auto"}


def _degrees(scenario: Scenario) -> Iterator[Change]:
    plan = scenario.parallelism
    for more, less in permutations(("tp", "pp", "dp"), 2):
        if plan.layout.degree(less) % 2:
            continue
        now = {more: 2 * plan.layout.degree(more), less: plan.layout.degree(less) // 2}
        change: dict[str, Any] = {f"parallelism.{axis}": degree for axis, degree in now.items()}
        if "pp" in now:
            change |= _even_stages(scenario)
        if now.get("pp") == 1 and plan.virtual_stages > 1:
            change |= {"parallelism.schedule": "1f1b", "parallelism.virtual_stages": 1}
        if now.get("pp") == 1 and plan.post_validation:
            change |= {"parallelism.post_validation": False}
        yield change


def _kernels(scenario: Scenario) -> Iterator[Change]:
    accelerator = scenario.cluster.accelerator
    measured = {point.kernel for point in accelerator.efficiency.attention}
    for kernel in (Attention.FLASH2, Attention.FLASH3):
        if kernel.value in measured and kernel is not scenario.training.attention:
            yield {"training.attention": kernel.value}
    full = (Precision.FP32, Precision.TF32)
    if scenario.training.precision in full:
        for precision in (Precision.BF16, Precision.FP16, Precision.TF32):
            if precision in accelerator.matrix_peak and precision is not scenario.training.precision:
                yield {"training.precision": precision.value}
                return


def _try_all(scenario: Scenario, result: Result, made: Change, specs: tuple[Path, ...]) -> list[tuple[Change, Advice]]:
    """Every possible candidate on top of the changes already ``made``, simulated."""
    start = _changed(scenario, made, specs) if made else scenario
    if start is None:
        return []
    fresh = ({**made, **change} for change in candidates(start) if not made.keys() & change.keys())
    possible = ((change, changed) for change in fresh if (changed := _changed(scenario, change, specs)) is not None)
    most = max(MAX_WORK * _work(scenario), SMALL_WORK)
    cheap = ((change, changed) for change, changed in possible if _work(changed) <= most)
    tried = ((change, _try(change, changed, result)) for change, changed in islice(cheap, MAX_CANDIDATES))
    return [(change, advice) for change, advice in tried if advice is not None]


def _try(change: Change, changed: Scenario, before: Result) -> Advice | None:
    """``None`` where the change makes more to simulate than may be."""
    try:
        return _advice(change, simulate(changed), before)
    except InputError:
        return None


def _changed(scenario: Scenario, change: Change, specs: tuple[Path, ...]) -> Scenario | None:
    """The scenario that ``-o`` with this change gives; ``None`` where there is none.

    What the file left open is left open again, so that it follows the change (ZeRO-2 reduces every microbatch, say).
    """
    document = copy.deepcopy(dict(scenario.document))
    for key in (*scenario.defaults, "training.accumulation"):
        section, _, name = key.partition(".")
        if section in ("training", "parallelism"):
            document[section].pop(name, None)
    try:
        return files.from_mapping(document, specs=specs, overrides=_overrides(change))
    except InputError:
        return None


def _overrides(change: Change) -> tuple[str, ...]:
    return tuple(f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in change.items())


def _work(scenario: Scenario) -> float:
    """How the engine's time grows: a task a microbatch and stage, or several a block where blocks cannot merge.

    They cannot where ZeRO-3 gathers each, even less where tensor parallelism leaves the machine and shares NICs.
    """
    blocks = scenario.microbatches * scenario.model.layers
    if scenario.parallelism.layout.tp > scenario.cluster.devices_per_machine:
        return 12.0 * blocks
    return (
        4.0 * blocks if scenario.parallelism.zero is Zero.PARAMETERS else float(scenario.microbatches * scenario.stages)
    )


def _advice(change: Change, after: Result, before: Result) -> Advice:
    old, new = float(before.summary["step_time_s"]), float(after.summary["step_time_s"])
    memory = after.summary["memory"]
    fits = bool(after.summary["fits"])
    gain = 1.0 - new / old
    words = _overrides(change)
    short = ", ".join(word for word in words if not word.endswith("=auto"))
    difference = f"{abs(gain):.1%} {'less' if gain >= 0 else 'more'}"
    verdict = "fits" if fits else "does not fit"
    text = (
        f"{short}: {format_time(new)} a step instead of {format_time(old)} ({difference}); {verdict} with a peak of "
        f"{format_bytes(memory['peak_bytes'])} of {format_bytes(memory['capacity_bytes'])}."
    )
    return Advice(
        change=" ".join(words),
        step_time_s=new,
        gain=gain,
        fits=fits,
        peak_bytes=float(memory["peak_bytes"]),
        text=text,
    )
