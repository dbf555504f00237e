"""Figures of measurements."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparsifiner.files import replacing
from sparsifiner.inspect.sweep import frontier, worth

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#999999")


def pyplot() -> Any:
    """Pyplot without a screen; slow to import, so only where something is drawn."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: Path, close: bool = True) -> None:
    """Writes a figure in the format of the file's name."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:], bbox_inches="tight")
    if close:
        pyplot().close(figure)


def _plain(axes: Any) -> None:
    axes.grid(alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def training_curves(lines: list[dict[str, Any]], path: Path) -> None:
    """The losses of a run over its epochs, one panel a phase; top-1 beside them where it was measured."""
    phases = sorted({line["phase"] for line in lines})
    figure, panels = pyplot().subplots(1, len(phases), figsize=(6 * len(phases), 4), dpi=150, squeeze=False)
    for axes, phase in zip(panels[0], phases, strict=True):
        here = [line for line in lines if line["phase"] == phase]
        names = [
            name
            for name in ("loss", "attention", "label", "token", "prediction", "ratio")
            if any(name in x for x in here)
        ]
        for number, name in enumerate(names):
            if phase == 1 and name == "loss":  # the attention loss is all of it
                continue
            points = [(line["epoch"], line[name]) for line in here if name in line]
            axes.plot(*zip(*points, strict=True), color=COLOURS[number], label=name, linewidth=1)
        values = [line[name] for line in here for name in names if name in line]
        if values and 0 < 20 * min(values) < max(values):
            axes.set_yscale("log")
        if scored := [(line["epoch"], line["top1"]) for line in here if "top1" in line]:
            other = axes.twinx()
            other.plot(*zip(*scored, strict=True), "k--o", markersize=3, label="top-1")
            other.set_ylabel("top-1 (%)")
        axes.set_xlabel("epoch")
        axes.set_ylabel("loss")
        axes.set_title(f"phase {phase}: " + ("predictors" if phase == 1 else "all weights"))
        axes.legend(fontsize=8, frameon=False)
        _plain(axes)
    save(figure, path)


def speed_ups(rows: list[dict[str, Any]], path: Path) -> None:
    """Speed-up over dense attention against the number of tokens: a line per setting."""
    figure, axes = pyplot().subplots(figsize=(7, 4.4), dpi=150)
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
    axes.set_ylim(top=1.6 * axes.get_ylim()[1])  # room for the legend
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    _plain(axes)
    save(figure, path)


# What a setting of a sweep can cost or be worth: the axis' title and its unit.
AXES = {
    "total_macs": ("multiply-adds of the model (G)", 1e9),
    "attention_macs": ("multiply-adds of attention (M)", 1e6),
    "milliseconds": ("measured time per image (ms)", 1.0),
    "top1": ("top-1 (%)", 1.0),
    "agreement": ("agreement with dense (%)", 1.0),
}


def trade_off(dense: Any, points: list[Any], costs: Sequence[str] = ("total_macs", "milliseconds")) -> Any:
    """What each setting of a sweep costs against what it keeps, a panel a cost, with a line through the unbeaten.

    Args:
        dense: the dense model's row.
        points: the settings.
        costs: ``"total_macs"``, ``"attention_macs"`` or ``"milliseconds"``, one after the other.
    """
    value = worth(dense)
    figure, panels = pyplot().subplots(
        1, len(costs), figsize=(5.6 * len(costs), 4.4), dpi=150, squeeze=False, sharey=True, layout="constrained"
    )
    kinds = list(dict.fromkeys((p.setting.tokens, p.setting.layers is not None) for p in points))
    for axes, cost in zip(panels[0], costs, strict=True):
        title, unit = AXES[cost]

        def places(found: list[Any], cost: str = cost, unit: float = unit) -> tuple[list[float], list[float]]:
            return [getattr(p.row, cost) / unit for p in found], [getattr(p.row, value) for p in found]

        for number, (tokens, by_layer) in enumerate(kinds):
            name = "all tokens" if tokens is None else f"{tokens.method} {tokens.keep:g}"
            line = [p for p in points if (p.setting.tokens, p.setting.layers is not None) == (tokens, by_layer)]
            axes.plot(
                *places(line),
                "s" if by_layer else "o",
                color=COLOURS[number % len(COLOURS)],
                label=name + (", budgets by layer" if by_layer else ""),
            )
            for p, place in zip(line, zip(*places(line), strict=True), strict=True):
                axes.annotate(f"{p.setting.keep:g}", place, xytext=(4, -9), textcoords="offset points", fontsize=7)
        axes.plot(*places(frontier(points, cost, value)), "k-", linewidth=0.8, zorder=0, label="beaten by no other")
        axes.plot(getattr(dense, cost) / unit, getattr(dense, value), "k*", markersize=10, label="dense")
        axes.set_xlabel(title)
        _plain(axes)
    panels[0][0].set_ylabel(f"{AXES[value][0]}, {dense.images} images")
    panels[0][0].legend(fontsize=8, frameon=False)
    return figure


def paper_trade_off(rows: Any, measured: Any, path: Path) -> None:
    """The paper's trade-off on DeiT-S, as printed; and a model at hand in the same settings, in a panel of its own."""
    count = 1 if measured is None else 2
    figure, panels = pyplot().subplots(1, count, figsize=(6.2 * count, 4.4), dpi=150, squeeze=False)
    printed = [row for row in rows if row.model == "DeiT-S" and row.keep is not None]
    groups = (
        ("Sparsifiner", [r for r in printed if r.table == 2 and r.keep < 1], "o-"),
        ("EViT", [r for r in printed if r.method == "EViT"], "s--"),
        ("DynamicViT", [r for r in printed if r.method == "DynamicViT"], "^--"),
        ("Sparsifiner + EViT", [r for r in printed if r.method == "Sparsifiner + EViT"], "D-"),
        ("dense", [r for r in printed if r.table == 2 and r.keep == 1], "k*"),
    )
    for number, (name, found, style) in enumerate(groups):
        colour = {} if name == "dense" else {"color": COLOURS[number]}
        panels[0][0].plot([r.paper for r in found], [r.paper_top1 for r in found], style, label=name, **colour)
    panels[0][0].set_title("as printed in the paper: DeiT-S")
    if measured is not None:
        axes = panels[0][1]
        seen = {index: row for index, row in measured.rows.items() if row.attention_macs is not None}
        for number, (name, found, style) in enumerate(groups[:-1]):
            here = [seen[i] for i, row in enumerate(rows) if row in found and i in seen]
            if here:
                xs, ys = [r.attention_macs / 1e6 for r in here], [r.top1 or r.agreement for r in here]
                axes.plot(xs, ys, style, color=COLOURS[number], label=name)
        dense = measured.dense
        axes.plot(dense.attention_macs / 1e6, dense.top1 or dense.agreement, "k*", label="dense")
        axes.set_title(f"measured: {measured.model}, {measured.images} images")
    for axes in panels[0]:
        axes.set_xlabel("multiply-adds of attention (M)")
        axes.set_ylabel("top-1 (%)")
        axes.legend(fontsize=8, frameon=False)
        _plain(axes)
    save(figure, path)
