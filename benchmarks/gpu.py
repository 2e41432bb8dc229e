"""What ``make gpu`` does on a machine with a GPU: install, test, look for bad memory accesses, measure.

``python benchmarks/gpu.py --out FOLDER [--wheel FILE] [PART ...]``, from the root of the checkout. Parts: tests,
conformance, sanitize, bench; each ends within minutes, so that they can be run one at a time where a lease is short.
Nothing is fetched: what the library needs must be importable, through PYTHONPATH for instance. Without a wheel the
environment's installation is used. ``FOLDER/gpu.json`` says how each part ended, its other files what it found.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRITON = ROOT / "backends" / "dsa_backends" / "triton_kernels"
SANITIZED = ROOT / "tests" / "gpu" / "sanitized"
PLANTED = {"memcheck": ("write", "one_row_too_many_kernel"), "initcheck": ("read", "copy_kernel")}
"""Tool to the fault that it must find, and the kernel that has it."""
FOUND = re.compile(r"^=+\s+((?:Invalid|Uninitialized|Misaligned)[^\n]*)\n=+\s+at ([^\n]*)", re.M)
COMPILERS = 6
QUIET = tuple(PLANTED)
"""Logs of these names are long, and shown only in part where something is wrong."""


class Failed(Exception):
    """A part did not pass; the text says why."""


class Host:
    """The installation under test, and where results go."""

    def __init__(self, out: Path, site: Path | None) -> None:
        self.out = out
        self.table = ""
        paths = [str(site)] if site else []
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH", "")])]),
            # The installed library is tested, not the folder that the commands run in.
            "PYTHONSAFEPATH": "1",
        }

    def run(self, *command: object, log: str = "", **extra: str) -> tuple[int, str]:
        """Exit status and output, which is shown as it comes and kept in ``log``."""
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=ROOT,
            env={**self.environment, "PYTHONUNBUFFERED": "1", **extra},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        lines = []
        with open(self.out / (log or os.devnull), "w") as file:
            for line in process.stdout or ():
                lines.append(line)
                file.write(line)
                if not log.startswith(QUIET):
                    sys.stdout.write(line)
                    sys.stdout.flush()
        return process.wait(), "".join(lines)

    def python(self, *command: object, log: str = "", **extra: str) -> tuple[int, str]:
        return self.run(sys.executable, *command, log=log, **extra)


def install(wheel: Path | None, place: Path) -> Path | None:
    """Unpack the wheel and compare it with the checkout: figures of other sources would be worth nothing."""
    if wheel is None:
        return None
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-index",
            "--no-deps",
            "--target",
            place,
            wheel,
        ],
        check=True,
    )
    for folder, package in ((ROOT, "dsa_dispatch"), (ROOT / "backends", "dsa_backends")):
        for source in (folder / package).rglob("*.py"):
            installed = place / source.relative_to(folder)
            if not installed.is_file() or installed.read_bytes() != source.read_bytes():
                raise SystemExit(
                    f"{wheel} is not of this checkout: {source.relative_to(ROOT)} differs. Build it anew"
                )
    return place


def tests(host: Host) -> dict[str, object]:
    report = host.out / "tests.xml"
    status, _ = host.python(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "tests/gpu", "--durations=10",
        "--deselect", "tests/gpu/test_triton_conformance_on_gpu.py",
    )  # fmt: skip
    return _tests_passed(status, report)


def conformance(host: Host) -> dict[str, object]:
    report = host.out / "conformance.xml"
    status, _ = host.python(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}",
        "tests/gpu/test_triton_conformance_on_gpu.py",
    )  # fmt: skip
    return _tests_passed(status, report)


def _tests_passed(status: int, report: Path) -> dict[str, object]:
    counts = {}
    if report.is_file():
        head = re.search(r"<testsuite [^>]*>", report.read_text()) or [""]
        counts = {
            name: int(value)
            for name, value in re.findall(r'\b(tests|failures|errors|skipped)="(\d+)"', head[0])
        }
    if status or not counts:
        raise Failed(f"pytest ended with {status}: {counts}")
    if counts["skipped"] == counts["tests"]:
        raise Failed("every test was skipped: is there a CUDA device?")
    return counts


def sanitize(host: Host) -> dict[str, object]:
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).is_file():
        raise Failed("compute-sanitizer is not on PATH; it comes with the CUDA toolkit")
    alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    # First without the tool, and side by side, so that it waits for no compiler.
    with ThreadPoolExecutor(COMPILERS) as pool:
        runs = [
            pool.submit(host.python, SANITIZED / "odd_shapes.py", f"{part}/{COMPILERS}", **alone)
            for part in range(COMPILERS)
        ]
    broken = next((run.result()[1] for run in runs if run.result()[0]), None)
    if broken is not None:
        raise Failed(f"odd_shapes.py fails by itself:\n{broken[-2000:]}")
    kernels = re.findall(
        r"^def (\w+_kernel)\(", "".join(path.read_text() for path in TRITON.glob("*.py")), flags=re.M
    )
    found: dict[str, object] = {}
    for name, (fault, culprit) in PLANTED.items():
        command = (tool, "--tool", name, "--report-api-errors", "no", "--print-limit", 1000, sys.executable)
        _, text = host.run(*command, SANITIZED / "planted.py", fault, log=f"{name}-planted.log", **alone)
        if not any(culprit in place for _, place in FOUND.findall(text)):
            raise Failed(f"{name} did not find the planted fault:\n{text[-2000:]}")
        status, text = host.run(*command, SANITIZED / "odd_shapes.py", log=f"{name}.log", **alone)
        if status or "every stage ran" not in text or "ERROR SUMMARY" not in text:
            raise Failed(f"odd_shapes.py ended with {status} under {name}:\n{text[-2000:]}")
        reports = FOUND.findall(text)
        # Sorts of PyTorch, for instance, read what they reserved and did not write.
        ours = [
            f"{kind} at {place}"
            for kind, place in reports
            if name == "memcheck" or any(kernel in place for kernel in kernels)
        ]
        if ours:
            raise Failed(f"{name}: {len(ours)} reports: " + "; ".join(dict.fromkeys(ours[:20])))
        found[name] = {"planted": "found", "ours": 0, "elsewhere": len(reports)}
    return found


def bench(host: Host) -> dict[str, object]:
    record = host.out / "bench.json"
    peers = ("--peer", "flashmla-direct=peers:flash_mla_forward", "--peer", "cudnn-direct=peers:cudnn")
    paths = os.pathsep.join([host.environment["PYTHONPATH"], str(ROOT / "benchmarks")])
    command = ("-c", "from dsa_dispatch._cli import main; main()", "bench", "--suite", "h200", "--seconds", 2)
    status, text = host.python(
        *command, "--out", record, *peers, *_commit(), log="bench.log", PYTHONPATH=paths
    )
    host.table = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    if status:
        raise Failed(f"bench ended with {status}; bench.log says why")
    return {"record": record.name, "results": len(json.loads(record.read_text())["results"])}


def _commit() -> list[str]:
    commit = os.environ.get("COMMIT", "")
    return ["--commit", commit] if commit else []


PARTS = {"tests": tests, "conformance": conformance, "sanitize": sanitize, "bench": bench}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--wheel", type=Path)
    parser.add_argument("parts", nargs="*", metavar="PART")
    chosen = parser.parse_args()
    unknown = set(chosen.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    chosen.out.mkdir(parents=True, exist_ok=True)
    outcomes: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as place:
        host = Host(chosen.out.resolve(), install(chosen.wheel, Path(place)))
        for name in chosen.parts or PARTS:
            begun = time.time()
            try:
                outcomes[name] = {"passed": True, **PARTS[name](host)}
            except Failed as reason:
                outcomes[name] = {"passed": False, "reason": str(reason)}
                print(f"{name}: {reason}", flush=True)
            outcomes[name]["seconds"] = round(time.time() - begun, 1)
            (chosen.out / "gpu.json").write_text(json.dumps(outcomes, indent=1))
    for name, outcome in outcomes.items():
        shown = ", ".join(
            f"{key} {value}" for key, value in outcome.items() if key not in ("passed", "reason")
        )
        print(f"{name}: {'passed' if outcome['passed'] else 'FAILED'} ({shown})")
    print(host.table)
    raise SystemExit(0 if all(outcome["passed"] for outcome in outcomes.values()) else 1)


if __name__ == "__main__":
    main()
