"""Which algorithm runs each convolution: measured results, where they are kept, and how to take them elsewhere.

A problem is one convolution's shapes, options, memory format, type and number of threads, and one of its three passes. convoke chooses an
algorithm by estimate when it meets a problem, and times the contestants between later steps, in at most as much time as the training
takes. Results are kept in a folder (:func:`path`) that the program ``convoke`` shares, one small file each, apart for each kind of
machine. So a second run measures nothing.

Measure before training, and ship the results with a container image::

    tuning.tune(model, images)        # now, instead of during the first steps
    tuning.export("tuning.json")      # everything in the folder; `convoke cache export` does the same
    tuning.load("tuning.json")        # on another machine of the same kind; `convoke cache import` adds to the folder only

Different algorithms round differently, so ranks that should agree to the last bit need the same choices. Give all of them one file, or let
rank 0 measure and share::

    if dist.get_rank() == 0:
        tuning.tune(model, images)    # before the model is wrapped in DistributedDataParallel
    tuning.broadcast()

The folder is ``tuning`` in the user's folder for caches (on Linux ``~/.cache/convoke``), or what the environment variable
``CONVOKE_CACHE`` names when the package first computes. The program does not read that variable: give it ``--tuning-cache``.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any, Iterator, NamedTuple

import torch
import torch.distributed as dist
from torch.utils import _pytree

from . import _engine, _pace, _threads

__all__ = ["Choice", "Loaded", "broadcast", "choices", "export", "load", "path", "tune"]

#: The most steps that `tune` runs to see whether convoke or PyTorch is faster.
MOST_TURNS = 40

#: Choices that every engine of this process takes over, oldest first, in JSON.
_adopted: list[str] = []


class Choice(NamedTuple):
    """The algorithm for one pass of one problem."""

    #: The problem as the program and benchdnn write it, such as mb8ic64ih56oc64kh3ph1.
    problem: str
    #: "fwd", "bwd-data" or "bwd-weights"; of max pooling "max-pool-fwd", "max-pool-bwd" or "max-pool-inference".
    pass_: str
    #: The memory format, "nchw" or "nhwc".
    format: str
    #: "f32" or "f64".
    dtype: str
    threads: int
    algorithm: str


class Loaded(NamedTuple):
    """What :func:`load` found."""

    #: How many results are new in the folder.
    added: int
    #: How many the folder had already.
    present: int


def path() -> Path | None:
    """The folder of tuning results; None if the system has no folder for caches, and then nothing is kept."""
    named = os.environ.get("CONVOKE_CACHE") or _engine.cache_path()
    return None if named is None else Path(named)


def choices() -> list[Choice]:
    """The algorithms that this process has chosen so far, sorted by problem."""
    found = []
    for choice in _choices().values():
        key = choice["key"]
        found.append(
            Choice(
                key["problem"], key["pass"], key["format"], key["dtype"], key["threads"], choice["algorithm"]
            )
        )
    return sorted(found)


def export(file: str | os.PathLike[str]) -> int:
    """Writes every result in the folder, of all kinds of machines, to one file.

    Returns:
        How many results there are.

    Raises:
        RuntimeError: if there is no folder: see :func:`path`.
        OSError: if the file cannot be written or the folder not be read.
    """
    with _remedies():
        return _engine.tuning_export(_folder(), file)


def load(file: str | os.PathLike[str]) -> Loaded:
    """Takes the results of an exported file over: by :func:`export`, or by the program's ``convoke cache export``.

    Those that the folder does not have are added to it. Those of this kind of machine are what this process chooses by from now on, even
    where the folder has other ones, and in place of choices that it has made.

    Raises:
        RuntimeError: if there is no folder: see :func:`path`.
        OSError: if the file cannot be read or the folder not be written.
        ValueError: if the file is no export, or holds a result that makes no sense. Then nothing is added.
    """
    with _remedies():
        added, present = _engine.tuning_import(_folder(), file)
    _adopt(_choices_in(Path(file).read_text(encoding="utf-8")))
    return Loaded(added, present)


def tune(model: torch.nn.Module, *example_inputs: Any, progress: bool = True) -> int:
    """Captures a model now, and measures what its steps with such inputs need.

    In training mode it runs forward and backward, with a gradient of ones for each output, in evaluation mode forward only. Each
    convolution for which no result is stored is measured, however long that takes: up to 0.3 seconds for a pass. Running
    statistics and other buffers, gradients, and the state of torch's generator are then what they were; parameters do not change. Hooks
    of the model run.

    Args:
        model: an optimized model, or one with layers of :mod:`torch_convoke.nn`, in its mode of training or evaluation. Of a
            DistributedDataParallel, the model inside.
        example_inputs: what it will be called with: shapes, types, memory formats and ``requires_grad`` matter.
        progress: whether to say on standard error how far it is, once it takes more than a second.

    Returns:
        How many choices were made or measured. 0 if all were known.

    Raises:
        ValueError: if the model is not optimized.
        TypeError: without inputs.
    """
    from ._backend import Backend
    from ._optimize import Optimized

    if isinstance(model, torch.nn.parallel.DistributedDataParallel) and not _runs_in_convoke(model, inner=False):
        model = model.module
    if not _runs_in_convoke(model):
        raise ValueError("nothing of the model runs in convoke: call torch_convoke.optimize(model) first")
    if not example_inputs:
        raise TypeError("tune needs the inputs of a step: tune(model, images)")
    before = _choices()
    for module in model.modules():
        if isinstance(module._compiled_call_impl, Optimized):
            module._compiled_call_impl.pace.wait = 0.0
    with _Progress(progress, len(before)) as shown, _unchanged(model), contextlib.ExitStack() as stack:
        _threads.engine()
        with contextlib.ExitStack() as paused:
            for engine in _threads.engines():
                paused.enter_context(_pace.of(engine).decided(0.0))
            _step(model, example_inputs)
        for engine in _threads.engines():
            stack.enter_context(_pace.of(engine).decided(math.inf))
        new = {key: choice for key, choice in _choices().items() if key not in before}
        # Beyond the time that an engine spends by itself, choices are by estimate, or as for another batch.
        made = set(new)
        for engine in _threads.engines():
            of_engine = json.loads(_engine.tuning_choices(engine))
            shown.total = len(of_engine)
            for shown.done, choice in enumerate(of_engine):
                if _engine.tuning_measure(engine, json.dumps(choice)):
                    made.add(_key(choice))
        # Subgraphs run in convoke and in PyTorch by turns, until it is known who is faster.
        for _ in range(MOST_TURNS):
            shown.total = None
            before_step = Backend.measuring_calls()
            _step(model, example_inputs)
            if Backend.measuring_calls() == before_step:
                break
    return len(made)


def broadcast(process_group: Any | None = None) -> None:
    """Makes all ranks choose as the group's first rank does: a collective call, over any backend of :mod:`torch.distributed`.

    Ranks get the results in the first one's folder, as by :func:`load`, and the choices that it has made, also those that were not
    measured. A rank on another kind of machine warns, and keeps its own. Messages are pickled: ranks must trust each other.

    Problems that the first rank has not met are each rank's own choice: let it call :func:`tune` before.

    Args:
        process_group: the ranks; by default all.

    Raises:
        RuntimeError: without an initialised process group, or if the first rank cannot read its results; then on all ranks.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError("broadcast needs ranks: call torch.distributed.init_process_group first")
    group = dist.group.WORLD if process_group is None else process_group
    first = dist.get_rank(group) == 0
    message: list[Any] = [_message() if first else None]
    dist.broadcast_object_list(message, src=dist.get_global_rank(group, 0), group=group)
    error, scope, results, made = message[0]
    if error is not None:
        raise RuntimeError(f"the first rank cannot read its tuning results: {error}")
    if first:
        return
    if results is not None and path() is not None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "tuning.json"
            file.write_text(results, encoding="utf-8")
            load(file)
    elif results is not None:
        _adopt(_choices_in(results))
    if scope == _engine.tuning_scope():
        _adopt(made)
    else:
        warnings.warn(
            f"this rank is a {_engine.tuning_scope()}, the first one a {scope}: it keeps its own choices of algorithms, so results may "
            "differ in their last bits",
            stacklevel=2,
        )


def _message() -> tuple[str | None, str, str | None, list[Any]]:
    """What the first rank tells: why it cannot, its kind of machine, its results, its choices."""
    scope, results = _engine.tuning_scope(), None
    try:
        if path() is not None:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "tuning.json"
                export(file)
                results = file.read_text(encoding="utf-8")
    except Exception as error:
        return str(error), scope, None, []
    return None, scope, results, list(_choices().values())


def share(engine: _engine.Engine) -> None:
    """Makes an engine that is new in this process choose by what was loaded."""
    for made in _adopted:
        _engine.tuning_adopt(engine, made)


def _adopt(made: list[Any]) -> None:
    text = json.dumps(made)
    _adopted.append(text)
    for engine in _threads.engines():
        _engine.tuning_adopt(engine, text)


def _choices_in(results: str) -> list[Any]:
    """The choices of an export that are for this kind of machine."""
    own = [entry["record"] for entry in json.loads(results)["entries"] if entry["scope"] == _engine.tuning_scope()]
    return [{"key": record["key"], "algorithm": record["chosen"]} for record in own]


def _key(choice: Any) -> str:
    return json.dumps(choice["key"], sort_keys=True)


def _choices() -> dict[str, Any]:
    """Every choice of this process, by its key."""
    return {_key(choice): choice for engine in _threads.engines() for choice in json.loads(_engine.tuning_choices(engine))}


def _folder() -> Path:
    folder = path()
    if folder is None:
        raise RuntimeError("this system has no folder for caches: set the environment variable CONVOKE_CACHE to a folder")
    return folder


@contextlib.contextmanager
def _remedies() -> Iterator[None]:
    """Adds to errors what to do about them."""
    try:
        yield
    except PermissionError as error:
        text = f"{error}; name a place that you may write to, for the folder by the environment variable CONVOKE_CACHE"
        raise PermissionError(text) from None
    except ValueError as error:
        raise ValueError(f"{error}; torch_convoke.tuning.export and `convoke cache export` write such files") from None


def _runs_in_convoke(model: torch.nn.Module, inner: bool = True) -> bool:
    """Whether a model, or a part of it, is compiled, or has a layer of ours."""
    from .nn import FusedConvBN2d

    modules = model.modules() if inner else [model]
    return any(
        module._compiled_call_impl is not None or hasattr(module, "_orig_mod") or isinstance(module, FusedConvBN2d)
        for module in modules
    )


def _step(model: torch.nn.Module, example_inputs: tuple[Any, ...]) -> None:
    """Forward and backward without any trace in the parameters."""

    def copied(value: Any) -> Any:
        return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value

    inputs = _pytree.tree_map(copied, example_inputs)
    if not model.training:
        with torch.no_grad():
            model(*inputs)
        return
    quiet = model.no_sync() if isinstance(model, torch.nn.parallel.DistributedDataParallel) else contextlib.nullcontext()
    with torch.enable_grad(), quiet:
        leaves = [*model.parameters(), *_pytree.tree_leaves(inputs)]
        leaves = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        outputs = [part for part in _pytree.tree_leaves(model(*inputs)) if isinstance(part, torch.Tensor)]
        outputs = [output for output in outputs if output.requires_grad]
        if outputs and leaves:
            # Not `backward`, which would add to gradients and run hooks on them, such as an optimizer's.
            torch.autograd.grad(outputs, leaves, [torch.ones_like(output) for output in outputs], allow_unused=True)


@contextlib.contextmanager
def _unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Puts buffers and the generator's state back."""
    kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, values in kept:
                    buffer.copy_(values)


def progress_of_first_steps() -> contextlib.AbstractContextManager[Any]:
    """Says on a terminal what takes long, unless `tune` says it already."""
    if _Progress.shown or not sys.stderr.isatty():
        return contextlib.nullcontext()
    return _Progress(True, len(_choices()))


class _Progress:
    """Says on standard error how far measuring is, in a thread of its own, once it takes more than a second."""

    #: Whether one is shown now.
    shown = False

    def __init__(self, shows: bool, known: int):
        self.known, self.done, self.total = known, 0, None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True) if shows else None

    def __enter__(self) -> _Progress:
        if self._thread is not None:
            _Progress.shown = True
            self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            _Progress.shown = False

    def _run(self) -> None:
        start, wait, said = time.monotonic(), 1.0, False
        tty = sys.stderr.isatty()
        while not self._ended.wait(wait):
            text = f"torch_convoke: {self._state()}, {time.monotonic() - start:.0f} s"
            print(f"\r{text}\x1b[K" if tty else text, end="" if tty else "\n", file=sys.stderr, flush=True)
            wait, said = 0.5 if tty else 10.0, True
        if said and tty:
            print(file=sys.stderr, flush=True)

    def _state(self) -> str:
        if self.total is None:
            return f"measuring algorithms, {len(_choices()) - self.known} chosen"
        return f"{self.done} of {self.total} choices checked"
