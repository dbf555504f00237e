"""Models with many tokens, random weights, sparse as suggested against dense by turns, each with its ceiling.

DINOv3-S/16 (timm) at 1024 pixels and Depth-Anything-S (transformers) at 518, one image, keep 0.1, float32 and
bfloat16. No pretrained weights are needed: lists are as long as the budget says, whatever is on them. Clips are in
video.py. Writes hosts-speed.csv in the machine's folder.

    python benchmarks/hosts_speed.py --threads 2 --seconds 10
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import timm
import torch
from torch import nn
from torch.nn import functional

import sparsifiner as sp
from common import environment, machine_results, write_csv
from sparsifiner.convert import conversion_of, part_of, sparse_layers
from sparsifiner.inspect.observe import observing
from sparsifiner.inspect.speed import take_turns

KEEP = 0.1


def dinov3() -> tuple[nn.Module, torch.Tensor]:
    return timm.create_model("vit_small_patch16_dinov3", img_size=1024), torch.randn(1, 3, 1024, 1024)


def depth_anything() -> tuple[nn.Module, torch.Tensor]:
    from transformers import DepthAnythingConfig, DepthAnythingForDepthEstimation, Dinov2Config

    shape: dict[str, Any] = {"hidden_size": 384, "num_attention_heads": 6, "patch_size": 14, "image_size": 518}
    shape |= {"out_features": ["stage3", "stage6", "stage9", "stage12"], "reshape_hidden_states": False}
    backbone = Dinov2Config(num_hidden_layers=12, apply_layernorm=True, **shape)
    config = DepthAnythingConfig(backbone_config=backbone, patch_size=14, reassemble_hidden_size=384)
    return DepthAnythingForDepthEstimation(config), torch.randn(1, 3, 518, 518)


CASES = {"DINOv3-S/16, 1024 px": dinov3, "Depth-Anything-S, 518 px": depth_anything}


def run_of(model: nn.Module, image: torch.Tensor) -> Callable[[], object]:
    def run() -> None:
        with torch.inference_mode():
            model(image)

    return run


def core_of(sparse: nn.Module, image: torch.Tensor) -> Callable[[], object]:
    """Dense attention of one layer, on what that layer is given."""
    seen: list[Any] = []
    with torch.inference_mode(), sp.dense_mode(sparse), observing([sparse_layers(sparse)[0]], seen.append):
        sparse(image)
    q, k, v = seen[0].q, seen[0].k, seen[0].v
    return lambda: functional.scaled_dot_product_attention(q, k, v)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each candidate")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows: list[dict[str, Any]] = []
    for name, make in CASES.items():
        model, image = make()
        for dtype in (torch.float32, torch.bfloat16):
            dense, shown = model.eval().to(dtype), image.to(dtype)
            sparse = sp.sparsify(dense, sp.suggest_config(dense, KEEP))
            sparse.load_state_dict(dense.state_dict(), assign=True)
            runs = {"dense": run_of(dense, shown), "sparse": run_of(sparse, shown), "core": core_of(sparse, shown)}
            with torch.inference_mode():
                times = take_turns(runs, arguments.seconds, least=3)
            whole, attention = times["dense"].minimum, times["core"].minimum * len(sparse_layers(sparse))
            tokens = conversion_of(part_of(sparse)).grid.num_tokens
            row = {"model": name, "tokens": tokens, "type": str(dtype).removeprefix("torch."), "keep": KEEP}
            row |= {"dense_ms": whole, "sparse_ms": times["sparse"].minimum}
            row |= {"speed_up": whole / times["sparse"].minimum, "ceiling": whole / (whole - attention)}
            row |= {"speed_up_median": times["dense"].p50 / times["sparse"].p50, "threads": arguments.threads}
            rows.append(row | {"load": environment()["load"]})
            print(
                f"{name}, {tokens} tokens, {row['type']}: {row['sparse_ms']:.0f} ms, {row['speed_up']:.2f}x "
                f"({row['speed_up_median']:.2f}x) of {row['ceiling']:.2f}x at most",
                flush=True,
            )
            write_csv(rows, machine_results() / "hosts-speed.csv")


if __name__ == "__main__":
    main()
