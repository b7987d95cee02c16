"""Operations by PyTorch's names, for tensors on the CPU: a convolution by the algorithm that measures fastest, and the five functions that
synchronized batch norm is made of.

:func:`conv2d` records gradients, as `torch.nn.functional.conv2d` does. The five functions record none, which is for
:class:`torch_convoke.nn.SyncBatchNorm`. PyTorch has them for GPUs only, as ``torch.batch_norm_stats`` and so on. Names, order of arguments and meaning are
PyTorch's (``aten/src/ATen/native/cuda/Normalization.cuh``). On a rank with input x, (N, C, ...), and gradient dy::

    mean, invstd = batch_norm_stats(x, eps)                        # of this rank
    mean, invstd = batch_norm_gather_stats_with_counts(...)        # of all ranks
    y = batch_norm_elemt(x, weight, bias, mean, invstd, eps)       # (x - mean) * invstd * weight + bias
    sum_dy, sum_dy_xmu, dweight, dbias = batch_norm_backward_reduce(dy, x, mean, invstd, weight, True, True, True)
    ...                                                            # sum_dy and sum_dy_xmu are summed over all ranks
    dx = batch_norm_backward_elemt(dy, x, mean, invstd, weight, sum_dy, sum_dy_xmu, counts)

Inputs are float32, float64, float16 or bfloat16, with 2 dimensions or more. Contiguous and channels-last inputs are
read where they lie, and results have their order; inputs of other strides are copied. Statistics are summed in float64,
and rounded to the accumulate type: float64 for float64 inputs, else float32.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

from . import _engine, _threads
from ._conv import conv2d

__all__ = [
    "conv2d",
    "batch_norm_stats",
    "batch_norm_gather_stats_with_counts",
    "batch_norm_elemt",
    "batch_norm_backward_reduce",
    "batch_norm_backward_elemt",
]


def batch_norm_stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and 1 / sqrt(biased variance + eps) of each channel.

    Args:
        input: (N, C, ...).
        eps: 0 or more.

    Returns:
        mean, invstd: (C) each, in the accumulate type. A batch without values has mean 0 and variance 0. Where variance
        and eps are both 0, invstd is 0.

    Raises:
        RuntimeError: if the input has fewer than 2 dimensions, or eps is negative or NaN.
        ValueError, TypeError: if the input is not on the CPU, or not of floating-point numbers.
    """
    statistics, _ = gather(moments(dense(input))[None], eps)
    mean, invstd, _ = statistics.to(_accumulate_type(input))
    return mean, invstd


def batch_norm_gather_stats_with_counts(
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """The statistics of all ranks' values together; also updates the running statistics, in place.

    Args:
        input: not used; PyTorch looks at its type.
        mean, invstd: (ranks, C), each row as :func:`batch_norm_stats` gives it.
        running_mean, running_var: (C), or None. They become (1 - momentum) * old + momentum * new, where the new
            variance is the unbiased one: divided by the count of all values - 1. No values at all change nothing.
        momentum: the weight of the new statistics.
        eps: the one that invstd was computed with.
        counts: (ranks), the number of values of a channel. Ranks with 0 do not count, whatever their statistics.

    Returns:
        mean, invstd: (C) each, float64 if the given means are, else float32.

    Raises:
        RuntimeError: if shapes do not fit, or a count is not a whole number.
    """
    dtype = _accumulate_type(mean)
    mean, invstd, counts = (each.detach().double() for each in (mean, invstd, counts))
    if mean.dim() != 2 or mean.shape != invstd.shape or counts.shape != mean.shape[:1]:
        shapes = f"{tuple(mean.shape)}, {tuple(invstd.shape)} and {tuple(counts.shape)}"
        raise RuntimeError(
            "batch_norm_gather_stats_with_counts: expected mean and invstd of shape (ranks, C) and counts of shape "
            f"(ranks), got {shapes}"
        )
    counts = counts[:, None]
    # batch_norm_stats gives an invstd of 0 for a variance of 0. Rounding may make another variance negative.
    variance = torch.where(invstd == 0, 0.0, invstd**-2 - eps).clamp(min=0)
    parts = torch.where(counts == 0, 0.0, torch.cat([mean, variance * counts, counts], dim=1))
    statistics, count = gather(parts, eps)
    if count > 0:
        with torch.no_grad():
            for running, new in ((running_mean, statistics[0]), (running_var, statistics[2])):
                if running is not None:
                    running.copy_((1 - momentum) * running.double() + momentum * new)
    mean, invstd, _ = statistics.to(dtype)
    return mean, invstd


def batch_norm_elemt(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    eps: float,
) -> Tensor:
    """(input - mean) * invstd * weight + bias.

    Args:
        input: (N, C, ...).
        weight, bias: (C), or None for 1 and 0.
        mean, invstd: (C).
        eps: not used, as in PyTorch.

    Returns:
        (N, C, ...), of the input's type.

    Raises:
        RuntimeError: if shapes do not fit.
    """
    return elemt(dense(input), weight, bias, mean, invstd)


def batch_norm_backward_reduce(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The sums over one rank's values that the gradients need.

    Args:
        grad_out, input: (N, C, ...), of one type.
        mean, invstd: (C), of all ranks together.
        weight: (C), or None. Only its type matters.
        input_g, weight_g, bias_g: which gradients are needed.

    Returns:
        sum_dy, sum_dy_xmu: the sums of grad_out and of grad_out * (input - mean), (C), of the mean's type; None without
            input_g.
        grad_weight: sum_dy_xmu * invstd, (C), of the weight's type, or of the mean's if there is no weight; None
            without weight_g.
        grad_bias: sum_dy, of the same type; None without bias_g.

    Raises:
        RuntimeError: if shapes or types do not fit.
    """
    x = dense(input)
    sum_dy, sum_dy_xmu = backward_reduce(like(grad_out, x), x, mean, invstd)
    statistic, parameter = mean.dtype, mean.dtype if weight is None else weight.dtype
    return (
        sum_dy.to(statistic, copy=True) if input_g else None,
        sum_dy_xmu.to(statistic, copy=True) if input_g else None,
        (sum_dy_xmu * invstd.detach().double()).to(parameter) if weight_g else None,
        sum_dy.to(parameter, copy=True) if bias_g else None,
    )


def batch_norm_backward_elemt(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    """The gradient of the input: (dy - sum_dy / n - (x - mean) * invstd^2 * sum_dy_xmu / n) * invstd * weight.

    Args:
        grad_out, input: (N, C, ...), of one type.
        mean, invstd: (C), of all ranks together.
        weight: (C), or None for 1.
        sum_dy, sum_dy_xmu: (C), summed over all ranks.
        count: (ranks), whole numbers; n is their sum.

    Returns:
        (N, C, ...), of the input's type.

    Raises:
        RuntimeError: if shapes or types do not fit, or the sum of the counts is 0.
    """
    x = dense(input)
    return backward_elemt(like(grad_out, x), x, mean, invstd, weight, sum_dy, sum_dy_xmu, int(count.sum()))


# What follows is for this package: the same on statistics in float64, which the synchronized layer does not round.


def moments(x: Tensor) -> Tensor:
    """What ranks send each other, (2 C + 1) float64 numbers: the mean of each channel of a dense tensor, the sum of
    squared deviations from it, and the count of values of a channel."""
    return from_dlpack(_run(_engine.batch_norm_moments, _lend(x)))


def gather(parts: Tensor, eps: float) -> tuple[Tensor, int]:
    """Mean, invstd and unbiased variance of all parts together, (3, C) float64 numbers, and the count of values of a
    channel. `parts` is (ranks, 2 C + 1)."""
    statistics, count = _run(_engine.batch_norm_gather, _lend(parts), eps)
    return from_dlpack(statistics), count


def elemt(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor) -> Tensor:
    """As :func:`batch_norm_elemt`, of a dense tensor."""
    layer = _lend(weight), _lend(bias), _lend(mean), _lend(invstd)
    return from_dlpack(_run(_engine.batch_norm_elemt, _lend(x), *layer))


def backward_reduce(dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor) -> Tensor:
    """The sums of dy and of dy * (x - mean), (2, C) float64 numbers, of dense tensors that lie in the same order."""
    tensors = _lend(dy), _lend(x), _lend(mean), _lend(invstd)
    return from_dlpack(_run(_engine.batch_norm_backward_reduce, *tensors))


def backward_elemt(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: int,
) -> Tensor:
    """As :func:`batch_norm_backward_elemt`, of dense tensors that lie in the same order."""
    vectors = _lend(mean), _lend(invstd), _lend(weight), _lend(sum_dy), _lend(sum_dy_xmu)
    return from_dlpack(_run(_engine.batch_norm_backward_elemt, _lend(dy), _lend(x), *vectors, count))


def dense(x: Tensor) -> Tensor:
    """`x` if it is contiguous or channels-last (of any number of dimensions), else a contiguous copy."""
    return x if x.is_contiguous() or _is_channels_last(x) else x.contiguous()


def like(dy: Tensor, x: Tensor) -> Tensor:
    """`dy`, with its elements in the order in which those of the dense tensor `x` lie; a copy if they are not."""
    if x.is_contiguous():
        return dy.contiguous()
    return dy if _is_channels_last(dy) else dy.movedim(1, -1).contiguous().movedim(-1, 1)


def _is_channels_last(x: Tensor) -> bool:
    return x.dim() > 2 and x.movedim(1, -1).is_contiguous()


def _run(kernel: Callable[..., Any], *operands: Any) -> Any:
    with _threads.running:
        return kernel(_threads.engine(), *operands)


def _lend(tensor: Tensor | None) -> object:
    """A capsule for the engine, which reads the elements where they lie; those of other strides are copied first."""
    return None if tensor is None else to_dlpack(dense(tensor.detach()))


def _accumulate_type(input: Tensor) -> torch.dtype:
    return torch.float64 if input.dtype == torch.float64 else torch.float32
