"""Which of PyTorch's operations convoke has, and what they are in its graphs: one function each.

A function gets an `Emitter` and the operation's arguments, with PyTorch's names and defaults; tensors are `Value`s. It emits nodes and
gives the resulting value, or raises `Unsupported` with a reason for the report. The operators of graphs are listed in
crates/graph/src/graph/ops/mod.rs; their names and meanings are ONNX's.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any, Callable, Sequence

import torch
import torch.nn.functional as F

from . import _volumes


#: The types between which values are converted inside a graph, by their names in definitions.
PRECISIONS = {torch.float32: "f32", torch.bfloat16: "bf16"}


class Unsupported(Exception):
    """Why convoke does not run an operation. Its text completes "left to PyTorch: "."""


@dataclasses.dataclass(frozen=True)
class Value:
    """A tensor of a graph: its name and its shape for the sizes that the graph is made for."""

    name: str
    shape: tuple[int, ...]
    #: "input", "parameter", "statistic", or "computed"
    kind: str = "computed"

    @property
    def rank(self) -> int:
        return len(self.shape)


class Emitter:
    """Collects the nodes of a graph's definition."""

    def __init__(self) -> None:
        self.nodes: list[dict[str, Any]] = []
        self.stored: list[dict[str, Any]] = []
        #: Stand-ins for running statistics that a batch norm does not have: name and number of channels.
        self.dummies: dict[str, int] = {}
        #: What dropout multiplies by, drawn for each call: the value, the probability that an element is 0, and the type.
        self.noises: list[tuple[Value, float, torch.dtype | None]] = []
        #: The axes of each of these in the order of memory, outermost first: elements are drawn in that order.
        self.noise_axes: list[list[int]] = []
        #: Gives the axes of what the node that is being translated reads, in the order of memory.
        self.axes: Callable[[], list[int]] = list
        #: The name of the node that is being translated, for errors and reports, and the type of its result.
        self.place = ""
        self.dtype: torch.dtype | None = None
        self._count = 0

    def name(self) -> str:
        self._count += 1
        return f"%{self._count}"

    def node(self, op: Any, inputs: Sequence[Value | None], shape: Sequence[int]) -> Value:
        """A node with one output."""
        return self.nodes_of(op, inputs, [shape])[0]

    def nodes_of(self, op: Any, inputs: Sequence[Value | None], shapes: Sequence[Sequence[int]]) -> list[Value]:
        """A node with several outputs."""
        outputs = [Value(self.name(), tuple(shape)) for shape in shapes]
        self.nodes.append(
            {
                "name": self.place,
                "op": op,
                "inputs": [value.name if value is not None else "" for value in inputs],
                "outputs": [value.name for value in outputs],
            }
        )
        return outputs

    def integers(self, numbers: Sequence[int]) -> Value:
        """A list of whole numbers that are known."""
        numbers = [int(number) for number in numbers]
        return self.node({"Constant": {"shape": [len(numbers)], "data": {"I64": numbers}}}, [], [len(numbers)])

    def numbers(self, numbers: Sequence[float]) -> Value:
        """A list of numbers that are known."""
        numbers = [_finite(number) for number in numbers]
        return self.node({"Constant": {"shape": [len(numbers)], "data": {"F64": numbers}}}, [], [len(numbers)])

    def number(self, number: float) -> Value:
        """A number that is known."""
        return self.node({"Constant": {"shape": [], "data": {"F64": [_finite(number)]}}}, [], [])

    def filled(self, name: str, channels: int, value: float, trained: bool | None) -> Value:
        """A stored vector with the same number everywhere."""
        values = {"Constant": {"shape": [channels], "value": value}}
        self.stored.append({"name": name, "values": values, "trained": trained})
        return Value(name, (channels,), "constant")

    def noise(self, shape: Sequence[int], p: float, axes: Sequence[int]) -> Value:
        """A tensor of dropout: an element is 0 with probability p, and else 1 / (1 - p). `axes` is their order in memory."""
        value = Value(self.name(), tuple(shape), "noise")
        self.noises.append((value, p, self.dtype))
        self.noise_axes.append(list(axes))
        return value

    def converted(self, x: Value, dtype: torch.dtype) -> Value:
        """The nearest numbers of another type, float32 or bfloat16."""
        return self.node({"Precision": PRECISIONS[dtype]}, [x], x.shape)

    def reshaped(self, x: Value, shape: Sequence[int]) -> Value:
        """The same elements in the same order, in another shape."""
        if tuple(shape) == x.shape:
            return x
        return self.node({"Reshape": {"allow_zero": True}}, [x, self.integers(shape)], shape)


def _finite(number: Any) -> float:
    if isinstance(number, Value) or not isinstance(number, (int, float)):
        raise Unsupported("an argument that must be a number is a tensor")
    if not math.isfinite(number):
        raise Unsupported(f"an argument is {number}")
    return float(number)


#: What a translation gives: a value, or several for operations such as `chunk`.
Result = Value | list[Value]
Translation = Callable[..., Result]


@dataclasses.dataclass(frozen=True)
class Operator:
    """How one of PyTorch's operations is translated."""

    translate: Translation
    #: Whether its result may share memory with its input in PyTorch.
    view: bool
    #: Whether it alone makes a subgraph worth running: what only moves or maps elements does not.
    computes: bool
    #: Whether its tensors after the first are parameters, which are float32 where the first is bfloat16.
    has_parameters: bool


_FUNCTIONS: dict[Any, Operator] = {}
_METHODS: dict[str, Operator] = {}
#: Functions that write their result into their first argument, and what they compute.
_IN_PLACE: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}


def _operator(
    *targets: Any,
    methods: Sequence[str] = (),
    view: bool = False,
    computes: bool = False,
    has_parameters: bool = False,
) -> Callable[[Translation], Translation]:
    def add(translate: Translation) -> Translation:
        entry = Operator(translate, view, computes, has_parameters)
        for target in targets:
            _FUNCTIONS[target] = entry
            # torch.relu_ and F.relu_ stand beside torch.relu and F.relu.
            name = getattr(target, "__name__", "")
            for module in (torch, F):
                in_place = getattr(module, f"{name}_", None)
                if name and in_place is not None:
                    _IN_PLACE[in_place] = target
        for method in methods:
            _METHODS[method] = entry
        return translate

    return add


def find(node: torch.fx.Node) -> tuple[Operator | None, bool]:
    """The operator of a node of a captured graph, and whether its name says that it writes into its first argument."""
    if node.op == "call_method":
        name = str(node.target)
        in_place = name.endswith("_") and not name.endswith("__")
        return _METHODS.get(name[:-1] if in_place else name), in_place
    if node.op != "call_function":
        return None, False
    in_place = node.target in _IN_PLACE
    return _FUNCTIONS.get(_IN_PLACE[node.target] if in_place else node.target), in_place


def out_of_place(target: Any) -> Any:
    """What a function that writes into its first argument computes."""
    return _IN_PLACE[target]


def _repeated(value: Any, count: int, what: str) -> list[int]:
    """One number for each axis, from one for all or a list."""
    values = list(value) if isinstance(value, (tuple, list)) else [value]
    if len(values) == 1:
        values *= count
    if len(values) != count or not all(isinstance(number, int) for number in values):
        raise Unsupported(f"{what} is {value!r}")
    return values


def _tensor(value: Any, what: str) -> Value:
    if not isinstance(value, Value):
        raise Unsupported(f"its {what} is no tensor")
    return value


def _axis(axis: int, rank: int) -> int:
    return axis + rank if axis < 0 else axis


def _shape_like(shape: Sequence[int], axes: Sequence[int], sizes: Sequence[int]) -> list[int]:
    shape = list(shape)
    for axis, size in zip(axes, sizes):
        shape[axis] = size
    return shape


# --- Convolution ---------------------------------------------------------------------------------------------------------------


def _window(stride: Any, padding: Any, dilation: Any, groups: int, axes: int) -> dict[str, Any]:
    if padding == "same":
        pads: Any = "SameUpper"
    elif padding == "valid":
        pads = "Valid"
    else:
        pads = {"Explicit": _repeated(padding, axes, "padding") * 2}
    return {
        "strides": _repeated(stride, axes, "stride"),
        "pads": pads,
        "dilations": _repeated(dilation, axes, "dilation"),
        "group": groups,
    }


def _spatial_axes(x: Value, weight: Value) -> int:
    axes = weight.rank - 2
    if x.rank != weight.rank:
        raise Unsupported("its input has no batch axis")
    if axes not in (1, 2, 3):
        raise Unsupported(f"it has {axes} spatial axes")
    return axes


@_operator(torch.conv1d, torch.conv2d, torch.conv3d, computes=True, has_parameters=True)
def _conv(to, input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, *, shape):
    axes = _spatial_axes(input, _tensor(weight, "weight"))
    if padding == "same" and any(size != 1 for size in _repeated(stride, axes, "stride")):
        raise Unsupported("padding='same' with a stride")
    return to.node({"Conv": _window(stride, padding, dilation, groups, axes)}, [input, weight, bias], shape)


@_operator(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d, computes=True, has_parameters=True)
def _conv_transpose(
    to, input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1, *, shape
):
    axes = _spatial_axes(input, _tensor(weight, "weight"))
    op = {
        "conv": _window(stride, padding, dilation, groups, axes),
        "output_padding": _repeated(output_padding, axes, "output_padding"),
        "output_shape": None,
    }
    return to.node({"ConvTranspose": op}, [input, weight, bias], shape)


@_operator(F.linear, torch._C._nn.linear, computes=True, has_parameters=True)
def _linear(to, input, weight, bias=None, *, shape):
    if input.rank < 2:
        raise Unsupported("its input has no batch axis")
    rows = math.prod(input.shape[:-1])
    flat = to.reshaped(input, (rows, input.shape[-1]))
    gemm = {"alpha": 1.0, "beta": 1.0, "trans_a": False, "trans_b": True}
    y = to.node({"Gemm": gemm}, [flat, weight, bias], (rows, weight.shape[0]))
    return to.reshaped(y, shape)


@_operator(torch.matmul, operator.matmul, torch.bmm, methods=["matmul", "bmm"])
def _matmul(to, input, other, *, shape):
    if input.rank < 2 or other.rank < 2:
        raise Unsupported("a product with a vector")
    return to.node("MatMul", [input, other], shape)


# --- Normalization -------------------------------------------------------------------------------------------------------------


def _affine(to: Emitter, weight: Value | None, bias: Value | None, channels: int) -> tuple[Value, Value]:
    """Weight and bias; neutral ones in place of those that are left out."""
    for value, what in ((weight, "weight"), (bias, "bias")):
        if value is not None and value.kind != "parameter":
            raise Unsupported(f"its {what} is computed, or no parameter")
    if weight is None:
        weight = to.filled(to.name(), channels, 1.0, False)
    if bias is None:
        bias = to.filled(to.name(), channels, 0.0, False)
    return weight, bias


@_operator(F.batch_norm, computes=True, has_parameters=True)
def _batch_norm(
    to, input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5, *, shape
):
    if input.rank < 2:
        raise Unsupported("its input has no channels")
    channels = input.shape[1]
    if (running_mean is None) != (running_var is None):
        raise Unsupported("it has one of the two running statistics")
    if running_mean is None:
        if not training:
            raise Unsupported("it has no running statistics to normalize with")
        running_mean, running_var = (to.filled(to.name(), channels, 0.0, None) for _ in range(2))
        to.dummies[running_mean.name] = to.dummies[running_var.name] = channels
        momentum = 0.1
    elif {running_mean.kind, running_var.kind} != {"statistic"}:
        raise Unsupported("its running statistics are computed")
    weight, bias = _affine(to, weight, bias, channels)
    op = {"eps": _finite(eps), "momentum": 1.0 - _finite(momentum), "frozen": not training}
    return to.node({"BatchNorm": op}, [input, weight, bias, running_mean, running_var], shape)


@_operator(F.group_norm, torch.group_norm, computes=True, has_parameters=True)
def _group_norm(to, input, num_groups, weight=None, bias=None, eps=1e-5, *, shape):
    weight, bias = _affine(to, weight, bias, input.shape[1])
    return to.node({"GroupNorm": {"groups": num_groups, "eps": _finite(eps)}}, [input, weight, bias], shape)


@_operator(F.layer_norm, torch.layer_norm, computes=True, has_parameters=True)
def _layer_norm(to, input, normalized_shape, weight=None, bias=None, eps=1e-5, *, shape):
    axes = len(normalized_shape) if isinstance(normalized_shape, (tuple, list)) else 1
    if weight is None:
        if axes != 1:
            raise Unsupported("it has no weight and normalizes over several axes")
        weight = to.filled(to.name(), input.shape[-1], 1.0, False)
    return to.node({"LayerNorm": {"axis": -axes, "eps": _finite(eps)}}, [input, weight, bias], shape)


@_operator(F.instance_norm, computes=True, has_parameters=True)
def _instance_norm(
    to,
    input,
    running_mean=None,
    running_var=None,
    weight=None,
    bias=None,
    use_input_stats=True,
    momentum=0.1,
    eps=1e-5,
    *,
    shape,
):
    if running_mean is not None or running_var is not None or not use_input_stats:
        raise Unsupported("it has running statistics")
    weight, bias = _affine(to, weight, bias, input.shape[1])
    return to.node({"InstanceNorm": {"eps": _finite(eps)}}, [input, weight, bias], shape)


@_operator(F.local_response_norm, computes=True)
def _local_response_norm(to, input, size, alpha=1e-4, beta=0.75, k=1.0, *, shape):
    return to.node({"Lrn": {"size": size, "alpha": alpha, "beta": beta, "bias": k}}, [input], shape)


# --- Pooling and resizing ------------------------------------------------------------------------------------------------------


def _pool(to, kind, axes, input, kernel, stride, padding, dilation, ceil_mode, include_pad, shape):
    if input.rank != axes + 2:
        raise Unsupported("its input has no batch axis")
    kernel = _repeated(kernel, axes, "kernel_size")
    stride = kernel if stride is None or stride == [] else stride
    op = {
        "kernel": kernel,
        "strides": _repeated(stride, axes, "stride"),
        "pads": {"Explicit": _repeated(padding, axes, "padding") * 2},
        "dilations": _repeated(dilation, axes, "dilation"),
        "ceil_mode": ceil_mode,
        "count_include_pad": include_pad,
    }
    return _volumes.pool(to, kind, op, input, shape) if axes == 3 else to.node({kind: op}, [input], shape)


def _max_pool(axes: int, *targets: Any) -> None:
    def translate(
        to, input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False, *, shape
    ):
        if return_indices:
            raise Unsupported("return_indices=True")
        return _pool(to, "MaxPool", axes, input, kernel_size, stride, padding, dilation, ceil_mode, False, shape)

    _operator(*targets, computes=True)(translate)


_max_pool(1, F.max_pool1d, torch.max_pool1d)
_max_pool(2, F.max_pool2d, torch.max_pool2d)
_max_pool(3, F.max_pool3d, torch.max_pool3d)


def _avg_pool(axes: int, target: Any) -> None:
    def translate(
        to,
        input,
        kernel_size,
        stride=None,
        padding=0,
        ceil_mode=False,
        count_include_pad=True,
        divisor_override=None,
        *,
        shape,
    ):
        if divisor_override is not None:
            raise Unsupported("divisor_override")
        steps = kernel_size, stride, padding, 1, ceil_mode, count_include_pad
        return _pool(to, "AveragePool", axes, input, *steps, shape)

    _operator(target, computes=True)(translate)


_avg_pool(1, F.avg_pool1d)
_avg_pool(2, F.avg_pool2d)
_avg_pool(3, F.avg_pool3d)


@_operator(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d, computes=True)
def _adaptive_avg_pool(to, input, output_size, *, shape):
    if input.rank not in (3, 4, 5) or len(shape) != input.rank:
        raise Unsupported("its input has no batch axis")
    sizes = list(shape[2:])
    if len(sizes) == 3:
        return _volumes.adaptive_average(to, input, shape)
    if all(size == 1 for size in sizes):
        return to.node("GlobalAveragePool", [input], shape)
    if len(sizes) != 2:
        raise Unsupported("it has one spatial axis and a size other than 1")
    return to.node({"AdaptiveAveragePool": sizes}, [input], shape)


@_operator(F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d, computes=True)
def _adaptive_max_pool(to, input, output_size, return_indices=False, *, shape):
    if return_indices or input.rank not in (3, 4, 5) or any(size != 1 for size in shape[2:]):
        raise Unsupported("only an output of size 1 is supported")
    # Of equal values the first one gets the gradient, which `GlobalMaxPool` would share.
    sizes = list(input.shape[2:])
    return _pool(to, "MaxPool", len(sizes), input, sizes, None, 0, 1, False, False, shape)


@_operator(F.interpolate, computes=True)
def _interpolate(
    to,
    input,
    size=None,
    scale_factor=None,
    mode="nearest",
    align_corners=None,
    recompute_scale_factor=None,
    antialias=False,
    *,
    shape,
):
    if input.rank not in (4, 5) or antialias:
        raise Unsupported("antialias" if antialias else "its input is not N x C x H x W or N x C x D x H x W")
    if mode == "nearest":
        interpolation, coordinates = {"Of": {"Nearest": "Floor"}}, "Asymmetric"
    elif mode in ("bilinear", "trilinear", "bicubic"):
        interpolation = {"Cubic": {"a": -0.75}} if mode == "bicubic" else {"Of": "Bilinear"}
        coordinates = "AlignCorners" if align_corners else "HalfPixel"
    else:
        raise Unsupported(f"mode {mode!r}")
    op = {"mode": interpolation, "coordinates": coordinates, "one_pixel_at_zero": False, "aspect": "Stretch"}
    factors = scales = sizes = None
    if scale_factor is not None and not recompute_scale_factor:
        axes = input.rank - 2
        factors = list(scale_factor) if isinstance(scale_factor, (tuple, list)) else [scale_factor] * axes
    if input.rank == 5:
        return _volumes.resize(to, op, input, factors, shape)
    if factors is not None:
        scales = to.numbers([1.0, 1.0, *factors])
    else:
        sizes = to.integers(shape)
    return to.node({"Resize": op}, [input, None, scales, sizes], shape)


@_operator(F.pixel_shuffle)
def _pixel_shuffle(to, input, upscale_factor, *, shape):
    if input.rank != 4:
        raise Unsupported("its input is not N x C x H x W")
    return to.node({"DepthToSpace": {"block": upscale_factor, "order": "ChannelFirst"}}, [input], shape)


@_operator(F.channel_shuffle, torch.channel_shuffle)
def _channel_shuffle(to, input, groups, *, shape):
    n, c, *rest = shape
    split = to.reshaped(input, (n, groups, c // groups, *rest))
    order = [0, 2, 1, *range(3, 3 + len(rest))]
    turned = to.node({"Transpose": {"order": order}}, [split], (n, c // groups, groups, *rest))
    return to.reshaped(turned, shape)


# --- Functions of each element -------------------------------------------------------------------------------------------------


@_operator(F.relu, torch.relu, methods=["relu"])
def _relu(to, input, inplace=False, *, shape):
    return to.node("Relu", [input], shape)


def _clipped(to, input, low, high, shape):
    bounds = [None if bound is None else to.number(bound) for bound in (low, high)]
    return to.node("Clip", [input, *bounds], shape)


@_operator(F.relu6)
def _relu6(to, input, inplace=False, *, shape):
    return _clipped(to, input, 0.0, 6.0, shape)


@_operator(F.hardtanh)
def _hardtanh(to, input, min_val=-1.0, max_val=1.0, inplace=False, *, shape):
    return _clipped(to, input, min_val, max_val, shape)


@_operator(torch.clamp, torch.clip, methods=["clamp", "clip"])
def _clamp(to, input, min=None, max=None, *, shape):
    return _clipped(to, input, min, max, shape)


def _pointwise(name: Any, *targets: Any, methods: Sequence[str] = ()) -> None:
    def translate(to, input, inplace=False, *, shape):
        return to.node({"Pointwise": name}, [input], shape)

    _operator(*targets, methods=methods)(translate)


_pointwise("Sigmoid", torch.sigmoid, F.sigmoid, methods=["sigmoid"])
_pointwise("Tanh", torch.tanh, F.tanh, methods=["tanh"])
_pointwise("Silu", F.silu)
_pointwise("HardSwish", F.hardswish)
_pointwise({"HardSigmoid": {"alpha": 1 / 6, "beta": 0.5}}, F.hardsigmoid)
_pointwise("Selu", F.selu, torch.selu)
_pointwise("Mish", F.mish)
_pointwise("Softsign", F.softsign)
_pointwise("Exp", torch.exp, methods=["exp"])
_pointwise("Log", torch.log, methods=["log"])
_pointwise("Sqrt", torch.sqrt, methods=["sqrt"])
_pointwise("Abs", torch.abs, methods=["abs"])
_pointwise("Neg", torch.neg, operator.neg, methods=["neg"])
_pointwise("Reciprocal", torch.reciprocal, methods=["reciprocal"])
_pointwise("Erf", torch.erf, methods=["erf"])


@_operator(F.leaky_relu)
def _leaky_relu(to, input, negative_slope=0.01, inplace=False, *, shape):
    return to.node({"LeakyRelu": {"alpha": _finite(negative_slope)}}, [input], shape)


@_operator(F.elu)
def _elu(to, input, alpha=1.0, inplace=False, *, shape):
    return to.node({"Pointwise": {"Elu": {"alpha": _finite(alpha)}}}, [input], shape)


@_operator(F.celu, torch.celu)
def _celu(to, input, alpha=1.0, inplace=False, *, shape):
    return to.node({"Pointwise": {"Celu": {"alpha": _finite(alpha)}}}, [input], shape)


@_operator(F.softplus, torch._C._nn.softplus)
def _softplus(to, input, beta=1.0, threshold=20.0, *, shape):
    op = {"Softplus": {"beta": _finite(beta), "threshold": _finite(threshold)}}
    return to.node({"Pointwise": op}, [input], shape)


@_operator(F.gelu, torch._C._nn.gelu)
def _gelu(to, input, approximate="none", *, shape):
    return to.node({"Pointwise": "GeluTanh" if approximate == "tanh" else "Gelu"}, [input], shape)


@_operator(F.prelu, torch.prelu, methods=["prelu"], has_parameters=True)
def _prelu(to, input, weight, *, shape):
    channels = math.prod(weight.shape)
    if channels > 1:
        weight = to.reshaped(weight, (channels, *[1] * (input.rank - 2)))
    return to.node("PRelu", [input, weight], shape)


def _softmax(name: str, functional: Any, target: Any) -> None:
    def translate(to, input, dim=None, _stacklevel=3, dtype=None, *, shape):
        if dim is None or dtype is not None:
            raise Unsupported("no dim is given" if dim is None else "it computes in another type")
        return to.node({name: {"axis": dim}}, [input], shape)

    def of_tensor(to, input, dim, dtype=None, *, shape):
        return translate(to, input, dim, dtype=dtype, shape=shape)

    _operator(functional)(translate)
    _operator(target, methods=[target.__name__])(of_tensor)


_softmax("Softmax", F.softmax, torch.softmax)
_softmax("LogSoftmax", F.log_softmax, torch.log_softmax)


def _dropped(to, input, p, training, noise_shape, shape):
    if not training or p == 0.0 or 0 in shape:
        return to.node("Identity", [input], shape)
    if not isinstance(p, (int, float)):
        raise Unsupported("its probability is no constant")
    axes = to.axes() if tuple(noise_shape) == tuple(shape) else range(len(noise_shape))
    return to.node({"Arithmetic": "Mul"}, [input, to.noise(noise_shape, float(p), axes)], shape)


@_operator(F.dropout, torch.dropout, view=True)
def _dropout(to, input, p=0.5, training=True, inplace=False, *, shape):
    return _dropped(to, input, p, training, shape, shape)


@_operator(F.dropout1d, F.dropout2d, torch.feature_dropout, view=True)
def _feature_dropout(to, input, p=0.5, training=True, inplace=False, *, shape):
    if input.rank < 3:
        raise Unsupported("its input has no batch axis")
    return _dropped(to, input, p, training, (*shape[:2], *[1] * (input.rank - 2)), shape)


@_operator(F.dropout3d, view=True)
def _dropout3d(to, input, p=0.5, training=True, inplace=False, *, shape):
    if input.rank != 5:
        raise Unsupported("its input has no batch axis")
    return _feature_dropout(to, input, p, training, shape=shape)


# --- Arithmetic ----------------------------------------------------------------------------------------------------------------


def _operand(to: Emitter, value: Any) -> Value:
    return value if isinstance(value, Value) else to.number(value)


def _scaled(to: Emitter, input: Value, factor: Any) -> Value:
    return input if factor == 1 else to.node({"Arithmetic": "Mul"}, [input, to.number(factor)], input.shape)


def _arithmetic(name: str, *targets: Any, methods: Sequence[str] = (), swapped: bool = False) -> None:
    def translate(to, input, other, *, alpha=1, shape, rounding_mode=None):
        if rounding_mode is not None:
            raise Unsupported("rounding_mode")
        first, second = _operand(to, input), _operand(to, other)
        if swapped:
            first, second = second, first
        return to.node({"Arithmetic": name}, [first, _scaled(to, second, alpha)], shape)

    _operator(*targets, methods=methods)(translate)


_arithmetic("Add", operator.add, torch.add, methods=["add"])
_arithmetic("Sub", operator.sub, torch.sub, methods=["sub"])
_arithmetic("Mul", operator.mul, torch.mul, methods=["mul"])
_arithmetic("Div", operator.truediv, torch.div, torch.true_divide, methods=["div"])
_arithmetic("Max", torch.maximum, methods=["maximum"])
_arithmetic("Min", torch.minimum, methods=["minimum"])
_arithmetic("Sub", torch.rsub, swapped=True)


@_operator(operator.pow, torch.pow, methods=["pow"])
def _pow(to, input, exponent, *, shape):
    if not isinstance(input, Value) or isinstance(exponent, Value):
        raise Unsupported("its exponent is a tensor")
    return to.node({"Arithmetic": "Pow"}, [input, to.number(exponent)], shape)


@_operator(torch.square, methods=["square"])
def _square(to, input, *, shape):
    return to.node({"Arithmetic": "Mul"}, [input, input], shape)


def _reduce(to: Emitter, kind: str, input: Value, dim: Any, keepdim: Any, dtype: Any, shape: Sequence[int]) -> Value:
    if dtype is not None:
        raise Unsupported("it computes in another type")
    axes = list(range(input.rank)) if dim is None or dim == () or dim == [] else dim
    axes = list(axes) if isinstance(axes, (tuple, list)) else [axes]
    op = {"kind": kind, "keep_dims": bool(keepdim), "no_axes_is_identity": False}
    return to.node({"Reduce": op}, [input, to.integers(axes)], shape)


def _reduction(kind: str, *targets: Any, methods: Sequence[str] = ()) -> None:
    def translate(to, input, dim=None, keepdim=False, *, dtype=None, shape):
        return _reduce(to, kind, input, dim, keepdim, dtype, shape)

    _operator(*targets, methods=methods)(translate)


_reduction("Mean", torch.mean, methods=["mean"])
_reduction("Sum", torch.sum, methods=["sum"])
_reduction("Max", torch.amax, methods=["amax"])
_reduction("Min", torch.amin, methods=["amin"])


@_operator(torch.norm, methods=["norm"])
def _norm(to, input, p="fro", dim=None, keepdim=False, out=None, dtype=None, *, shape):
    return _vector_norm(to, input, 2 if p == "fro" or p is None else p, dim, keepdim, dtype=dtype, shape=shape)


@_operator(torch.linalg.vector_norm)
def _vector_norm(to, input, ord=2, dim=None, keepdim=False, *, dtype=None, shape):
    kind = {1: "L1", 2: "L2"}.get(ord) if isinstance(ord, (int, float)) else None
    if kind is None:
        raise Unsupported(f"its order is {ord}")
    return _reduce(to, kind, input, dim, keepdim, dtype, shape)


@_operator(torch.addcmul, methods=["addcmul"])
def _addcmul(to, input, tensor1, tensor2, *, value=1, shape):
    return _combined(to, "Mul", input, (tensor1, tensor2), value, shape)


@_operator(torch.addcdiv, methods=["addcdiv"])
def _addcdiv(to, input, tensor1, tensor2, *, value=1, shape):
    return _combined(to, "Div", input, (tensor1, tensor2), value, shape)


def _combined(to: Emitter, name: str, input: Value, pair: tuple[Value, Value], value: Any, shape: Sequence[int]) -> Value:
    """The input and `value` times a product or quotient."""
    between = torch.broadcast_shapes(*(one.shape for one in pair))
    result = to.node({"Arithmetic": name}, list(pair), between)
    return to.node({"Arithmetic": "Add"}, [input, _scaled(to, result, value)], shape)


# --- Shapes --------------------------------------------------------------------------------------------------------------------


@_operator(
    torch.reshape,
    torch.flatten,
    torch.squeeze,
    torch.unsqueeze,
    torch.unflatten,
    methods=["view", "reshape", "flatten", "squeeze", "unsqueeze", "unflatten", "view_as", "reshape_as"],
    view=True,
)
def _reshape(to, input, *sizes, shape, **named):
    return to.reshaped(to.node("Identity", [input], input.shape), shape)


@_operator(methods=["contiguous"], view=True)
def _contiguous(to, input, memory_format=None, *, shape):
    return to.node("Identity", [input], shape)


@_operator(methods=["to", "float", "bfloat16", "type_as"], view=True)
def _convert(to, input, *others, shape, **named):
    if named.keys() - {"dtype", "copy", "non_blocking"}:
        raise Unsupported("it changes more than the type")
    # What it reads is converted to the type of its result, as for any other operation.
    return to.node("Identity", [input], shape)


@_operator(torch.clone, methods=["clone"])
def _clone(to, input, memory_format=None, *, shape):
    return to.node("Identity", [input], shape)


@_operator(torch.permute, methods=["permute"], view=True)
def _permute(to, input, *dims, shape):
    order = dims[0] if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
    order = [_axis(axis, input.rank) for axis in order]
    return to.node({"Transpose": {"order": order}}, [input], shape)


@_operator(torch.transpose, methods=["transpose"], view=True)
def _transpose(to, input, dim0, dim1, *, shape):
    order = list(range(input.rank))
    if not order:
        raise Unsupported("its tensor has no axes")
    dim0, dim1 = _axis(dim0, input.rank), _axis(dim1, input.rank)
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return to.node({"Transpose": {"order": order}}, [input], shape)


@_operator(methods=["expand", "expand_as"], view=True)
def _expand(to, input, *sizes, shape):
    return to.node("Expand", [input, to.integers(shape)], shape)


@_operator(torch.cat, torch.concat)
def _cat(to, tensors, dim=0, *, shape):
    values = [_tensor(value, "input") for value in tensors]
    if any(value.rank != len(shape) for value in values):
        raise Unsupported("it joins tensors of different ranks")
    return to.node({"Concat": {"axis": dim}}, values, shape)


@_operator(torch.stack)
def _stack(to, tensors, dim=0, *, shape):
    dim = _axis(dim, len(shape))
    single = _shape_like(shape, [dim], [1])
    values = [to.reshaped(_tensor(value, "input"), single) for value in tensors]
    return to.node({"Concat": {"axis": dim}}, values, shape)


def _split_into(to, input, dim, shape):
    sizes = to.integers([part[_axis(dim, input.rank)] for part in shape])
    return to.nodes_of({"Split": {"axis": dim}}, [input, sizes], shape)


@_operator(torch.chunk, methods=["chunk"], view=True)
def _chunk(to, input, chunks, dim=0, *, shape):
    return _split_into(to, input, dim, shape)


@_operator(torch.split, methods=["split"], view=True)
def _split(to, tensor, split_size_or_sections=None, dim=0, *, split_size=None, shape):
    return _split_into(to, tensor, dim, shape)


@_operator(operator.getitem, view=True)
def _getitem(to, input, index, *, shape):
    if isinstance(input, list):
        return input[index]
    index = index if isinstance(index, tuple) else (index,)
    if any(part is Ellipsis for part in index):
        place = next(place for place, part in enumerate(index) if part is Ellipsis)
        given = sum(part is not None for part in index) - 1
        index = index[:place] + (slice(None),) * (input.rank - given) + index[place + 1 :]
    # New axes come in with the last reshape.
    index = tuple(part for part in index if part is not None)
    lists = [axis for axis, part in enumerate(index) if isinstance(part, list)]
    numbers = any(isinstance(part, int) and not isinstance(part, bool) for part in index)
    if len(lists) > 1 or (lists and numbers) or any(not _is_index(part) for axis in lists for part in index[axis]):
        raise Unsupported("it is indexed by several lists, or by a mask")
    bounds = []
    for axis, part in enumerate(index):
        size = input.shape[axis]
        if isinstance(part, (slice, list)):
            start, stop, step = (part if isinstance(part, slice) else slice(None)).indices(size)
            if step < 1:
                raise Unsupported("a slice with a negative step")
            bounds.append((start, max(start, stop), step))
        elif _is_index(part):
            start = _axis(part, size)
            bounds.append((start, start + 1, 1))
        else:
            raise Unsupported("it is indexed by a tensor" if isinstance(part, Value) else f"it is indexed by {part!r}")
    sliced = [len(range(*bound)) for bound in bounds]
    found = _shape_like(input.shape, range(len(bounds)), sliced)
    if bounds:
        starts, ends, steps = (to.integers(numbers) for numbers in zip(*bounds))
        axes = to.integers(range(len(bounds)))
        input = to.node("Slice", [input, starts, ends, axes, steps], found)
    for axis in lists:
        places = [_axis(part, input.shape[axis]) for part in index[axis]]
        found = _shape_like(found, [axis], [len(places)])
        input = to.node({"Gather": {"axis": axis}}, [input, to.integers(places)], found)
    return to.reshaped(input, shape)


def _is_index(part: Any) -> bool:
    return isinstance(part, int) and not isinstance(part, bool)


@_operator(F.pad, torch._C._nn.pad)
def _pad(to, input, pad, mode="constant", value=None, *, shape):
    kinds = dict(constant="Constant", reflect="Reflect", replicate="Edge", circular="Wrap")
    if mode not in kinds or len(pad) % 2 or len(pad) > 2 * input.rank:
        raise Unsupported(f"mode {mode!r} with {pad!r}")
    before, after = [0] * input.rank, [0] * input.rank
    for place in range(len(pad) // 2):
        before[-1 - place], after[-1 - place] = pad[2 * place], pad[2 * place + 1]
    if mode == "circular" and min(pad, default=0) < 0:
        raise Unsupported("it wraps around and crops")
    filling = to.number(value) if mode == "constant" and value is not None else None
    return to.node({"Pad": kinds[mode]}, [input, to.integers(before + after), filling], shape)
