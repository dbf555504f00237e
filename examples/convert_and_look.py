"""Makes a pretrained ViT sparse and shows, on a photo, what changes and what one patch attends to.

    python examples/convert_and_look.py --weights hub
    python examples/convert_and_look.py --weights deit_tiny_patch16_224.safetensors

The photos are the two that scikit-learn ships. Nothing is calibrated: the model opens cells of the grid.
"""

from __future__ import annotations

import argparse

import torch
from PIL import Image
from sklearn.datasets import load_sample_images

import sparsifiner as sp
from sparsifiner.data.images import preprocessing
from sparsifiner.models import create_host


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", help="a file, or 'hub'; random weights if not given")
    parser.add_argument("--keep", type=float, default=0.1)
    arguments = parser.parse_args()

    model = create_host("deit_tiny_patch16_224", arguments.weights)
    transform = preprocessing(model)
    photos = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    student = sp.sparsify(model, sp.suggest_config(model, arguments.keep))

    photo = transform(photos[0])[None]
    with torch.inference_mode(), sp.capture(student, layers=[2, 8], queries=[100]) as seen:
        sparse = student(photo).softmax(-1)
        dense = model(photo).softmax(-1)
    print("most likely, dense: ", dense.topk(3).indices.tolist(), [f"{p:.3f}" for p in dense.topk(3).values[0]])
    print("most likely, sparse:", sparse.topk(3).indices.tolist(), [f"{p:.3f}" for p in sparse.topk(3).values[0]])
    for layer, view in seen.items():
        kept = view.mask[0, 0, 0, 1:].view(view.grid)
        print(f"\nlayer {layer}, head 0: the patches that patch 99 attends to")
        print("\n".join("".join("#" if cell else "." for cell in row) for row in kept.tolist()))


if __name__ == "__main__":
    main()
