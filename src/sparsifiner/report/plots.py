"""Figures of measurements; needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparsifiner.errors import ConfigError
from sparsifiner.files import replacing

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#999999")


def speed_ups(rows: list[dict[str, Any]], path: Path) -> None:
    """Speed-up over dense attention against the number of tokens: a line per setting."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("drawing needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.4), dpi=150)
    axes.axhline(1, color="black", linewidth=1)
    sparse = [row for row in rows if row["keep"] is not None]
    keeps = list(dict.fromkeys(row["keep"] for row in sparse))
    for name in dict.fromkeys(row["name"] for row in sparse):
        line = sorted((row for row in sparse if row["name"] == name), key=lambda row: row["n"])
        style = "-" if line[0]["tile"] is None else "--"
        colour = COLOURS[keeps.index(line[0]["keep"]) % len(COLOURS)]
        marker = "s" if line[0]["narrow"] else "o"
        axes.plot([r["n"] for r in line], [r["speed_up"] for r in line], style, color=colour, marker=marker, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks = sorted({row["n"] for row in sparse})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    heights = [height for height in (0.5, 1, 2, 3, 5, 8, 12) if height <= 1.2 * max(r["speed_up"] for r in sparse)]
    axes.set_yticks(heights, [f"{height:g}x" for height in heights])
    axes.set_xlabel("tokens")
    axes.set_ylabel("speed-up over dense attention (SDPA)")
    axes.grid(alpha=0.3)
    axes.set_ylim(top=1.6 * axes.get_ylim()[1])  # room for the legend
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", bbox_inches="tight")
    pyplot.close(figure)
