"""matplotlib for plots: an optional package, imported only when a plot is drawn."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from accel_train.errors import needing


def import_pyplot() -> Any:
    """Return matplotlib's pyplot, set up for SVG files. Raises UserError if matplotlib is not installed."""
    with needing("matplotlib is not installed, so no plot was drawn: pip install 'accel-train[plot]'."):
        import matplotlib
    if not ({"MPLBACKEND", "JPY_PARENT_PID"} & os.environ.keys() or "matplotlib.pyplot" in sys.modules):
        matplotlib.use("svg")  # else a program or a notebook, which draws figures of its own, has chosen
    matplotlib.rcParams["svg.hashsalt"] = "accel_train"  # the same figures give the same file
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text: a smaller file, and one can search it
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: Path) -> None:
    """Write a matplotlib figure to the SVG file `path`, without the date, and free its memory."""
    figure.savefig(path, metadata={"Date": None})
    import_pyplot().close(figure)
