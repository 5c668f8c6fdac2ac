"""Device memory: what is held all step, what each piece of work keeps and frees, whether it fits.

``states`` counts parameters, gradients and optimizer state; ``activations`` what a sub-layer saves for its backward;
``pieces`` turns lowered pieces into allocations and releases; ``verdict`` compares a peak with the capacity.
"""

from simtrain.cost.memory.activations import Sizes, sizes
from simtrain.cost.memory.pieces import fold_pieces, piece_memory
from simtrain.cost.memory.states import held_parameters, loading, resting
from simtrain.cost.memory.verdict import Verdict, verdict

__all__ = [
    "Sizes",
    "Verdict",
    "fold_pieces",
    "held_parameters",
    "loading",
    "piece_memory",
    "resting",
    "sizes",
    "verdict",
]
