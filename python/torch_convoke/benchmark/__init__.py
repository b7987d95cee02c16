"""Whole training steps of a model, in PyTorch's fastest settings and with torch_convoke, on this machine.

    python -m torch_convoke.benchmark model.py:make_model --batch 8 --size 224

Each setting is a process of its own, and all of them train by turns, so that what else the machine does meets all alike. See
:func:`measure` for the same from Python.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, Iterator

__all__ = ["PRECISIONS", "Failure", "Mistake", "Result", "Setting", "Task", "measure"]

#: What runs a step, and in which words.
ENGINES = {"eager": "eager PyTorch", "compiled": "torch.compile", "convoke": "torch_convoke"}
#: Single precision, and autocast to bfloat16.
PRECISIONS = ("f32", "bf16")
#: malloc keeps memory, as fresh pages cost PyTorch's larger steps a tenth of their time. convoke keeps what it needs by itself.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1", "MALLOC_TOP_PAD_": str(64 << 20)}
#: Seconds that the steps of a setting take in a round, and how many they are at least and at most.
ROUND_SECONDS, LEAST_STEPS, MOST_STEPS = 0.7, 3, 50


class Mistake(ValueError):
    """A mistake in what was asked for, such as a model that does not exist."""


class Failure(RuntimeError):
    """A setting that could not train the model."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A model and how it is trained."""

    #: ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION``, a function that returns a model, or a model and its inputs; or a model of
    #: torchvision by name, of timm as ``timm:NAME``, of segmentation_models_pytorch as ``smp:NAME/ENCODER``.
    model: str
    #: Images of a step: 8 if None.
    batch: int | None = None
    #: Edge of the images in pixels, or edges: 224 if None.
    size: tuple[int, ...] | None = None
    #: As many as PyTorch takes if None.
    threads: int | None = None


@dataclasses.dataclass(frozen=True)
class Setting:
    """What runs the steps, and in which precision."""

    engine: str
    precision: str

    @property
    def name(self) -> str:
        """Such as "compiled" or "compiled-bf16"."""
        return self.engine if self.precision == "f32" else f"{self.engine}-{self.precision}"

    @staticmethod
    def of(name: str) -> Setting:
        """The setting with a name."""
        engine, _, precision = name.partition("-")
        return Setting(engine, precision or "f32")

    def __str__(self) -> str:
        return ENGINES[self.engine] + (" in bf16" if self.precision == "bf16" else "")


@dataclasses.dataclass
class Result:
    """What was measured."""

    task: Task
    machine: str
    threads: int
    #: Parameters, and shapes of inputs.
    model: dict[str, Any]
    #: By name of the setting: seconds of a step in each round, of the first step, until ready; bytes resident in training, at most since
    #: the start, and before the model was made; the memory format of images; what convoke reports; or an error.
    settings: dict[str, dict[str, Any]]

    def seconds(self, name: str) -> float:
        """The median of the rounds."""
        return statistics.median(self.settings[name]["seconds"])

    def best_peer(self, precision: str | None = None) -> str | None:
        """PyTorch's fastest setting, in a precision or in all."""
        names = [
            name
            for name, found in self.settings.items()
            if "error" not in found and not name.startswith("convoke") and precision in (None, Setting.of(name).precision)
        ]
        return min(names, key=self.seconds, default=None)

    def ratio(self, name: str, peer: str) -> float:
        """The median over rounds of one setting's time in another one's."""
        pairs = zip(self.settings[name]["seconds"], self.settings[peer]["seconds"])
        return statistics.median(one / other for one, other in pairs)

    def as_json(self) -> dict[str, Any]:
        """What :meth:`from_json` reads."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(values: dict[str, Any]) -> Result:
        """A result that was written as JSON."""
        task = dict(values["task"])
        task["size"] = None if task["size"] is None else tuple(task["size"])
        return Result(**{**values, "task": Task(**task)})


def measure(
    task: Task,
    precisions: tuple[str, ...] = ("f32",),
    *,
    rounds: int = 5,
    progress: Callable[[str], None] = lambda text: None,
) -> Result:
    """Trains a model in PyTorch, eager and compiled, and with torch_convoke, by turns.

    Loss functions are cross entropy for outputs of classes, random labels given, and the mean square of others; the optimizer is SGD with
    momentum. Before the first round each setting compiles, captures and measures what it needs to.

    Args:
        task: the model.
        precisions: "f32", "bf16" for autocast, or both.
        rounds: how often each setting has its turn.
        progress: is told what happens.

    Raises:
        Mistake: if there is no such model, or it is not one.
        Failure: if the model cannot be trained in eager PyTorch, or with torch_convoke.
    """
    settings = [Setting(engine, precision) for precision in precisions for engine in ENGINES]
    threads = task.threads or available_threads()
    with contextlib.ExitStack() as stack:
        workers: dict[str, Worker] = {}
        found: dict[str, dict[str, Any]] = {}
        formats: dict[str, str] = {}
        for setting in settings:
            progress(f"{setting} gets ready")
            try:
                worker = stack.enter_context(Worker(task, setting, threads, formats.get(setting.precision)))
                found[setting.name] = worker.answer()
            except Failure as failure:
                if setting.engine != "compiled":
                    raise
                found[setting.name] = {"error": str(failure)}
                continue
            formats[setting.precision] = found[setting.name]["format"]
            workers[setting.name] = worker
            found[setting.name]["seconds"] = []
        steps = {name: worker.round(1)["seconds"][0] for name, worker in workers.items()}
        counts = {name: min(max(math.ceil(ROUND_SECONDS / one), LEAST_STEPS), MOST_STEPS) for name, one in steps.items()}
        for turn in range(rounds):
            for name, worker in workers.items():
                progress(f"round {turn + 1} of {rounds}: {name}")
                answer = worker.round(counts[name])
                found[name]["seconds"].append(statistics.median(answer["seconds"]))
                found[name]["bytes"] = answer["bytes"]
                if answer["report"] is not None:
                    found[name]["report"] = answer["report"]
    model = next(iter(found.values()))["model"]
    for values in found.values():
        values.pop("model", None)
    return Result(task, machine(), threads, model, found)


class Worker:
    """A process that trains the model in one setting."""

    def __init__(self, task: Task, setting: Setting, threads: int, memory_format: str | None):
        self.setting = setting
        options = {
            "model": task.model,
            "batch": task.batch,
            "size": task.size,
            "threads": threads,
            "setting": setting.name,
            "format": memory_format,
        }
        environment = dict(os.environ, OMP_NUM_THREADS=str(threads))
        if setting.engine != "convoke":
            environment.update(KEEP_MEMORY)
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("_worker.py")), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            text=True,
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            with contextlib.suppress(OSError):
                stream.close()  # type: ignore[union-attr]

    def round(self, steps: int) -> dict[str, Any]:
        """Runs so many steps."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"steps": steps}) + "\n")
            self._process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Its next answer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Failure(f"{self.setting} cannot train the model: {self._last_words()}")
        answer = json.loads(line)
        if "mistake" in answer:
            raise Mistake(answer["mistake"])
        return answer

    def _last_words(self) -> str:
        code = self._process.wait()
        if code == -9:
            return "the system ended the process, which is what happens where memory runs out"
        self._log.seek(0)
        lines = [line for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else f"its process ended with {code}"


def available_threads() -> int:
    """As many threads as PyTorch would take."""
    import torch

    return torch.get_num_threads()


def machine() -> str:
    """The processor and its widest instruction set."""
    from .. import _engine

    name = platform.processor() or platform.machine()
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    return f"{name}, {_engine.Engine(1, cache=None, budget=0.0, budget_each=0.0).isa}"


def _lines(file: str) -> Iterator[str]:
    try:
        yield from Path(file).read_text().splitlines()
    except OSError:
        return
