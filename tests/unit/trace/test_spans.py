import numpy as np
import pandas as pd

from simtrain.engine.run import run
from simtrain.program.lowered import PieceKind, Stream, Task
from simtrain.trace import spans
from tests.unit.engine.jobs import COMM, COMPUTE, REDUCE, B, F, group, job, work


def example() -> pd.DataFrame:
    """Rank 20 is late at a collective; ranks 0 and 10 share one list."""
    works = [work(F, 1.0, name="block 0 forward"), work(B, 2.0), work(REDUCE, 0.5, name="bucket")]
    short = [Task(COMPUTE, 0, 4), Task(COMM, 2, -1, (0,), slot=1)]
    long = [Task(COMPUTE, 1, 7), Task(COMM, 2, -1, (0,), slot=0)]
    groups = [group(1, axis="tp"), group(0, 1, 2, axis="dp")]
    return run(*job(works, [short, short, long], groups=groups, slots=[(0, 1), (0, 1), (1,)])).frame()


def test_columns_are_those_documented() -> None:
    assert spans.__doc__ is not None
    table = spans.__doc__.split("------          -------\n")[1]
    names = [name.strip() for line in table.splitlines() for name in line[:16].split(",")]
    assert example().columns.tolist() == [name for name in names if name]


def test_values() -> None:
    frame = example()
    assert frame["id"].tolist() == [0, 1, 2, 3, 4, 5]
    assert frame["step"].tolist() == [0] * 6
    assert frame["rank"].tolist() == [0, 10, 20, 0, 10, 20]
    assert frame["multiplicity"].tolist() == [2] * 6
    assert frame["stream"].tolist() == ["compute"] * 3 + ["reduce"] * 3
    assert frame["kind"].tolist() == ["forward", "forward", "backward"] + ["all_reduce"] * 3
    assert frame["unit"].tolist() == ["block 0 forward", "block 0 forward", "backward"] + ["bucket"] * 3
    assert frame["stage"].tolist() == [1] * 6
    assert frame["microbatch"].tolist() == [4, 4, 7, -1, -1, -1]
    assert frame["group"].tolist() == [""] * 3 + ["dp"] * 3
    assert frame["bytes"].tolist() == [5e6] * 6
    assert frame["flops"].tolist() == [3e9] * 6
    assert frame["start"].tolist() == [0.0] * 3 + [2.0] * 3
    assert frame["end"].tolist() == [1.0, 1.0, 2.0, 2.5, 2.5, 2.5]
    assert frame["released_by"].tolist() == [-1, -1, -1, 2, 2, 2]
    assert frame["cause"].tolist() == [""] * 6


def test_text_is_categorical() -> None:
    """So that a million spans are small, and groupby knows all kinds."""
    frame = example()
    for column in ("stream", "kind", "unit", "group", "cause"):
        assert isinstance(frame[column].dtype, pd.CategoricalDtype)
    assert frame["kind"].cat.categories.tolist() == [kind.value for kind in PieceKind]
    assert frame["stream"].cat.categories.tolist() == [stream.value for stream in Stream]


def test_nothing_ran() -> None:
    frame = run(*job([], [[]])).frame()
    assert len(frame) == 0
    assert frame["start"].dtype == np.float64
