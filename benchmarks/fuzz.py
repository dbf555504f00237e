"""Hands spoilt files to every way by which a stranger's file comes in, and sees what happens: results/fuzz.csv.

    python benchmarks/fuzz.py --cases 10000
    python benchmarks/fuzz.py --only checkpoint --seconds 60
    python benchmarks/fuzz.py --case checkpoint:123        # one case again, with its traceback

A case is a kind of file and a number, from which, with the seed, everything about it is drawn. It ends well if the file
is accepted, or refused by an error of ours in one line. Anything else is a finding:

    foreign   an error that is not ours
    message   one of ours, but not in one readable line
    crash     the process is gone
    hang      no answer within 5 seconds, of the processor's time where others use it too
    memory    more than 2 GiB for a file of at most a few MiB
    executed  code in the file was run

Cases run in a child process, which is started anew when one ends it. What was found is noted as it is found: the same
command goes on where it was stopped, as long as neither the package nor the fuzzer has changed.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import hashlib
import json
import os
import resource
import select
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import sparsifiner
from sparsifiner.errors import SparsifinerError
from sparsifiner.inspect.journal import Journal

if TYPE_CHECKING:  # only the child needs torch and all that
    from fuzz_targets import Case, Target

KINDS = ("checkpoint", "weights", "config", "recipe", "image", "tar", "shard", "run", "upload")
SECONDS = 5.0
# A child that waits uses no time of the processor: it is given up after this many times as long.
PATIENCE = 6
MEMORY = 2 << 30
# A message longer than this is no line that anybody reads.
LONGEST = 1000
GOOD = ("accepted", "refused")
BAD = ("foreign", "message", "crash", "hang", "memory", "executed")

Found = dict[str, Any]


def draw_case(target: Target, seed: int, kind: str, number: int) -> Case:
    """The case of this number, always the same."""
    return target.make(Random(f"{seed}/{kind}/{number}"))


# In the child.


def attempt(target: Target, case: Case) -> Found:
    """What comes of one case in this process."""
    before = _peak_memory(reset=True)
    start = time.process_time()
    outcome, said, trace = "accepted", "", ""
    try:
        with _limited_memory():
            target.run(case)
    except SparsifinerError as error:
        said = str(error)
        readable = said.isprintable() and 0 < len(said) <= LONGEST
        outcome = "memory" if _ran_out(error) else "refused" if readable else "message"
    except BaseException as error:
        outcome, said = "memory" if _ran_out(error) else "foreign", f"{type(error).__name__}: {error}"
        trace = traceback.format_exc()
    seconds = time.process_time() - start  # as hangs are judged
    peak = max(0, _peak_memory() - before)
    if peak > MEMORY:
        outcome = "memory"
    if target.marker.exists():
        outcome = "executed"
        target.marker.rmdir()
    return {"outcome": outcome, "said": said[:LONGEST], "trace": trace, "seconds": seconds, "peak": peak}


def _ran_out(error: BaseException | None) -> bool:
    """Whether an error, or one that led to it, is of memory that could not be had."""
    while error is not None:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _status(name: str) -> int:
    """Bytes, as the system counts them for this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def _peak_memory(reset: bool = False) -> int:
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmHWM")


@contextlib.contextmanager
def _limited_memory() -> Iterator[None]:
    """Within it, what is over the bound fails before it can hurt the machine."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def work(seed: int, folder: Path) -> None:
    """Reads cases from standard input, writes what comes of them to what was standard output."""
    channel = os.fdopen(os.dup(1), "w")
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)  # decoders and others print what they like
    faulthandler.enable()
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    targets: dict[str, Target] = {}
    for line in sys.stdin:
        kind, number = line.split()
        if kind not in targets:
            targets[kind] = opened(kind, folder)
        case = draw_case(targets[kind], seed, kind, int(number))
        print("begin", file=channel, flush=True)
        print(json.dumps(attempt(targets[kind], case)), file=channel, flush=True)


def opened(kind: str, folder: Path) -> Target:
    """A target that has read its good files, so that what is done once is done."""
    place = folder / kind
    place.mkdir(exist_ok=True)
    from fuzz_targets import TARGETS

    target = TARGETS[kind](place)
    for case in target.good():
        target.run(case)
    return target


# In the parent.


class Worker:
    """A child process that runs cases, and is replaced when one ends it.

    Args:
        folder: where its files go.
        command: what is run; reads cases and writes what comes of them, as `work` does.
    """

    def __init__(self, folder: Path, command: list[str]) -> None:
        self.folder, self.command = folder, command
        self.process: subprocess.Popen[bytes] | None = None

    def run(self, kind: str, number: int) -> Found:
        """What comes of one case."""
        if self.process is None:
            errors = (self.folder / "stderr").open("wb")
            # Unbuffered: a line that waits in a buffer is not seen by select.
            self.process = subprocess.Popen(
                self.command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
            )
        stdin = self.process.stdin
        assert stdin is not None
        stdin.write(f"{kind} {number}\n".encode())
        stdin.flush()
        # The first answer comes when everything is imported and the case is made, which is no part of the case.
        if self._line(300) is None:
            raise SystemExit(f"{kind}:{number} could not be made: {self._last_words()}")
        line = self._answer()
        return self._gone() if line is None else json.loads(line)

    def _line(self, seconds: float) -> bytes | None:
        assert self.process is not None
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        return (self.process.stdout.readline() or None) if ready else None

    def _answer(self) -> bytes | None:
        """The line about a case; None if there is none in time."""
        start, used = time.monotonic(), self._used()
        while time.monotonic() - start < PATIENCE * SECONDS and self._used() - used < SECONDS:
            if (line := self._line(0.2)) is not None:
                return line
            if self.process is None or self.process.poll() is not None:
                return None
        return None

    def _used(self) -> float:
        """Seconds of the processor's time that the child has used."""
        assert self.process is not None
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _gone(self) -> Found:
        assert self.process is not None
        try:
            code = self.process.wait(timeout=0.5)
            outcome, said = "crash", f"exit code {code}; {self._last_words()}"
        except subprocess.TimeoutExpired:
            outcome, said = "hang", f"no answer within {SECONDS:g} seconds"
        self.close()
        return {"outcome": outcome, "said": said, "trace": "", "seconds": SECONDS, "peak": 0}

    def _last_words(self) -> str:
        return (self.folder / "stderr").read_text(errors="replace")[-2000:]

    def close(self) -> None:
        """Ends the child."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def sources() -> str:
    """A digest of the package and the fuzzer: what was found in others is not found in these."""
    files = [*Path(sparsifiner.__file__).parent.rglob("*.py"), *Path(__file__).parent.glob("fuzz*.py")]
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def planned(kinds: list[str], cases: int) -> Iterator[tuple[str, int]]:
    """Kinds in turn."""
    return ((kinds[number % len(kinds)], number // len(kinds)) for number in range(cases))


def fuzz(kinds: list[str], cases: int, seconds: float, seed: int, journal: Journal) -> list[tuple[str, Found]]:
    """Runs the cases that were not run before; returns what came of all."""
    results: list[tuple[str, Found]] = []
    start = told = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sparsifiner-fuzz-") as name:
        worker = Worker(Path(name), [sys.executable, __file__, "--worker", name, "--seed", str(seed)])
        try:
            for kind, number in planned(kinds, cases):
                found = journal.get(f"{kind}:{number}")
                if found is None:
                    if time.monotonic() - start > seconds:
                        break
                    found = worker.run(kind, number)
                    journal.put(f"{kind}:{number}", found)
                results.append((kind, found))
                if found["outcome"] in BAD:
                    print(f"{found['outcome']:8s} {kind}:{number}  {found['said'][:200]!r}", flush=True)
                if time.monotonic() - told > 10:
                    told = time.monotonic()
                    bad = sum(result["outcome"] in BAD for _, result in results)
                    print(f"{len(results)} of {cases} cases, {bad} findings, {told - start:.0f} s", flush=True)
        finally:
            worker.close()
    return results


def table(results: list[tuple[str, Found]], seed: int) -> list[dict[str, Any]]:
    """Counts by kind of file."""
    rows = []
    for kind in [*dict.fromkeys(kind for kind, _ in results), "all"]:
        mine = [found for one, found in results if kind in (one, "all")]
        counts = {outcome: sum(found["outcome"] == outcome for found in mine) for outcome in GOOD + BAD}
        slowest = max(found["seconds"] for found in mine)
        spent = {"seconds": round(sum(found["seconds"] for found in mine), 1), "slowest_ms": round(1000 * slowest, 1)}
        peak = {"peak_mib": round(max(found["peak"] for found in mine) / 2**20, 1)}
        rows.append({"kind": kind, "cases": len(mine)} | counts | spent | peak | {"seed": seed})
    return rows


def again(kind: str, number: int, seed: int) -> None:
    """One case in this process, with all that is said."""
    with tempfile.TemporaryDirectory(prefix="sparsifiner-fuzz-") as name:
        target = opened(kind, Path(name))
        case = draw_case(target, seed, kind, number)
        print(f"{len(case.content)} bytes, handed in by way {case.choice}: {case.content[:300]!r}")
        found = attempt(target, case)
        print(found.pop("trace"))
        print(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000, help="in all")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long, with what there is")
    parser.add_argument("--only", choices=list(KINDS), action="append", metavar="KIND", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", metavar="KIND:NUMBER", help="one case, with its traceback")
    parser.add_argument("--journal", type=Path, default=Path("build/fuzz.jsonl"), help="what was found so far")
    parser.add_argument("--out", type=Path, help="the CSV; results/fuzz.csv where all kinds were run, else none")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        return work(arguments.seed, arguments.worker)
    if arguments.case is not None:
        kind, _, number = arguments.case.partition(":")
        return again(kind, int(number), arguments.seed)
    arguments.journal.parent.mkdir(parents=True, exist_ok=True)
    journal = Journal(arguments.journal, {"sources": sources(), "seed": arguments.seed})
    results = fuzz(arguments.only or list(KINDS), arguments.cases, arguments.seconds, arguments.seed, journal)
    if not results:
        raise SystemExit("no case was run: give more --seconds")
    rows = table(results, arguments.seed)
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    from common import RESULTS, write_csv

    out = arguments.out or (RESULTS / "fuzz.csv" if not arguments.only else None)
    if out is not None:
        write_csv(rows, out)
    if rows[-1]["cases"] != rows[-1]["accepted"] + rows[-1]["refused"]:
        raise SystemExit(1)
    return None


if __name__ == "__main__":
    main()
