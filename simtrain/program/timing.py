"""When each action of a program runs if messages are free, and the closed forms that the answer must equal."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from simtrain.errors import ProgramError
from simtrain.program.actions import Action, ActionKind, Program

F, B, W = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD  # an enum's attributes are slow to look up


class Replay(NamedTuple):
    """How far a program gets: per rank (start, end) of the actions that ran, a prefix of its list."""

    times: tuple[list[tuple[float, float]], ...]

    def blocked(self, program: Program) -> dict[int, int]:
        """Rank -> index of the action it is stuck at; empty if the program ran to its end."""
        return {rank: len(done) for rank, done in enumerate(self.times) if len(done) < len(program[rank])}


def replay(program: Program, f: float = 1.0, b: float = 2.0) -> Replay:
    """Run each rank's list in order, every action as early as its inputs allow; messages take no time.

    A forward needs the forward of the stage before, a backward (B or I) the forward of its own stage and the backward
    of the stage after, a weight gradient its input gradient. A split backward takes half of ``b`` for each part.
    """
    last = max((action[0] for actions in program for action in actions), default=0)
    forwards: defaultdict[int, dict[int, float]] = defaultdict(dict)
    gradients: defaultdict[int, dict[int, float]] = defaultdict(dict)
    times: tuple[list[tuple[float, float]], ...] = tuple([] for _ in program)
    progress = True
    while progress:
        progress = False
        for actions, done in zip(program, times, strict=True):
            before, clock = len(done), done[-1][1] if done else 0.0
            for at in range(before, len(actions)):
                stage, kind, m = actions[at]
                if kind is F:
                    ready, cost = forwards[stage - 1].get(m) if stage else 0.0, f
                elif kind is W:
                    ready, cost = gradients[stage].get(m), b / 2
                else:
                    ready, cost = forwards[stage].get(m), b if kind is B else b / 2
                    if ready is not None and stage < last:
                        ready = gradients[stage + 1].get(m)  # never earlier than the own forward, which fed it
                if ready is None:
                    break
                start = max(clock, ready)
                clock = start + cost
                done.append((start, clock))
                if kind is F:
                    forwards[stage][m] = clock
                elif kind is not W:
                    gradients[stage][m] = clock
            progress = progress or len(done) > before
    return Replay(times)


def unit_times(program: Program, f: float = 1.0, b: float = 2.0) -> dict[Action, tuple[float, float]]:
    """Start and end of each action when communication is free (longest path over the dependencies).

    Parameters
    ----------
    program
        A valid program.
    f, b
        Duration of a stage's forward and backward, any unit of time.

    Raises
    ------
    ProgramError
        The program deadlocks; ``validation.validate`` says where.
    """
    result = replay(program, f, b)
    if stuck := result.blocked(program):
        raise ProgramError("deadlock: " + ", ".join(f"rank {r} waits at {program[r][at]}" for r, at in stuck.items()))
    return {
        action: time
        for actions, done in zip(program, result.times, strict=True)
        for action, time in zip(actions, done, strict=True)
    }


def makespan(program: Program, f: float = 1.0, b: float = 2.0) -> float:
    """End of the last action, communication free."""
    return max(end for _, end in unit_times(program, f, b).values())


def peak_in_flight(program: Program) -> tuple[int, ...]:
    """Per rank, the largest number of (stage, microbatch) pairs run forward but not yet (fully) backward."""
    step = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1, ActionKind.INPUT_GRAD: 0, ActionKind.WEIGHT_GRAD: -1}
    peaks = []
    for actions in program:
        held = peak = 0
        for action in actions:
            held += step[action.kind]
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)


def bubble_fraction(ranks: int, microbatches: int, virtual: int = 1) -> float:
    """Idle time over ideal time of GPipe and 1F1B: (p - 1) / m; interleaved: (p - 1) / (v m), for m % p = 0.

    Source: Narayanan et al., SC21, sections 2.2.1 and 2.2.2.

    >>> bubble_fraction(4, 8)
    0.375
    """
    return (ranks - 1) / (virtual * microbatches)


def in_flight_1f1b(stage: int, ranks: int, microbatches: int) -> int:
    """Largest number of microbatches whose activations 1F1B's stage holds: min(m, p - s).

    Source: Narayanan et al., SC21, section 2.2.1 (at most p); Korthikanti et al. 2022, section 4.2.3.
    """
    return min(microbatches, ranks - stage)


def in_flight_interleaved(ranks: int, virtual: int) -> float:
    """Microbatches, in units of all layers of one rank, that stage 0 holds: p (1 + (p - 1) / (p v)), for m >= 2 p.

    Source: Korthikanti et al. 2022, section 4.2.3 (their m is our v).

    >>> in_flight_interleaved(8, 3)
    10.333333333333334
    """
    return ranks * (1 + (ranks - 1) / (ranks * virtual))
