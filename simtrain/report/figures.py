"""Figure -> file bytes, the same for the same figure."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plain(text: str) -> str:
    """Text that matplotlib shows as it is: a dollar sign begins no formula."""
    return text.replace("$", r"\$")


def png(figure: Figure, dpi: float = 150) -> bytes:
    """The figure as PNG, without date or version in it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()


def svg(figure: Figure) -> str:
    """The figure as an SVG element on a transparent ground, without date; ids depend on the figure alone."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": "simtrain", "svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
