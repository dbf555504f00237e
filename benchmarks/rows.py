"""Row after row of random and adversarial inputs through every variant of the kernels, against the float64 reference.

A row is one patch query. Its selection, by `select` and by the fused kernel, must be one that rounding explains
(sparsifiner/ops/agreement.py), and its output, by both ways, within what rounding makes of that selection's own.
Whatever is not is a failure: it is printed with its case, and the exit code is 1.

Every case (a problem, drawn from its number) is noted in a journal, so a run that was stopped goes on. Example:

    python benchmarks/rows.py --rows 1000000          # writes results/rows.csv
    python benchmarks/rows.py --case 137              # one case again, nothing written
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import RESULTS, write_csv
from sparsifiner.ops import agreement, cpu, reference
from sparsifiner.ops.agreement import Bounds
from sparsifiner.ops.attention import predict, sparse_attention
from sparsifiner.ops.connectivity import query_groups
from sparsifiner.progress import show_progress

JOURNAL = Path(__file__).parents[1] / "build" / "rows.jsonl"
KINDS = (
    "random", "exact ties", "near ties", "equal columns", "all zero", "few scores", "large logits", "small", "denormal",
    "many octaves", "equal tokens", "bfloat16", "narrow",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem: all that decides its tensors."""

    number: int
    seed: int
    kind: str
    grid: tuple[int, int]
    prefix: int
    batch: int
    heads: int
    head_dim: int
    landmarks: int
    budget: int
    tile: tuple[int, int] | None
    tau: float
    basis_threshold: float
    residual: bool
    layout: str
    pooled: bool
    dropped: bool
    threads: int

    @property
    def known(self) -> int:
        """The tokens of the whole grid, the prefix included."""
        return self.prefix + self.grid[0] * self.grid[1]


def draw(number: int, seed: int) -> Case:
    """The case of a number: kinds by turns, all else by chance."""
    chance = random.Random(f"{seed}/{number}")
    kind = KINDS[number % len(KINDS)]
    head_dim = chance.choice([1, 3, 7, 16, 24, 33, 48, 64, 64, 64, 80, 100, 128, 256])
    side = 5 if head_dim < 16 else 33 if chance.random() < 0.03 and head_dim >= 64 else 16
    grid = chance.randint(1, side), chance.randint(1, side)
    patches, prefix = grid[0] * grid[1], chance.randint(0, 5)
    n = prefix + patches
    exact = kind == "exact ties"
    return Case(
        number=number,
        seed=seed,
        kind=kind,
        grid=grid,
        prefix=prefix,
        batch=chance.randint(1, 3),
        heads=chance.randint(1, 3),
        head_dim=head_dim,
        landmarks=chance.randint(1, min(patches, head_dim if exact else 128, 128)),
        budget=chance.choice([chance.randint(1, n), chance.randint(1, max(1, n // 8))]),
        tile=None if exact else chance.choice([None, None, (1, 1), (2, 2), (2, 7), (4, 4), (5, 9)]),
        tau=0.001 if exact else chance.choice([0.0, 0.0, 0.02, 0.3]),
        basis_threshold=0.0 if kind in ("denormal", "many octaves") else chance.choice([0.0, 0.0, 0.01, 0.5]),
        residual=chance.random() < 0.5,
        layout=chance.choice(["contiguous", "qkv", "last dimension strided"]),
        pooled=exact or chance.random() < 0.5,
        dropped=not exact and patches > 3 and chance.random() < 0.2,
        threads=chance.choice([1, 1, 2, 3]),
    )


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Tensors as the kernels take them; weights of the whole grid."""

    q: Tensor
    k: Tensor
    v: Tensor
    w_down: Tensor
    w_up: Tensor
    positions: Tensor | None


def tensors(case: Case) -> Inputs:
    """What a case is about."""
    generator = torch.Generator().manual_seed(case.seed * 1_000_003 + case.number)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    n, m, known = case.known, case.landmarks, case.known
    positions = None
    if case.dropped:
        patches = known - case.prefix
        left = int(torch.randint(1, patches, (1,), generator=generator))
        order = torch.stack([torch.randperm(patches, generator=generator)[:left] for _ in range(case.batch)])
        prefix = torch.arange(case.prefix).expand(case.batch, -1)
        positions = torch.cat([prefix, order.sort(-1).values + case.prefix], 1)
        n = case.prefix + left
    q, k, v = normal(3, case.batch, case.heads, n, case.head_dim)
    w_down = torch.rand(case.heads, m, known, generator=generator) / known
    if case.pooled:
        w_down = torch.zeros(case.heads, m, known)
        w_down[:, torch.arange(known) % m, torch.arange(known)] = m / known
    w_up = normal(case.heads, m, known) * 0.3
    q, k, v, w_down, w_up = _adverse(case, generator, q, k, v, w_down, w_up)
    dtype = torch.bfloat16 if case.kind == "bfloat16" else torch.float32
    q, k, v = (_laid_out(x.to(dtype), case.layout) for x in (q, k, v))
    return Inputs(q, k, v, w_down, w_up, positions)


def _laid_out(x: Tensor, layout: str) -> Tensor:
    if layout == "qkv":  # heads innermost, in memory that holds other things too
        batch, heads, n, d = x.shape
        host = torch.full((batch, n, 3, heads, d), torch.nan, dtype=x.dtype)
        return host[:, :, 1].copy_(x.transpose(1, 2)).transpose(1, 2)
    return x.mT.contiguous().mT if layout == "last dimension strided" else x


def _adverse(case: Case, generator: torch.Generator, q: Tensor, k: Tensor, v: Tensor, w_down: Tensor, w_up: Tensor):
    """The tensors of the case's kind, made of random ones."""
    m, known = w_up.shape[1:]
    if case.kind == "exact ties":
        # Every query has logits of 0 at a power of two of the landmarks, which share its attention equally, and of -64
        # at the others, which tau takes out; few bits in the basis. Sums are exact: rounding explains nothing at all.
        k, w_down = torch.zeros_like(k), torch.zeros_like(w_down)
        landmarks = torch.arange(m)
        k[:, :, case.prefix + landmarks, landmarks] = 64 * case.head_dim**0.5
        w_down[:, landmarks, case.prefix + landmarks] = 1
        order = torch.rand(*q.shape[:3], m, generator=generator).argsort(-1).argsort(-1)
        power = 2 ** torch.randint(0, m.bit_length(), q.shape[:3], generator=generator)
        q = torch.zeros_like(q)
        q[..., :m] = -(order >= power[..., None]).float()
        w_up = (w_up * 8).round() / 4
    elif case.kind == "near ties":  # columns that are one another's neighbours in float32
        columns = torch.randint(0, max(1, known // 8), (known,), generator=generator)
        w_up = w_up[..., columns] * (1 + torch.randint(-1, 2, w_up.shape, generator=generator) * 2**-23)
    elif case.kind == "equal columns":
        different = max(1, known // 16) if case.residual else 1
        w_up = w_up[..., torch.randint(0, different, (known,), generator=generator)]
    elif case.kind == "all zero":
        w_up = -w_up.abs()
    elif case.kind == "few scores":
        w_up = torch.where(torch.rand(w_up.shape, generator=generator) < 0.5 / m, w_up, 0)
    elif case.kind == "large logits":
        q, k, v = q * 30, k * 30, v * 1e30
    elif case.kind == "small":
        q, k, v = q * 1e-3, k * 1e-20, v * 1e-30
    elif case.kind == "denormal":
        v, w_up = v * 1e-40, w_up * 1e-42
    elif case.kind == "many octaves":
        w_up = torch.exp2(torch.rand(w_up.shape, generator=generator) * 100 - 95)
    elif case.kind == "equal tokens":
        q, k = q[:, :, :1].expand_as(q), k[:, :, :1].expand_as(k)
    return q, k, v, w_down, w_up


@dataclasses.dataclass(frozen=True)
class Oracle:
    """A case in float64; rows are patch queries."""

    q: Tensor  # with the prefix
    k: Tensor  # as attention reads them
    v: Tensor
    values: Tensor  # as they came in
    w_up: Tensor  # [batch, heads, m, n]: each image's own columns
    scale: float
    coefficients: Bounds
    group_of: Tensor | None
    forced: Tensor
    scores: Bounds


def solve(case: Case, given: Inputs) -> Oracle:
    """The reference's side of a case."""
    q, k, v, w_down, w_up = (x.double() for x in (given.q, given.k, given.v, given.w_down, given.w_up))
    n, prefix, scale = q.shape[2], case.prefix, case.head_dim**-0.5
    columns = torch.arange(n).expand(case.batch, -1) if given.positions is None else given.positions
    w_down, w_up = (x[:, :, columns].permute(2, 0, 1, 3) for x in (w_down, w_up))
    coefficients = agreement.coefficient_bounds(q[:, :, prefix:], k, w_down, scale)
    if case.kind == "exact ties":
        coefficients = Bounds.certain(coefficients.exact)
    members = query_groups(case.grid, prefix, case.tile, q.device)
    group_of = None
    if members.shape[1] > 1:
        group_of = agreement.groups_of_rows(members, case.known, prefix, given.positions).expand(case.batch, -1)
    scores = agreement.score_bounds(coefficients, w_up, case.tau, case.basis_threshold, group_of)
    if case.kind == "exact ties":
        scores = Bounds.certain(scores.exact)
    keys, values = (x.bfloat16().double() if case.kind == "narrow" else x for x in (k, v))
    forced = agreement.forced_keys(n - prefix, n, prefix)
    return Oracle(q, keys, values, v, w_up, scale, coefficients, group_of, forced, scores)


def out_of_order(chosen: Tensor, w_up: Tensor, forced: Tensor) -> Tensor:
    """The rows that have a key but not an earlier one with the same weights: the kernels give both the same score."""
    n = w_up.shape[-1]
    earlier = torch.ones(n, n, dtype=torch.bool).tril(-1)
    twins = torch.stack(
        [torch.stack([(w[:, :, None] == w[:, None]).all(0) & earlier for w in image]) for image in w_up]
    )  # [batch, heads, n, n]: key i, and an earlier j
    taken, left = chosen & ~forced, ~chosen & ~forced
    return (taken.double() @ twins.double() * left).any(-1)


def select_and_attend(case: Case, given: Inputs, oracle: Oracle) -> dict[str, Any]:
    """The path of training: lists, then attention over the lists."""
    picked = given.w_down, given.w_up
    if given.positions is not None:
        picked = tuple(x[:, :, given.positions].permute(2, 0, 1, 3).contiguous() for x in picked)
    connectivity, residual = predict(
        given.q,
        given.k,
        *picked,
        budget=case.budget,
        grid=case.grid,
        num_prefix=case.prefix,
        tau=case.tau,
        basis_threshold=case.basis_threshold,
        tile=case.tile,
        backend="cpu",
        positions=given.positions,
    )
    chosen = connectivity.mask()[:, :, case.prefix :]
    coefficients = Bounds.certain(residual.a_down.double())
    scores = agreement.score_bounds(coefficients, oracle.w_up, case.tau, case.basis_threshold, oracle.group_of)
    if case.kind == "exact ties":
        scores = oracle.scores
    found = judge_selection(case, oracle, scores, chosen, oracle.forced)
    if case.kind in ("bfloat16", "narrow"):  # rounds parts of the result on the way; holds nothing in 16 bits
        return found
    out = sparse_attention(
        given.q, given.k, given.v, connectivity, residual=residual if case.residual else None, backend="cpu"
    )
    return found | judge_output(case, oracle, coefficients, chosen, out, torch.zeros_like(chosen))


def fused(case: Case, given: Inputs, oracle: Oracle) -> dict[str, Any]:
    """The path of inference: one call, whose selection its values tell."""
    packed = cpu.pack(given.w_down, given.w_up, case.basis_threshold)
    members = query_groups(case.grid, case.prefix, case.tile, given.q.device)

    def attend(v: Tensor, residual: bool = False) -> Tensor:
        return cpu.fused(
            given.q,
            given.k,
            v,
            packed,
            members,
            budget=case.budget,
            tau=case.tau,
            scale=oracle.scale,
            num_prefix=case.prefix,
            residual=residual,
            positions=given.positions,
            narrow=case.kind == "narrow",
        )

    used = agreement.keys_used(attend, given.v)[:, :, case.prefix :]
    # Where a weight may underflow its key is not seen: it may be there or not.
    logits = oracle.q[:, :, case.prefix :] @ oracle.k.mT * oracle.scale
    unseen = ~used & (logits < logits.amax(-1, keepdim=True) - 75) & ~oracle.forced
    forced = oracle.forced | unseen
    found = judge_selection(case, oracle, oracle.scores, used | forced, forced)
    out = attend(given.v, case.residual)
    return found | judge_output(case, oracle, oracle.coefficients, used | oracle.forced, out, unseen)


def judge_selection(case: Case, oracle: Oracle, scores: Bounds, chosen: Tensor, forced: Tensor) -> dict[str, Any]:
    """How many rows differ from the reference, and which of them nothing explains."""
    budget = min(case.budget, chosen.shape[-1])
    wanted = reference.top_budget(scores.exact, budget) | forced
    wrong = agreement.unexplained(chosen, scores.lower, scores.upper, budget, forced)
    wrong |= out_of_order(chosen, oracle.w_up, forced)
    return {
        "undecided": int(agreement.undecided(scores, budget, forced).sum()),
        "differing": int((chosen != wanted).any(-1).sum()),
        "unexplained": int(wrong.sum()),
    }


def judge_output(
    case: Case, oracle: Oracle, coefficients: Bounds, mask: Tensor, out: Tensor, unseen: Tensor
) -> dict[str, Any]:
    """How many rows are further from the reference's output for their keys than rounding may carry them."""
    q, prefix = oracle.q, case.prefix
    rows, every = q[:, :, prefix:], torch.ones(1, 1, 1, q.shape[2], dtype=torch.bool)
    expected = reference.masked_attention(rows, oracle.k, oracle.v, mask, oracle.scale)
    estimate = None
    # Below this a weight may be zero: see `fused`.
    slack = unseen.sum(-1, keepdim=True) * 2.0**-100 * oracle.v.abs().amax()
    if case.residual:
        estimate = (coefficients, oracle.w_up, oracle.values)
        kept = reference.kept_part(rows, oracle.k, oracle.v, mask, oracle.scale, coefficients.exact, oracle.w_up)
        expected = kept + coefficients.exact @ (oracle.w_up @ oracle.values)
        doubtful = (coefficients.exact @ oracle.w_up).abs() * unseen
        slack = slack + 2 * doubtful.sum(-1, keepdim=True) * oracle.v.abs().amax()
    allowed = agreement.output_error(rows, oracle.k, oracle.v, mask, oracle.scale, estimate) + slack
    if prefix:
        dense = reference.full_attention(q[:, :, :prefix], oracle.k, oracle.scale) @ oracle.v
        exact = agreement.output_error(q[:, :, :prefix], oracle.k, oracle.v, every, oracle.scale)
        expected, allowed = torch.cat([dense, expected], 2), torch.cat([exact, allowed], 2)
    allowed = agreement.stored(allowed, expected, out.dtype)
    off = (out.double() - expected).abs()
    return {
        "unseen": int(unseen.any(-1).sum()),
        "outside": int((~(off <= allowed)).any(-1).sum()),  # NaN is outside too
        "share_of_bound": float((off / allowed).max()),
    }


def run(case: Case, variants: list[str]) -> Iterator[dict[str, Any]]:
    """A line of the journal for every variant and path."""
    given = tensors(case)
    oracle = solve(case, given)
    native, best, threads = cpu.native(), cpu.instruction_set(), torch.get_num_threads()
    native.poison_scratch(True)
    torch.use_deterministic_algorithms(True)  # and so fresh memory is filled with NaN
    torch.set_num_threads(case.threads)
    try:
        for variant in variants:
            native.use(variant)
            for path in (select_and_attend, fused):
                about = {"case": case.number, "variant": variant, "path": path.__name__, "kind": case.kind}
                yield about | {"rows": oracle.scores.exact[..., 0].numel()} | path(case, given, oracle)
    finally:
        native.use(best)
        native.poison_scratch(False)
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)


def table(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sums over the cases of each variant, path and kind, and over all."""
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for line in lines:
        for kind in (line["kind"], "all"):
            key = (line["variant"], line["path"], kind)
            row = rows.setdefault(key, dict(zip(("variant", "path", "kind"), key, strict=True)) | {"cases": 0})
            row["cases"] += 1
            for name in ("rows", "undecided", "differing", "unexplained", "unseen", "outside"):
                row[name] = row.get(name, 0) + line.get(name, 0)
            row["share_of_bound"] = max(row.get("share_of_bound", 0.0), line.get("share_of_bound", 0.0))
    return [rows[key] for key in sorted(rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="in all, over the variants (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="only this one; prints what it found")
    parser.add_argument("--journal", type=Path, default=JOURNAL, help="where cases are noted (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS / "rows.csv")
    arguments = parser.parse_args()
    variants = cpu.native().instruction_sets()
    if arguments.case is not None:
        case = draw(arguments.case, arguments.seed)
        lines = list(run(case, variants))
        print(case, *lines, sep="\n")
        raise SystemExit(any(map(failures, lines)))
    lines = read_journal(arguments.journal, arguments.seed, variants)
    lines += go_on(lines, arguments.rows, arguments.seed, variants, arguments.journal)
    write_csv([row | {"seed": arguments.seed} for row in table(lines)], arguments.out)
    failed = sum(map(failures, lines))
    print(f"{rows_of(lines):,d} rows in {lines[-1]['case'] + 1} cases: {failed} failures; {arguments.out}")
    raise SystemExit(failed > 0)


def go_on(done: list[dict[str, Any]], rows: int, seed: int, variants: list[str], path: Path) -> list[dict[str, Any]]:
    """Case after case from where the journal ends until there are enough rows, each noted when it is done."""
    lines = []
    number, left = done[-1]["case"] + 1 if done else 0, rows - rows_of(done)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as journal, show_progress() as bar:
        advance = bar.start("rows", rows)
        advance(rows - left)
        while left > 0:
            found = list(run(draw(number, seed), variants))
            journal.write("".join(json.dumps(line | {"seed": seed}) + "\n" for line in found))
            journal.flush()
            for line in filter(failures, found):
                print(f"FAILED {line}", flush=True)
            lines += found
            number, left = number + 1, left - rows_of(found)
            advance(rows_of(found))
    return lines


def failures(line: dict[str, Any]) -> int:
    """The rows of a line of the journal that nothing explains."""
    return line["unexplained"] + line.get("outside", 0)


def rows_of(lines: list[dict[str, Any]]) -> int:
    """Rows of each variant count once, though two paths are taken."""
    return sum(line["rows"] for line in lines if line["path"] == "fused")


def read_journal(path: Path, seed: int, variants: list[str]) -> list[dict[str, Any]]:
    """Whole cases of this seed; what a stopped run left half written is dropped from the file too."""
    if not path.exists():
        return []
    per_case = 2 * len(variants)
    text = path.read_text().splitlines(keepends=True)
    whole = [json.loads(line) for line in text if line.endswith("\n")]
    whole = whole[: len(whole) // per_case * per_case]
    if any(line["seed"] != seed or line["variant"] not in variants for line in whole):
        raise SystemExit(f"{path} is of another seed or machine: remove it, or name another with --journal")
    path.write_text("".join(json.dumps(line) + "\n" for line in whole))
    return whole


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
