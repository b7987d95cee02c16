"""A convolution, its batch norm and an activation as one layer that keeps less for backward."""

from __future__ import annotations

import math
from typing import Any, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from .. import _conv

__all__ = ["FusedConvBN2d"]

_FORMULAS = ("tutorial", "batch_norm")


class FusedConvBN2d(nn.Module):
    r"""activation(batch_norm(conv2d(x))), where backward needs nothing but x.

    Layers of their own keep the input of each for backward: x, the convolution's output y, and with most activations their output.
    This one keeps x, and computes y again in backward, as PyTorch's tutorial "Fusing Convolution and Batch Norm using Custom Function"
    (https://docs.pytorch.org/tutorials/intermediate/custom_function_conv_bn_tutorial.html) does. It can stand in for the tutorial's
    module: the first seven arguments, the attributes ``conv_weight``, ``num_features`` and ``eps``, the initial values and, by default,
    the results are the same.

    **Two formulas.** The tutorial's has no weight, bias or running statistics, divides by the *unbiased* variance, and adds eps outside
    of the root; :class:`torch.nn.BatchNorm2d` does neither::

        tutorial:    (y - mean) / (sqrt(variance * n / (n - 1)) + eps)
        batch_norm:  (y - mean) / sqrt(variance + eps)

    where n is the number of values of a channel. ``formula`` chooses; by default it is "tutorial" for a layer with neither ``affine`` nor
    ``track_running_stats``, as the tutorial's is, and "batch_norm" for others. With "batch_norm" the layer computes what
    :class:`torch.nn.Conv2d` and :class:`torch.nn.BatchNorm2d` compute. Take care: their default eps is 1e-5, this one's is 1e-3.

    What convoke does not compute, PyTorch's own operations do, with the same results: tensors on other devices or of other types than
    float32 and float64, empty batches, and calls under autocast or ``torch.func``. In a model that is compiled or optimized, "batch_norm"
    layers become part of the captured graph. Gradients that are differentiated themselves are computed by PyTorch.

    Shape: input (N, C, H, W), output (N, K, H', W'), in channels-last if input or weight is.

    Args:
        in_channels, out_channels: C and K.
        kernel_size: one number, or height and width.
        exp_avg_factor: the weight of new statistics in the running ones, which BatchNorm calls momentum; None for their plain average.
            Without ``track_running_stats`` it has no effect.
        eps: keeps the divisor from 0.
        device, dtype: of parameters and buffers.
        stride, padding, dilation, groups: as in :class:`torch.nn.Conv2d`; padding may be "same" or "valid".
        bias: whether the convolution has a bias.
        affine: whether the batch norm has a weight and a bias.
        track_running_stats: whether it has running statistics, which normalise in evaluation. Without them the batch's always do.
        activation: None, "relu", "leaky_relu", "relu6", "hardswish" or "silu".
        negative_slope: of "leaky_relu".
        formula: None, "tutorial" or "batch_norm".
        recompute: whether backward computes the convolution again. If not, its output is kept, and backward is faster.

    ``state_dict`` has these entries, if the layer has them:

    ======================  ===============  ===========================
    name                    shape            in Conv2d and BatchNorm2d
    ======================  ===============  ===========================
    conv_weight             (K, C/groups, R, S)  conv.weight
    conv_bias               (K)              conv.bias
    bn_weight, bn_bias      (K)              bn.weight, bn.bias
    running_mean            (K)              bn.running_mean
    running_var             (K)              bn.running_var
    num_batches_tracked     ()               bn.num_batches_tracked
    ======================  ===============  ===========================

    Raises:
        ValueError: for a formula or activation that does not exist, a slope that is not above 0, channels that groups do not divide;
            for an input that has not 4 dimensions, or one value per channel in training.
        RuntimeError: if the input does not fit the weight: PyTorch's error.
    """

    conv_bias: Tensor | None
    bn_weight: Tensor | None
    bn_bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        exp_avg_factor: float | None = 0.1,
        eps: float = 1e-3,
        device: Any = None,
        dtype: Any = None,
        *,
        stride: int | Sequence[int] = 1,
        padding: str | int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: bool = False,
        affine: bool = False,
        track_running_stats: bool = False,
        activation: str | None = None,
        negative_slope: float = 0.01,
        formula: str | None = None,
        recompute: bool = True,
    ) -> None:
        super().__init__()
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ValueError(f"{groups} groups do not divide {in_channels} and {out_channels} channels")
        self.num_features = out_channels
        self.exp_avg_factor, self.eps = exp_avg_factor, eps
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups
        self.track_running_stats = track_running_stats
        self._set_options(activation, negative_slope, formula, affine or track_running_stats, recompute)
        options = {"device": device, "dtype": dtype}
        kernel = (kernel_size, kernel_size) if isinstance(kernel_size, int) else tuple(kernel_size)

        def parameter(wanted: bool, *shape: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(*shape, **options)) if wanted else None

        self.conv_weight = nn.Parameter(torch.empty(out_channels, in_channels // groups, *kernel, **options))
        self.register_parameter("conv_bias", parameter(bias, out_channels))
        self.register_parameter("bn_weight", parameter(affine, out_channels))
        self.register_parameter("bn_bias", parameter(affine, out_channels))
        tracks = track_running_stats
        self.register_buffer("running_mean", torch.zeros(out_channels, **options) if tracks else None)
        self.register_buffer("running_var", torch.ones(out_channels, **options) if tracks else None)
        counter = torch.tensor(0, dtype=torch.long, device=device) if tracks else None
        self.register_buffer("num_batches_tracked", counter)
        self.reset_parameters()

    def _set_options(
        self, activation: str | None, slope: float, formula: str | None, standard: bool, recompute: bool
    ) -> None:
        if activation is not None and activation not in _conv.ACTIVATIONS:
            raise ValueError(f"there is no activation {activation!r}: use None or one of {', '.join(_conv.ACTIVATIONS)}")
        if not 0 < slope < math.inf:
            raise ValueError(f"negative_slope must be above 0, not {slope}")
        if formula is not None and formula not in _FORMULAS:
            raise ValueError(f"there is no formula {formula!r}: use None or one of {', '.join(_FORMULAS)}")
        self.activation, self.negative_slope = activation, slope
        self.formula = formula or _FORMULAS[standard]
        self.recompute = recompute

    @classmethod
    def from_modules(
        cls,
        conv: nn.Conv2d,
        bn: nn.BatchNorm2d,
        activation: str | None = None,
        *,
        negative_slope: float = 0.01,
        recompute: bool = True,
    ) -> FusedConvBN2d:
        """The layer that computes ``activation(bn(conv(x)))``, with the same Parameter and buffer objects.

        So an optimizer of the modules' parameters trains this layer. The modules stay as they are. Moving either to another device or
        type replaces its buffers, after which they are not shared any more.

        Args:
            conv, bn: the modules. Their hooks do not run.
            activation, negative_slope, recompute: as in the constructor.

        Raises:
            TypeError: if they are no :class:`torch.nn.Conv2d` and :class:`torch.nn.BatchNorm2d`, compute something else, or have a weight
                that is no Parameter.
            ValueError: if they do not fit, or the convolution pads with something else than zeros.
        """
        _check_kind(conv, nn.Conv2d, (nn.Conv2d.forward, nn.Conv2d._conv_forward))
        _check_kind(bn, nn.BatchNorm2d, (_BatchNorm.forward,))
        if conv.padding_mode != "zeros":
            raise ValueError(f"the convolution pads with {conv.padding_mode!r}, only 'zeros' can be fused")
        if conv.out_channels != bn.num_features:
            raise ValueError(f"the convolution gives {conv.out_channels} channels, the batch norm takes {bn.num_features}")
        layer = cls(
            conv.in_channels,
            conv.out_channels,
            conv.kernel_size,
            bn.momentum,
            bn.eps,
            device="meta",
            stride=conv.stride,
            padding=conv.padding,
            dilation=conv.dilation,
            groups=conv.groups,
            activation=activation,
            negative_slope=negative_slope,
            formula="batch_norm",
            recompute=recompute,
        )
        layer.track_running_stats = bn.track_running_stats
        layer.conv_weight, layer.conv_bias = conv.weight, conv.bias
        layer.bn_weight, layer.bn_bias = bn.weight, bn.bias
        layer.running_mean, layer.running_var = bn.running_mean, bn.running_var
        layer.num_batches_tracked = bn.num_batches_tracked
        return layer.train(bn.training)

    def reset_parameters(self) -> None:
        """Initial values: the tutorial's, which are :class:`torch.nn.Conv2d`'s and :class:`torch.nn.BatchNorm2d`'s."""
        nn.init.kaiming_uniform_(self.conv_weight, a=math.sqrt(5))
        if self.conv_bias is not None:
            bound = 1 / math.sqrt(self.conv_weight[0].numel())
            nn.init.uniform_(self.conv_bias, -bound, bound)
        if self.bn_weight is not None:
            nn.init.ones_(self.bn_weight)
        if self.bn_bias is not None:
            nn.init.zeros_(self.bn_bias)
        self.reset_running_stats()

    def reset_running_stats(self) -> None:
        """Forgets the batches so far."""
        if self.running_mean is not None:
            self.running_mean.zero_()
            self.running_var.fill_(1)
            self.num_batches_tracked.zero_()

    def extra_repr(self) -> str:
        out_channels, group_channels, *kernel = self.conv_weight.shape
        text = f"{group_channels * self.groups}, {out_channels}, kernel_size={tuple(kernel)}"
        for name in ("stride", "padding", "dilation", "groups"):
            if getattr(self, name) not in (0, 1, (0, 0), (1, 1)):
                text += f", {name}={getattr(self, name)}"
        text += f", eps={self.eps}, exp_avg_factor={self.exp_avg_factor}, bias={self.conv_bias is not None}"
        text += f", affine={self.bn_weight is not None}, track_running_stats={self.track_running_stats}"
        return f"{text}, activation={self.activation}, formula={self.formula}"

    def forward(self, input: Tensor) -> Tensor:
        """(N, K, H', W') for an (N, C, H, W) input."""
        if input.dim() != 4:
            raise ValueError(f"expected 4D input (got {input.dim()}D input)")
        tracks = self.training and self.track_running_stats and self.running_mean is not None
        momentum = self.exp_avg_factor
        if tracks:
            self.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        running = None if self.running_mean is None else (self.running_mean, self.running_var)
        given = None if self.training else running
        updated = running if tracks else None
        if torch.compiler.is_compiling() and self.formula == "batch_norm":
            return self._in_pytorch(input, given, updated, momentum)
        return self._alone(input, given, updated, momentum)

    # torch.compile does not look into this, but runs it between two graphs.
    @torch._disable_dynamo
    def _alone(self, input: Tensor, given: Any, updated: Any, momentum: float | None) -> Tensor:
        options = self.conv_weight, self.conv_bias, self.stride, self.padding, self.dilation, self.groups
        steps = _conv.steps_of(input, *options)
        vectors = [vector for vector in (self.bn_weight, self.bn_bias, *(given or ())) if vector is not None]
        if steps is None or not _conv.can_run(input, *vectors):
            return self._in_pytorch(input, given, updated, momentum)
        height, width = steps.output(input, self.conv_weight)
        count = input.shape[0] * height * width
        if given is None and count == 1:
            size = (1, self.num_features, height, width)
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {size} after the convolution")
        weight, eps, tutorial = self.bn_weight, self.eps, self.formula == "tutorial"
        if tutorial and given is None:
            # sqrt(unbiased) + eps = (sqrt(biased) + eps f) / f.
            factor = math.sqrt((count - 1) / count)
            eps *= factor
            weight = input.new_full((self.num_features,), factor) if weight is None else weight * factor
        activation = None if self.activation is None else (self.activation, self.negative_slope)
        norm = _conv.Norm(eps, tutorial, activation, self.recompute, given)
        output, moments = _conv.run(steps, norm, input, self.conv_weight, self.conv_bias, weight, self.bn_bias)
        if updated is not None:
            _update(updated, moments, momentum)
        return output

    def _in_pytorch(self, input: Tensor, given: Any, updated: Any, momentum: float | None) -> Tensor:
        """What `forward` computes and updates, by PyTorch's operations."""
        y = F.conv2d(
            input, self.conv_weight, self.conv_bias, self.stride, self.padding, self.dilation, self.groups
        )
        if self.formula == "batch_norm":
            running = given or updated or (None, None)
            factor = 0.0 if momentum is None else momentum
            y = F.batch_norm(y, *running, self.bn_weight, self.bn_bias, given is None, factor, self.eps)
        elif y.numel():
            variance, mean = torch.var_mean(y, (0, 2, 3)) if given is None else given[::-1]
            if updated is not None:
                _update(updated, torch.stack([mean.detach(), variance.detach()]), momentum)
            by_channel = [None if part is None else part[:, None, None] for part in (mean, variance, self.bn_weight, self.bn_bias)]
            mean, variance, weight, bias = by_channel
            y = (y - mean) / (variance.sqrt() + self.eps)
            y = y if weight is None else y * weight
            y = y if bias is None else y + bias
        return y if self.activation is None else _conv.ACTIVATIONS[self.activation](y, self.negative_slope)


def _update(running: tuple[Tensor, Tensor], moments: Tensor, momentum: float) -> None:
    """Blends a batch's mean and unbiased variance into the running ones."""
    with torch.no_grad():
        for old, new in zip(running, moments):
            old.lerp_(new.to(old.dtype), momentum)


def _check_kind(module: nn.Module, kind: type, own: tuple[Any, ...]) -> None:
    """Raises TypeError for a module that computes something else than its class in PyTorch."""
    name = kind.__name__
    if not isinstance(module, kind):
        raise TypeError(f"expected a torch.nn.{name}, got {type(module).__name__}")
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        raise TypeError(f"{type(module).__name__} does not know its number of channels: run the model once first")
    if any(getattr(type(module), function.__name__) is not function for function in own) or "forward" in vars(module):
        raise TypeError(f"{type(module).__name__} has a forward of its own, so a fused layer would compute something else")
    if not isinstance(module.weight, (nn.Parameter, type(None))) or hasattr(module, "parametrizations"):
        raise TypeError(f"the weight of {type(module).__name__} is computed: remove its parametrization first")
