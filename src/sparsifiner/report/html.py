"""One self-contained HTML file of a model: what it is, what it costs and keeps, and what it looks at."""

from __future__ import annotations

import base64
import dataclasses
import html
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from sparsifiner import __version__
from sparsifiner.config import SparseConfig, name_tile
from sparsifiner.convert import config_of, conversion_of, sparse_layers
from sparsifiner.files import replacing
from sparsifiner.inspect.compare import Row
from sparsifiner.inspect.gain import Gain, in_words
from sparsifiner.inspect.machine import environment
from sparsifiner.inspect.statistics import LayerStatistics
from sparsifiner.report.plots import pyplot
from sparsifiner.report.tables import GAIN_TITLES, TITLES, cells, gain_cells, gain_note
from sparsifiner.sides import spelled

MOST_FRAMES = 6  # of a clip beside each other

# Nothing from outside, and no scripts, whatever a name in a checkpoint may hold.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5b6572; --line: #d8dde3; --paper: #ffffff; --tint: #f4f6f8 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ed; --soft: #9aa5b1; --line: #333b45; --paper: #14181d; --tint: #1c222a }
  figure img { background: #ffffff }
}
body { margin: 0 auto; max-width: 62rem; padding: 2rem 1.2rem 4rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.55 system-ui, sans-serif }
h1 { font-size: 1.7rem; margin: 0 0 .3rem } h2 { font-size: 1.15rem; margin: 2.4rem 0 .6rem }
p { max-width: 46rem } .soft { color: var(--soft) }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap }
th:first-child, td:first-child { text-align: left } th { color: var(--soft); font-weight: 600 }
figure { margin: 1rem 0 } figure img { max-width: 100%; height: auto; border-radius: 4px }
figcaption { color: var(--soft); font-size: .9rem; max-width: 46rem }
pre { background: var(--tint); padding: .8rem 1rem; overflow-x: auto; border-radius: 4px; font-size: .85rem }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem }
dt { color: var(--soft) } dd { margin: 0 }
"""


@dataclasses.dataclass
class Picture:
    """A figure of matplotlib's and what to say under it."""

    figure: Any
    caption: str


def _text(value: object) -> str:
    return html.escape(str(value))


def _table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    head = "".join(f'<th scope="col">{_text(title)}</th>' for title in titles)
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _image(picture: Picture) -> str:
    buffer = io.BytesIO()
    picture.figure.savefig(buffer, format="png", bbox_inches="tight")
    pyplot().close(picture.figure)
    encoded = base64.b64encode(buffer.getvalue()).decode()
    caption = _text(picture.caption)
    shown = f'<img src="data:image/png;base64,{encoded}" alt="{caption}">'
    return f"<figure>{shown}<figcaption>{caption}</figcaption></figure>"


def _about(student: nn.Module) -> str:
    config, record = config_of(student), conversion_of(student)
    layers = sparse_layers(student)
    keep = ", ".join(f"{rate:g}" for rate in (config.keep if isinstance(config.keep, Sequence) else [config.keep]))
    tokens = (
        "all kept" if config.tokens is None else f"{config.tokens.method}, each pruning keeps {config.tokens.keep:g}"
    )
    ours = sum(p.numel() for layer in layers if layer.has_predictor for p in layer.predictor.parameters()) / 1e6
    facts = {
        "host": f"{record.host_name}, {type(student).__name__}",
        "input": _input(student),
        "attention": f"{len(layers)} layers of {layers[0].num_heads} heads",
        **_left_dense(record.host.left_dense(student)),
        "keys kept": keep,
        "chosen by": {"learned": "the predictor", "cells": "the means of cells"}.get(config.pattern, config.pattern),
        **_form(config),
        "tile": f"{name_tile(config.tile).replace(',', ', ')} queries share a list"
        if config.tiles
        else "a list for each query",
        "tokens": tokens,
        "parameters": f"{sum(p.numel() for p in student.parameters()) / 1e6:.2f} M, of which predictors {ours:.2f} M",
    }
    return "<dl>" + "".join(f"<dt>{_text(name)}</dt><dd>{_text(fact)}</dd>" for name, fact in facts.items()) + "</dl>"


def _input(student: nn.Module) -> str:
    """What the model takes, in words."""
    host = conversion_of(student).host
    frames, tokens = host.frames(student), host.grid(student).num_tokens
    clip = "" if frames is None else f"{frames} frames of "
    return f"{clip}{spelled(host.image_size(student))} pixels, {tokens} tokens"


def _left_dense(reasons: dict[str, str]) -> dict[str, object]:
    """Layers that were not converted, where a model has some."""
    shown = [f"{sum(why == other for other in reasons.values())} ({why})" for why in dict.fromkeys(reasons.values())]
    return {"layers not converted": "; ".join(shown)} if shown else {}


def _form(config: SparseConfig) -> dict[str, object]:
    """What only one way to choose keys has."""
    if config.asks_predictor:
        return {
            "landmarks": config.n_down,
            "thresholds": f"tau {config.tau:.4g}, basis {config.basis_threshold:.4g}",
            "residual": "on" if config.residual else "off (the paper's form)",
        }
    levels = ", ".join(map(spelled, config.cells))
    refined = f"; coarser ones opened hold {config.breadth:g} times the keys of finer" if len(config.cells) > 1 else ""
    standing = "stand for their keys as one token" if config.residual else "are left out"
    return {"cells": f"{levels} patches{refined}", "cells not opened": standing}


def _layers(statistics: Sequence[LayerStatistics], config: SparseConfig) -> str:
    shown: dict[str, Callable[[LayerStatistics], str]] = {
        "tokens": lambda layer: str(layer.tokens),
        "recall": lambda layer: f"{layer.recall:.3f}",
        "keys kept": lambda layer: f"{layer.kept_share:.1%}",
    }
    if config.asks_predictor:
        shown["coefficients above tau"] = lambda layer: f"{layer.coefficient_density:.1%}"
        shown["basis above threshold"] = lambda layer: f"{layer.basis_density:.1%}"
        shown["score products"] = lambda layer: f"{layer.score_density:.1%}"
    else:
        shown["standing cells a query"] = lambda layer: f"{_standing(layer):.1f}"
    rows = [(number, *(tell(layer) for tell in shown.values())) for number, layer in enumerate(statistics)]
    return _table(("layer", *shown), rows)


def _standing(layer: LayerStatistics) -> float:
    """Cells that stand for their keys, on average over patch queries and heads."""
    # Connections are a share of all pairs of a patch query and a key: so many pairs there are, and so many queries.
    return layer.standing * layer.kept_share * layer.tokens / layer.connections


def write_report(
    path: Path,
    student: nn.Module,
    *,
    title: str,
    command: str,
    gains: Sequence[Gain] = (),
    highlights: Sequence[Picture] = (),
    rows: Sequence[Row] = (),
    statistics: Sequence[LayerStatistics] = (),
    statistics_images: int = 0,
    pictures: Sequence[Picture] = (),
    log: Sequence[dict[str, Any]] = (),
) -> None:
    """Writes the file; it asks nothing of the network.

    Args:
        path: where to; an existing file is replaced only by a whole one.
        student: a converted model.
        title: of the page.
        command: what made it.
        gains: by number of tokens; they come first.
        highlights: figures that belong to them.
        rows: forms of the model against dense.
        statistics: by layer.
        statistics_images: how many images these are of.
        pictures: figures, which are closed.
        log: last lines of a training run.
    """
    parts = [
        f"<h1>{_text(title)}</h1>",
        f'<p class="soft">sparsifiner {__version__}</p>',
    ]
    if gains:
        table = _table(GAIN_TITLES, [gain_cells(gain) for gain in gains])
        parts += ["<h2>What is gained</h2>", f"<p><strong>{_text(in_words(gains))}</strong></p>", table]
        parts += [f'<p class="soft">{_text(gain_note(gains))}</p>', *(_image(picture) for picture in highlights)]
    parts += ["<h2>The model</h2>", _about(student)]
    if rows:
        note = (
            f"On {rows[0].images} images. Agreement and KL are to the dense model; attention and model are million "
            "multiply-adds an image, as counted on these images; time is this machine's."
        )
        parts += [
            "<h2>What it costs and keeps</h2>",
            _table(TITLES, [cells(row) for row in rows]),
            f'<p class="soft">{note}</p>',
        ]
    if statistics:
        note = (
            f"Means over {statistics_images} image{'s' if statistics_images != 1 else ''}. Recall is the share of the "
            "true attention that lies on kept keys."
        )
        parts += ["<h2>Layer by layer</h2>", _layers(statistics, config_of(student)), f'<p class="soft">{note}</p>']
    if log:
        shown = {key: value for key, value in log[-1].items() if not isinstance(value, dict | list)}
        parts += [
            "<h2>Training</h2>",
            _table(list(shown), [[f"{v:.4g}" if isinstance(v, float) else v for v in shown.values()]]),
        ]
    if pictures:
        parts += ["<h2>What it looks at</h2>", *(_image(picture) for picture in pictures)]
    versions = json.dumps(environment(), indent=2)
    parts += ["<h2>How this was made</h2>", f"<pre>{_text(command)}</pre>", f"<pre>{_text(versions)}</pre>"]
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<style>{STYLE}</style></head><body><main>{''.join(parts)}</main></body></html>\n"
    )
    with replacing(path) as temporary:
        temporary.write_text(page, encoding="utf-8")


def pictures_of(student: nn.Module, image: Any, photo: Any, name: str) -> list[Picture]:
    """The figures of one photo, or of one clip with its pictures, that say most in a report."""
    from sparsifiner.config import TokenConfig
    from sparsifiner.report import figures

    scene = figures.look(student, image, photo)
    depth = len(sparse_layers(student))
    layers = sorted({depth // 6, depth // 2, max(0, depth - 2)})
    where = f"{name}, patch {scene.query}"
    tokens = config_of(student).tokens or TokenConfig(0.7)
    found = [
        Picture(
            figures.connections(scene, layers, [0]),
            f"{where}, head 0: the keys it is connected to, its sparse attention, and its full attention.",
        ),
        Picture(
            figures.patterns(scene, layers, 0), f"{where}: fixed patterns with as many keys, beside the model's own."
        ),
        Picture(figures.recalls(scene.statistics, 1), f"{name}: recall of each layer and head."),
        Picture(
            figures.kept_tokens(scene, figures.left_tokens(student, image, tokens), tokens.method),
            f"{name}: the patches that are left when tokens are dropped ({tokens.method}, keep {tokens.keep:g}).",
        ),
    ]
    if any(layer in scene.coefficients for layer in layers):
        found.insert(
            1, Picture(figures.three_attentions(scene, layers, 0), f"{where}, head 0: full, low-rank, sparse.")
        )
        found.append(
            Picture(figures.basis(scene, layers, 0), "The sparse basis of head 0: some rows of w_up, by layer.")
        )
    if any(scene.maps[layer].opened is not None for layer in layers):
        shown = "the cells it opens, the others dimmed, and what it attends to through both."
        found.insert(1, Picture(figures.opened_cells(scene, layers, 0), f"{where}, head 0: {shown}"))
    if scene.frames:
        count = scene.grid[0]
        some = sorted(
            {frame * count // MOST_FRAMES for frame in range(MOST_FRAMES)} if count > MOST_FRAMES else range(count)
        )
        over = dataclasses.replace(scene, frames=tuple(some))
        said = f"{where}, head 0, over frames {', '.join(map(str, some))} of {count}."
        found.insert(1, Picture(figures.connections(over, layers, [0]), said))
    return found
