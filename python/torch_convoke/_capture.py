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
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase
from torch.fx.passes.utils.fuser_utils import fuse_by_partitions

from . import _engine, _operators
from ._operators import Emitter, Unsupported, Value

DTYPES = {torch.float32: "f32", torch.float64: "f64"}
#: The same types in definitions.
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


def storages(node: torch.fx.Node) -> set[int]:
    """The memory of a node's tensors: views of one tensor have it in common."""
    value = example(node)
    parts = value if isinstance(value, (tuple, list)) else [value]
    return {part.untyped_storage()._cdata for part in parts if isinstance(part, torch.Tensor) and part.layout is torch.strided}


def is_view(node: torch.fx.Node) -> bool:
    """Whether a node's tensors share memory with what it reads."""
    return not node.meta.get("convoke_copies") and any(storages(node) & storages(read) for read in node.all_input_nodes)


def settle_writes(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Makes later readers of a tensor that an operation writes to read that operation's result, so that the order of nodes follows from
    what they read. Gives the nodes that must stay in PyTorch because they write to what the graph was given.

    Raises LeftAlone if a tensor is shared in a way that this cannot follow.
    """
    order: dict[torch.fx.Node, float] = {node: place for place, node in enumerate(graph.nodes)}
    must_stay: set[torch.fx.Node] = set()
    holders: dict[int, list[torch.fx.Node]] = {}
    for node in graph.nodes:
        for storage in storages(node):
            holders.setdefault(storage, []).append(node)
    for node in list(graph.nodes):
        _check_state(node)
        target = writes_into(node)
        if target is None or isinstance(example(target), (int, float, torch.SymInt, torch.SymFloat)):
            continue
        shared = storages(target)
        if not shared:
            raise LeftAlone(f"{node.name} writes to what is no tensor")
        place = order[node]
        holding = {other for storage in shared for other in holders[storage]}
        kin = [other for other in holding if other is not target and order[other] < place]
        given = target.op in ("placeholder", "get_attr") or target in must_stay
        if any(other.op in ("placeholder", "get_attr") and not (given and other in _written(target)) for other in kin):
            raise LeftAlone(f"{node.name} writes to a part of what the model was given, or holds twice")
        if any(order[user] > place for other in kin for user in other.users):
            raise LeftAlone(f"{node.name} writes to a tensor that is read through another view afterwards")
        family = {*kin, target, node}
        read_before = any(user not in family and order[user] < place for other in family for user in other.users)
        if given and read_before:
            raise LeftAlone(f"{node.name} writes to {name_of(target)}, which other operations read before")
        if given:
            must_stay.add(node)
        elif read_before and not _without_writing(node):
            if "out" in node.kwargs:
                raise LeftAlone(f"{node.name} writes to a tensor that other operations read before")
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
        target.replace_all_uses_with(node, delete_user_cb=lambda user: order[user] > place)
    return must_stay


def _written(node: torch.fx.Node) -> set[torch.fx.Node]:
    """What nodes that write to each other's results write to in the end, with all of them on the way."""
    found = {node}
    target = writes_into(node)
    while target is not None and target not in found:
        found.add(target)
        target = writes_into(target)
    return found


def set_item(tensor: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    """`tensor[index] = value`, which gives the tensor."""
    tensor[index] = value
    return tensor


#: Parts of names of functions that change how PyTorch runs what comes after them.
_STATEFUL = re.compile("set_grad_enabled|inference_mode|autocast|nesting|set_multithreading|saved_tensors|torch_function")


def _check_state(node: torch.fx.Node) -> None:
    """Raises LeftAlone for what changes the meaning of the operations after it, which could not be reordered any more."""
    if node.op == "call_function" and _STATEFUL.search(operation_name(node)):
        raise LeftAlone(f"it has a region that starts or ends with {operation_name(node)}")
    schema = getattr(node.target, "_schema", None)
    lists = [arg for arg in node.args if isinstance(arg, (tuple, list)) and any(isinstance(one, torch.fx.Node) for one in arg)]
    if getattr(schema, "is_mutable", False) or (lists and operation_name(node).endswith("_")):
        raise LeftAlone(f"{node.name} writes to its arguments")


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


def concrete(value: Any, sizes: dict[Any, int]) -> Any:
    """A number of the graph as an int or float: `sizes` has the values of its symbols."""
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        expression = value.node.expr
        found = sympy.sympify(expression.xreplace(sizes) if sizes else expression)
        if not found.is_number:
            hint = value.node.hint
            if sizes or hint is None:
                raise Unsupported("a size depends on values")
            return hint
        return int(found) if isinstance(value, torch.SymInt) else float(found)
    return value


def shape_of(tensor: torch.Tensor, sizes: dict[Any, int]) -> tuple[int, ...]:
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


def is_channels_last(tensor: torch.Tensor) -> bool:
    """Whether a tensor is N x C x H x W in channels-last, and not in the default format as well."""
    return (
        tensor.dim() == 4
        and not tensor.is_contiguous()
        and tensor.is_contiguous(memory_format=torch.channels_last)
    )


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
        self.to.axes = lambda: axes_in_memory(example(node.all_input_nodes[0]), self.sizes)
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
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                self.reasons[node] = f"its translation failed: {type(error).__name__}: {error}"
        self._leave_views(graph)
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
            if node.op in ("placeholder", "get_attr"):
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


#: Functions that draw random numbers, beside those whose ATen operators say so.
_RANDOM = re.compile("dropout|bernoulli|(^|_)rand|multi_head_attention|scaled_dot_product|gumbel|rrelu|fractional|poisson|checkpoint")


def effects_of(node: torch.fx.Node, support: Support) -> list[Any]:
    """In what a node must keep its place among others: the random numbers that it draws, the statistics that it changes or reads."""
    if node.op not in ("call_function", "call_method"):
        return []
    found: list[Any] = [read for read in node.all_input_nodes if support.kinds.get(read) == "statistic"]
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


def partition(module: torch.fx.GraphModule, support: Support) -> tuple[torch.fx.GraphModule, list[str]]:
    """Fuses what is supported into submodules; gives the module, and the names of those worth running."""
    order = {node: place for place, node in enumerate(module.graph.nodes)}
    chains: dict[Any, list[torch.fx.Node]] = {}
    for node in module.graph.nodes:
        for effect in effects_of(node, support):
            chains.setdefault(effect, []).append(node)
    chains = {effect: nodes for effect, nodes in chains.items() if len(nodes) > 1}
    while True:
        partitioner = CapabilityBasedPartitioner(module, support, allows_single_node_partition=True)
        proposed = []
        for part in partitioner.propose_partitions():
            part.nodes = dict(sorted(part.nodes.items(), key=lambda item: order[item[0]]))
            if any(_operators.find(node)[0].computes for node in part.nodes):
                proposed.append(part)
            else:
                for node in part.nodes:
                    support.reasons[node] = "there is nothing beside it that convoke would make faster"
        moved = _reordered(module, proposed, chains) if chains else []
        if not moved:
            break
        for effect in moved:
            nodes = [node for node in chains[effect] if node in support.supported]
            if not nodes:
                raise LeftAlone("operations whose order matters would change places")
            for node in nodes:
                support.leave(node, "it would change places with another operation, and their order matters")
    before = {name for name, _ in module.named_children()}
    fused = partitioner.fuse_partitions(proposed, prefix="convoke_")
    # Older versions sort what nobody reads, such as a counter's last change, behind the output, where it would not run.
    (output,) = fused.graph.find_nodes(op="output")
    nodes = list(fused.graph.nodes)
    for node in nodes[nodes.index(output) + 1 :]:
        output.prepend(node)
    names = [name for name, _ in fused.named_children() if name.startswith("convoke_") and name not in before]
    return fused, names


def _reordered(module: torch.fx.GraphModule, proposed: Sequence[Any], chains: dict[Any, list[torch.fx.Node]]) -> list[Any]:
    """The chains whose nodes would run in another order if the proposed partitions were fused."""
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, copies))
    for place, node in enumerate(copies.values()):
        node.meta = {"place": place}
    places = {node: copy.meta["place"] for node, copy in copies.items()}
    trial = torch.fx.GraphModule(module, graph)
    partitions = [{copies[node]: None for node in part.nodes} for part in proposed]
    fuse_by_partitions(trial, partitions, prefix="trial_")
    ran: list[int] = []
    for node in trial.graph.nodes:
        parts = trial.get_submodule(node.target).graph.nodes if node.op == "call_module" else [node]
        ran.extend(part.meta["place"] for part in parts if part.op.startswith("call_") and "place" in part.meta)
    rank = {place: index for index, place in enumerate(ran)}
    moved = []
    for effect, nodes in chains.items():
        ranks = [rank[places[node]] for node in nodes]
        if ranks != sorted(ranks):
            moved.append(effect)
    return moved
