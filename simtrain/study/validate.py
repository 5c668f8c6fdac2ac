"""Simulate published rows and compare: errors by metric and source, and who was right about fitting.

Like is compared with like: a peak of ``torch.cuda.max_memory_allocated`` with the allocated peak, one of
``max_memory_reserved`` with allocator reserve on top, nvidia-smi with the runtime as well (``rows.PeakKind``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from simtrain.errors import InputError
from simtrain.scenario import files, shipped, yamltext
from simtrain.simulate import simulate
from simtrain.study.rows import Metric, PeakKind, Row, read

if TYPE_CHECKING:
    from simtrain.scenario.scenario import Scenario

NAIVE_MFU = 0.45
"""The share of peak that the naive baseline assumes (README)."""
BYTES_A_PARAMETER = 16.0
"""Naive memory: mixed-precision Adam (Rajbhandari 2020, section 3.1), over tensor, pipeline and shard ranks alike."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One measured value beside its prediction."""

    id: str
    source: str
    metric: Metric
    measured: float
    predicted: float
    naive: float
    defaults: tuple[str, ...]
    peak_kind: PeakKind | None = None
    """Of a peak memory: what it counts."""

    @property
    def error(self) -> float:
        """Fraction; positive where the prediction is too high."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a row fitted, and whether it was predicted to."""

    id: str
    source: str
    fits: bool
    predicted: bool


@dataclass(frozen=True, slots=True)
class Validation:
    """All that was compared, and what could not be."""

    compared: tuple[Compared, ...]
    verdicts: tuple[Verdict, ...]
    skipped: Mapping[str, tuple[str, ...]]
    """Id -> what the row does not state."""
    refused: Mapping[str, str]
    """Id of an eligible row -> why simtrain refuses it. Empty once everything that rows use is modelled."""
    ignored: int
    """Keys of rows that were not read."""

    def document(self) -> dict[str, Any]:
        """As ``simtrain validate --json`` prints it."""
        metrics = sorted({one.metric for one in self.compared})
        peaks = [one for one in self.compared if one.peak_kind]
        return {
            "summary": {metric.value: _errors([c for c in self.compared if c.metric is metric]) for metric in metrics},
            "groups": {
                "peak_memory": {
                    kind.value: _errors(found)
                    for kind in PeakKind
                    if (found := [one for one in peaks if one.peak_kind is kind])
                },
                "source": {
                    metric.value: {
                        source: _errors(found)
                        for source in sorted({one.source for one in self.compared})
                        if (found := [c for c in self.compared if c.metric is metric and c.source == source])
                    }
                    for metric in metrics
                },
            },
            "verdicts": verdict_scores(self.verdicts),
            "rows": [
                {
                    "id": one.id,
                    "source": one.source,
                    "metric": one.metric.value,
                    "peak_kind": one.peak_kind.value if one.peak_kind else None,
                    "measured": one.measured,
                    "predicted": one.predicted,
                    "error": one.error,
                    "defaults": list(one.defaults),
                }
                for one in self.compared
            ],
            "skipped": [{"id": name, "missing": list(missing)} for name, missing in self.skipped.items()],
            "refused": [{"id": name, "why": why} for name, why in self.refused.items()],
            "ignored_keys": self.ignored,
        }


def tables(paths: Sequence[Path] = ()) -> list[Mapping[str, Any]]:
    """Rows of the tables; without paths those that ship (``scenarios/published/*.yaml``).

    Raises
    ------
    InputError
        A table is no YAML list of mappings.
    """
    found: list[Mapping[str, Any]] = []
    for path in paths or shipped.published():
        data = yamltext.read_list(path)
        if not all(isinstance(row, Mapping) for row in data):
            raise InputError(f"{path}: expected a list of rows")
        found += data
    return found


def validate(rows: Iterable[Mapping[str, Any]], *, specs: tuple[Path, ...] = ()) -> Validation:
    """Simulate every eligible row.

    Parameters
    ----------
    rows
        As ``tables`` returns them.
    specs
        Folders of extra hardware rows.

    Returns
    -------
    Validation
        A row that states nothing to compare is left out silently; one that misses an input is in ``skipped``.
    """
    compared: list[Compared] = []
    verdicts: list[Verdict] = []
    skipped: dict[str, tuple[str, ...]] = {}
    refused: dict[str, str] = {}
    ignored = 0
    for raw in rows:
        row = read(raw)
        ignored += row.ignored
        if not row.measured and row.fits is None:
            continue
        if row.missing:
            skipped[row.id] = row.missing
            continue
        try:
            found, verdict = compare(row, files.from_mapping(row.scenario, specs=specs))
        except InputError as error:
            refused[row.id] = "; ".join(str(problem) for problem in error.problems)
            continue
        compared += found
        verdicts += [verdict] if verdict else []
    return Validation(tuple(compared), tuple(verdicts), skipped, refused, ignored)


def compare(row: Row, scenario: Scenario) -> tuple[list[Compared], Verdict | None]:
    """Simulate one row and put each measured value beside its prediction."""
    summary = simulate(scenario).summary
    memory = summary["memory"]
    runtime = memory["by_category"].get("runtime", 0.0)
    kind = row.peak_kind
    peak = {PeakKind.ALLOCATED: memory["allocated_peak_bytes"], PeakKind.RESERVED: memory["peak_bytes"] - runtime}
    values = {
        Metric.STEP_TIME: (summary["step_time_s"], summary["naive_step_time_s"]),
        Metric.MFU: (summary["mfu"], NAIVE_MFU),
        Metric.PEAK_MEMORY: (peak.get(kind, memory["peak_bytes"]), _naive_peak(scenario)),
    }
    found = [
        Compared(
            id=row.id,
            source=row.source,
            metric=metric,
            measured=measured,
            predicted=values[metric][0],
            naive=values[metric][1],
            defaults=row.defaults,
            peak_kind=kind if metric is Metric.PEAK_MEMORY else None,
        )
        for metric, measured in row.measured.items()
    ]
    return found, Verdict(row.id, row.source, row.fits, summary["fits"]) if row.fits is not None else None


def _naive_peak(scenario: Scenario) -> float:
    layout, zero = scenario.parallelism.layout, scenario.parallelism.zero
    shards = scenario.replicas if zero else 1
    return BYTES_A_PARAMETER * scenario.model.parameters() / (layout.tp * layout.pp * shards)


def verdict_scores(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Precision and recall of both classes; ``None`` where nothing was in the class."""
    scores: dict[str, Any] = {"count": len(verdicts)}
    for name, wanted in (("fits", True), ("oom", False)):
        said = [one for one in verdicts if one.predicted is wanted]
        true = [one for one in verdicts if one.fits is wanted]
        hits = sum(one.fits is wanted for one in said)
        scores[name] = {
            "count": len(true),
            "predicted": len(said),
            "precision": hits / len(said) if said else None,
            "recall": hits / len(true) if true else None,
        }
    return scores


def _errors(found: Sequence[Compared]) -> dict[str, float | int]:
    """Mean absolute error and its kin, as fractions."""
    absolute = sorted(abs(one.error) for one in found)
    sources = {one.source for one in found}
    by_source = [fmean(abs(one.error) for one in found if one.source == source) for source in sources]
    return {
        "count": len(found),
        "micro": fmean(absolute),
        "macro_by_source": fmean(by_source),
        "median": median(absolute),
        "p90": absolute[min(len(absolute) - 1, int(0.9 * len(absolute)))],
        "bias": fmean(one.error for one in found),
        "naive": fmean(abs(one.naive / one.measured - 1) for one in found),
    }
