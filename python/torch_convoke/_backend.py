"""The backend of torch.compile: gets captured graphs, and gives what runs them."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Sequence

import torch

from . import _capture, _threads
from ._run import Subgraph


@dataclasses.dataclass(frozen=True)
class Options:
    """What `optimize` was told."""

    memory_budget: int | None = None
    threads: int | None = None
    verbose: bool = False


@dataclasses.dataclass
class Captured:
    """A captured graph, for reports."""

    #: Nodes that stay in PyTorch: name, operation, reason.
    left: list[tuple[str, str, str]]
    subgraphs: list[Subgraph]
    #: Why all of it stays in PyTorch, if it does.
    reason: str | None = None


class Backend:
    """A backend for torch.compile that remembers what it was given."""

    def __init__(self, options: Options):
        self.options = options
        self.captured: list[Captured] = []

    def __call__(self, module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            return self._compiled(module)
        except _capture.LeftAlone as reason:
            self.captured.append(Captured([], [], str(reason)))
            return module.forward

    def _compiled(self, module: torch.fx.GraphModule) -> Callable[..., Any]:
        if torch.is_autocast_enabled("cpu"):
            raise _capture.LeftAlone("autocast is on, and its bf16 regions are PyTorch's")
        if any("autocast" in str(node.target) for node in module.graph.nodes if node.op == "call_function"):
            raise _capture.LeftAlone("it has a region of autocast, which is PyTorch's")
        # Writes are settled on a copy: where they cannot be, PyTorch gets the graph as it was.
        settled = torch.fx.GraphModule(module, _copied(module.graph))
        settled.meta = dict(module.meta)
        must_stay = _capture.settle_writes(settled.graph)
        engine = _threads.engine(self.options.threads)
        support = _capture.Support(settled.graph, must_stay, engine)
        fused, names = _capture.partition(settled, support)
        subgraphs = []
        for name in names:
            subgraph = Subgraph(name, getattr(fused, name), support, self.options.threads)
            delattr(fused, name)
            setattr(fused, name, subgraph)
            subgraphs.append(subgraph)
        fused.recompile()
        left = [
            (_capture.path_of(node), _capture.operation_name(node), reason)
            for node, reason in support.reasons.items()
        ]
        self.captured.append(Captured(left, subgraphs))
        return fused.forward


def _copied(graph: torch.fx.Graph) -> torch.fx.Graph:
    copy = torch.fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


def backend(module: torch.fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """For `torch.compile(model, backend="convoke")`."""
    known = {field.name for field in dataclasses.fields(Options)}
    unknown = set(options) - known
    if unknown:
        raise ValueError(f"the backend convoke has no option {sorted(unknown)[0]}, it has {sorted(known)}")
    return Backend(Options(**options))(module, example_inputs)
