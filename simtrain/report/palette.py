"""Colours and words that all pictures, the page and the terminal share.

The hues are those of Okabe and Ito (2008), which colour-blind readers tell apart, with greys for what is not work.
"""

from __future__ import annotations

from enum import StrEnum

from simtrain.program.demand import Memory, TimeKind
from simtrain.program.lowered import PieceKind

INK = "#1b1e24"
"""Text and axes; the page replaces it by the reader's own text colour."""
MUTED = "#6b7280"
IDLE = "#e9ebee"
"""Background of a rank's row: waiting."""
EDGE = "#fefefe"
"""Seams between boxes: the colour of the page."""
OVER = "#c1121f"
"""The capacity that must not be passed."""


class Band(StrEnum):
    """What a box, or a part of its height, stands for in the timeline; the legend's order."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT_GRAD = "weight gradient"
    RECOMPUTE = "recomputation"
    OPTIMIZER = "optimizer"
    TP = "tensor-parallel comm."
    CP = "context-parallel comm."
    EP = "expert-parallel comm."
    PP = "pipeline messages"
    DP_REDUCE = "gradient reduction"
    DP_GATHER = "parameter gathers"
    HOST = "host"
    CONTENTION = "contention"
    INPUT = "input stall"
    OFFLOAD = "offload"


BAND_COLOUR = {
    Band.FORWARD: "#0072b2",
    Band.BACKWARD: "#009e73",
    Band.WEIGHT_GRAD: "#7bcbb0",
    Band.RECOMPUTE: "#56b4e9",
    Band.OPTIMIZER: "#f0e442",
    Band.TP: "#e69f00",
    Band.CP: "#8c6d1f",
    Band.EP: "#a0522d",
    Band.PP: "#7b52ab",
    Band.DP_REDUCE: "#d55e00",
    Band.DP_GATHER: "#cc79a7",
    Band.HOST: "#8a8f98",
    Band.CONTENTION: "#3b3f46",
    Band.INPUT: "#7a1f3d",
    Band.OFFLOAD: "#4f6d2f",
}
LIGHT = (Band.OPTIMIZER, Band.WEIGHT_GRAD, Band.RECOMPUTE, Band.TP)
"""Bands that carry dark text."""

PIECE_BAND = {
    PieceKind.FORWARD: Band.FORWARD,
    PieceKind.BACKWARD: Band.BACKWARD,
    PieceKind.INPUT_GRAD: Band.BACKWARD,
    PieceKind.WEIGHT_GRAD: Band.WEIGHT_GRAD,
    PieceKind.RECOMPUTE: Band.RECOMPUTE,
    PieceKind.OPTIMIZER: Band.OPTIMIZER,
}
TIME_BAND = {
    TimeKind.RECOMPUTE: Band.RECOMPUTE,
    TimeKind.OPTIMIZER: Band.OPTIMIZER,
    TimeKind.HOST: Band.HOST,
    TimeKind.TP: Band.TP,
    TimeKind.CP: Band.CP,
    TimeKind.DP_REDUCE: Band.DP_REDUCE,
    TimeKind.DP_GATHER: Band.DP_GATHER,
    TimeKind.PP: Band.PP,
    TimeKind.EP: Band.EP,
    TimeKind.CONTENTION: Band.CONTENTION,
    TimeKind.INPUT: Band.INPUT,
    TimeKind.OFFLOAD: Band.OFFLOAD,
}
TIME_COLOUR = {
    TimeKind.COMPUTE: BAND_COLOUR[Band.FORWARD],
    TimeKind.BUBBLE: "#c9cdd4",
    **{kind: BAND_COLOUR[band] for kind, band in TIME_BAND.items()},
}
MEMORY_COLOUR = {
    Memory.PARAMETERS: "#0072b2",
    Memory.GRADIENTS: "#d55e00",
    Memory.OPTIMIZER: "#f0e442",
    Memory.ACTIVATIONS: "#009e73",
    Memory.LOGITS: "#56b4e9",
    Memory.GATHERED: "#cc79a7",
    Memory.BUFFERS: "#7b52ab",
    Memory.WORKSPACE: "#e69f00",
    Memory.RUNTIME: "#8a8f98",
    Memory.RESERVE: "#c9cdd4",
}


def words(name: str) -> str:
    """``transient_gathers`` -> ``transient gathers``."""
    return name.replace("_", " ")
