"""How long simulations take: ``python -m tests.bench.simulate_speed`` from the repository root prints a table.

Times are the best of several runs in one process; compare them as ratios within one run.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable

import simtrain
from simtrain.scenario.scenario import Scenario

GPT3 = "llm/gpt3-175b-1024xa100"
PUBLISHED = (
    "korthikanti/22b-seqsel",
    "korthikanti/175b-full",
    "korthikanti/530b-full",
    "korthikanti/1t-full",
    "sc21/1008b",
)


def gpt3(devices: int, microbatches: int = 96) -> Scenario:
    """The main example on more machines: data parallelism and the batch grow together."""
    dp = devices // 64
    changes = (
        f"cluster.nodes={devices // 8}",
        f"parallelism.dp={dp}",
        f"training.global_batch={dp * microbatches}",
    )
    return simtrain.load(GPT3, overrides=changes)


def best(run: Callable[[], object], times: int = 5) -> float:
    """Shortest wall time of several runs, s."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return min(taken)


def main() -> None:
    """Print the table."""
    small, large = gpt3(1024), gpt3(16384)
    folded = {made.cluster.devices: best(lambda made=made: simtrain.simulate(made)) for made in (small, large)}
    for devices, seconds in folded.items():
        print(f"GPT-3 175B on {devices:6,} A100, 96 microbatches, folded     {seconds * 1e3:8.1f} ms")
    print(f"ratio 16,384 to 1,024 devices                             {folded[16384] / folded[1024]:8.2f}")
    whole = gpt3(4096, microbatches=24)
    start = time.perf_counter()
    result = simtrain.simulate(whole, fold=False)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30
    spans = len(result.spans.end)
    print(f"4,096 unfolded ranks, 24 microbatches, {spans:,} spans   {seconds:8.1f} s, peak {peak:.2f} GiB")
    for name in PUBLISHED:
        made = simtrain.load(f"published/{name}")
        spans = len(simtrain.simulate(made).spans.end)
        print(
            f"{name:28} {spans:9,} spans                  {best(lambda made=made: simtrain.simulate(made), 2):8.3f} s"
        )


if __name__ == "__main__":
    main()
