"""The exception tree.

SimtrainError                 anything simtrain raises on purpose
|-- InputError                bad input: carries every problem found, each with its place   (exit code 2)
|-- ProgramError              an action list that cannot run: order, pairing, deadlock      (exit code 1: a defect)
`-- DoesNotFit                raised by ``--strict`` alone                                  (exit code 3)
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


class SimtrainError(Exception):
    """Base of all errors that simtrain raises on purpose."""

    exit_code = 1


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One thing wrong with an input, and where.

    ``str()`` gives ``file:line:column: key: message``; parts that are unknown are left out.
    """

    file: str = ""
    line: int = 0
    column: int = 0
    key: str = ""
    message: str = ""

    def __str__(self) -> str:
        place = self.file
        if self.line:
            place += f":{self.line}:{self.column}"
        return ": ".join(part for part in (place, self.key, self.message) if part)


class InputError(SimtrainError):
    """Bad input. ``problems`` lists all that is wrong with it, in order of place."""

    exit_code = 2

    def __init__(self, problems: Iterable[Problem] | str) -> None:
        listed = [Problem(message=problems)] if isinstance(problems, str) else problems
        self.problems: tuple[Problem, ...] = tuple(sorted(listed))
        super().__init__("\n".join(str(problem) for problem in self.problems))


class ProgramError(SimtrainError):
    """An action list that cannot be executed. ``places``: where, as (pipeline rank, index in its list)."""

    def __init__(self, message: str, places: Iterable[tuple[int, int]] = ()) -> None:
        self.places = tuple(sorted(places))
        super().__init__(message)


class DoesNotFit(SimtrainError):
    """The scenario needs more memory than the accelerator has, and ``--strict`` was asked for."""

    exit_code = 3


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the nearest choice, or the empty string; case does not count.

    A word that several choices begin with is no slip: `` (which of 'x', 'y'?)``.
    """
    plain: dict[str, str] = {}
    for choice in choices:
        plain.setdefault(choice.casefold(), choice)
    begun = [choice for low, choice in plain.items() if word and low.startswith(word.casefold())]
    if 1 < len(begun) <= 8 and word.casefold() not in plain:
        return f" (which of {', '.join(map(repr, begun))}?)"
    near = difflib.get_close_matches(word.casefold(), list(plain), n=1, cutoff=0.6)
    found = begun[:1] if len(begun) == 1 else [plain[low] for low in near]
    return f" (did you mean {found[0]!r}?)" if found else ""
