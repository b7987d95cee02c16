"""Finds in a captured model what convoke runs, and puts subgraphs of it in the place of PyTorch's operations.

The graph is what TorchDynamo captures for a backend of torch.compile: calls such as `torch.conv2d` and `F.relu`, with parameters and
buffers among its inputs. It is cut into the largest subgraphs of operations that `_operators` translates; the rest stays in PyTorch.
"""

from __future__ import annotations

import inspect
import json
import math
import operator
import re
from typing import Any, Iterable, Sequence

import sympy
import torch
import torch.nn.functional as F

from . import _engine, _operators
from ._operators import Emitter, Unsupported, Value
from ._partition import Regions
from ._writes import Writes, example, is_given, is_view, operation_name, storages, writes_into

DTYPES = {torch.float32: "f32", torch.float64: "f64"}
#: The names of all types that tensors of a graph may have.
NAMES = {**DTYPES, torch.bfloat16: "bf16"}
#: The names of the types in definitions.
KINDS = {torch.float32: "F32", torch.float64: "F64"}


class LeftAlone(Exception):
    """Why a whole graph stays in PyTorch."""


def guard_hooks() -> None:
    """Makes what TorchDynamo compiles right now depend on which modules have hooks.

    By default (torch._dynamo.config.skip_nnmodule_hook_guards) it does not notice hooks that are added to inner modules afterwards.
    """
    from torch._dynamo.guards import GuardBuilder

    context = torch._guards.TracingContext.try_get()
    if context is not None:
        guards = context.guards_context.dynamo_guards
        for guard in [guard for guard in guards if guard.create_fn is GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT]:
            guards.add(guard.originating_source.make_guard(GuardBuilder.SEQUENCE_LENGTH))


def name_of(node: torch.fx.Node) -> str:
    """The name of a parameter or buffer in the user's model, or the node's own."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    try:
        text = source.name if isinstance(source.name, str) else source.name()
    except Exception:
        return node.name
    parts = re.findall(r"(?:_modules|_parameters|_buffers)\['([^']+)'\]", text)
    return ".".join(parts) or node.name


def is_of_model(node: torch.fx.Node) -> bool:
    """Whether a node is a parameter or buffer of the user's model."""
    return node.op == "get_attr" or (node.op == "placeholder" and name_of(node) != node.name)


def path_of(node: torch.fx.Node) -> str:
    """The module that a node belongs to, such as layer1.0.conv1, or the node's own name."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return node.name
    text = list(stack.values())[-1][0]
    path = re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", text)
    path = re.sub(r"^L\.(?:self|model)\.?|(?:^|\.)_modules(?=\.|$)|^self\.?", "", path)
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
        if not is_given(node):
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


def is_frozen_norm(node: torch.fx.Node) -> bool:
    """Whether a node is a batch norm that normalizes with its statistics instead of changing them."""
    return node.target is F.batch_norm and not bind(_operators.find(node)[0], node).get("training", False)


def unread_norms(
    body: Sequence[torch.fx.Node], results: Iterable[torch.fx.Node], kinds: dict[torch.fx.Node, str]
) -> list[torch.fx.Node]:
    """The batch norms with running statistics of which no result depends on."""
    read, left = set(), list(results)
    while left:
        node = left.pop()
        if node not in read:
            read.add(node)
            left.extend(node.all_input_nodes)
    return [
        node
        for node in body
        if node not in read and node.target is F.batch_norm and any(kinds.get(part) == "statistic" for part in node.all_input_nodes)
    ]


def bind(op: _operators.Operator, node: torch.fx.Node) -> dict[str, Any]:
    """The arguments of a node by the names of the translation's parameters."""
    signature = inspect.signature(op.translate)
    try:
        return dict(signature.bind(None, *node.args, shape=None, **node.kwargs).arguments)
    except TypeError as error:
        raise Unsupported(f"its arguments are not known ({error})") from None


def concrete(value: Any, sizes: dict[Any, int] | None) -> Any:
    """A number of the graph as an int or float: `sizes` has the values of its symbols, None stands for those of the first call."""
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        if sizes is None and value.node.hint is not None:
            return value.node.hint
        found = sympy.sympify(value.node.expr.xreplace(sizes or {}))
        if not found.is_number:
            raise Unsupported("a size depends on values")
        return int(found) if isinstance(value, torch.SymInt) else float(found)
    return value


def shape_of(tensor: torch.Tensor, sizes: dict[Any, int] | None) -> tuple[int, ...]:
    return tuple(concrete(size, sizes) for size in tensor.shape)


def bytes_of_results(nodes: Iterable[torch.fx.Node], sizes: dict[Any, int]) -> int:
    """The bytes of all tensors that nodes give."""
    total = 0
    for node in nodes:
        value = example(node)
        for tensor in value if isinstance(value, (tuple, list)) else [value]:
            if isinstance(tensor, torch.Tensor):
                total += math.prod(shape_of(tensor, sizes)) * tensor.element_size()
    return total


def sizes_of(placeholders: Sequence[torch.fx.Node], args: Sequence[Any]) -> dict[Any, int]:
    """The values of a graph's symbols for its arguments."""
    sizes: dict[Any, int] = {}
    for node, arg in zip(placeholders, args):
        value = example(node)
        pairs = zip(value.shape, arg.shape) if isinstance(arg, torch.Tensor) else [(value, arg)]
        for size, actual in pairs:
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                sizes[size.node.expr] = int(actual)
    return sizes


def is_dynamic(node: torch.fx.Node) -> bool:
    """Whether a size of what enters a graph may differ from call to call."""
    value = example(node)
    sizes = value.shape if isinstance(value, torch.Tensor) else [value]
    return any(isinstance(size, torch.SymInt) for size in sizes)


#: Channels-last, by the number of axes of images and volumes.
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def is_channels_last(tensor: torch.Tensor) -> bool:
    """Whether a tensor of images or volumes is in channels-last, and not in the default format as well."""
    format = CHANNELS_LAST.get(tensor.dim())
    return format is not None and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=format)


def axes_in_memory(tensor: torch.Tensor, sizes: dict[Any, int]) -> list[int]:
    """The axes of a tensor from the outermost in memory to the innermost; in their own order if elements overlap or have gaps."""
    shape, strides = shape_of(tensor, sizes), [concrete(stride, sizes) for stride in tensor.stride()]
    # An axis of one element may be anywhere: it stays beside those that it is beside.
    wide = [axis for axis in range(len(shape)) if shape[axis] > 1]
    turned = sorted(wide, key=lambda axis: -strides[axis])
    next_stride = 1
    for axis in reversed(turned):
        if strides[axis] != next_stride:
            return list(range(len(shape)))
        next_stride *= shape[axis]
    places = iter(turned)
    return [next(places) if axis in wide else axis for axis in range(len(shape))]


def dtype_of(value: Any) -> torch.dtype | None:
    """The type of a tensor, or of the first of several."""
    parts = value if isinstance(value, (tuple, list)) else [value]
    return next((part.dtype for part in parts if isinstance(part, torch.Tensor)), None)


class Translator:
    """Turns nodes of a captured graph into nodes of a definition."""

    def __init__(self, kinds: dict[torch.fx.Node, str], names: dict[torch.fx.Node, str], sizes: dict[Any, int] | None):
        self.to = Emitter()
        self.kinds, self.names, self.sizes = kinds, names, sizes
        self.values: dict[torch.fx.Node, Any] = {}
        #: Values in another type than they are given in.
        self.converted: dict[tuple[torch.fx.Node, torch.dtype], Value] = {}
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
        if isinstance(tensor, torch.SymFloat):
            # The value of the number may differ from call to call.
            self.inputs.append(node)
            return Value(self.names[node], (), "input")
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
        self.to.axes = lambda: axes_in_memory(example(node.all_input_nodes[0]), self.sizes)
        self.to.dtype = dtype_of(result)
        first = next(iter(node.all_input_nodes), None)

        def read(part: torch.fx.Node) -> Any:
            keeps = op.has_parameters and part is not first
            return self.value(part) if keeps else self.value_in(part, self.to.dtype)

        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), read)
        self.values[node] = op.translate(self.to, *args, **kwargs, shape=shape)

    def value_in(self, node: torch.fx.Node, dtype: torch.dtype | None) -> Any:
        """The value of a node as an operation reads it that gives this type: autocast and PyTorch's promotion convert it before."""
        value, given = self.value(node), dtype_of(example(node))
        if not isinstance(value, Value) or given is dtype or given not in _operators.PRECISIONS or dtype not in _operators.PRECISIONS:
            return value
        if (node, dtype) not in self.converted:
            self.converted[node, dtype] = self.to.converted(value, dtype)
        return self.converted[node, dtype]

    def taken(self) -> list[Value]:
        """What the definition takes: the inputs, and then what dropout multiplies by."""
        return [self.values[node] for node in self.inputs] + [noise for noise, _, _ in self.to.noises]

    def types_taken(self, dtype: torch.dtype) -> list[torch.dtype]:
        """The types of these, where `dtype` is that of numbers."""
        inputs = [getattr(example(node), "dtype", dtype) for node in self.inputs]
        return inputs + [kind or dtype for _, _, kind in self.to.noises]

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


class Support:
    """Which nodes of a graph convoke runs; for each other one, the reason."""

    def __init__(self, writes: Writes, regions: Regions, engine: _engine.Engine):
        graph = writes.graph
        self.kinds = kinds_of(graph)
        self.names = unique_names(graph.nodes)
        #: The type that autocast computes in, by node.
        self.autocast = regions.autocast
        self.dtype = self._dtype(graph)
        self.reasons: dict[torch.fx.Node, str] = {}
        self.supported: set[torch.fx.Node] = set()
        dry = engine.dry()
        for node in graph.nodes:
            if node.op not in ("call_function", "call_method", "call_module"):
                continue
            if (reason := writes.must_stay.get(node) or regions.reasons.get(node)) is not None:
                self.reasons[node] = reason
                continue
            try:
                self._check(node, dry)
                self.supported.add(node)
            except Unsupported as reason:
                self.reasons[node] = str(reason)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                self.reasons[node] = f"its translation failed: {type(error).__name__}: {error}"
        self._leave_views(graph)
        self._keep_lists_together(graph)

    def _dtype(self, graph: torch.fx.Graph) -> torch.dtype:
        """The type that convoke computes in: that of the first parameter or input in a type that it has; float32 if all are bfloat16."""
        tensors = [example(node) for node in self.kinds]
        types = [tensor.dtype for tensor in tensors if isinstance(tensor, torch.Tensor)]
        found = [dtype for dtype in types if dtype in DTYPES]
        if not found:
            if torch.bfloat16 in types:
                return torch.float32
            raise LeftAlone("it computes in none of float32, float64 and bfloat16")
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
        translator = Translator(self.kinds, self.names, None)
        if node.target is operator.getitem and isinstance(tensors[0], (tuple, list)):
            if node.args[0] not in self.supported:
                raise Unsupported("it picks a result of an operation that is left to PyTorch")
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
            types = [NAMES[kind] for kind in translator.types_taken(self.dtype)]
            found, types = graph.outputs(list(zip(shapes, types)))
        except (RuntimeError, ValueError, MemoryError) as error:
            raise Unsupported(str(error)) from None
        wanted = [list(shape_of(part, None)) for part in results]
        if found != wanted:
            raise Unsupported(f"its result would have the shape {found} instead of {wanted}")
        if types != [NAMES[part.dtype] for part in results]:
            raise Unsupported(f"its result would be of type {', '.join(types)}")

    def _check_tensor(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cpu":
            raise Unsupported(f"a tensor is on {tensor.device.type}")
        if tensor.layout is not torch.strided:
            raise Unsupported(f"a tensor is {tensor.layout}")
        if tensor.dtype is not self.dtype and (self.dtype, tensor.dtype) != (torch.float32, torch.bfloat16):
            raise Unsupported(f"a tensor is of type {str(tensor.dtype).removeprefix('torch.')}")

    def _keep_lists_together(self, graph: torch.fx.Graph) -> None:
        """An operation with several results, such as `chunk`, and those that pick one of them stay together."""
        for node in graph.nodes:
            if node not in self.supported or not isinstance(example(node), (tuple, list)):
                continue
            picks = list(node.users)
            if not all(user.target is operator.getitem and user in self.supported for user in picks):
                for left in (node, *picks):
                    self.leave(left, "another operation reads its results as a list")

    def leave(self, node: torch.fx.Node, reason: str) -> None:
        """Leaves a node to PyTorch after all."""
        if node in self.supported:
            self.supported.discard(node)
            self.reasons[node] = reason

    def _leave_views(self, graph: torch.fx.Graph) -> None:
        """Leaves views to PyTorch where they cost nothing there, and where what a graph gives shares memory."""
        results = {storage: set() for node in graph.nodes for storage in storages(node)}
        given = set()
        for node in graph.nodes:
            if is_given(node):
                given |= storages(node)
            if node.op == "output":
                for result in node.all_input_nodes:
                    for storage in storages(result):
                        results[storage].add(result)
        for node in reversed(graph.nodes):
            if node not in self.supported or not is_view(node) or writes_into(node) is not None:
                continue
            if not any(user in self.supported for user in node.users):
                self.leave(node, "a view at the end of a subgraph costs nothing")
            elif any(len(results[storage]) > (storage not in given) for storage in storages(node)):
                self.leave(node, "it shares memory with another result")
