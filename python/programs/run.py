#!/usr/bin/env python3
"""Trains models of other libraries in PyTorch and in convoke, and tells whether both agree.

Each program of this folder trains a model for some steps on synthetic batches: as it is, and after
`torch_convoke.optimize`. It runs three times, each time in a process of its own:

  empty  compares both, with an empty folder of tuning results. Here convoke runs all that it can, though PyTorch be
         faster.
  full   compares again, with the folder that the first run has filled. Here PyTorch runs some steps, to see who is
         faster, as for users.
  time   takes the time of ten steps and, half a minute later, of ten more in float32, with an empty folder. A program
         with a loop of its own goes on at once.

Losses of each step, parameters, buffers, the last gradients and the state of the random numbers must agree: in float64
to 1e-8. Training can be chaotic, so all may also differ by 100 times what a change of the parameters by 1e-7 (in
float64 by 1e-15) makes of them in PyTorch.

Columns of the table:

  empty, full   the largest relative difference, and what is wrong where something is
  convolutions  those that convoke runs, of all, as the reports of the models say of their last calls
  first ten     seconds of the first ten steps in convoke / in PyTorch
  later         milliseconds of a step after these in convoke / in PyTorch (medians), and how many times as fast
                convoke is
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import THREADS, Program, load

HERE = Path(__file__).resolve().parent


def run_in_process(name: str, phase: str, folder: str, cache: str, limit: float) -> dict[str, Any]:
    """Runs a phase of a program in a process of its own. An error is part of the result."""
    output, log = Path(folder) / f"{phase}.json", Path(folder) / f"{phase}.log"
    environment = {
        **os.environ,
        "CONVOKE_CACHE": cache,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": str(THREADS),
        # Threads that wait leave their processors to others: PyTorch's steps take a tenth of the time where others run.
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive"),
        "HF_HUB_OFFLINE": "1",
        "YOLO_OFFLINE": "true",
        "YOLO_AUTOINSTALL": "false",
        "YOLO_CONFIG_DIR": folder,
        "KINETO_LOG_LEVEL": "99",
        "PYTHONHASHSEED": "0",
    }
    # The first second of a model runs in PyTorch; comparisons begin with convoke.
    environment.pop("CONVOKE_CAPTURE_AFTER", None)
    if phase != "time":
        environment["CONVOKE_CAPTURE_AFTER"] = "0"
    command = [sys.executable, str(HERE / "compare.py"), name, phase, str(output), str(limit)]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    before = used.ru_utime + used.ru_stime
    with open(log, "w") as out:
        child = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment, cwd=folder, start_new_session=True
        )
        try:
            code = child.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            raise
        if code is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds = used.ru_utime + used.ru_stime - before
            return {"error": f"not done after {limit:.0f} s, {seconds:.0f} s of them on processors", "log": tail(log)}
    if code != 0 or not output.exists():
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Unsupported|Interrupt)\b", line)]
        ended = "" if code >= 0 else f"ended by {signal.Signals(-code).name}: "
        last = errors[-1] if errors else lines[-1] if lines else f"exit code {code}"
        return {"error": ended + last[:200], "log": tail(log)}
    return json.loads(output.read_text())


def tail(log: Path, lines: int = 60) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def run_program(name: str, phases: list[str], limit: float) -> dict[str, Any]:
    """The results of a program's phases."""
    results: dict[str, Any] = {"name": name}
    with tempfile.TemporaryDirectory() as folder:
        for phase in phases:
            cache = str(Path(folder) / ("cache-of-time" if phase == "time" else "cache"))
            began = time.perf_counter()
            results[phase] = run_in_process(name, phase, folder, cache, limit)
            results[phase]["process_seconds"] = time.perf_counter() - began
    results["agrees"] = all("error" not in results[phase] and not results[phase].get("wrong") for phase in phases)
    return results


def cells(results: dict[str, Any]) -> list[str]:
    """The results of a program as a row of the table."""

    def agreement(phase: str) -> str:
        found = results.get(phase)
        if found is None:
            return "-"
        if "error" in found:
            return "error"
        return f"{found['difference']:.0e}" if not found["wrong"] else f"WRONG {found['difference']:.0e}"

    of_empty, of_time = results.get("empty") or results.get("full") or {}, results.get("time", {})
    counts = of_empty.get("convolutions")
    row = [results["name"], agreement("empty"), agreement("full"), f"{counts[0]} of {counts[1]}" if counts else "-"]
    if "convoke_later" in of_time:
        ours, theirs = of_time["convoke_later"], of_time["pytorch_later"]
        row.append(f"{of_time['convoke_first']:.1f} / {of_time['pytorch_first']:.1f}")
        row.append(f"{1e3 * ours:.0f} / {1e3 * theirs:.0f}, {theirs / ours:.2f}x")
    else:
        row += ["error" if "error" in of_time else "-", "-"]
    return row


HEADER = ["program", "empty", "full", "convolutions", "first ten", "later"]
WIDTHS = [36, 12, 12, 14, 14, 24]


def line(row: list[str]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(row, WIDTHS)).rstrip()


def notes(results: dict[str, Any]) -> list[str]:
    """What its row does not say of a program: errors, what is wrong, warnings, why convolutions are left to PyTorch."""
    found: list[str] = []
    for phase in ("empty", "full", "time"):
        of_phase = results.get(phase, {})
        if "error" in of_phase:
            found.append(f"{phase}: {of_phase['error']}")
        wrong = of_phase.get("wrong", [])
        found.extend(f"{phase}: {text}" for text in wrong[:4])
        if len(wrong) > 4:
            found.append(f"{phase}: and {len(wrong) - 4} more")
        found.extend(f"warning: {text}" for text in of_phase.get("warnings", []))
    of_empty = results.get("empty") or results.get("full") or {}
    counts, counted = of_empty.get("convolutions", [0, 0]), of_empty.get("counted", [0, 0])
    if counted != counts:
        found.append(
            f"counted: {counted[0]} of {counted[1]} convolutions of the last step's forward passes ran in convoke"
        )
    if counts[0] < counts[1] or counted[0] < counted[1]:
        found.extend(f"left: {text}" for text in of_empty["reasons"])
        found.extend(f"split: {text}" for text in of_empty["graph_breaks"])
    return list(dict.fromkeys(found))


def selected(programs: dict[str, Program], patterns: list[str], quick: bool) -> list[str]:
    """The programs whose name or file has a pattern in it, or matches it."""
    for pattern in patterns:
        if not any(matches(program, pattern) for program in programs.values()):
            sys.exit(f"No program matches {pattern!r}; --list shows all.")
    chosen = [
        name for name, program in programs.items() if not patterns or any(matches(program, one) for one in patterns)
    ]
    return [name for name in chosen if not quick or programs[name].quick]


def matches(program: Program, pattern: str) -> bool:
    return any(pattern in name or fnmatch.fnmatch(name, pattern) for name in (program.name, program.group))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "patterns", nargs="*", metavar="PROGRAM", help="names of programs or of their files, in part or with * and ?"
    )
    parser.add_argument("--quick", action="store_true", help="the five programs that CI runs")
    parser.add_argument("--list", action="store_true", help="show the programs, and run none")
    parser.add_argument(
        "--phases", default="empty,full,time", help="which of the three runs, separated by commas (default: all)"
    )
    parser.add_argument(
        "--limit", type=float, default=300, metavar="SECONDS", help="for each run; more is a failure (default: 300)"
    )
    parser.add_argument("--json", metavar="FILE", help="write a line of JSON for each program, as soon as it has run")
    args = parser.parse_args()
    phases = [phase for phase in args.phases.split(",") if phase]
    if unknown := set(phases) - {"empty", "full", "time"}:
        parser.error(f"there is no phase {min(unknown)!r}: there are empty, full and time")
    programs = load()
    names = selected(programs, args.patterns, args.quick)
    if args.list:
        for name in names:
            program = programs[name]
            first = (program.make.__doc__ or "").strip().split("\n")[0]
            print(f"{program.group:15} {name}{' (quick)' if program.quick else ''}{f': {first}' if first else ''}")
        return 0
    out = open(args.json, "w") if args.json else None
    began, all_notes, failed, skipped = time.perf_counter(), {}, [], 0
    print(line(HEADER), flush=True)
    for name in names:
        missing = [package for package in programs[name].needs if importlib.util.find_spec(package) is None]
        if missing:
            results: dict[str, Any] = {"name": name, "skipped": f"{', '.join(missing)} is not installed"}
            print(f"{name.ljust(WIDTHS[0])}  skipped: {results['skipped']}", flush=True)
            skipped += 1
        else:
            results = run_program(name, phases, args.limit)
            print(line(cells(results)), flush=True)
            all_notes[name] = notes(results)
            if not results["agrees"]:
                failed.append(name)
        if out is not None:
            out.write(json.dumps(results) + "\n")
            out.flush()
    for name, texts in all_notes.items():
        if texts:
            print(f"\n{name}")
            for text in texts:
                print(f"  {text}")
    ran = len(names) - skipped
    print(f"\n{ran - len(failed)} of {ran} programs agree, {skipped} skipped, {time.perf_counter() - began:.0f} s.")
    if failed:
        print(f"Not: {', '.join(failed)}.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
