"""Problems for the kernels with what the reference makes of them in float64, as files for selftest.cpp.

    python tests/native/cases.py FOLDER

Only problems whose answer rounding cannot change are written: those that the same mathematics in float32, and on inputs
shaken by far more than rounding does, answers alike. So the answer is the same for every processor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsifiner.ops import cells, reference
from sparsifiner.ops.attention import predict, sparse_attention
from sparsifiner.ops.connectivity import Connectivity, query_groups

BATCH, HEADS = 2, 2
SHAKEN = 4e-6  # relative; a float32 has 6e-8
EXACT, SIXTEEN = 2e-5, 2e-2  # of the largest number expected: in float32, and where 16 bits come in
TRIALS = 200

Case = dict[str, Any]


def write(case: Case, path: Path) -> None:
    """Arrays and numbers: a line that names and measures each, then its 32-bit numbers, little-endian."""
    with path.open("wb") as file:
        for name, value in case.items():
            array = value.detach().numpy() if isinstance(value, Tensor) else np.asarray(value)
            kind = "f" if array.dtype.kind == "f" else "i"
            array = np.ascontiguousarray(np.atleast_1d(array), dtype="<f4" if kind == "f" else "<i4")
            file.write(f"{name} {kind} {array.ndim} {' '.join(map(str, array.shape))}\n".encode())
            file.write(array.tobytes())


def inputs(seed: int, n: int, dim: int, bf16: bool) -> list[Tensor]:
    """Queries, keys and values, alike where they are neighbours, as bfloat16 has them if that is wanted."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(BATCH, HEADS, n, dim, generator=generator) * 1.5 for _ in range(3)]
    return [x.bfloat16().float() for x in made] if bf16 else made


def shaken(tensors: list[Tensor], seed: int) -> list[Tensor]:
    """The same, but for what rounding could make of them."""
    generator = torch.Generator().manual_seed(seed)
    return [x * (1 + SHAKEN * torch.randn(x.shape, generator=generator)) for x in tensors]


def settled(make: Callable[[int], tuple[list[Tensor], Callable[..., Any]]], tolerance: float) -> tuple[Any, Any]:
    """Inputs and answer of the first seed whose answer does not hang on rounding."""
    for seed in range(TRIALS):
        given, answer = make(seed)
        exact = answer(*(x.double() for x in given))
        others = [answer(*given), *(answer(*(x.double() for x in shaken(given, trial))) for trial in range(3))]
        if all(_alike(exact, other, tolerance) for other in others):
            return given, exact
    raise SystemExit("every problem hangs on rounding: make them smaller")


def _alike(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float) -> bool:
    for name, expected in one.items():
        if not expected.is_floating_point():
            if not torch.equal(expected, other[name]):
                return False
        elif bool(((expected - other[name]).abs() > tolerance * max(1.0, float(expected.abs().max()))).any()):
            return False
    return True


def sizes(q: Tensor, landmarks: int, prefix: int) -> Tensor:
    """As the kernels' `Shape`."""
    return torch.tensor([*q.shape, landmarks, prefix])


def fused(grid, dim, landmarks, prefix, tile, residual, **kind: bool) -> Case:
    """Predictor, selection and attention in one."""
    n = prefix + grid[0] * grid[1]
    settings = {"budget": n // 4, "tau": 0.02, "basis_threshold": 0.01}

    def make(seed: int):
        generator = torch.Generator().manual_seed(1000 + seed)
        w_down = torch.rand(HEADS, landmarks, n, generator=generator) / n * 2
        w_down[w_down < (1.8 if kind.get("sparse_down") else 0.2) / n] = 0
        w_up = torch.rand(HEADS, landmarks, n, generator=generator) / n

        def answer(q, k, v, w_down, w_up):
            connectivity, estimate = predict(
                q, k, w_down, w_up, **settings, grid=grid, num_prefix=prefix, tile=tile, backend="reference"
            )
            kept = estimate if residual else None
            out = sparse_attention(q, k, v, connectivity, residual=kept, backend="reference")
            return {"out": out, "lists": connectivity.indices}

        return [*inputs(seed, n, dim, "bf16" in kind), w_down, w_up], answer

    (q, k, v, w_down, w_up), exact = settled(make, EXACT)
    return {
        "sizes": sizes(q, landmarks, prefix), "q": q, "k": k, "v": v, "w_down": w_down, "w_up": w_up, **settings,
        "members": query_groups(grid, prefix, tile, q.device), "scale": dim**-0.5, "residual": int(residual),
        "expected_out": exact["out"], "allowed": SIXTEEN if {"bf16", "narrow"} & set(kind) else EXACT,
        **dict.fromkeys(kind, 1),
    }  # fmt: skip


def open_cells(grid, dim, prefix, tile, levels, tolerance=0.0, closed=True, **kind: bool) -> Case:
    """Attention at several resolutions."""
    n = prefix + grid[0] * grid[1]
    opening = cells.Opening(
        grid=grid, budget=n // 3, cells=levels, breadth=2.0, tolerance=tolerance, num_prefix=prefix, tile=tile,
        closed=closed,
    )  # fmt: skip
    whole = cells.cut_cells(grid, levels, torch.device("cpu"))

    def make(seed: int):
        def answer(q, k, v):
            opened = cells.connect(q, k, v, opening, backend="reference")
            out = cells.cell_attention(q, k, v, opened, backend="reference")
            return {"out": out, "lists": opened.lists.indices, "counts": opened.lists.counts}

        return inputs(seed, n, dim, "bf16" in kind), answer

    (q, k, v), exact = settled(make, EXACT)
    return {
        "sizes": sizes(q, 0, prefix), "q": q, "k": k, "v": v, "of": whole.of, "parent": whole.parent,
        "starts": list(whole.starts), "opened": list(opening.levels().opened), "closed": int(closed),
        "members": query_groups(grid, prefix, tile, q.device), "scale": dim**-0.5, "tolerance": float(tolerance),
        "lists": exact["lists"], "counts": exact["counts"], "expected_out": exact["out"],
        "allowed": SIXTEEN if kind else EXACT, **dict.fromkeys(kind, 1),
    }  # fmt: skip


def select(grid, landmarks, prefix, tile, budget) -> Case:
    """Lists from coefficients: sums of sixteenths, which float32 has exactly, with ties."""
    n = prefix + grid[0] * grid[1]
    generator = torch.Generator().manual_seed(3)
    coefficients = torch.randint(0, 17, (BATCH, HEADS, n - prefix, landmarks), generator=generator) / 16
    w_up = torch.randint(-4, 13, (HEADS, landmarks, n), generator=generator) / 16
    members = query_groups(grid, prefix, tile, w_up.device)
    lists, counts = reference.select(coefficients.double(), w_up.double(), members, budget, 0.25, 0.125, prefix)
    return {
        "sizes": torch.tensor([BATCH, HEADS, n, 1, landmarks, prefix]), "coefficients": coefficients, "w_up": w_up,
        "members": members, "budget": budget, "tau": 0.25, "basis_threshold": 0.125, "lists": lists, "counts": counts,
    }  # fmt: skip


def attend(grid, dim, landmarks, prefix, tile, bias=False, **kind: bool) -> Case:
    """Attention over lists that are given, and its gradients."""
    n = prefix + grid[0] * grid[1]
    q, k, v = inputs(5, n, dim, "bf16" in kind)
    generator = torch.Generator().manual_seed(6)
    members = query_groups(grid, prefix, tile, q.device)
    some = torch.rand(BATCH, HEADS, n - prefix, 5, generator=generator)
    basis = torch.rand(HEADS, 5, n, generator=generator)
    lists, counts = reference.select(some.double(), basis.double(), members, n // 3, 0.0, 0.0, prefix)
    shared = members.shape[1] > 1
    connectivity = Connectivity(lists, counts, members, num_tokens=n, num_prefix=prefix, adds_self=shared)
    # Estimates of well under the whole: where what was dropped is 0 or 1 its slope hangs on rounding.
    coefficients = torch.rand(BATCH, HEADS, n - prefix, landmarks, generator=generator) / max(1, landmarks)
    w_up = torch.rand(HEADS, landmarks, n, generator=generator) / n
    added = torch.randn(BATCH, HEADS, n, generator=generator) if bias else None
    exact = [x.double().requires_grad_() for x in (q, k, v, coefficients, w_up)]
    more = () if added is None else (added.double(),)
    out = reference.attend(*exact[:3], connectivity, *exact[3:], dim**-0.5, *more)
    direction = torch.randn(out.shape, generator=generator)
    direction = direction.bfloat16().float() if "bf16" in kind else direction
    gradients = torch.autograd.grad(out, exact, direction.double(), allow_unused=True)
    names = ("q_grad", "k_grad", "v_grad", "coefficients_grad", "w_up_grad")
    found = {
        f"expected_{name}": torch.zeros_like(x) if gradient is None else gradient
        for name, x, gradient in zip(names, exact, gradients, strict=True)
    }
    return {
        "sizes": sizes(q, landmarks, prefix), "q": q, "k": k, "v": v, "coefficients": coefficients, "w_up": w_up,
        "basis_threshold": 0.0, "members": members, "lists": lists, "adds_self": int(shared), "scale": dim**-0.5,
        "direction": direction, "expected_out": out, **found,
        "allowed": SIXTEEN if "bf16" in kind else 2 * EXACT, **({} if added is None else {"bias": added}),
        **dict.fromkeys(kind, 1),
    }  # fmt: skip


def problems() -> Iterator[tuple[str, Case]]:
    """Names, which begin with the kernel's and a '-', and problems: small, of odd sizes."""
    yield "fused-query", fused((5, 6), 8, 5, 1, None, False)
    yield "fused-query-residual", fused((5, 7), 20, 9, 1, None, True)
    yield "fused-tile", fused((6, 8), 64, 12, 1, (2, 4), False, sparse_down=True)
    yield "fused-tile-residual", fused((5, 9), 32, 4, 2, (2, 2), True)
    yield "fused-narrow", fused((5, 6), 64, 8, 1, (2, 2), True, narrow=True)
    yield "fused-bf16", fused((6, 6), 64, 8, 1, None, True, bf16=True)
    yield "fused-no-prefix", fused((3, 3), 3, 1, 0, None, True)
    yield "open_cells-query", open_cells((5, 6), 20, 1, None, ((2, 2),))
    yield "open_cells-tile", open_cells((8, 8), 64, 1, (4, 4), ((1, 2), (2, 4)))
    yield "open_cells-levels", open_cells((8, 9), 32, 1, (2, 2), ((2, 2), (4, 4)), closed=False)
    yield "open_cells-tolerance", open_cells((6, 6), 16, 2, None, ((1, 2), (2, 2)), tolerance=0.05)
    yield "open_cells-bf16", open_cells((8, 8), 64, 1, (4, 4), ((2, 2), (4, 4)), bf16=True)
    yield "select-query", select((7, 9), 6, 1, None, 9)
    yield "select-tile", select((6, 8), 17, 1, (2, 2), 12)
    yield "select-many", select((12, 12), 70, 0, None, 30)
    yield "attend-query", attend((5, 6), 20, 0, 1, None)
    yield "attend-residual", attend((5, 6), 8, 7, 1, None)
    yield "attend-tile", attend((6, 6), 64, 5, 1, (2, 3))
    yield "attend-bias", attend((5, 5), 16, 0, 1, (2, 2), bias=True)
    yield "attend-bf16", attend((5, 6), 64, 4, 1, None, bf16=True)


def write_all(folder: Path) -> list[Path]:
    """Every problem as a file."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, case in problems():
        paths.append(folder / f"{name}.case")
        write(case, paths[-1])
    return paths


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    print(f"{len(write_all(Path(sys.argv[1])))} problems in {sys.argv[1]}")
