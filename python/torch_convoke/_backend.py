"""The backend of torch.compile: gets captured graphs, and gives what runs them."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Sequence

import torch

from . import _capture, _memory, _threads, tuning
from ._run import Subgraph

#: The first calls measure: algorithms, what a budget leads to, and whether PyTorch is faster.
MEASURING_CALLS = 3


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

    def __init__(self, placeholders: Sequence[torch.fx.Node], options: Options, owner: Any):
        self.placeholders, self.options, self.owner = placeholders, options, owner
        self.run: Callable[..., Any] | None = None
        self.calls = 0
        self.subgraphs: list[Subgraph] = []
        #: The nodes that stay in PyTorch, with the reasons.
        self.left: dict[torch.fx.Node, str] = {}
        #: Why all of it stays in PyTorch, if it does.
        self.reason: str | None = None
        budget = options.memory_budget
        self.budget = None if budget is None else _memory.Budget(budget, self)

    def of_subgraphs(self, args: Sequence[Any]) -> set[int]:
        """The arguments that subgraphs take, by identity."""
        names = {node.name for subgraph in self.subgraphs for node in subgraph.placeholders}
        return {id(arg) for node, arg in zip(self.placeholders, args) if node.name in names}

    def __call__(self, *args: Any) -> Any:
        if self.calls >= MEASURING_CALLS:
            return self._run(args)
        self.calls += 1
        with tuning.progress_of_first_steps():
            return self._run(args)

    def _run(self, args: Sequence[Any]) -> Any:
        if self.budget is not None and self.subgraphs and torch.is_grad_enabled():
            self.budget.apply(args, _threads.engine(self.options.threads, self.owner))
        return self.run(*args)


class Backend:
    """A backend for torch.compile that remembers what it was given."""

    def __init__(self, options: Options):
        self.options = options
        self.captured: list[Captured] = []

    def __call__(self, module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        _capture.guard_hooks()
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        # A budget counts the bytes of one engine.
        owner = self if self.options.memory_budget is not None else None
        captured = Captured(placeholders, self.options, owner)
        self.captured.append(captured)
        try:
            self._compile(module, captured)
        except _capture.LeftAlone as reason:
            captured.reason = str(reason)
            captured.run = module.forward
        if self.options.verbose:
            from ._report import describe

            print("\n".join(describe(captured)))
        return captured

    def _compile(self, module: torch.fx.GraphModule, captured: Captured) -> None:
        if torch.is_autocast_enabled("cpu"):
            raise _capture.LeftAlone("autocast is on, and its bf16 regions are PyTorch's")
        if any("autocast" in str(node.target) for node in module.graph.nodes if node.op == "call_function"):
            raise _capture.LeftAlone("it has a region of autocast, which is PyTorch's")
        # Writes are settled on a copy: where they cannot be, PyTorch gets the graph as it was.
        settled = torch.fx.GraphModule(module, _copied(module.graph))
        settled.meta = dict(module.meta)
        must_stay = _capture.settle_writes(settled.graph)
        engine = _threads.engine(self.options.threads, captured.owner)
        support = _capture.Support(settled.graph, must_stay, engine)
        fused, names = _capture.partition(settled, support)
        for name in names:
            subgraph = Subgraph(name, getattr(fused, name), support, self.options.threads, captured.owner)
            # Within a budget there is no room for PyTorch's way to run it, and a plan says what is kept.
            subgraph.measures = self.options.measure and self.options.memory_budget is None
            subgraph.lightens = self.options.memory_budget is None
            delattr(fused, name)
            setattr(fused, name, subgraph)
            captured.subgraphs.append(subgraph)
        fused.recompile()
        captured.left = support.reasons
        captured.run = fused.forward


def _copied(graph: torch.fx.Graph) -> torch.fx.Graph:
    copy = torch.fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


def backend(module: torch.fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """For `torch.compile(model, backend="convoke")`. Options are those of `optimize`: `memory_budget`, `threads`, `verbose`."""
    known = ["memory_budget", "threads", "verbose"]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"the backend convoke has no option {unknown[0]!r}, it has {', '.join(known)}")
    if options.get("memory_budget") is not None:
        options["memory_budget"] = _memory.parse_size(options["memory_budget"])
    return Backend(Options(**options))(module, example_inputs)
