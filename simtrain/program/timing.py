"""When each action of a program runs if messages are free, and the closed forms that the answer must equal."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from simtrain.errors import ProgramError
from simtrain.program.actions import Action, ActionKind, Pair, Program, Step, flat

F, B, I, W = ActionKind  # noqa: E741  (an enum's attributes are slow to look up)


class Replay(NamedTuple):
    """How far a program gets: per rank (start, end) of the steps that ran, a prefix of its list."""

    times: tuple[list[tuple[float, float]], ...]

    def blocked(self, program: Program) -> dict[int, int]:
        """Rank -> index of the step it is stuck at; empty if the program ran to its end."""
        return {rank: len(done) for rank, done in enumerate(self.times) if len(done) < len(program[rank])}


class Costs(NamedTuple):
    """Durations of a stage's passes, any unit of time."""

    f: float = 1.0
    i: float = 1.0
    """Input gradient."""
    w: float = 1.0
    """Weight gradient; a full backward takes both, one behind the other."""
    b: float = 2.0
    pair: float | None = None
    """A forward and a backward woven into one another; None = one behind the other."""

    @staticmethod
    def of(f: float, b: float, w: float | None = None) -> Costs:
        """From a forward, a full backward, and the weight gradient's part of it (half where not said)."""
        w = b / 2 if w is None else w
        return Costs(f, b - w, w, b)

    def step(self, step: Step) -> float:
        """Duration of a step."""
        if isinstance(step, Pair):
            return self.step(step.forward) + self.step(step.backward) if self.pair is None else self.pair
        return {F: self.f, I: self.i, W: self.w, B: self.b}[step.kind]


UNIT = Costs()


def replay(program: Program, costs: Costs = UNIT) -> Replay:
    """Run each rank's list in order, every step as early as its inputs allow; messages take no time.

    A forward needs the forward of the stage before, a backward (B or I) the forward of its own stage and the backward
    of the stage after, a weight gradient its input gradient. A pair waits for the inputs of both.
    """
    last = max((action.stage for steps in program for action in flat(steps)), default=0)
    forwards: defaultdict[int, dict[int, float]] = defaultdict(dict)
    gradients: defaultdict[int, dict[int, float]] = defaultdict(dict)
    price = {F: costs.f, I: costs.i, W: costs.w, B: costs.b}

    def ready(action: Action) -> float | None:
        stage, kind, m = action
        if kind is F:
            return forwards[stage - 1].get(m) if stage else 0.0
        if kind is W:
            return gradients[stage].get(m)
        fed = forwards[stage].get(m)
        return fed if fed is None or stage == last else gradients[stage + 1].get(m)  # never earlier than the forward

    times: tuple[list[tuple[float, float]], ...] = tuple([] for _ in program)
    progress = True
    while progress:
        progress = False
        for steps, done in zip(program, times, strict=True):
            before, clock = len(done), done[-1][1] if done else 0.0
            for at in range(before, len(steps)):
                step = steps[at]
                both = step if isinstance(step, Pair) else (step,)
                start = clock
                for action in both:
                    since = ready(action)
                    if since is None:
                        break
                    start = max(start, since)
                else:
                    clock = start + (costs.step(step) if isinstance(step, Pair) else price[step.kind])
                    done.append((start, clock))
                    for stage, kind, m in both:
                        if kind is not W:
                            (forwards if kind is F else gradients)[stage][m] = clock
                    continue
                break
            progress = progress or len(done) > before
    return Replay(times)


def unit_times(
    program: Program, f: float = 1.0, b: float = 2.0, w: float | None = None
) -> dict[Step, tuple[float, float]]:
    """Start and end of each step when communication is free (longest path over the dependencies).

    Parameters
    ----------
    program
        A valid program.
    f, b, w
        Duration of a stage's forward, of its full backward, and of the weight gradient's part of that (None = half).

    Raises
    ------
    ProgramError
        The program deadlocks; ``validation.validate`` says where.
    """
    result = replay(program, Costs.of(f, b, w))
    if stuck := result.blocked(program):
        raise ProgramError("deadlock: " + ", ".join(f"rank {r} waits at {program[r][at]}" for r, at in stuck.items()))
    return {
        step: time
        for steps, done in zip(program, result.times, strict=True)
        for step, time in zip(steps, done, strict=True)
    }


def makespan(program: Program, f: float = 1.0, b: float = 2.0, w: float | None = None) -> float:
    """End of the last step, communication free."""
    return max(end for _, end in unit_times(program, f, b, w).values())


def longest_stage(program: Program, costs: Costs = UNIT) -> float:
    """Largest time from the first to the last action of one rank, communication free.

    The period of the step where no rank waits for the others at its end (optimizer post-validation, Qi et al. 2023,
    section 4), because each may begin the next step as soon as it is done.
    """
    return max(times[-1][1] - times[0][0] for times in replay(program, costs).times)


def peak_in_flight(program: Program, kept: float = 1.0) -> tuple[float, ...]:
    """Per rank, the largest number of (stage, microbatch) pairs run forward but not yet (fully) backward.

    Between input and weight gradient it counts ``kept``: the share of its activations that the weight gradient needs.
    """
    change = {F: 1.0, B: -1.0, I: kept - 1.0, W: -kept}
    peaks = []
    for steps in program:
        held = peak = 0.0
        for action in flat(steps):
            held += change[action.kind]
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


def zero_bubble_h1(ranks: int, f: float, i: float, w: float) -> float:
    """Idle time of ZB-H1, at most: (p - 1)(F + I - W), with I the input gradient.

    Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", table 2 (their B is our I).

    >>> zero_bubble_h1(4, 1.0, 1.0, 1.0)
    3.0
    """
    return (ranks - 1) * (f + i - w)


def zero_bubble_h2(ranks: int, f: float, i: float, w: float) -> float:
    """Idle time of ZB-H2 within a rank's own step: (p - 1)(F + I - 2 W); none where the three are equal.

    Source: as ``zero_bubble_h1``.
    """
    return (ranks - 1) * (f + i - 2 * w)


def dualpipe_bubble(ranks: int, f: float, b: float, w: float, together: float) -> float:
    """Idle time of DualPipe: (p/2 - 1)(F&B + B - 3 W), with ``together`` = F&B of a pair and B the full backward.

    Source: README of deepseek-ai/DualPipe; for DualPipe-V p counts the stages.
    """
    return (ranks / 2 - 1) * (together + b - 3 * w)
