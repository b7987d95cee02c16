"""Plans a step's memory within a budget, and counts what PyTorch holds."""

from __future__ import annotations

import ctypes
import functools
import re
import weakref
from typing import Any, Callable, Iterable, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import _capture, _engine

#: Seconds that timing a model's blocks may take; after that each remaining kind is timed once.
SECONDS = 20.0

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _UNITS |= {f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power, _letter: 1000**_power}


def parse_size(size: int | str) -> int:
    """A number of bytes from a number, or a text such as "2GB", "512 MiB"."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", size)
        unit = _UNITS.get(match[2].lower()) if match else None
        if unit is not None and float(match[1]) * unit >= 1:
            return int(float(match[1]) * unit)
    raise ValueError(f"memory_budget must be a number of bytes or a text such as '2GB' or '512MiB', not {size!r}")


def megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """Only glibc has it."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None


def give_back() -> None:
    """Gives freed memory back to the system: malloc holds much of it after steps in PyTorch, and convoke takes no memory from malloc."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_watching = False


def watch_optimizers() -> None:
    """From now on notes the optimizers that step, whose state counts in budgets."""
    global _watching
    if not _watching:
        _watching = True
        register_optimizer_step_post_hook(lambda optimizer, args, kwargs: _optimizers.add(optimizer))


def _bytes_of(tensors: Iterable[Any]) -> int:
    """The bytes of tensors; those that share memory count once."""
    storages = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def held_by_pytorch(args: Sequence[Any], captured: Any, sizes: dict[Any, int]) -> dict[str, int]:
    """What PyTorch holds during a step, in bytes: what the graph is given, gradients that are not convoke's, the optimizer's state, and
    what operations compute that are left to PyTorch."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    known = {id(tensor) for tensor in tensors}
    state = []
    for optimizer in list(_optimizers):
        for parameter, values in list(optimizer.state.items()):
            if id(parameter) in known:
                state.extend(values.values())
    # Where gradients are added up, there are old ones beside those that backward computes.
    gradients = [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    others = [tensor for tensor in tensors if tensor.requires_grad and id(tensor) not in captured.of_subgraphs(args)]
    return {
        "parameters, buffers and inputs": _bytes_of(tensors),
        "gradients": _bytes_of([*gradients, *others]),
        "the optimizer's state": _bytes_of(state),
        "operations left to PyTorch": _capture.bytes_of_results(captured.left, sizes),
    }


def saved_by_pytorch(subgraph: Any, sizes: dict[Any, int]) -> int:
    """The bytes that PyTorch would save for backward in a subgraph, besides its parameters: its own operations run on tensors without
    elements, and what they save is counted."""
    storages: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage.nbytes()
        alive.append(tensor)
        return tensor

    with FakeTensorMode(), torch.enable_grad():
        args, own = [], set()
        for node in subgraph.placeholders:
            value = _capture.example(node)
            if isinstance(value, torch.SymFloat):
                args.append(1.0)
                continue
            if not isinstance(value, torch.Tensor):
                args.append(_capture.concrete(value, sizes))
                continue
            shape = _capture.shape_of(value, sizes)
            fake = torch.empty(shape, dtype=value.dtype)
            if _capture.is_channels_last(value):
                fake = fake.to(memory_format=_capture.CHANNELS_LAST[fake.dim()])
            # A copy, as operations may write to results of others but not to leaves.
            fake = fake.requires_grad_(value.requires_grad).clone()
            if subgraph.kinds[node] != "input":
                own.add(fake.untyped_storage()._cdata)
            args.append(fake)
        # The autocast of the place of the subgraph: whoever asks for a report stands outside of it.
        autocast = torch.autocast("cpu", subgraph.autocast or torch.bfloat16, enabled=subgraph.autocast is not None)
        with autocast, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = subgraph.module(*args)
        del outputs
    return sum(size for key, size in storages.items() if key not in own)


class Plan:
    """What a budget led to."""

    def __init__(self, budget: int, held: dict[str, int], plan: _engine.Plan):
        self.budget, self.held = budget, held
        self.keeps, self.peak, self.workspace_limit = plan.keeps, plan.bytes_peak, plan.workspace_limit

    def __str__(self) -> str:
        total = self.peak + sum(self.held.values())
        return (
            f"the peak of a step is {megabytes(total)} of {megabytes(self.budget)}: convoke {megabytes(self.peak)}, "
            + ", ".join(f"{what} {megabytes(count)}" for what, count in self.held.items() if count)
        )


class Budget:
    """Keeps the steps of a captured graph within a budget."""

    def __init__(self, budget: int, captured: Any):
        self.budget, self.captured = budget, captured
        self.plan: Plan | None = None
        self._planner: tuple[Any, Any] | None = None
        self._done: Any = None
        watch_optimizers()

    def apply(self, args: Sequence[Any], engine: _engine.Engine) -> None:
        """Makes the subgraphs keep what a plan says, before a step."""
        sizes = _capture.sizes_of(self.captured.placeholders, args)
        held = held_by_pytorch(args, self.captured, sizes)
        key = tuple(sorted((str(symbol), size) for symbol, size in sizes.items())), id(engine)
        if self._done == (key, held):
            return
        tensors = {node.name: arg for node, arg in zip(self.captured.placeholders, args)}
        specializations = [subgraph.prepare(engine, sizes, tensors) for subgraph in self.captured.subgraphs]
        specializations = [found for found in specializations if found is not None]
        if not specializations:
            return
        if self._planner is None or self._planner[0] != key:
            steps = [found.step for found in specializations]
            self._planner = key, _engine.Planner(engine, steps, SECONDS)
        rest = max(self.budget - sum(held.values()), 0)
        fits, plan = self._planner[1].within(rest)
        self.plan = Plan(self.budget, held, plan)
        if not fits:
            raise RuntimeError(
                f"no plan fits the memory budget: with the smallest one, {self.plan}. Use a smaller batch, or a budget of at "
                f"least {megabytes(self.plan.peak + sum(held.values()))}"
            )
        engine.limit_workspace(self.plan.workspace_limit)
        for found, keeps in zip(specializations, self.plan.keeps):
            found.graph.set_keeps(*keeps)
        self._done = key, held
