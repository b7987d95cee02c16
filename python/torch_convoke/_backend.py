"""The backend of torch.compile: gets captured graphs, and gives what runs them."""

from __future__ import annotations

import dataclasses
import logging
import time
import weakref
from typing import Any, Callable, Sequence

import torch

from . import _capture, _checkpoint, _memory, _pace, _partition, _threads, _writes, tuning
from ._run import Subgraph, Symbols

log = logging.getLogger("torch_convoke")

#: In the first calls something may take long: what a budget leads to is measured.
FIRST_CALLS = 3


@dataclasses.dataclass(frozen=True)
class Options:
    """What `optimize` was told."""

    memory_budget: int | None = None
    threads: int | None = None
    verbose: bool = False
    #: Whether to leave subgraphs to PyTorch that it runs faster.
    measure: bool = True


class Captured:
    """A captured graph, which runs when it is called."""

    def __init__(self, module: torch.fx.GraphModule, backend: Backend, owner: Any):
        self.nodes = [node for node in module.graph.nodes if node.op.startswith("call_")]
        self.placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        self.options, self.owner = backend.options, owner
        self._backend = weakref.ref(backend)
        self.run: Callable[..., Any] | None = None
        self.calls = 0
        #: Whether sizes may differ from call to call, and what they are in this one.
        self.is_dynamic = any(_capture.is_dynamic(node) for node in self.placeholders)
        self.symbols = Symbols()
        #: Which of the model's calls was the last one that ran this.
        self.last_call = 0
        self.subgraphs: list[Subgraph] = []
        #: The nodes that stay in PyTorch, with the reasons.
        self.left: dict[torch.fx.Node, str] = {}
        #: Why all of it stays in PyTorch, if it does.
        self.reason: str | None = None
        #: Whether it turns gradients on or off inside.
        self.sets_grad = False
        #: Seconds of all forwards, and of those parts of them that ran in convoke's subgraphs.
        self.seconds = self.inside = 0.0
        budget = self.options.memory_budget
        self.budget = None if budget is None else _memory.Budget(budget, self)

    def of_subgraphs(self, args: Sequence[Any]) -> set[int]:
        """The arguments that subgraphs take, by identity."""
        names = {node.name for subgraph in self.subgraphs for node in subgraph.placeholders}
        return {id(arg) for node, arg in zip(self.placeholders, args) if node.name in names}

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        if (backend := self._backend()) is not None:
            backend.runs += 1
            self.last_call = backend.call
        if not self.subgraphs:
            return self._guarded(args)
        engine = _threads.engine(self.options.threads, self.owner)
        pace = _pace.of(engine)
        if self.calls > FIRST_CALLS and pace.is_settled():
            pace.measure(engine)
            return self._timed(args, engine)
        with tuning.progress_of_first_steps():
            pace.measure(engine)
            return self._timed(args, engine)

    def _timed(self, args: Sequence[Any], engine: Any) -> Any:
        if self.budget is not None and torch.is_grad_enabled():
            self.budget.apply(args, engine)
        if self.calls <= FIRST_CALLS:
            return self._guarded(args)
        start, before = time.perf_counter(), sum(subgraph.seconds for subgraph in self.subgraphs)
        results = self._guarded(args)
        self.seconds += time.perf_counter() - start
        self.inside += sum(subgraph.seconds for subgraph in self.subgraphs) - before
        return results

    def _guarded(self, args: Sequence[Any]) -> Any:
        if self.is_dynamic:
            self.symbols.sizes = _capture.sizes_of(self.placeholders, args)
        if not self.sets_grad:
            return self.run(*args)
        # An error inside would leave gradients off.
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            return self.run(*args)


class Backend:
    """A backend for torch.compile that remembers what it was given."""

    _all: weakref.WeakSet[Backend] = weakref.WeakSet()

    def __init__(self, options: Options):
        Backend._all.add(self)
        self.options = options
        self.captured: list[Captured] = []
        #: How many times captured graphs have run, and the number of the model's call that runs now.
        self.runs = self.call = 0

    @staticmethod
    def measuring_calls() -> int:
        """How many calls of subgraphs there were, in all, before it was known whether convoke or PyTorch is faster."""
        graphs = [captured for backend in list(Backend._all) for captured in backend.captured]
        return sum(subgraph.measuring_calls for captured in graphs for subgraph in captured.subgraphs)

    def __call__(self, module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        _capture.guard_hooks()
        # A budget counts the bytes of one engine.
        owner = self if self.options.memory_budget is not None else None
        captured = Captured(module, self, owner)
        self.captured.append(captured)
        try:
            captured.run = self.compiled(module, captured)
        except Exception as error:
            # A mistake of ours costs speed, not the user's training.
            log.warning("a graph of %d operations runs in PyTorch: %s", len(captured.nodes), error, exc_info=True)
            captured.run, captured.subgraphs = module.forward, []
            captured.reason = f"an internal error, {type(error).__name__}: {error}; please report it"
        if captured.reason is None and not captured.subgraphs and not captured.left:
            captured.reason = "it has nothing that convoke would run"
        if self.options.verbose:
            from ._report import describe

            print("\n".join(describe(captured)))
        return captured

    def compiled(self, module: torch.fx.GraphModule, captured: Captured, measures: bool = True) -> Callable[..., Any]:
        """What runs a graph, which may be a part of a captured one; the subgraphs are added to what is captured.

        `measures` says whether subgraphs may run in PyTorch by turns.
        """
        writes = _writes.settle(module.graph)
        regions = _partition.Regions(writes.graph)
        engine = _threads.engine(self.options.threads, captured.owner)
        try:
            support = _capture.Support(writes, regions, engine)
        except _capture.LeftAlone as reason:
            captured.left |= {node: str(reason) for node in module.graph.nodes if node.op.startswith("call_")}
            return module.forward
        partition = _partition.Partition(writes, regions, support.kinds, support.supported)
        parts = partition.parts
        for node, why in partition.reasons.items():
            support.leave(node, why)
        captured.left |= support.reasons
        fused = _partition.fuse(module, partition, parts)
        regions_inside = _checkpoint.replace(fused, self, captured, support)
        if not parts and not regions_inside:
            return module.forward
        for part in parts:
            subgraph = Subgraph(part, support, self.options.threads, captured.owner, captured.symbols)
            # Within a budget there is no room for PyTorch's way to run it, and a plan says what is kept.
            subgraph.measures &= measures and self.options.measure and self.options.memory_budget is None
            subgraph.lightens = self.options.memory_budget is None
            delattr(fused, part.name)
            setattr(fused, part.name, subgraph)
            captured.subgraphs.append(subgraph)
        captured.sets_grad |= any(node.target is torch._C._set_grad_enabled for node in fused.graph.nodes)
        fused.recompile()
        return fused.forward


#: The options of `backend`, which are those of `optimize`.
OPTIONS = ("memory_budget", "threads", "verbose")


def backend(
    module: torch.fx.GraphModule, example_inputs: Sequence[Any], options: dict[str, Any] | None = None, **others: Any
) -> Callable[..., Any]:
    """For `torch.compile(model, backend="convoke", options={...})`. Options are those of `optimize`: `memory_budget`, `threads`,
    `verbose`."""
    others = {**(options or {}), **others}
    unknown = sorted(set(others) - set(OPTIONS))
    if unknown:
        raise ValueError(f"the backend convoke has no option {unknown[0]!r}, it has {', '.join(OPTIONS)}")
    if others.get("memory_budget") is not None:
        others["memory_budget"] = _memory.parse_size(others["memory_budget"])
    _threads.check(others.get("threads"))
    return Backend(Options(**others))(module, example_inputs)
