"""What one process of the suite does: a program in PyTorch, in convoke, and what differs. `run.py` starts these.

python compare.py NAME PHASE OUTPUT LIMIT writes the result to OUTPUT as JSON.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import json
import logging
import random
import re
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any, Callable, Iterator

import numpy
import torch

import torch_convoke
from common import THREADS, Program, load

#: How many steps are timed as the first ones, and as later ones.
FIRST, LATER = 10, 10
#: Seconds of training in convoke between both: captures and measuring are over then.
BETWEEN = 30.0
#: How much results may differ, and by how much parameters are changed to find out what else is possible.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-5}
SHAKEN = {torch.float64: 1e-15, torch.float32: 1e-7}
MARGIN = 100


class Training:
    """A model in training, and what comes of it."""

    def __init__(self, program: Program, model: torch.nn.Module, start: Callable[..., Any]):
        self.program, self.model, self.start = program, model, start
        self.losses: list[Any] = []
        self.seconds: list[float] = []
        #: How many convolutions PyTorch ran in the forward passes of the last step, if they are counted.
        self.convolutions: int | None = None
        self.step: Callable[[int], Any] | None = None

    def run(self, steps: int, count: bool = False) -> Training:
        """Some more steps; a program with a loop of its own runs it once. The last one can count convolutions."""
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


def shake(model: torch.nn.Module, share: float) -> None:
    """Changes each parameter by about a share of it."""
    numbers = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=numbers, dtype=torch.float64)
            parameter.copy_((parameter.double() * (1 + share * noise)).to(parameter.dtype))


def optimized(model: torch.nn.Module, program: Program) -> list[Any]:
    """Optimizes the parts of a model that the program says, and gives them."""
    parts = [model.get_submodule(name) for name in program.parts]
    for part in parts:
        torch_convoke.optimize(part)
    return parts


def convolutions(reports: list[str], all_of_them: int, by_pytorch: int) -> list[int]:
    """How many convolutions convoke runs, of how many: as reports say of the last calls, or as counted in a step."""
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
    torch.set_num_threads(THREADS)
    program = load()[name]
    dtype = torch.float32 if phase == "time" else program.dtype
    random.seed(0), torch.manual_seed(0)
    model, start = program.make(dtype)
    expected, found, shaken = (
        Training(program, copied, start) for copied in (model, copy.deepcopy(model), copy.deepcopy(model))
    )
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
    precision = program.precision or dtype
    shake(shaken.model, SHAKEN[precision])
    shaken.compared()
    usual = {shortened(text) for text in usual}
    compared = compare(found, expected, shaken, TOLERANCE[precision])
    reports = []
    for part in parts:
        try:
            reports.append(torch_convoke.report(part))
        except Exception as error:
            compared["wrong"].append(f"report failed: {type(error).__name__}: {error}")
    counters = torch._dynamo.utils.counters
    return {
        **compared,
        "dtype": str(dtype).removeprefix("torch."),
        "convolutions": convolutions(reports, expected.convolutions, found.convolutions),
        "counted": [expected.convolutions - found.convolutions, expected.convolutions],
        "reasons": reasons(reports),
        "report": reports,
        "captures": counters["stats"]["unique_graphs"],
        "graph_breaks": [shortened(text) for text in counters["graph_break"]],
        "warnings": list(dict.fromkeys(short for text in texts if (short := shortened(text)) not in usual)),
    }


def timed(found: Training, expected: Training) -> dict[str, Any]:
    """Seconds of the first steps, and of later ones, which take turns: what else the machine does slows both."""
    if found.program.own_loop:
        found.run(FIRST + LATER)
        expected.run(FIRST + LATER)
    else:
        found.run(FIRST)
        expected.run(FIRST)
        began = time.perf_counter()
        while time.perf_counter() - began < BETWEEN:
            found.run(1)
        del found.seconds[FIRST:]
        for _ in range(LATER):
            found.run(1)
            expected.run(1)
    result = {}
    for key, training in (("convoke", found), ("pytorch", expected)):
        result[f"{key}_first"] = sum(training.seconds[:FIRST])
        result[f"{key}_later"] = statistics.median(training.seconds[FIRST:])
        result[f"{key}_least"] = min(training.seconds[FIRST:])
    return result


def shortened(text: str, most: int = 300) -> str:
    """A text on one line, without what differs between two runs."""
    text = " ".join(str(text).split())
    return text if len(text) <= most else f"{text[:most]}..."


if __name__ == "__main__":
    name, phase, output, limit = sys.argv[1:]
    # Shows where it hangs, if it does.
    faulthandler.dump_traceback_later(0.9 * float(limit))
    Path(output).write_text(json.dumps(run_phase(name, phase)))
