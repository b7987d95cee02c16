"""Trains one model in one setting. The program that compares settings starts this file as a process of its own, so that settings share no
memory, and PyTorch's settings know nothing of torch_convoke. Commands and answers are lines of JSON."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import json
import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable

#: Steps of each memory format that are timed to find the faster one, after one that is not.
FORMAT_STEPS = 2


class Mistake(Exception):
    """A mistake of the user, which needs no traceback."""


def main() -> None:
    # The model may print: its lines go to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # The folder of this file holds no modules for the model.
    sys.path[0] = os.getcwd()
    options = json.loads(sys.argv[1])
    try:
        for answer in served(options):
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    except Mistake as mistake:
        answers.write(json.dumps({"mistake": str(mistake)}) + "\n")
        answers.flush()


def served(options: dict[str, Any]):
    """The answers: what the setting needed to get ready, then a round of steps for each command."""
    import torch

    torch.set_num_threads(options["threads"])
    idle = resident("VmRSS")
    trainer = Trainer(options, torch)
    start = time.perf_counter()
    first = trainer.step()
    trainer.settle()
    yield {
        "first": first,
        "ready": time.perf_counter() - start,
        "format": trainer.format,
        "idle": idle,
        "model": trainer.describe(),
        "peak": resident("VmHWM"),
    }
    # From here on the kernel counts the most that is resident anew.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    for line in sys.stdin:
        steps = json.loads(line)["steps"]
        # OpenMP's threads of the process before spin for a while after its last operation.
        time.sleep(0.05)
        trainer.step()
        seconds = [trainer.step() for _ in range(steps)]
        yield {"seconds": seconds, "bytes": resident("VmHWM"), "report": trainer.report()}


class Trainer:
    """A model with its inputs, loss and optimizer in one setting."""

    def __init__(self, options: dict[str, Any], torch: Any):
        self.torch = torch
        self.engine, _, precision = options["setting"].partition("-")
        self.bf16 = precision == "bf16"
        torch.manual_seed(0)
        self.model, self.inputs = made(options)
        self.model.train()
        self.forward: Callable[..., Any] = self.model
        self.targets: list[Any] = []
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9, fused=True)
        self.format = options.get("format")
        if self.format is None:
            self.format = self._faster_format()
        self._set_format(self.format)
        if self.engine == "compiled":
            self.forward = torch.compile(self.model)
        elif self.engine == "convoke":
            import torch_convoke

            self.convoke = torch_convoke
            self.forward = torch_convoke.optimize(self.model)

    def step(self) -> float:
        """Runs a training step. Returns its seconds."""
        start = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        with self._precision():
            loss = self._loss(self.forward(*self.inputs))
        loss.backward()
        self.optimizer.step()
        if not math.isfinite(loss.item()):
            raise Mistake("the loss is not finite: with SGD and a learning rate of 0.001, on noise. Does the model start with sensible weights?")
        return time.perf_counter() - start

    def settle(self) -> None:
        """Runs what comes before steps take the time that they take from then on."""
        if self.engine == "convoke":
            with self._precision():
                self.convoke.tuning.tune(self.forward, *self.inputs, progress=False)
        for _ in range(2):
            self.step()

    def describe(self) -> dict[str, Any]:
        """What the table tells of the model."""
        shapes = [list(value.shape) for value in self.inputs if isinstance(value, self.torch.Tensor)]
        return {"parameters": sum(parameter.numel() for parameter in self.model.parameters()), "inputs": shapes}

    def report(self) -> str | None:
        """Where convoke runs what."""
        return str(self.convoke.report(self.forward)) if self.engine == "convoke" else None

    def _precision(self) -> Any:
        return self.torch.autocast("cpu", self.torch.bfloat16, enabled=self.bf16)

    def _loss(self, output: Any) -> Any:
        """Cross entropy for classes, of images or pixels; a loss that the model returns; the mean square of what else it returns."""
        from torch.nn import functional as F
        from torch.utils import _pytree

        outputs = [value for value in _pytree.tree_leaves(output) if isinstance(value, self.torch.Tensor) and value.requires_grad]
        if not outputs:
            raise Mistake("the model returned no tensor with a gradient")
        if not self.targets:
            for value in outputs:
                classes = value.dim() in (2, 4) and value.shape[1] > 1
                self.targets.append(self.torch.randint(value.shape[1], (value.shape[0], *value.shape[2:])) if classes else None)
        losses = []
        for value, target in zip(outputs, self.targets):
            value = value.float()
            if target is not None:
                losses.append(F.cross_entropy(value, target))
            else:
                losses.append(value if value.dim() == 0 else value.square().mean())
        return sum(losses)

    def _set_format(self, name: str) -> None:
        chosen = self.torch.channels_last if name == "channels-last" else self.torch.contiguous_format
        self.model.to(memory_format=chosen)
        self.inputs = [
            value.contiguous(memory_format=chosen) if isinstance(value, self.torch.Tensor) and value.dim() == 4 else value
            for value in self.inputs
        ]

    def _faster_format(self) -> str:
        """The memory format in which eager steps are faster."""
        seconds = {}
        for name in ("contiguous", "channels-last"):
            self._set_format(name)
            self.step()
            seconds[name] = statistics.median(self.step() for _ in range(FORMAT_STEPS))
        return min(seconds, key=seconds.__getitem__)


def made(options: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The model that the user names, and inputs for a step."""
    import torch

    result = maker(options["model"])()
    if isinstance(result, torch.nn.Module):
        channels = next((module.in_channels for module in result.modules() if isinstance(module, torch.nn.modules.conv._ConvNd)), 3)
        size = options["size"] or [224]
        return result, [torch.randn(options["batch"] or 8, channels, *(size * 2 if len(size) == 1 else size))]
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], torch.nn.Module)):
        raise Mistake(f"{options['model']} returned {type(result).__name__}: it should return a torch.nn.Module, or such a model and its inputs")
    if options["batch"] or options["size"]:
        raise Mistake(f"{options['model']} brings inputs of its own: leave out --batch and --size")
    model, inputs = result
    return model, list(inputs) if isinstance(inputs, (tuple, list)) else [inputs]


def maker(name: str) -> Callable[[], Any]:
    """A function that makes the model: of a file, a module, torchvision, timm or segmentation_models_pytorch."""
    source, _, function = name.rpartition(":")
    if source in ("", "torchvision"):
        models = imported("torchvision.models", "torchvision")
        if function not in models.list_models():
            raise unknown(f"torchvision has no model {function!r}", function, models.list_models(), "FILE.py:FUNCTION names a model of your own")
        segments = function in models.list_models(models.segmentation)
        return lambda: models.get_model(function, weights=None, **({"weights_backbone": None} if segments else {}))
    if source == "timm":
        timm = imported("timm", "timm")
        if not timm.is_model(function):
            raise unknown(f"timm has no model {function!r}", function, timm.list_models(), "timm.list_models() has all")
        return lambda: timm.create_model(function, pretrained=False)
    if source == "smp":
        smp = imported("segmentation_models_pytorch", "segmentation-models-pytorch")
        architecture, _, encoder = function.partition("/")
        made = getattr(smp, architecture, None)
        if made is None:
            raise unknown(f"segmentation_models_pytorch has no model {architecture!r}", architecture, dir(smp), "smp:Unet/resnet18 is an example")
        return lambda: made(encoder or "resnet18", encoder_weights=None, classes=4)
    module = of_file(Path(source)) if source.endswith(".py") else imported(source, source)
    found = getattr(module, function, None)
    if not callable(found):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise unknown(f"{source} has no function {function!r}", function, functions, f"it has {', '.join(sorted(functions)[:12]) or 'none'}")
    needed = [
        parameter.name
        for parameter in inspect.signature(found).parameters.values()
        if parameter.default is parameter.empty and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        raise Mistake(f"{name} wants {', '.join(needed)}: name a function without arguments, which makes the model")
    return found


def of_file(path: Path) -> Any:
    if not path.is_file():
        raise Mistake(f"there is no file {str(path)!r}")
    # What the file imports from beside it is found.
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def imported(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(error.name + ".")):
            raise
        raise Mistake(f"{package} is not installed: pip install {package}, or name a model as FILE.py:FUNCTION") from None


def unknown(text: str, name: str, names: Any, remedy: str) -> Mistake:
    near = difflib.get_close_matches(name, list(names), 3)
    return Mistake(f"{text}: {'is it ' + ', '.join(near) + '? ' if near else ''}{remedy}")


def resident(kind: str) -> int:
    """Bytes resident now (VmRSS), or the most that were (VmHWM); where the system does not tell both, the most since the start, or 0."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(kind + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        import resource
    except ImportError:
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


if __name__ == "__main__":
    main()
