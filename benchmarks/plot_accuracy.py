"""Draws docs/figures/accuracy.png from results/accuracy.csv: what is kept against what it costs.

python benchmarks/plot_accuracy.py
"""

from __future__ import annotations

import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from common import RESULTS

FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "accuracy.png"
# Okabe and Ito's colours, which colour-blind readers can tell apart.
STYLES = {
    ("refined", "residual"): ("sparsifiner: residual", "#0072B2", "o-"),
    ("refined", "residual + tile 2x2"): ("residual, lists shared in 2 x 2 tiles", "#56B4E9", "s--"),
    ("ridge", "exact top-B"): ("exact top-B of the true attention, no residual", "#999999", "^:"),
    ("ridge", "paper form"): ("the paper's form", "#D55E00", "D-"),
}


def main() -> None:
    with (RESULTS / "accuracy.csv").open() as file:
        rows = list(csv.DictReader(file))
    figure, axes = pyplot.subplots(figsize=(7, 4.2), dpi=150)
    dense = float(rows[0]["top1"])
    axes.axhline(dense, color="black", linewidth=1)
    axes.text(0.52, dense + 0.6, f"dense {dense:.1f} %", ha="right", fontsize=9)
    for (settings, form), (label, colour, line) in STYLES.items():
        chosen = [row for row in rows if row["settings"].startswith(settings) and row["form"] == form and row["keep"]]
        if not chosen:  # an interrupted run
            continue
        chosen.sort(key=lambda row: float(row["keep"]))
        axes.plot(
            [float(row["keep"]) for row in chosen],
            [float(row["top1"]) for row in chosen],
            line,
            color=colour,
            label=label,
            markersize=5,
        )
    axes.set_xscale("log")
    ticks = (0.05, 0.1, 0.25, 0.5)
    axes.set_xticks(ticks, [f"{tick:.0%}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("keys each query attends to")
    axes.set_ylabel("top-1 (%)")
    axes.set_title(f"DeiT-Tiny, no training, {rows[0]['images']} ImageNet validation images", fontsize=10)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    figure.tight_layout()
    FIGURE.parent.mkdir(exist_ok=True)
    figure.savefig(FIGURE)
    print(f"wrote {FIGURE.relative_to(Path(__file__).parents[1])}")


if __name__ == "__main__":
    main()
