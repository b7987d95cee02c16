"""Writes in place: which nodes of a captured graph write to tensors, and how their order follows from what nodes read."""

from __future__ import annotations

import inspect
import operator
from typing import Any

import torch

from . import _operators


def example(node: torch.fx.Node) -> Any:
    """What a node gave when the graph was captured: fake tensors, numbers."""
    return node.meta.get("example_value")


def operation_name(node: torch.fx.Node) -> str:
    if isinstance(node.target, str):
        return node.target
    return getattr(node.target, "__name__", str(node.target))


def storages(node: torch.fx.Node) -> set[int]:
    """The memory of a node's tensors: views of one tensor have it in common."""
    value = example(node)
    parts = value if isinstance(value, (tuple, list)) else [value]
    return {part.untyped_storage()._cdata for part in parts if isinstance(part, torch.Tensor) and part.layout is torch.strided}


def is_view(node: torch.fx.Node) -> bool:
    """Whether a node's tensors share memory with what it reads."""
    return not node.meta.get("convoke_copies") and any(storages(node) & storages(read) for read in node.all_input_nodes)


def is_given(node: torch.fx.Node) -> bool:
    """Whether a node is a tensor that enters the graph."""
    return node.op in ("placeholder", "get_attr")


def set_item(tensor: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    """`tensor[index] = value`, which gives the tensor."""
    tensor[index] = value
    return tensor


def writes_into(node: torch.fx.Node) -> torch.fx.Node | None:
    """The node whose tensor this node writes to, if there is one."""
    if node.op not in ("call_function", "call_method"):
        return None
    if isinstance(node.kwargs.get("out"), torch.fx.Node):
        return node.kwargs["out"]
    _, in_place = _operators.find(node)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    by_name = name.endswith("_") and not name.endswith("__")
    if not (in_place or by_name or node.target in (operator.setitem, set_item)):
        flag = node.kwargs.get("inplace")
        if flag is None and node.op == "call_function":
            try:
                flag = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments.get("inplace")
            except (TypeError, ValueError):
                flag = None
        if not flag:
            return None
    first = node.args[0] if node.args else node.kwargs.get("input")
    return first if isinstance(first, torch.fx.Node) else None


class Writes:
    """A captured graph whose writes are settled: later readers of a tensor that an operation writes to read that operation's result, so
    that the order of nodes follows from what they read."""

    def __init__(self, graph: torch.fx.Graph):
        #: A copy of the graph, with other edges where a tensor is written to.
        self.graph = graph
        #: The nodes that must stay in PyTorch, with the reason.
        self.must_stay: dict[torch.fx.Node, str] = {}
        #: For nodes that touch memory whose writes cannot be settled, the nodes that must run before.
        self.before: dict[torch.fx.Node, list[torch.fx.Node]] = {}


def settle(graph: torch.fx.Graph) -> Writes:
    """Settles the writes of a graph on a copy of it.

    Memory that is written to in a way that this cannot follow, such as through another view than the one that is read later, is left as it
    is: what touches it stays in PyTorch, in the order of the graph.
    """
    unfollowed: set[int] = set()
    while True:
        writes = Writes(torch.fx.Graph())
        writes.graph.output(writes.graph.graph_copy(graph, {}))
        found = _settle(writes, unfollowed)
        if not found:
            break
        unfollowed |= found
    for storage in unfollowed:
        _chain(writes, storage)
    return writes


def _settle(writes: Writes, unfollowed: set[int]) -> set[int]:
    """Settles the writes to all memory but `unfollowed`. Gives the memory for which that is not possible; the graph is then useless."""
    graph = writes.graph
    order: dict[torch.fx.Node, float] = {node: place for place, node in enumerate(graph.nodes)}
    holders: dict[int, list[torch.fx.Node]] = {}
    for node in graph.nodes:
        for storage in storages(node):
            holders.setdefault(storage, []).append(node)
    for node in list(graph.nodes):
        hidden = _hidden_writes(node)
        if hidden - unfollowed:
            return hidden
        target = writes_into(node)
        if target is None or isinstance(example(target), (int, float, torch.SymInt, torch.SymFloat)):
            continue
        shared = storages(target)
        if not shared:
            writes.must_stay[node] = "it writes to what has no memory of its own"
            continue
        if shared & unfollowed:
            continue
        place = order[node]
        holding = {other for storage in shared for other in holders[storage]}
        kin = [other for other in holding if other is not target and order[other] < place]
        given = is_given(target) or target in writes.must_stay
        family = {*kin, target, node}
        read_before = any(user not in family and order[user] < place for other in family for user in other.users)
        if (
            # A part of what the model was given, or what it holds twice.
            any(is_given(other) and not (given and other in _written(target)) for other in kin)
            # The memory is read through another view afterwards.
            or any(order[user] > place for other in kin for user in other.users)
            or given
            and read_before
        ):
            return shared
        if given:
            writes.must_stay[node] = "it writes to what the model was given"
        elif read_before and not _without_writing(node):
            if "out" in node.kwargs:
                return shared
            with graph.inserting_before(node):
                copy = graph.call_method("clone", (target,))
            copy.meta = dict(target.meta)
            order[copy] = place - 0.5
            for storage in shared:
                holders[storage].append(copy)
            node.replace_input_with(target, copy)
        later = [user for user in target.users if order[user] > place]
        if later and node.target is operator.setitem:
            node.target = set_item
            node.meta = {**target.meta, "nn_module_stack": node.meta.get("nn_module_stack")}
            for storage in shared:
                holders[storage].append(node)
        target.replace_all_uses_with(node, delete_user_cb=lambda user: order[user] > place)
    return set()


def _chain(writes: Writes, storage: int) -> None:
    """Keeps what touches a memory in PyTorch, in order; what reads it after the last write may run anywhere, but after that."""
    touching = []
    for node in writes.graph.nodes:
        own = storage in storages(node)
        if not is_given(node) and node.op != "output" and (own or any(storage in storages(read) for read in node.all_input_nodes)):
            touching.append((node, own))
    last = max((place for place, (node, _) in enumerate(touching) if _writes_to(node, storage)), default=-1)
    for place, (node, own) in enumerate(touching):
        if own or place <= last:
            writes.must_stay.setdefault(node, "it shares memory with what is written to through another view")
        if place > 0 and last >= 0:
            writes.before.setdefault(node, []).append(touching[min(place - 1, last)][0])


def _writes_to(node: torch.fx.Node, storage: int) -> bool:
    target = writes_into(node)
    return storage in _hidden_writes(node) or (target is not None and storage in storages(target))


def _hidden_writes(node: torch.fx.Node) -> set[int]:
    """The memory that a node may write to beside that of its first argument, as its schema or its name says."""
    if node.op not in ("call_function", "call_method"):
        return set()
    schema = getattr(node.target, "_schema", None)
    lists = [arg for arg in node.args if isinstance(arg, (tuple, list)) and any(isinstance(one, torch.fx.Node) for one in arg)]
    if getattr(schema, "is_mutable", False) or (lists and operation_name(node).endswith("_")):
        return {storage for read in node.all_input_nodes for storage in storages(read)}
    return set()


def _written(node: torch.fx.Node) -> set[torch.fx.Node]:
    """What nodes that write to each other's results write to in the end, with all of them on the way."""
    found = {node}
    target = writes_into(node)
    while target is not None and target not in found:
        found.add(target)
        target = writes_into(target)
    return found


def _without_writing(node: torch.fx.Node) -> bool:
    """Changes a node so that it computes the same into a new tensor; gives whether that is possible."""
    op, in_place = _operators.find(node)
    types = {part.dtype for read in node.all_input_nodes if isinstance(part := example(read), torch.Tensor)}
    if op is None or "out" in node.kwargs or len(types) > 1:
        return False
    if node.op == "call_method" and in_place:
        node.target = str(node.target)[:-1]
    elif in_place:
        node.target = _operators.out_of_place(node.target)
    else:
        names = list(inspect.signature(node.target).parameters)
        place = names.index("inplace")
        if place < len(node.args):
            node.args = (*node.args[:place], False, *node.args[place + 1 :])
        else:
            node.kwargs = {**node.kwargs, "inplace": False}
    node.meta["convoke_copies"] = True
    return True
