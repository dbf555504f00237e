"""Throughput of whole models that drop tokens, with and without sparse attention: writes results/MACHINE/tokens.csv.

Two threads, batch 8, all forms of a model by turns in one run. DeiT-S is two DeiT-Tiny side by side (its own weights
are not at hand), so its attention is real; DynamicViT's networks are untrained, which changes what is kept, not how
much.

    python benchmarks/tokens.py [--seconds 3]
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from common import machine_results
from sparsifiner.cli.bench import write_csv
from sparsifiner.config import TokenConfig
from sparsifiner.inspect.flops import count_flops
from sparsifiner.inspect.speed import model_runs, take_turns
from speed import doubled, resized, student_and_images

BATCH = 8


def forms(token_keeps: tuple[float, ...], keep: float, tile: tuple[int, int]) -> dict[str, dict[str, Any]]:
    """Token pruning alone, and with sparse attention in all layers, per query and in tiles."""
    found: dict[str, dict[str, Any]] = {}
    kinds = {"EViT": {}, "EViT fused": {"fuse": True}, "DynamicViT": {"method": "dynamicvit"}}
    for kind, settings in kinds.items():
        for token_keep in token_keeps:
            tokens = TokenConfig(token_keep, **settings)  # pyright: ignore[reportArgumentType]
            name = f"{kind} {token_keep:g}"
            found[name] = {"tokens": tokens, "keep": 1.0}
            for residual in (False, True):
                about = {"tokens": tokens, "keep": keep, "residual": residual}
                label = f"{name}, keep {keep:g}" + (", residual" if residual else "")
                found[label] = about
                found[f"{label}, tiles"] = about | {"tile": tile}
    found["all tokens"] = {"tokens": None, "keep": 1.0}  # the control: the host again
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each form")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    student, images = student_and_images(32, 0.05)
    small = doubled(student, images)
    rows: list[dict[str, Any]] = []
    for name, model, pixels, token_keeps, keep, tile in (
        ("DeiT-S", small, 224, (0.7, 0.5), 0.25, (2, 7)),
        ("DeiT-T", student, 384, (0.7,), 0.1, (4, 4)),
    ):
        scaled = resized(model, images[:BATCH], pixels)
        wanted = forms(token_keeps, keep, tile)
        times = take_turns(model_runs(model, scaled, wanted), arguments.seconds, least=5)
        dense = times["dense"]
        for form, timing in times.items():
            row = {"model": name, "pixels": pixels, "batch": BATCH, "form": form}
            row |= vars(timing) | {"speed_up": dense.minimum / timing.minimum, "speed_up_p50": dense.p50 / timing.p50}
            row |= {"images_per_second": 1000 * BATCH / timing.minimum}
            rows.append(row)
            print(f"{name} {pixels}  {form:44s} {timing.minimum:8.1f} ms  {row['speed_up']:.2f}x", flush=True)
        write_csv(rows, machine_results() / "tokens.csv")
        print(f"dense {name}: {count_flops(model).dense_total / 1e9:.2f} G multiply-adds")


if __name__ == "__main__":
    main()
