"""Batch norm over the batches of all ranks, on CPUs."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from .. import ops

__all__ = ["SyncBatchNorm", "convert_sync_batchnorm"]


class SyncBatchNorm(_BatchNorm):
    """:class:`torch.nn.SyncBatchNorm` that also takes tensors on the CPU, over any process group that does, like gloo.

    Constructor, attributes, ``repr`` and ``state_dict`` are those of :class:`torch.nn.SyncBatchNorm`. Outputs,
    gradients and running statistics are those of a BatchNorm that sees the batches of all ranks as one. Ranks may have
    different numbers of samples, even none: such a rank passes an empty batch through forward and backward. Forward
    makes one ``all_gather`` of 2 C + 1 float64 numbers. Backward makes one ``all_reduce`` of 2 C, if the input needs a
    gradient: all ranks must agree on whether it does.

    In evaluation, without an initialised process group, or in a group of one rank, it is plain batch norm. Tensors on
    other devices go to PyTorch's own forward.

    The gradients of weight and bias are those of this rank's outputs: DistributedDataParallel averages them over the
    ranks. Backward cannot be differentiated again.

    It is no subclass of :class:`torch.nn.SyncBatchNorm`, because DistributedDataParallel refuses models on the CPU that
    contain one.

    Shape: input and output (N, C, ...), with 2 dimensions or more; float32, float64, float16 or bfloat16.

    Raises:
        ValueError: if the input has fewer than 2 dimensions or no channels, or if all ranks together have one value per
            channel in training.
        RuntimeError: if the input does not have ``num_features`` channels, or communication fails.
    """

    process_group: Any

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any | None = None,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
    ) -> None:
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        # Older versions of PyTorch do not know `bias`.
        if not bias:
            options["bias"] = False
        super().__init__(num_features, eps, momentum, affine, track_running_stats, **options)
        self.process_group = process_group

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def _check_non_zero_input_channels(self, input: Tensor) -> None:
        if input.size(1) == 0:
            raise ValueError("SyncBatchNorm number of input channels should be non-zero")

    def forward(self, input: Tensor) -> Tensor:
        if input.device.type != "cpu":
            return torch.nn.SyncBatchNorm.forward(self, input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        tracks = self.training and self.track_running_stats
        momentum = 0.0 if self.momentum is None else self.momentum
        if tracks:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / self.num_batches_tracked.item()
        # In evaluation, running statistics normalise; in training, they are only updated.
        running_mean = self.running_mean if tracks or not self.training else None
        running_var = self.running_var if tracks or not self.training else None
        group = _group_of_several(self.process_group) if self.training else None
        if group is None:
            of_batch = self.training or (self.running_mean is None and self.running_var is None)
            return F.batch_norm(
                input, running_mean, running_var, self.weight, self.bias, of_batch, momentum, self.eps
            )
        if input.size(1) != self.num_features:
            shape = tuple(input.shape)
            raise RuntimeError(f"SyncBatchNorm: expected {self.num_features} channels, got input of shape {shape}")
        y, statistics, count = _sync_batch_norm(
            ops.dense(input), self.weight, self.bias, self.eps, group.group_name
        )
        # Statistics of no values change nothing.
        momentum = momentum * count.clamp(max=1)
        for running, new in ((running_mean, statistics[0]), (running_var, statistics[2])):
            if running is not None:
                running.lerp_(new.to(running.dtype), momentum.to(running.dtype))
        return y

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module, process_group: Any | None = None) -> torch.nn.Module:
        """See :func:`convert_sync_batchnorm`."""
        return convert_sync_batchnorm(module, process_group)


def _group_of_several(group: Any) -> Any:
    """The group, or the default one, if it has more than one rank; else None."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.group.WORLD if group is None else group
    return group if dist.get_world_size(group) > 1 else None


def _group_named(name: str) -> Any:
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)


# Operators of PyTorch's, so that torch.compile keeps them in its graphs as they are: it neither looks into them nor
# stops at them.


@torch.library.custom_op(
    "torch_convoke::sync_batch_norm",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor x, Tensor? weight, Tensor? bias, float eps, str group) -> (Tensor, Tensor, Tensor)",
)
def _sync_batch_norm(x, weight, bias, eps, group):
    """The output; mean, invstd and unbiased variance over all ranks, (3, C); the count of values. `x` is dense."""
    group = _group_named(group)
    mine = ops.moments(x)
    parts = mine.new_empty(dist.get_world_size(group), mine.numel())
    dist.all_gather(list(parts.unbind(0)), mine, group)
    statistics, count = ops.gather(parts, eps)
    # Every rank knows the count, so all of them stop.
    if count == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)} "
            "and one value on all ranks together"
        )
    mean, invstd, _ = statistics
    return ops.elemt(x, weight, bias, mean, invstd), statistics, statistics.new_tensor(count)


@_sync_batch_norm.register_fake
def _(x, weight, bias, eps, group):
    statistics = x.new_empty((3, x.size(1)), dtype=torch.float64)
    return torch.empty_like(x), statistics, statistics.new_empty(())


@torch.library.custom_op(
    "torch_convoke::sync_batch_norm_backward",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor dy, Tensor x, Tensor? weight, Tensor statistics, Tensor count, bool for_input, str group)"
    " -> (Tensor, Tensor)",
)
def _sync_batch_norm_backward(dy, x, weight, statistics, count, for_input, group):
    """The gradient of x, or nothing; this rank's gradients of weight and bias, (2, C). `dy` lies in memory as `x`."""
    mean, invstd, _ = statistics
    sums = ops.backward_reduce(dy, x, mean, invstd)
    sum_dy, sum_dy_xmu = sums
    # The gradients of this rank, thus before the sums become those of all ranks.
    parameters = torch.stack([sum_dy_xmu * invstd, sum_dy])
    if not for_input:
        return x.new_empty(0), parameters
    dist.all_reduce(sums, dist.ReduceOp.SUM, _group_named(group))
    return ops.backward_elemt(dy, x, mean, invstd, weight, sum_dy, sum_dy_xmu, int(count)), parameters


@_sync_batch_norm_backward.register_fake
def _(dy, x, weight, statistics, count, for_input, group):
    return torch.empty_like(x) if for_input else x.new_empty(0), statistics.new_empty((2, x.size(1)))


def _keep(ctx, inputs, output):
    x, weight, bias, _, group = inputs
    _, statistics, count = output
    ctx.save_for_backward(x, weight, statistics, count)
    ctx.mark_non_differentiable(statistics, count)
    ctx.set_materialize_grads(False)
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.group = group


def _gradients(ctx, dy, *_):
    x, weight, statistics, count = ctx.saved_tensors
    for_input, for_weight, for_bias, _, _ = ctx.needs_input_grad
    dx, parameters = _sync_batch_norm_backward(
        ops.like(dy, x), x, weight, statistics, count, for_input, ctx.group
    )
    return (
        dx if for_input else None,
        parameters[0].to(weight.dtype) if for_weight else None,
        parameters[1].to(ctx.bias_dtype) if for_bias else None,
        None,
        None,
    )


def _refuse(ctx, *gradients):
    raise RuntimeError("SyncBatchNorm: its backward cannot be differentiated again")


_sync_batch_norm.register_autograd(_gradients, setup_context=_keep)
_sync_batch_norm_backward.register_autograd(_refuse)


def convert_sync_batchnorm(module: torch.nn.Module, process_group: Any | None = None) -> torch.nn.Module:
    """Turns every BatchNorm layer of a model, and every :class:`torch.nn.SyncBatchNorm`, into a :class:`SyncBatchNorm`.

    The layers stay the objects that they are, and only their class changes: parameters, buffers, names, hooks, training
    flags and whoever refers to a layer see no difference. (:meth:`torch.nn.SyncBatchNorm.convert_sync_batchnorm` makes
    new layers instead, without the hooks of the old ones.)

    Layers with a forward of their own, such as a batch norm with an activation inside, are left alone with a warning.

    Args:
        module: the model, or a single layer.
        process_group: the ranks that share statistics; by default all.

    Returns:
        The same module.

    Raises:
        ValueError: if a lazy layer has not seen an input yet.
    """
    forwards = (_BatchNorm.forward, torch.nn.SyncBatchNorm.forward, SyncBatchNorm.forward)
    for name, layer in module.named_modules():
        if not isinstance(layer, _BatchNorm):
            continue
        place = f"{name or 'the module'} ({type(layer).__name__})"
        if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():
            raise ValueError(f"{place} does not know its number of channels: run the model once, then convert it")
        if type(layer).forward not in forwards or "forward" in vars(layer) or hasattr(layer, "parametrizations"):
            warnings.warn(f"{place} is left as it is, not synchronized: it does more than batch norm", stacklevel=2)
            continue
        layer.__class__ = SyncBatchNorm
        layer.process_group = process_group
    return module
