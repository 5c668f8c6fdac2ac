"""What context parallelism holds beside an attention core while it runs, on one rank."""

from __future__ import annotations

from simtrain.cost.memory.activations import element_bytes
from simtrain.program.context import key_value_elements, output_elements, query_elements
from simtrain.program.demand import Memory
from simtrain.program.lowered import PieceKind
from simtrain.scenario.scenario import ContextKind, Scenario


def transient(scenario: Scenario, kind: PieceKind) -> dict[Memory, float]:
    """Return the bytes by category of one core's exchange; n is the size of the ring or of the gather.

    Gathered: K and V of all ranks, in backward their gradients too (Llama 3, section 3.3.2). Ring, as Transformer
    Engine's ``context_parallel.py``: forward n buffers of K and V and the n partial outputs, all released at its end;
    backward two buffers of K, V and their gradients. All-to-all: the packed copy of what is sent.
    """
    backward = kind in (PieceKind.BACKWARD, PieceKind.INPUT_GRAD)
    element, parallelism = element_bytes(scenario.training.precision), scenario.parallelism
    keys, outputs = element * key_value_elements(scenario), element * output_elements(scenario)
    n = parallelism.sequence_split
    if parallelism.cp_kind is ContextKind.ALL_GATHER:
        return {Memory.GATHERED: n * keys * (2 if backward else 1)}
    held: dict[Memory, float] = {}
    if n > 1:
        held = {Memory.BUFFERS: 4 * keys if backward else n * keys, Memory.WORKSPACE: 0.0 if backward else n * outputs}
    if parallelism.head_split > 1:
        held[Memory.BUFFERS] = held.get(Memory.BUFFERS, 0.0) + element * query_elements(scenario) + keys
    return held
