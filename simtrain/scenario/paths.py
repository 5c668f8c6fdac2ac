"""Where the data that ships with simtrain lies: inside an installed wheel, or beside ``simtrain/`` in a checkout."""

from __future__ import annotations

from pathlib import Path

from simtrain.errors import SimtrainError

_PACKAGE = Path(__file__).resolve().parents[1]


def data_dir(name: str) -> Path:
    """Folder of shipped data: ``hardware_specs`` or ``scenarios``.

    Raises
    ------
    SimtrainError
        The installation has no such folder.
    """
    for folder in (_PACKAGE / "_data" / name, _PACKAGE.parent / name):
        if folder.is_dir():
            return folder
    raise SimtrainError(f"this installation of simtrain lacks its folder {name}/")
