"""Distils a small ViT on digits in the paper's form, and shows what each step wins back. About a minute.

python examples/distil.py
"""

from __future__ import annotations

from pathlib import Path

import sparsifiner as sp
from sparsifiner import digits
from sparsifiner.inspect.compare import predict_all


def main() -> None:
    (images, labels), (test_images, test_labels) = digits.load_digits()
    test = [(test_images, test_labels)]
    dense = digits.train_digits(images, labels, epochs=12)
    print(f"dense       {predict_all(dense, test).top1:.2f} %")

    recipe = sp.Recipe.read("digits").replace(keep=0.05)
    student = sp.sparsify(dense, sp.suggest_config(dense, recipe.keep, pattern="learned", residual=False))
    sp.calibrate(student, images[:256])
    print(f"calibrated  {predict_all(student, test).top1:.2f} %, each query sees 1 key in 20")

    # Checkpoints and the log go to the folder; the same line again goes on from there.
    report = sp.distill(
        student, (images, labels), recipe.replace(start="given"), teacher=dense, out=Path("demo-output")
    )
    print(f"distilled   {predict_all(student, test).top1:.2f} %, {report.result}")


if __name__ == "__main__":
    main()
