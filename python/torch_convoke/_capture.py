"""Finds in a captured model what convoke runs, and puts subgraphs of it in the place of PyTorch's operations.

The graph is what TorchDynamo captures for a backend of torch.compile: calls such as `torch.conv2d` and `F.relu`, with parameters and
buffers among its inputs. It is cut into the largest subgraphs of operations that `_operators` translates; the rest stays in PyTorch.
"""

from __future__ import annotations

import inspect
import json
import operator
import re
from typing import Any, Iterable

import torch
import torch.nn.functional as F
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from . import _engine, _operators
from ._operators import Emitter, Unsupported, Value

DTYPES = {torch.float32: "f32", torch.float64: "f64"}
#: The same types in definitions.
KINDS = {torch.float32: "F32", torch.float64: "F64"}


class LeftAlone(Exception):
    """Why a whole graph stays in PyTorch."""


def example(node: torch.fx.Node) -> Any:
    """What a node gave when the graph was captured: fake tensors, numbers."""
    return node.meta.get("example_value")


def name_of(node: torch.fx.Node) -> str:
    """The name of a parameter or buffer in the user's model, or the node's own."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    try:
        text = source.name if isinstance(source.name, str) else source.name()
    except Exception:
        return node.name
    parts = re.findall(r"(?:_modules|_parameters|_buffers)\['([^']+)'\]", text)
    return ".".join(parts) or node.name


def path_of(node: torch.fx.Node) -> str:
    """The module that a node belongs to, such as layer1.0.conv1, or the node's own name."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return node.name
    text = list(stack.values())[-1][0]
    path = re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", text)
    path = re.sub(r"^L\.self\.?|(?:^|\.)_modules(?=\.|$)|^self\.?", "", path)
    path = re.sub(r"\.(?:_modules)(?=\.)", "", path).strip(".")
    return path or node.name


def kinds_of(graph: torch.fx.Graph) -> dict[torch.fx.Node, str]:
    """What each value that enters a graph is: "parameter", "statistic" of a batch norm, "input", or "number"."""
    statistics = set()
    for node in graph.nodes:
        if node.op == "call_function" and node.target is F.batch_norm:
            bound = bind(_operators.find(node)[0], node)
            statistics.update((bound.get("running_mean"), bound.get("running_var")))
    kinds = {}
    for node in graph.nodes:
        if node.op not in ("placeholder", "get_attr"):
            continue
        value = example(node)
        if not isinstance(value, torch.Tensor):
            kinds[node] = "number"
        elif node in statistics:
            kinds[node] = "statistic"
        elif isinstance(value, torch.nn.Parameter) and node.op == "placeholder":
            kinds[node] = "parameter"
        else:
            kinds[node] = "input"
    return kinds


def bind(op: _operators.Operator, node: torch.fx.Node) -> dict[str, Any]:
    """The arguments of a node by the names of the translation's parameters."""
    signature = inspect.signature(op.translate)
    try:
        return dict(signature.bind(None, *node.args, shape=None, **node.kwargs).arguments)
    except TypeError as error:
        raise Unsupported(f"its arguments are not known ({error})") from None


def writes_into(node: torch.fx.Node) -> torch.fx.Node | None:
    """The node whose tensor this node writes to, if there is one."""
    if node.op not in ("call_function", "call_method"):
        return None
    if isinstance(node.kwargs.get("out"), torch.fx.Node):
        return node.kwargs["out"]
    _, in_place = _operators.find(node)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    by_name = name.endswith("_") and not name.endswith("__")
    if not (in_place or by_name or node.target is operator.setitem):
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


def _is_view(node: torch.fx.Node) -> bool:
    """Whether a node's result may share memory with its inputs. Of operations that are not known nothing else is assumed."""
    if node.op == "placeholder" or node.op == "get_attr":
        return False
    op, _ = _operators.find(node)
    return op is None or op.view


def settle_writes(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Makes later readers of a tensor that an operation writes to read that operation's result, so that the order of nodes follows from
    what they read. Gives the nodes that must stay in PyTorch because they write to what the graph was given.

    Raises LeftAlone if a tensor may be shared in a way that this cannot follow.
    """
    order = {node: place for place, node in enumerate(graph.nodes)}
    must_stay = set()
    for node in list(graph.nodes):
        target = writes_into(node)
        if target is None:
            continue
        if target.op in ("placeholder", "get_attr"):
            if len(target.users) > 1:
                raise LeftAlone(f"{node.name} writes to {name_of(target)}, which other operations read")
            must_stay.add(node)
            continue
        # What `target` is a view of must not be read by others.
        view = target
        while _is_view(view):
            bases = view.all_input_nodes
            if any(len(base.users) > 1 or base.op in ("placeholder", "get_attr") for base in bases):
                raise LeftAlone(f"{node.name} writes to a part of a tensor that others read")
            if not bases:
                break
            view = bases[0]
        others = [user for user in target.users if user is not node]
        for user in others:
            later = any(order[reader] > order[node] for reader in user.users)
            if order[user] < order[node] and _is_view(user) and later:
                raise LeftAlone(f"{node.name} writes to a tensor that a view is read of afterwards")
        if not others:
            continue
        if not _without_writing(node):
            raise LeftAlone(f"{node.name} writes to a tensor that other operations read")
        target.replace_all_uses_with(node, delete_user_cb=lambda user: order[user] > order[node])
    return must_stay


def _without_writing(node: torch.fx.Node) -> bool:
    """Changes a node so that it computes the same into a new tensor; gives whether that is possible."""
    op, in_place = _operators.find(node)
    if op is None or "out" in node.kwargs:
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
    return True


def concrete(value: Any, sizes: dict[Any, int]) -> Any:
    """A number of the graph as an int or float: `sizes` has the values of its symbols."""
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        expression = value.node.expr
        found = expression.xreplace(sizes) if sizes else expression
        if not found.is_number:
            hint = value.node.hint
            if sizes or hint is None:
                raise Unsupported("a size depends on values")
            return hint
        return int(found) if isinstance(value, torch.SymInt) else float(found)
    return value


def shape_of(tensor: torch.Tensor, sizes: dict[Any, int]) -> tuple[int, ...]:
    return tuple(concrete(size, sizes) for size in tensor.shape)


class Translator:
    """Turns nodes of a captured graph into nodes of a definition."""

    def __init__(self, kinds: dict[torch.fx.Node, str], names: dict[torch.fx.Node, str], sizes: dict[Any, int]):
        self.to = Emitter()
        self.kinds, self.names, self.sizes = kinds, names, sizes
        self.values: dict[torch.fx.Node, Any] = {}
        #: The nodes whose tensors the definition takes: as inputs, and as parameters and statistics.
        self.inputs: list[torch.fx.Node] = []
        self.state: list[torch.fx.Node] = []

    def value(self, node: torch.fx.Node) -> Any:
        """The value of a node that is read."""
        if node not in self.values:
            self.values[node] = self._outer(node)
        return self.values[node]

    def _outer(self, node: torch.fx.Node) -> Any:
        """A value that comes from outside."""
        tensor = example(node)
        if not isinstance(tensor, torch.Tensor):
            if isinstance(tensor, (tuple, list)):
                raise Unsupported("it reads several values of an operation that is left to PyTorch")
            return concrete(tensor, self.sizes)
        kind = self.kinds.get(node, "input")
        value = Value(self.names[node], shape_of(tensor, self.sizes), kind)
        if kind == "input":
            self.inputs.append(node)
        else:
            self.state.append(node)
            values = {"Constant": {"shape": list(value.shape), "value": 0.0}}
            trained = True if kind == "parameter" else None
            self.to.stored.append({"name": value.name, "values": values, "trained": trained})
        return value

    def node(self, node: torch.fx.Node) -> None:
        """Translates one node."""
        op, _ = _operators.find(node)
        if op is None:
            raise Unsupported(f"convoke has no {operation_name(node)}")
        bind(op, node)
        result = example(node)
        shape = (
            [shape_of(part, self.sizes) for part in result]
            if isinstance(result, (tuple, list))
            else shape_of(result, self.sizes)
        )
        self.to.place = path_of(node)
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self.value)
        self.values[node] = op.translate(self.to, *args, **kwargs, shape=shape)

    def taken(self) -> list[Value]:
        """What the definition takes: the inputs, and then what dropout multiplies by."""
        return [self.values[node] for node in self.inputs] + [noise for noise, _ in self.to.noises]

    def definition(self, outputs: Iterable[torch.fx.Node], dtype: torch.dtype) -> str:
        """The definition as JSON."""
        kind = KINDS[dtype]
        return json.dumps(
            {
                "name": "subgraph",
                "inputs": [{"name": value.name, "kind": kind, "shape": None} for value in self.taken()],
                "outputs": [self.values[node].name for node in outputs],
                "nodes": self.to.nodes,
                "stored": self.to.stored,
            }
        )


def operation_name(node: torch.fx.Node) -> str:
    if isinstance(node.target, str):
        return node.target
    return getattr(node.target, "__name__", str(node.target))


def unique_names(nodes: Iterable[torch.fx.Node]) -> dict[torch.fx.Node, str]:
    """A name for each node: that of the parameter or buffer in the model, if no other has it."""
    names: dict[torch.fx.Node, str] = {}
    known: set[str] = set()
    for node in nodes:
        name = name_of(node)
        name = node.name if name in known else name
        known.add(name)
        names[node] = name
    return names


class Support(OperatorSupportBase):
    """Which nodes of a graph convoke runs; for each other one, the reason."""

    def __init__(self, graph: torch.fx.Graph, must_stay: set[torch.fx.Node], engine: _engine.Engine):
        self.kinds = kinds_of(graph)
        self.names = unique_names(graph.nodes)
        self.dtype = self._dtype(graph)
        self.reasons: dict[torch.fx.Node, str] = {}
        self.supported: set[torch.fx.Node] = set()
        dry = engine.dry()
        for node in graph.nodes:
            if node.op not in ("call_function", "call_method", "call_module"):
                continue
            try:
                if node in must_stay:
                    raise Unsupported("it writes to what the model was given")
                self._check(node, dry)
                self.supported.add(node)
            except Unsupported as reason:
                self.reasons[node] = str(reason)
        self._keep_lists_together(graph)

    def is_node_supported(self, submodules: Any, node: torch.fx.Node) -> bool:
        return node in self.supported

    def _dtype(self, graph: torch.fx.Graph) -> torch.dtype:
        """The type that convoke computes in: that of the first parameter or input in a type that it has."""
        tensors = [example(node) for node in self.kinds]
        found = [tensor.dtype for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.dtype in DTYPES]
        if not found:
            raise LeftAlone("it computes in neither float32 nor float64")
        parameters = [tensor.dtype for tensor in tensors if isinstance(tensor, torch.nn.Parameter)]
        return next((dtype for dtype in parameters if dtype in DTYPES), found[0])

    def _check(self, node: torch.fx.Node, dry: _engine.Engine) -> None:
        """Raises Unsupported if convoke cannot run a node."""
        result = example(node)
        results = result if isinstance(result, (tuple, list)) else [result]
        if not results or not all(isinstance(part, torch.Tensor) for part in results):
            raise Unsupported("it computes no tensor")
        tensors = [example(read) for read in node.all_input_nodes]
        for tensor in [*results, *tensors]:
            for part in tensor if isinstance(tensor, (tuple, list)) else [tensor]:
                if isinstance(part, torch.Tensor):
                    self._check_tensor(part)
        translator = Translator(self.kinds, self.names, {})
        if node.target is operator.getitem and isinstance(tensors[0], (tuple, list)):
            return
        translator.node(node)
        values = translator.values[node]
        values = values if isinstance(values, list) else [values]
        # Each node alone is planned on shapes, so that what the engine refuses stays in PyTorch.
        definition = json.loads(translator.definition([], self.dtype))
        definition["outputs"] = [value.name for value in values]
        shapes = [list(value.shape) for value in translator.taken()]
        if not shapes:
            raise Unsupported("it reads no tensor that depends on the model's input")
        try:
            graph = _engine.Graph(dry, json.dumps(definition), DTYPES[self.dtype])
            found = graph.output_shapes(shapes)
        except (RuntimeError, ValueError, MemoryError) as error:
            raise Unsupported(str(error)) from None
        wanted = [list(shape_of(part, {})) for part in results]
        if found != wanted:
            raise Unsupported(f"its result would have the shape {found} instead of {wanted}")

    def _check_tensor(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cpu":
            raise Unsupported(f"a tensor is on {tensor.device.type}")
        if tensor.layout is not torch.strided:
            raise Unsupported(f"a tensor is {tensor.layout}")
        if tensor.dtype is not self.dtype:
            raise Unsupported(f"a tensor is of type {str(tensor.dtype).removeprefix('torch.')}")

    def _keep_lists_together(self, graph: torch.fx.Graph) -> None:
        """An operation with several results, such as `chunk`, and those that pick one of them stay together."""
        for node in graph.nodes:
            if node not in self.supported or not isinstance(example(node), (tuple, list)):
                continue
            picks = list(node.users)
            if not all(user.target is operator.getitem and user in self.supported for user in picks):
                for left in (node, *picks):
                    self.supported.discard(left)
                    self.reasons.setdefault(left, "another operation reads its results as a list")


def partition(module: torch.fx.GraphModule, support: Support) -> tuple[torch.fx.GraphModule, list[str]]:
    """Fuses what is supported into submodules; gives the module, and the names of those worth running."""
    partitioner = CapabilityBasedPartitioner(module, support, allows_single_node_partition=True)
    proposed = []
    for part in partitioner.propose_partitions():
        if any(_operators.find(node)[0].computes for node in part.nodes):
            proposed.append(part)
        else:
            for node in part.nodes:
                support.reasons[node] = "there is nothing beside it that convoke would make faster"
    before = {name for name, _ in module.named_children()}
    fused = partitioner.fuse_partitions(proposed, prefix="convoke_")
    names = [name for name, _ in fused.named_children() if name.startswith("convoke_") and name not in before]
    return fused, names
