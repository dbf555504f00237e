"""Figures of measurements."""

from __future__ import annotations

import itertools
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


def growth(gains: Sequence[Any]) -> Any:
    """Speed-up over the dense model against the number of tokens: the whole model, its ceiling, attention alone."""
    figure, axes = pyplot().subplots(figsize=(7, 4.2), dpi=150, layout="constrained")
    tokens = [gain.tokens for gain in gains]
    axes.axhline(1, color="black", linewidth=1)
    axes.plot(tokens, [gain.attention_speed_up for gain in gains], "o-", color=COLOURS[1], label="attention alone")
    axes.plot(tokens, [gain.ceiling for gain in gains], ":", color=COLOURS[-1], label="if attention took no time")
    axes.plot(tokens, [gain.speed_up for gain in gains], "o-", color=COLOURS[0], linewidth=2.5, label="whole model")
    for gain in gains:
        place = (gain.tokens, gain.speed_up)
        axes.annotate(f"{gain.speed_up:.2f}x", place, textcoords="offset points", xytext=(0, -14), ha="center")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(tokens, [f"{count:,}" for count in tokens])
    heights = [height for height in (0.25, 0.5, 1, 2, 3, 5, 8, 12, 20, 30) if height <= 1.3 * axes.get_ylim()[1]]
    axes.set_yticks(heights, [f"{height:g}x" for height in heights])
    axes.minorticks_off()
    axes.margins(x=0.08, y=0.12)
    axes.set_xlabel("tokens")
    axes.set_ylabel("times as fast as dense")
    axes.legend(fontsize=9, frameon=False, loc="upper left")
    _plain(axes)
    return figure


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
    kinds = list(dict.fromkeys((p.setting.tokens, p.setting.layers is not None, p.setting.shape) for p in points))
    for axes, cost in zip(panels[0], costs, strict=True):
        title, unit = AXES[cost]

        def places(found: list[Any], cost: str = cost, unit: float = unit) -> tuple[list[float], list[float]]:
            return [getattr(p.row, cost) / unit for p in found], [getattr(p.row, value) for p in found]

        for number, kind in enumerate(kinds):
            tokens, by_layer, shape = kind
            name = "all tokens" if tokens is None else f"{tokens.method} {tokens.keep:g}"
            name = ", ".join([name] * (tokens is not None or not shape) + [shape] * bool(shape))
            line = [p for p in points if (p.setting.tokens, p.setting.layers is not None, p.setting.shape) == kind]
            axes.plot(
                *places(line),
                "s" if by_layer else "o",
                color=COLOURS[number % len(COLOURS)],
                label=name + (", budgets by layer" if by_layer else ""),
            )
            # Budgets by layer lie close to equal ones: their labels go to the other side.
            beside = {"xytext": (-4, 4), "ha": "right"} if by_layer else {"xytext": (4, -9), "ha": "left"}
            for p, place in zip(line, zip(*places(line), strict=True), strict=True):
                axes.annotate(f"{p.setting.keep:g}", place, textcoords="offset points", fontsize=7, **beside)
        axes.plot(*places(frontier(points, cost, value)), "k-", linewidth=0.8, zorder=0, label="beaten by no other")
        axes.plot(getattr(dense, cost) / unit, getattr(dense, value), "k*", markersize=10, label="dense")
        axes.set_xlabel(title)
        axes.margins(x=0.1)  # room for the labels
        _plain(axes)
    panels[0][0].set_ylabel(f"{AXES[value][0]}, {dense.images} images")
    panels[0][0].legend(fontsize=8, frameon=False)
    return figure


def paper_trade_off(rows: Any, measured: Any, path: Path) -> None:
    """The paper's trade-off on DeiT-S, as printed; and models at hand in the same settings, in a panel of their own."""
    of_deit = [(i, row) for i, row in enumerate(rows) if row.model == "DeiT-S"]
    fewer = [i for i, row in of_deit if row.method == "Sparsifiner" and row.token_keep < 1]
    groups = (
        ("Sparsifiner", [i for i, row in of_deit if row.table == 2 and row.keep < 1], "-"),
        ("EViT", [i for i, row in of_deit if row.method == "EViT"], "--"),
        ("DynamicViT", [i for i, row in of_deit if row.method == "DynamicViT"], ":"),
        ("Sparsifiner + EViT", [i for i, row in of_deit if row.method == "Sparsifiner + EViT"], "-."),
        ("Sparsifiner, fewer tokens", fewer, "-."),
    )
    dense = next(row for row in rows if row.table == 2 and row.keep == 1)
    # A model of another number of tokens is not in the tables that the groups are of.
    models = [model for model in measured if any(i in model.rows for _, group, _ in groups for i in group)]
    count = 2 if models else 1
    figure, grid = pyplot().subplots(1, count, figsize=(6.5 * count, 4.6), dpi=150, squeeze=False)
    panels = grid[0]

    def draw(axes: Any, number: int, points: list[tuple[float, float]], name: str, marker: str) -> None:
        if points:
            xs, ys = zip(*sorted(set(points)), strict=True)
            axes.plot(xs, ys, groups[number][2], marker=marker, markersize=4, color=COLOURS[number], label=name)

    def place(row: Any) -> tuple[float, float]:
        return row.attention_macs / 1e6, row.agreement if row.top1 is None else row.top1

    for number, (name, group, _) in enumerate(groups):
        draw(panels[0], number, [(rows[i].paper, rows[i].paper_top1) for i in group], name, "o")
        for model, marker in zip(models, itertools.cycle("os^Dv"), strict=False):
            points = [place(model.rows[i]) for i in group if i in model.rows]
            draw(panels[1], number, points, f"{name} ({model.name})", marker)
    panels[0].plot(dense.paper, dense.paper_top1, "k*", label="dense")
    panels[0].set_title("as printed in the paper: DeiT-S")
    if models:
        panels[1].plot(*place(models[0].dense), "k*", label="dense")
        panels[1].set_title(f"measured: {models[0].model}, {models[0].dense.images:,} images")
    for axes in panels:
        axes.set_xlabel("multiply-adds of attention (M)")
        axes.set_ylabel("top-1 (%)")
        axes.legend(fontsize=7, frameon=False)
        _plain(axes)
    save(figure, path)
