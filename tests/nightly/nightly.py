"""What CI has no time for: soaks, kills, storms and leaks, for hours. Writes build/nightly/report.md and report.json.

    python tests/nightly/nightly.py --hours 8 [--seed S] [--only NAME]

Each part runs in rounds, each with another seed, for its share of the time. A round that fails is reported with the
command that repeats it, and its part goes on with the next seed; so do the other parts. A round that does not end in
`TIMEOUT` times the time left to its part is killed, and reported as one that hangs. A part whose environment is
missing is reported as such, and its share goes to the others. The exit status is 1 if anything has failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
OUT = PROJECT / "build" / "nightly"
TIMEOUT, LEAST_TIMEOUT = 3, 900.0
TAIL = 25
"""Lines of the output of a failure that the report has."""

VLLM, SGLANG, REMOTE = (PROJECT / ".venvs" / name for name in ("vllm-0.32", "sglang-0.5.23", "remote"))


@dataclass(frozen=True)
class Part:
    """One kind of round.

    Attributes:
        share: Of the time, relative to the other parts.
        command: Of a round, by its seed and the seconds left to the part.
        counts: What the last lines of a round say was tried: a pattern whose groups are numbers to add up, by name.
        needs: Folders without which the part cannot run.
    """

    name: str
    share: float
    command: Callable[[int, float], Sequence[str]]
    counts: str
    environment: dict[str, str] = field(default_factory=dict)
    needs: tuple[Path, ...] = ()


@dataclass
class Failure:
    """A round that failed, or did not end."""

    seed: int
    command: str
    status: str
    output: str


@dataclass
class Outcome:
    """What a part has tried."""

    name: str
    rounds: int = 0
    seeds: list[int] = field(default_factory=list)
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    missing: str = ""


def _python(*arguments: str, by: str = sys.executable) -> list[str]:
    return [by, *arguments]


def _pytest(seed: int, *arguments: str, by: str = sys.executable) -> list[str]:
    return [by, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", f"--hypothesis-seed={seed}", *arguments]


_TESTS = r"(?P<tests>\d+) passed"
_MACHINES = ["tests/cache/test_state_machine.py", "tests/cache/test_state_machine_cascade.py"]
_MACHINES += [
    "tests/cache/test_state_machine_groups.py",
    "tests/cache/test_slab_pool.py",
    "tests/cache/test_recovery.py",
]
_DEEP = [
    *("tests/tiers/test_file_crash.py", "tests/tiers/test_file_every_call.py", "tests/transfer/test_order_explore.py"),
    *("tests/transfer/test_cuda_kernels.py", "tests/transfer/test_async_device.py"),
    *(
        "tests/transfer/test_transfer_order.py",
        "tests/transfer/test_cuda_order.py",
        "tests/tiers/test_file_invalidation.py",
    ),
    *("tests/cache/test_scenarios.py", "tests/examples/test_reference_engine.py"),
    *("tests/cache/test_admission.py", "tests/trace", "tests/runtime/test_tier_host.py"),
    *("tests/runtime/test_tier_host_conformance.py", "tests/runtime/test_hosted_store.py"),
]
"""Tests of which `make test` takes samples: see `depth.deep`."""
_SGLANG = [f"tests/engines/sglang/test_sglang_{name}.py" for name in ("pools", "scope", "shared", "storage")]

PARTS = (
    Part(
        "orders",
        1.5,
        lambda seed, left: _python(
            "tests/transfer/order_soak.py", "--first-seed", str(seed), "--minutes", f"{left / 60:.3f}"
        ),
        r"(?P<schedules>\d+) schedules by chance: (?P<orders>\d+) distinct orders",
    ),
    Part(
        "cache",
        1.5,
        lambda seed, left: _python("tests/cache/cache_soak.py", "--first-seed", str(seed), "--calls", "8000"),
        r"(?P<calls>[\d,]+) calls in",
        {"PYTHONPATH": "tests"},
    ),
    Part(
        "kills",
        1.0,
        lambda seed, left: _python("tests/tiers/kill_kit.py", "--seed", str(seed), "--kills", "50"),
        r"(?P<kills>\d+) kills, (?P<records>\d+) records served",
    ),
    Part("machines", 2.0, lambda seed, left: _pytest(seed, *_MACHINES), _TESTS),
    Part("deep", 1.0, lambda seed, left: _pytest(seed, *_DEEP), _TESTS),
    Part(
        "vllm",
        2.0,
        lambda seed, left: _pytest(
            seed,
            "tests/engines/vllm/test_vllm_sequences.py",
            "tests/engines/vllm/test_vllm_many_requests.py",
            by=str(VLLM / "bin" / "python"),
        ),
        _TESTS,
        needs=(VLLM,),
    ),
    Part(
        "sglang",
        1.0,
        lambda seed, left: _pytest(
            seed, "--dist", "loadfile", "--no-loadscope-reorder", *_SGLANG, by=str(SGLANG / "bin" / "python")
        ),
        _TESTS,
        {"PYTHONPATH": f"tests/engines/sglang/on_cpu{os.pathsep}{REMOTE}"},
        (SGLANG, REMOTE),
    ),
    Part(
        "leaks",
        1.0,
        lambda seed, left: _python("tests/nightly/leaks.py", "--seed", str(seed), "--seconds", f"{left:.0f}"),
        r": (?P<rounds>\d+) rounds",
    ),
)


def run(part: Part, seconds: float, seed: int, out: Path) -> Outcome:
    """Rounds of `part` for so many seconds, from `seed` on; at least one."""
    outcome, begun = Outcome(part.name), time.monotonic()
    outcome.missing = ", ".join(f"{each}" for each in part.needs if not each.exists())
    with (out / f"{part.name}.log").open("wb") as log:
        while not outcome.missing:
            spent = time.monotonic() - begun
            left = seconds - spent
            if outcome.rounds and left < max(1.0, spent / outcome.rounds / 2):
                break
            _round(part, outcome, seed + outcome.rounds * 1000, max(left, 1.0), log.fileno())
    outcome.seconds = round(time.monotonic() - begun, 1)
    return outcome


def _round(part: Part, outcome: Outcome, seed: int, left: float, log: int) -> None:
    command = list(part.command(seed, left))
    ours = {"HYPOTHESIS_PROFILE": "nightly", "NIGHTLY_SEED": str(seed), "OMP_NUM_THREADS": "1", **part.environment}
    ours["PYTHONPATH"] = os.pathsep.join(filter(None, ("src", ".", part.environment.get("PYTHONPATH", ""))))
    said = shlex.join([*(f"{name}={value}" for name, value in ours.items()), *command])
    os.write(log, f"\n{said}\n".encode())
    output, status = _outcome_of(command, {**os.environ, **ours}, max(TIMEOUT * left, LEAST_TIMEOUT))
    os.write(log, output.encode())
    outcome.rounds += 1
    outcome.seeds.append(seed)
    for found in re.finditer(part.counts, output):
        for what, number in found.groupdict().items():
            outcome.counts[what] = outcome.counts.get(what, 0) + int(number.replace(",", ""))
    if status:
        outcome.failures.append(Failure(seed, said, status, "\n".join(output.splitlines()[-TAIL:])))


def _outcome_of(command: Sequence[str], environment: dict[str, str], patience: float) -> tuple[str, str]:
    """What a command printed, and how it failed; empty if it did not."""
    with tempfile.TemporaryFile() as output:  # not a pipe: what the command leaves behind may keep that open
        process = subprocess.Popen(
            command,
            cwd=PROJECT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = f"exit status {process.returncode}" if process.wait(patience) else ""
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # it and what it has started
            process.wait()
            status = f"killed: it had not ended after {patience:.0f} s"
        output.seek(0)
        return output.read().decode(errors="replace"), status


def report(outcomes: Sequence[Outcome], hours: float, seed: int) -> str:
    """The report as a page."""
    failures = sum(len(each.failures) for each in outcomes)
    lines = [
        f"# Nightly run: {f'{failures} rounds failed' if failures else 'nothing failed'}",
        "",
        f"{hours:g} hours were given, from seed {seed}; {sum(each.seconds for each in outcomes):.0f} s were used.",
        "",
        "| part | rounds | failed | seeds | seconds | tried |",
        "|---|---|---|---|---|---|",
    ]
    for each in outcomes:
        tried = ", ".join(f"{count:,} {what}" for what, count in each.counts.items())
        seeds = f"{each.seeds[0]} to {each.seeds[-1]}" if each.seeds else ""
        tried = f"not run: {each.missing} is missing" if each.missing else tried
        lines.append(f"| {each.name} | {each.rounds} | {len(each.failures)} | {seeds} | {each.seconds:.0f} | {tried} |")
    for each in outcomes:
        for failure in each.failures:
            lines += ["", f"## {each.name}, seed {failure.seed}: {failure.status}", "", "To repeat it:", ""]
            lines += [f"    {failure.command}", "", "It ended with:", ""]
            lines += [f"    {line}" for line in failure.output.splitlines()]
    return "\n".join(lines) + "\n"


def main(parts: Sequence[Part] = PARTS, arguments: Sequence[str] | None = None) -> int:
    """Run all parts, one after the other; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=8.0)
    parser.add_argument(
        "--seed", type=int, default=int(time.time()) // 86_400 * 100_000, help="that of the day if not given"
    )
    parser.add_argument("--only", choices=[part.name for part in parts], action="append")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    wanted = [part for part in parts if not given.only or part.name in given.only]
    outcomes, end = list[Outcome](), time.monotonic() + 3600 * given.hours
    for at, part in enumerate(wanted):
        rest = sum(each.share for each in wanted[at:] if all(need.exists() for need in each.needs))
        outcome = run(part, (end - time.monotonic()) * part.share / max(rest, part.share), given.seed, given.out)
        outcomes.append(outcome)
        print(
            f"{part.name}: {outcome.rounds} rounds, {len(outcome.failures)} failed, {outcome.seconds:.0f} s", flush=True
        )
        # After each part: what ends this run early loses no more than one.
        (given.out / "report.md").write_text(report(outcomes, given.hours, given.seed))
        told = {"hours": given.hours, "seed": given.seed, "parts": [asdict(each) for each in outcomes]}
        (given.out / "report.json").write_text(json.dumps(told, indent=1) + "\n")
    print(f"{given.out / 'report.md'}")
    return int(any(each.failures for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
