#!/usr/bin/env python3
"""Trains models of other libraries in PyTorch and in convoke, and tells whether both agree.

Each program of this folder trains a model for some steps on synthetic batches: as it is, and after `torch_convoke.optimize`. It runs three
times, each time in a process of its own:

  empty  compares both, with an empty folder of tuning results. Here convoke runs all that it can, though PyTorch be faster.
  full   compares again, with the folder that the first run has filled. Here PyTorch runs some steps, to see who is faster, as for users.
  time   takes the time of ten steps and of ten more in float32, with an empty folder.

Losses of each step, parameters, buffers, the last gradients and the state of the random numbers must agree: in float64 to 1e-8. Training
can be chaotic, so all may also differ by 100 times what one change of the parameters by 1e-7 (in float64 by 1e-15) makes of them in PyTorch.

Columns of the table:

  empty, full   the largest relative difference, and what is wrong where something is
  convolutions  those that convoke runs, of all, as the reports of the models say of their last calls
  first ten     seconds of the first ten steps in convoke / in PyTorch
  later         milliseconds of a step after these in convoke / in PyTorch (medians), and how many times as fast convoke is
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import fnmatch
import importlib
import importlib.util
import json
import logging
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, Callable, Iterator

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

#: The files with programs.
GROUPS = ["techniques", "detection", "segmentation", "medical", "generative", "augmentation", "training_loops", "timm_models"]
THREADS = 2
#: How many steps are timed as the first ones, and as later ones.
FIRST, LATER = 10, 10
#: How much results may differ, and by how much parameters are changed to find out what else is possible.
TOLERANCE = {"float64": 1e-8, "float32": 1e-5}
SHAKEN = {"float64": 1e-15, "float32": 1e-7}
MARGIN = 100


# --- In a program's own process ------------------------------------------------------------------------------------------------


class Training:
    """A model in training, and what comes of it."""

    def __init__(self, program: Any, model: Any, start: Callable[..., Any]):
        self.program, self.model, self.start = program, model, start
        self.losses: list[Any] = []
        self.seconds: list[float] = []
        #: How many convolutions PyTorch ran in the forward passes of the last step, if they are counted.
        self.convolutions: int | None = None
        self.step: Callable[[int], Any] | None = None

    def run(self, steps: int, count: bool = False) -> Training:
        """Some more steps; programs with a loop of their own run it once. Convolutions can be counted in the last one."""
        import torch

        profiler, left, last = None, steps, time.perf_counter()

        def done(loss: Any) -> None:
            nonlocal profiler, left, last
            numbers = [torch.as_tensor(part).item() for part in (loss if isinstance(loss, tuple) else [loss])]
            self.seconds.append(time.perf_counter() - last)
            self.losses.append(torch.tensor(numbers, dtype=torch.float64))
            left -= 1
            if profiler is not None:
                profiler.__exit__(None, None, None)
                self.convolutions = forward_convolutions(profiler)
                profiler = None
            if count and left == 1:
                profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
                profiler.__enter__()
            last = time.perf_counter()

        if self.program.own_loop:
            self.start(self.model, steps, done)
            return self
        if self.step is None:
            self.step = self.start(self.model)
            last = time.perf_counter()
        for _ in range(steps):
            done(self.step(len(self.losses)))
        return self

    def compared(self, count: bool = False) -> Training:
        """All steps that are compared, from the same random numbers on."""
        import numpy
        import torch

        random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
        self.run(self.program.steps, count)
        self.random = torch.get_rng_state()
        return self

    def state(self) -> dict[str, Any]:
        """Parameters, buffers and gradients by name."""
        found = {name: value for name, value in self.model.state_dict().items() if hasattr(value, "dtype")}
        gradients = {f"gradient of {name}": parameter.grad for name, parameter in self.model.named_parameters()}
        return {**found, **gradients}


def forward_convolutions(profiler: Any) -> int:
    """The convolutions that PyTorch ran, without those of backward passes."""
    count = 0
    for event in profiler.events():
        # Captures run `aten::convolution` on tensors without elements, which goes no further.
        if event.name == "aten::_convolution":
            parent = event.cpu_parent
            while parent is not None and not parent.name.startswith("autograd::engine"):
                parent = parent.cpu_parent
            count += parent is None
    return count


def apart(one: Any, other: Any, least: float) -> float:
    """The largest difference between two tensors, as a share of the largest of the second one's elements."""
    import torch

    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    if not one.is_floating_point():
        return 0.0 if torch.equal(one, other) else float("inf")
    if not one.numel():
        return 0.0
    one, other = one.detach().double(), other.detach().double()
    difference = (one - other).abs().nan_to_num(float("inf"), float("inf"))
    difference[(one == other) | (one.isnan() & other.isnan())] = 0.0
    finite = other[other.isfinite()].abs()
    return difference.max().item() / max(finite.max().item() if finite.numel() else 0.0, least)


def compare(found: Training, expected: Training, shaken: Training, tolerance: float) -> dict[str, Any]:
    """The largest difference, what it may be, and what differs by more than it may."""
    import torch

    wrong, worst, so_far = [], 0.0, 0.0
    if len(found.losses) != len(expected.losses):
        wrong.append(f"{len(found.losses)} steps instead of {len(expected.losses)}")
    for number, (one, other, shook) in enumerate(zip(found.losses, expected.losses, shaken.losses)):
        so_far = max(so_far, apart(shook, other, 0.1))
        difference = apart(one, other, 0.1)
        worst = max(worst, difference)
        if difference > max(tolerance, MARGIN * so_far):
            wrong.append(f"loss of step {number}: {one.tolist()} instead of {other.tolist()}")
    states = found.state(), expected.state(), shaken.state()
    if list(states[0]) != list(states[1]):
        wrong.append("the names of parameters and buffers differ")
    for name, other in states[1].items():
        one, difference = states[0].get(name), apart(states[0].get(name), other, 0.01)
        worst = max(worst, difference)
        if difference > max(tolerance, MARGIN * apart(states[2].get(name), other, 0.01)):
            what = f"{difference:.1e}"
            if difference == float("inf") and (one is None or other is None):
                what = "missing" if one is None else "None in PyTorch"
            wrong.append(f"{name}: {what}")
    if not torch.equal(found.random, expected.random):
        wrong.append("the state of random numbers")
    return {"difference": worst, "loss_may_differ": max(tolerance, MARGIN * so_far), "wrong": wrong}


def shake(model: Any, dtype: Any) -> None:
    """Changes each parameter by about a rounding."""
    import torch

    numbers = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=numbers, dtype=torch.float64)
            parameter.copy_((parameter.double() * (1 + SHAKEN[name_of(dtype)] * noise)).to(parameter.dtype))


def optimized(model: Any, program: Any) -> list[Any]:
    """Optimizes the parts of a model that the program says, and gives them."""
    import torch_convoke

    parts = [model.get_submodule(name) for name in program.parts]
    for part in parts:
        torch_convoke.optimize(part)
    return parts


def convolutions(reports: list[str], all_of_them: int, by_pytorch: int) -> list[int]:
    """How many convolutions convoke runs, of how many: what reports say of each model's last call, or else what was counted in a step."""
    said = [re.findall(r"^(?:[\w.]+: )?(\d+) of (\d+) convolutions", report, re.MULTILINE) for report in reports]
    if said and all(said):
        return [sum(int(numbers[place]) for lines in said for numbers in lines) for place in (0, 1)]
    return [all_of_them - by_pytorch, all_of_them]


def reasons(reports: list[str]) -> list[str]:
    """The lines of reports that tell why PyTorch runs a convolution, or a whole subgraph or graph."""
    lines = [line.strip() for report in reports for line in report.splitlines()]
    pattern = re.compile(r"runs? in PyTorch|PyTorch runs (\d+ operations|a subgraph|conv|checkpoint)|could not capture")
    return list(dict.fromkeys(line for line in lines if pattern.search(line) and not line.startswith("A graph of 0")))


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """The warnings and the errors that are logged meanwhile."""
    texts: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(f"{record.name}: {record.getMessage()}")

    handler = Handler(logging.WARNING)
    names = ["", "torch._dynamo", "torch_convoke"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for name in names:
            logging.getLogger(name).addHandler(handler)
        try:
            yield texts
        finally:
            for name in names:
                logging.getLogger(name).removeHandler(handler)
            texts.extend(f"{warning.category.__name__}: {warning.message}" for warning in caught)


def run_phase(name: str, phase: str) -> dict[str, Any]:
    """What the process of one run does."""
    import torch

    torch.set_num_threads(THREADS)
    program = load()[name]
    dtype = torch.float32 if phase == "time" else program.dtype
    random.seed(0), torch.manual_seed(0)
    model, start = program.make(dtype)
    expected, found, shaken = (Training(program, copied, start) for copied in (model, copy.deepcopy(model), copy.deepcopy(model)))
    import torch_convoke

    if phase == "time":
        parts = optimized(found.model, program)
        return {**timed(found, expected), "report": [torch_convoke.report(part) for part in parts]}
    if phase == "empty":
        # No subgraph runs in PyTorch by turns, to see who is faster.
        torch_convoke._run.Subgraph.measures_by_default = False
    with heard() as usual:
        expected.compared(count=True)
    with heard() as texts:
        parts = optimized(found.model, program)
        found.compared(count=True)
    shake(shaken.model, dtype)
    shaken.compared()
    usual = {shortened(text) for text in usual}
    compared = compare(found, expected, shaken, program.tolerance or TOLERANCE[name_of(dtype)])
    reports = []
    for part in parts:
        try:
            reports.append(torch_convoke.report(part))
        except Exception as error:
            compared["wrong"].append(f"report failed: {type(error).__name__}: {error}")
    counters = torch._dynamo.utils.counters
    return {
        **compared,
        "dtype": name_of(dtype),
        "convolutions": convolutions(reports, expected.convolutions, found.convolutions),
        "counted": [expected.convolutions - found.convolutions, expected.convolutions],
        "reasons": reasons(reports),
        "report": reports,
        "captures": counters["stats"]["unique_graphs"],
        "graph_breaks": [shortened(text) for text in counters["graph_break"]],
        "warnings": list(dict.fromkeys(short for text in texts if (short := shortened(text)) not in usual)),
    }


def timed(found: Training, expected: Training) -> dict[str, Any]:
    """Seconds of the first steps, and of later ones. These take turns, so that what else the machine does slows both."""
    if found.program.own_loop:
        found.run(FIRST + LATER)
        expected.run(FIRST + LATER)
    else:
        found.run(FIRST)
        expected.run(FIRST)
        for _ in range(LATER):
            found.run(1)
            expected.run(1)
    result = {}
    for key, training in (("convoke", found), ("pytorch", expected)):
        result[f"{key}_first"] = sum(training.seconds[:FIRST])
        result[f"{key}_later"] = statistics.median(training.seconds[FIRST:])
        result[f"{key}_least"] = min(training.seconds[FIRST:])
    return result


def name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def shortened(text: str, most: int = 300) -> str:
    """A text on one line, without what differs between two runs."""
    text = " ".join(str(text).split())
    return text if len(text) <= most else f"{text[:most]}..."


def load() -> dict[str, Any]:
    """All programs by name."""
    from common import PROGRAMS

    for group in GROUPS:
        importlib.import_module(group)
    return PROGRAMS


# --- In the runner -------------------------------------------------------------------------------------------------------------


def run_in_process(name: str, phase: str, folder: str, cache: str, limit: float) -> dict[str, Any]:
    """Runs a phase of a program in a process of its own. An error is part of the result."""
    output, log = Path(folder) / f"{phase}.json", Path(folder) / f"{phase}.log"
    environment = {
        **os.environ,
        "CONVOKE_CACHE": cache,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": str(THREADS),
        # Threads that wait leave their processors to others: where something else runs, steps of PyTorch take a tenth of the time.
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
    command = [sys.executable, str(HERE / "run.py"), "--phase", phase, "--output", str(output), name]
    with open(log, "w") as out:
        child = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment, cwd=folder, start_new_session=True)
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
            return {"error": f"not done after {limit:.0f} s", "log": tail(log)}
    if code != 0 or not output.exists():
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Unsupported|Interrupt)\b", line)]
        ended = "" if code >= 0 else f"ended by {signal.Signals(-code).name}: "
        last = errors[-1] if errors else lines[-1] if lines else f"exit code {code}"
        return {"error": ended + shortened(last, 200), "log": tail(log)}
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
    """What is to be said about a program beside its row: errors, what is wrong, warnings, and why convolutions are left to PyTorch."""
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
    of_empty = results.get("empty", {})
    counts, counted = of_empty.get("convolutions", [0, 0]), of_empty.get("counted", [0, 0])
    if counted != counts:
        found.append(f"counted: in the last step, all its forward passes together, {counted[0]} of {counted[1]} convolutions ran in convoke")
    if counts[0] < counts[1] or counted[0] < counted[1]:
        found.extend(f"left: {text}" for text in of_empty["reasons"])
        found.extend(f"split: {text}" for text in of_empty["graph_breaks"])
    return list(dict.fromkeys(found))


def selected(programs: dict[str, Any], patterns: list[str], quick: bool) -> list[str]:
    """The programs whose name or file has a pattern in it, or matches it."""
    for pattern in patterns:
        if not any(matches(program, pattern) for program in programs.values()):
            sys.exit(f"No program matches {pattern!r}; --list shows all.")
    chosen = [name for name, program in programs.items() if not patterns or any(matches(program, one) for one in patterns)]
    return [name for name in chosen if not quick or programs[name].quick]


def matches(program: Any, pattern: str) -> bool:
    return any(pattern in name or fnmatch.fnmatch(name, pattern) for name in (program.name, program.group))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", metavar="PROGRAM", help="names of programs or of their files, in part or with * and ?")
    parser.add_argument("--quick", action="store_true", help="the five programs that CI runs")
    parser.add_argument("--list", action="store_true", help="show the programs, and run none")
    parser.add_argument("--phases", default="empty,full,time", help="which of the three runs, separated by commas (default: all)")
    parser.add_argument("--limit", type=float, default=300, metavar="SECONDS", help="for each run; more is a failure (default: 300)")
    parser.add_argument("--json", metavar="FILE", help="write a line of JSON for each program, as soon as it has run")
    parser.add_argument("--phase", help=argparse.SUPPRESS)
    parser.add_argument("--output", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.phase:
        result = run_phase(args.patterns[0], args.phase)
        Path(args.output).write_text(json.dumps(result))
        return 0
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
