"""One convolution in convoke, alone or with the batch norm and the activation behind it, as one function of PyTorch's autograd."""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function
from torch.utils.dlpack import from_dlpack, to_dlpack

from . import _engine, _pace, _threads

#: The types that convoke computes in.
DTYPES = (torch.float32, torch.float64)
#: Types of tensors that convoke takes: others, such as fake tensors, may mean something else by their operations.
_PLAIN = (Tensor, torch.nn.Parameter)


#: The activations behind a batch norm; each takes a tensor and the slope of a leaky ReLU.
ACTIVATIONS = {
    "relu": lambda y, slope: F.relu(y),
    "leaky_relu": lambda y, slope: F.leaky_relu(y, slope),
    "relu6": lambda y, slope: F.relu6(y),
    "hardswish": lambda y, slope: F.hardswish(y),
    "silu": lambda y, slope: F.silu(y),
}


class Steps(NamedTuple):
    """How a convolution steps over its input, height before width."""

    stride: tuple[int, int]
    #: Zeros above, below, to the left and to the right.
    padding: tuple[int, int, int, int]
    dilation: tuple[int, int]
    groups: int
    #: Whether the output is in channels-last.
    channels_last: bool

    def output(self, input: Tensor, weight: Tensor) -> tuple[int, int]:
        """Height and width of the output; below 1 if the kernel does not fit."""
        sizes = []
        for axis in range(2):
            padded = input.shape[2 + axis] + sum(self.padding[2 * axis : 2 * axis + 2])
            span = self.dilation[axis] * (weight.shape[2 + axis] - 1) + 1
            sizes.append((padded - span) // self.stride[axis] + 1)
        return sizes[0], sizes[1]


class Norm(NamedTuple):
    """A batch norm and an activation."""

    eps: float
    #: Whether the divisor is sqrt(variance) + eps instead of sqrt(variance + eps).
    eps_outside: bool
    #: The name of the activation, and the slope of a leaky ReLU.
    activation: tuple[str, float] | None
    #: Whether backward computes the convolution again, instead of keeping its output.
    recompute: bool
    #: Mean and variance, if they are not to be the batch's.
    statistics: tuple[Tensor, Tensor] | None


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """:func:`torch.nn.functional.conv2d`, computed by the algorithm that is fastest on this machine, forward and backward.

    For a new problem (shapes, options, memory format, type, threads) the algorithm is chosen by estimate, and by measurement within the
    next calls, unless a result is stored: see :mod:`torch_convoke.tuning`. What convoke does not compute, PyTorch computes: tensors on other
    devices or of other types than float32 and float64, subclasses of tensors, empty batches, calls under autocast, ``torch.func``
    or ``torch.compile``. It is also PyTorch that raises errors for wrong arguments, and that computes gradients which are differentiated
    themselves (``create_graph=True``).

    Args:
        input: (N, C, H, W) or (C, H, W).
        weight: (K, C / groups, R, S).
        bias: (K), or None.
        stride, dilation: one number, or one for height and one for width.
        padding: the same, or "valid" for none, or "same" for an output as large as the input; then the stride must be 1.
        groups: groups of channels that do not mix.

    Returns:
        (N, K, H', W') or (K, H', W'), in channels-last if input or weight is, as in PyTorch.

    Raises:
        RuntimeError, TypeError, ValueError: as :func:`torch.nn.functional.conv2d`.
    """
    # Under torch.compile this is a call that backends know.
    compiling = torch.compiler.is_compiling()
    steps = None if compiling else steps_of(input, weight, bias, stride, padding, dilation, groups)
    if steps is None:
        return F.conv2d(input, weight, bias, stride, padding, dilation, groups)
    if input.dim() == 3:
        return run(steps, None, input.unsqueeze(0), weight, bias)[0].squeeze(0)
    return run(steps, None, input, weight, bias)[0]


def steps_of(
    input: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: Any
) -> Steps | None:
    """The steps of a convolution that convoke computes; None for one that PyTorch computes, or refuses."""
    tensors = [input, weight] if bias is None else [input, weight, bias]
    if not all(type(tensor) in _PLAIN for tensor in tensors) or not can_run(*tensors):
        return None
    if weight.dim() != 4 or input.dim() not in (3, 4) or bias is not None and bias.shape != weight.shape[:1]:
        return None
    stride, dilation = _pair(stride), _pair(dilation)
    if padding == "valid":
        padding = (0, 0)
    elif padding == "same":
        padding = None if stride != (1, 1) else padding
    else:
        padding = _pair(padding)
    if stride is None or dilation is None or padding is None or type(groups) is not int:
        return None
    if min(*stride, *dilation, groups) < 1:
        return None
    if padding == "same":
        around = [dilation[axis] * (weight.shape[2 + axis] - 1) for axis in range(2)]
        padding = tuple(part for all in around for part in (all // 2, all - all // 2))
    else:
        padding = (padding[0], padding[0], padding[1], padding[1])
    batched = input if input.dim() == 4 else input.unsqueeze(0)
    if batched.shape[1] != weight.shape[1] * groups or weight.shape[0] % groups or min(padding) < 0:
        return None
    if not batched.numel() or not weight.numel():
        return None
    steps = Steps(stride, padding, dilation, groups, _is_channels_last(batched) or _is_channels_last(weight))
    return steps if min(steps.output(batched, weight)) >= 1 else None


def can_run(*tensors: Tensor) -> bool:
    """Whether convoke computes with these tensors, now."""
    dtype = tensors[0].dtype
    return (
        dtype in DTYPES
        and all(
            tensor.dtype is dtype and tensor.device.type == "cpu" and tensor.layout is torch.strided for tensor in tensors
        )
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._are_functorch_transforms_active()
    )


def _pair(value: Any) -> tuple[int, int] | None:
    """One number for each axis, from one for both or a sequence; None for anything else."""
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    values = values * 2 if len(values) == 1 else values
    return values if len(values) == 2 and all(type(number) is int for number in values) else None


def _is_channels_last(tensor: Tensor) -> bool:
    """Whether PyTorch takes strides for those of channels-last, also where sizes of 1 leave a choice."""
    sizes, strides = tensor.shape, tensor.stride()
    least = 0
    for axis in (1, 3, 2, 0):
        if strides[axis] < least or axis == 0 and least == strides[1] or strides[1] == 0:
            return False
        least = strides[axis] * sizes[axis]
    return True


def run(
    steps: Steps,
    norm: Norm | None,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The output; and the batch's mean and unbiased variance as 2 x K numbers in float64, if a batch norm computes them."""
    operands = (input, weight, bias, norm_weight, norm_bias)
    if torch.is_grad_enabled() and any(operand is not None and operand.requires_grad for operand in operands):
        return _Convolution.apply(steps, norm, *operands)
    return _forward(steps, norm, [_laid_out(operand, steps) for operand in operands], [False] * 5)[:2]


def _forward(
    steps: Steps, norm: Norm | None, operands: Sequence[Tensor | None], needs: list[bool]
) -> tuple[Tensor, Tensor | None, Any]:
    """Output, moments and tape."""
    capsules = [_lend(operand) for operand in operands]
    if norm is not None and norm.statistics is not None:
        mean, variance = norm.statistics
        norm = norm._replace(statistics=(_lend(mean), _lend(variance)))
    engine = _threads.engine()
    _pace.of(engine).measure(engine)
    output, moments, tape = _engine.conv_bn(engine, capsules, needs, steps, norm)
    return from_dlpack(output), None if moments is None else from_dlpack(moments), tape


class _Convolution(Function):
    @staticmethod
    def forward(ctx: Any, steps: Steps, norm: Norm | None, *operands: Tensor | None) -> tuple[Tensor, Tensor | None]:
        laid_out = [_laid_out(operand, steps) for operand in operands]
        output, moments, ctx.tape = _forward(steps, norm, laid_out, list(ctx.needs_input_grad[2:]))
        ctx.steps = steps
        ctx.set_materialize_grads(False)
        ctx.norm = norm
        # Lets PyTorch check that nobody changes what backward reads, and free it.
        ctx.save_for_backward(*operands)
        if moments is not None:
            ctx.mark_non_differentiable(moments)
        return output, moments

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return (None,) * 7
        operands = ctx.saved_tensors
        if torch.is_grad_enabled():
            return None, None, *_differentiable(ctx.steps, ctx.norm, operands, ctx.needs_input_grad[2:], gradient)
        retain = torch._C._autograd._get_current_graph_task_keep_graph()
        found = ctx.tape.backward([_lend(_laid_out(gradient, ctx.steps))], retain)
        return None, None, *(None if capsule is None else from_dlpack(capsule) for capsule in found)


def _differentiable(
    steps: Steps, norm: Norm | None, operands: Sequence[Tensor | None], needs: Sequence[bool], gradient: Tensor
) -> list[Tensor | None]:
    """The gradients of the operands by PyTorch's operations, which can be differentiated themselves."""
    input, weight, bias, norm_weight, norm_bias = operands
    top, bottom, left, right = steps.padding
    y = F.conv2d(F.pad(input, (left, right, top, bottom)), weight, bias, steps.stride, 0, steps.dilation, steps.groups)
    if norm is not None:
        variance, mean = torch.var_mean(y, (0, 2, 3), correction=0) if norm.statistics is None else norm.statistics[::-1]
        divisor = variance.sqrt() + norm.eps if norm.eps_outside else (variance + norm.eps).sqrt()
        y = (y - mean[:, None, None]) / divisor[:, None, None]
        y = y if norm_weight is None else y * norm_weight[:, None, None]
        y = y if norm_bias is None else y + norm_bias[:, None, None]
        if norm.activation is not None:
            name, slope = norm.activation
            y = ACTIVATIONS[name](y, slope)
    wanted = [place for place, needed in enumerate(needs) if needed]
    found: list[Tensor | None] = [None] * len(operands)
    gradients = torch.autograd.grad(y, [operands[place] for place in wanted], gradient, create_graph=True, allow_unused=True)
    for place, value in zip(wanted, gradients):
        found[place] = value
    return found


def _laid_out(tensor: Tensor | None, steps: Steps) -> Tensor | None:
    """The tensor, or a copy of it if its elements lie in another order than the convolution's."""
    if tensor is None or tensor.dim() != 4:
        return tensor
    order = torch.channels_last if steps.channels_last else torch.contiguous_format
    return tensor.contiguous(memory_format=order)


def _lend(tensor: Tensor | None) -> Any:
    """A capsule for the engine."""
    return None if tensor is None else to_dlpack(tensor.detach().contiguous() if tensor.dim() < 4 else tensor.detach())
