"""Cuts a captured graph into subgraphs that convoke runs and operations that PyTorch runs.

Every node gets a phase. Subgraphs of a phase run before PyTorch's operations of that phase, and those before the subgraphs of the next one;
what reads a result of PyTorch's is a phase later, so that no subgraph waits for itself. What must keep its order beside that (random
numbers, statistics, memory that is written to, regions of autocast) is ordered as if it read what comes before it. So an operation that
convoke lacks costs that operation, and what depends on it goes on in a later subgraph.
"""

from __future__ import annotations

import operator
import re
from typing import Any, Sequence

import torch

from . import _operators
from ._writes import Writes, example, is_given, operation_name

#: Functions that draw random numbers, beside those whose ATen operators say so.
_RANDOM = re.compile("dropout|bernoulli|(^|_)rand|multi_head_attention|scaled_dot_product|gumbel|rrelu|fractional|poisson|checkpoint")
#: Parts of names of functions that change how PyTorch runs what comes after them.
_STATEFUL = re.compile("autocast|inference_mode|nesting|set_multithreading|saved_tensors|torch_function")
_SET_GRAD_ENABLED = torch._C._set_grad_enabled


class Regions:
    """What is on where a node stands: gradients and autocast."""

    def __init__(self, graph: torch.fx.Graph):
        #: Whether gradients are recorded, for nodes in a region of their own such as `torch.no_grad()`.
        self.grad: dict[torch.fx.Node, bool] = {}
        #: The type that autocast computes in; None where it is off.
        self.autocast: dict[torch.fx.Node, torch.dtype | None] = {}
        #: Why nodes stay in PyTorch.
        self.reasons: dict[torch.fx.Node, str] = {}
        #: The nodes that all others keep their place to.
        self.barriers: set[torch.fx.Node] = set()
        ambient = torch.is_grad_enabled()
        grad, autocast, other = ambient, [_autocast_now()], []
        for node in graph.nodes:
            if node.op not in ("call_function", "call_method"):
                continue
            name = operation_name(node)
            if node.target is _SET_GRAD_ENABLED:
                grad = bool(node.args[0])
                continue
            self.grad[node], self.autocast[node] = grad, autocast[-1]
            if node.op == "call_function" and _STATEFUL.search(name):
                self.barriers.add(node)
                if "enter_autocast" in name:
                    autocast.append(_autocast_of(node, autocast[-1]))
                elif "exit_autocast" in name:
                    autocast = autocast[:-1] or autocast
                elif name.startswith("_exit") or "exit" in name:
                    other = other[:-1]
                else:
                    other.append(name)
            elif other:
                self.reasons[node] = f"it is in a region of {other[-1]}"
            elif autocast[-1] not in (None, torch.bfloat16):
                self.reasons[node] = f"autocast to {str(autocast[-1]).removeprefix('torch.')} is on"


def _autocast_now() -> torch.dtype | None:
    """The type that autocast computes in on the CPU; None if it is off."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


def _autocast_of(node: torch.fx.Node, before: torch.dtype | None) -> torch.dtype | None:
    """The type of a region of autocast: its arguments are device, type, whether it is enabled, whether weights are cached."""
    arguments = dict(zip(("device_type", "dtype", "enabled"), node.args)) | dict(node.kwargs)
    if arguments.get("device_type") != "cpu":
        return before
    return (arguments.get("dtype") or torch.bfloat16) if arguments.get("enabled", True) else None


def effects_of(node: torch.fx.Node, kinds: dict[torch.fx.Node, str]) -> list[Any]:
    """In what a node must keep its place among others: the random numbers that it draws, the statistics that it changes or reads."""
    if node.op not in ("call_function", "call_method"):
        return []
    found: list[Any] = [read for read in node.all_input_nodes if kinds.get(read) == "statistic"]
    name = operation_name(node)
    packet = getattr(torch.ops.aten, name, None) if not name.startswith("_") else None
    seeded = packet is not None and any(
        torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags for overload in packet.overloads()
    )
    if seeded or _RANDOM.search(name) or isinstance(node.target, torch._ops.HigherOrderOperator):
        training = node.kwargs.get("training", node.args[2] if len(node.args) > 2 else True)
        if "dropout" not in name or training:
            found.append("random numbers")
    return found


def kept_features(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The results that the graph gives and that other nodes read as well.

    Somebody may ask for their gradients, or put a hook on them: what reads them must read what the user gets.
    """
    (output,) = graph.find_nodes(op="output")
    return {
        node
        for node in output.all_input_nodes
        if len(node.users) > 1 and isinstance(value := example(node), torch.Tensor) and value.requires_grad
    }


def sizes_in(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The nodes that compute sizes and other numbers from sizes, as captures for any batch or image size do.

    They cost nothing: each subgraph has its own, so that it need not wait for its own results.
    """
    found: set[torch.fx.Node] = set()
    for node in graph.nodes:
        value = example(node)
        parts = value if isinstance(value, (tuple, list)) else [value]
        numbers = bool(parts) and all(isinstance(part, _SIZES) for part in parts)
        if node.op in ("call_function", "call_method") and numbers:
            known = node.target in ("size", "dim", "numel", "stride") or node.target is operator.getitem
            if known or all(read in found or isinstance(example(read), _SIZES) for read in node.all_input_nodes):
                found.add(node)
    return found


_SIZES = (int, torch.SymInt, torch.SymBool)


class Part:
    """Nodes that become one subgraph."""

    def __init__(self, phase: int, nodes: list[torch.fx.Node], sizes: set[torch.fx.Node], outer: set[torch.fx.Node]):
        """`sizes` are the nodes that compute sizes, `outer` those of them that PyTorch's operations need."""
        self.phase, self.nodes = phase, nodes
        #: The sizes that these read, in order.
        self.sizes: list[torch.fx.Node] = []
        inside, taken = set(nodes), {}

        def read(node: torch.fx.Node) -> None:
            for other in node.all_input_nodes:
                if other in inside:
                    continue
                if other in sizes:
                    read(other)
                    self.sizes.append(other)
                    inside.add(other)
                else:
                    taken[other] = None

        for node in nodes:
            read(node)
        #: The nodes outside that these read, which are its arguments; and those of them that others read, which are its results.
        self.taken = list(taken)
        self.given = [node for node in nodes if any(user in outer or user not in inside and user not in sizes for user in node.users)]
        #: The name of the part in the module that runs it, and its own module.
        self.name: str | None = None
        self.module: torch.fx.GraphModule | None = None

    def reason_against(self, kinds: dict[torch.fx.Node, str]) -> str | None:
        """Why PyTorch should run it, if it should."""
        if not any(_operators.find(node)[0].computes for node in self.nodes):
            return "there is nothing beside it that convoke would make faster"
        changes = any(kinds.get(read) == "statistic" for node in self.nodes for read in node.all_input_nodes)
        return None if self.given or changes else "nobody reads its result"

    def build(self, host: torch.fx.GraphModule) -> None:
        """Makes its module."""
        graph, copies = torch.fx.Graph(), {}
        for node in self.taken:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
        order = {node: place for place, node in enumerate(self.nodes[0].graph.nodes)}
        for node in sorted([*self.nodes, *self.sizes], key=order.__getitem__):
            copies[node] = graph.node_copy(node, lambda read: copies[read])
        given = tuple(copies[node] for node in self.given)
        graph.output(given[0] if len(given) == 1 else given)
        self.module = torch.fx.GraphModule(host, graph)


class Partition:
    """The phases of a graph's nodes and its parts."""

    def __init__(self, writes: Writes, regions: Regions, kinds: dict[torch.fx.Node, str], supported: set[torch.fx.Node]):
        self.graph, self.regions = writes.graph, regions
        self.phases: dict[torch.fx.Node, int] = {}
        graph = writes.graph
        features, sizes = kept_features(graph), sizes_in(graph)
        joined = _Sets()
        last: dict[Any, torch.fx.Node] = {}
        floors = {True: 0, False: -1}
        for node in graph.nodes:
            if node.op == "output":
                continue
            runs = node in supported
            before = [*_through(node, sizes), *writes.before.get(node, ())]
            for effect in effects_of(node, kinds):
                if effect in last:
                    before.append(last[effect])
                last[effect] = node
            phase = floors[runs]
            for other in before:
                near = runs and other in supported and other not in features and regions.grad[other] == regions.grad[node]
                phase = max(phase, self.phases[other] + (runs and not near))
            if node in regions.barriers:
                phase = max(self.phases.values(), default=-1)
                floors = {True: phase + 1, False: phase}
            self.phases[node] = phase
            if runs:
                joined.add(node)
                for other in before:
                    if other in supported and self.phases[other] == phase:
                        joined.join(node, other)
        groups: dict[torch.fx.Node, list[torch.fx.Node]] = {}
        for node in graph.nodes:
            if node in supported:
                groups.setdefault(joined.root(node), []).append(node)
        #: What becomes a subgraph each, and why the nodes of other groups do not.
        self.parts: list[Part] = []
        self.reasons: dict[torch.fx.Node, str] = {}
        chosen = list(groups.values())
        while True:
            #: The sizes that only subgraphs need, which have their own.
            self.inner = _read_only_by({node for nodes in chosen for node in nodes}, sizes, graph)
            self.parts = [Part(self.phases[nodes[0]], nodes, sizes, sizes - self.inner) for nodes in chosen]
            left = {id(part.nodes): reason for part in self.parts if (reason := part.reason_against(kinds)) is not None}
            if not left:
                break
            for nodes in chosen:
                if id(nodes) in left:
                    self.reasons |= dict.fromkeys(nodes, left[id(nodes)])
            chosen = [nodes for nodes in chosen if id(nodes) not in left]


def _read_only_by(inside: set[torch.fx.Node], sizes: set[torch.fx.Node], graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The sizes that no node outside of a set reads, but sizes that are such themselves."""
    found = set(sizes)
    for node in reversed(graph.nodes):
        if node not in inside and node not in found:
            found.difference_update(node.all_input_nodes)
    return found


def _through(node: torch.fx.Node, sizes: set[torch.fx.Node]) -> list[torch.fx.Node]:
    """What a node reads; in place of a size, what that is computed from."""
    found: dict[torch.fx.Node, None] = {}
    for read in node.all_input_nodes:
        found.update(dict.fromkeys(_through(read, sizes) if read in sizes else [read]))
    return list(found)


class _Sets:
    """Disjoint sets of nodes."""

    def __init__(self) -> None:
        self._parents: dict[torch.fx.Node, torch.fx.Node] = {}

    def add(self, node: torch.fx.Node) -> None:
        self._parents[node] = node

    def root(self, node: torch.fx.Node) -> torch.fx.Node:
        while self._parents[node] is not node:
            self._parents[node] = self._parents[self._parents[node]]
            node = self._parents[node]
        return node

    def join(self, one: torch.fx.Node, other: torch.fx.Node) -> None:
        self._parents[self.root(one)] = self.root(other)


def fuse(module: torch.fx.GraphModule, partition: Partition, parts: Sequence[Part]) -> torch.fx.GraphModule:
    """A module that runs the graph of a partition. Each of `parts` becomes a submodule, whose name and module it gets."""
    graph, grad = partition.graph, partition.regions.grad
    inside = {node for part in parts for node in part.nodes}
    # Arguments come first, in their order, and the subgraphs of a phase before the other nodes.
    steps: list[tuple[tuple[int, int, int], Any]] = [((part.phase, 0, place), part) for place, part in enumerate(parts)]
    for place, node in enumerate(graph.nodes):
        if is_given(node):
            steps.append(((-2, 0, place), node))
        elif node.op != "output" and node not in inside | partition.inner and node.target is not _SET_GRAD_ENABLED:
            steps.append(((partition.phases[node], 1, place), node))
    steps.sort(key=lambda step: step[0])

    host, fused = torch.fx.GraphModule(module, graph), torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    ambient = recording = torch.is_grad_enabled()

    def record(wanted: bool) -> None:
        nonlocal recording
        if wanted != recording:
            fused.call_function(_SET_GRAD_ENABLED, (wanted,))
            recording = wanted

    for _, step in steps:
        if isinstance(step, Part):
            record(grad[step.nodes[0]])
            step.name = f"convoke_{sum(part.name is not None for part in parts)}"
            step.build(host)
            host.add_module(step.name, step.module)
            call = fused.call_module(step.name, tuple(copies[node] for node in step.taken))
            for place, node in enumerate(step.given):
                copies[node] = call if len(step.given) == 1 else fused.call_function(operator.getitem, (call, place))
                copies[node].meta = dict(node.meta)
        else:
            record(grad.get(step, recording))
            copies[step] = fused.node_copy(step, lambda node: copies[node])
    record(ambient)
    (output,) = graph.find_nodes(op="output")
    fused.output(torch.fx.node.map_arg(output.args[0], lambda node: copies[node]))
    return torch.fx.GraphModule(host, fused)
