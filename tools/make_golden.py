#!/usr/bin/env python3
"""Writes the golden files: results of PyTorch, and for batch norm's conventions of TensorFlow, Keras and ONNX, on small
problems. convoke's tests compare their results with them.

    python3 -m venv venv && venv/bin/pip install torch numpy tensorflow-cpu onnx
    venv/bin/python tools/make_golden.py            # rewrites crates/testkit/golden/*.safetensors

Every input is representable in float32 and stored so; everything expected is computed by PyTorch in *float64*
from those inputs, so that the files are an oracle rather than a second opinion with its own rounding errors.
Results with two or more dimensions are stored in float32, scalars and per-channel results in float64.
Every backward pass starts from a random upstream gradient: a constant one makes the input gradient of batch norm
vanish, and a test against it proves nothing. Where a ReLU follows, inputs are drawn until no pre-activation lies
so close to zero that float32 rounding could switch it.

Format (read by crates/testkit/src/golden.rs): a tensor NAME of a case CASE has the key "CASE/NAME"; the metadata
holds "cases", a JSON list of {"name", "attributes"} in order, "torch" (the version that computed the file), "seed"
and "generator". Numbers are drawn from a generator seeded by (--seed, file, case), so that adding a case changes no
other case, and the same PyTorch version writes the same bytes again.
"""

import argparse
import json
import math
import os
import struct
import zlib
from pathlib import Path

import numpy
import torch
import torch.nn.functional as F

SIZE_LIMIT = 1_500_000  # bytes, all files together
DTYPE_NAMES = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64"}
ROOT = Path(__file__).resolve().parent.parent


# ---------------------------------------------------------------------------------------------------------------------
# Files


class GoldenFile:
    """The cases of one file, in order."""

    def __init__(self, name, seed):
        self.name, self.seed = name, seed
        self.cases, self.tensors = [], {}
        self.versions = {}  # of other frameworks than PyTorch

    def draws(self, case, attempt=0):
        """The random numbers of one case."""
        return Draws(zlib.crc32(f"{self.seed}/{self.name}/{case}/{attempt}".encode()))

    def add(self, case, attributes, inputs, expected):
        """Adds one case; a tensor that is None is left out.

        Floating-point `inputs` are checked to be float32 numbers; `expected` is stored as the module's doc says.
        """
        assert case not in [known["name"] for known in self.cases], f"{case} exists twice"
        self.cases.append({"name": case, "attributes": attributes})
        for name, tensor in inputs.items():
            if tensor is not None:
                self._put(case, name, exact_float32(tensor) if tensor.is_floating_point() else tensor)
        for name, tensor in expected.items():
            if tensor is not None:
                assert tensor.dtype != torch.float32, f"{case}/{name} was not computed in float64"
                small = tensor.dim() < 2 or not tensor.is_floating_point()
                self._put(case, name, tensor if small else tensor.float())

    def _put(self, case, name, tensor):
        key = f"{case}/{name}"
        assert key not in self.tensors, f"{key} exists twice"
        self.tensors[key] = tensor.detach().contiguous()

    def write(self, folder):
        """Writes the file, byte for byte reproducible (the safetensors package orders its metadata at random)."""
        metadata = {
            "cases": json.dumps(self.cases, allow_nan=False),
            "generator": "tools/make_golden.py",
            "seed": str(self.seed),
            "torch": torch.__version__,
            **self.versions,
        }
        header, blobs, offset = {"__metadata__": metadata}, [], 0
        # Wide elements first keeps every tensor aligned.
        for key, tensor in sorted(self.tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
            blob = tensor.numpy().tobytes()
            header[key] = {
                "dtype": DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offset, offset + len(blob)],
            }
            blobs.append(blob)
            offset += len(blob)
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        data = struct.pack("<Q", len(text)) + text + b"".join(blobs)
        path = folder / f"{self.name}.safetensors"
        path.write_bytes(data)
        print(f"{path.name:28} {len(data):8} bytes  {len(self.cases):3} cases")
        return len(data)


class Draws:
    """Random tensors whose values are float32 numbers, held in float64 so that PyTorch computes in float64."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape, mean=0.0, std=1.0):
        values = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return (mean + std * values).float().double()

    def uniform(self, *shape, low=0.0, high=1.0):
        values = torch.rand(shape, generator=self.generator, dtype=torch.float64)
        return (low + (high - low) * values).float().double()

    def integers(self, *shape, below):
        return torch.randint(below, shape, generator=self.generator)

    def like(self, tensor):
        return self.normal(*tensor.shape)


def exact_float32(tensor):
    rounded = tensor.detach().float()
    assert torch.equal(torch.nan_to_num(rounded.double()), torch.nan_to_num(tensor.detach().double()))
    return rounded


def leaf(tensor):
    """A copy that collects a gradient; None stays None."""
    return None if tensor is None else tensor.detach().clone().requires_grad_()


def gradient(tensor):
    return None if tensor is None else tensor.grad


# ---------------------------------------------------------------------------------------------------------------------
# Convolution


def pair(value):
    return list(value) if isinstance(value, (tuple, list)) else [value, value]


def four_sides(padding):
    """[top, bottom, left, right] from one number, [height, width], or all four."""
    padding = pair(padding)
    return padding if len(padding) == 4 else [padding[0], padding[0], padding[1], padding[1]]


def conv_attributes(stride=1, padding=0, dilation=1, groups=1):
    top, bottom, left, right = four_sides(padding)
    return {
        "stride": pair(stride),
        "padding": [top, bottom, left, right],
        "pad_top": top,
        "pad_bottom": bottom,
        "pad_left": left,
        "pad_right": right,
        "dilation": pair(dilation),
        "groups": groups,
    }


def convolve(x, weight, bias, attributes):
    """conv2d where each side has its own padding: PyTorch itself knows only symmetric padding."""
    top, bottom, left, right = attributes["padding"]
    padded = F.pad(x, (left, right, top, bottom))
    return F.conv2d(
        padded, weight, bias, attributes["stride"], 0, tuple(attributes["dilation"]), attributes["groups"]
    )


# name: ((N, C, H, W), (K, C / groups, R, S), bias?, options)
CONV_CASES = {
    "plain": ((2, 3, 7, 7), (5, 3, 3, 3), False, {}),
    "padded_with_bias": ((2, 5, 6, 7), (7, 5, 3, 3), True, dict(padding=1)),
    "stride_2": ((2, 3, 9, 8), (4, 3, 3, 3), False, dict(stride=2, padding=1)),
    "stride_3": ((1, 4, 10, 11), (5, 4, 3, 3), True, dict(stride=3)),
    "stride_differs_by_axis": ((2, 3, 7, 8), (4, 3, 3, 3), False, dict(stride=(2, 1), padding=1)),
    "stride_exceeds_kernel": ((2, 3, 8, 9), (4, 3, 2, 2), False, dict(stride=3)),
    "rows_left_over": ((2, 3, 8, 8), (4, 3, 3, 3), False, dict(stride=(3, 2))),
    "padding_differs_by_axis": ((2, 3, 6, 7), (4, 3, 5, 3), True, dict(padding=(2, 0))),
    "padding_asymmetric": ((2, 3, 6, 5), (4, 3, 3, 3), True, dict(padding=(1, 0, 2, 1))),
    "padding_same_stride_2": ((2, 3, 8, 8), (4, 3, 3, 3), False, dict(stride=2, padding=(0, 1, 0, 1))),
    "padding_exceeds_kernel": ((1, 2, 4, 4), (3, 2, 3, 3), True, dict(padding=3)),
    "dilation_2": ((2, 3, 8, 9), (4, 3, 3, 3), False, dict(dilation=2, padding=2)),
    "dilation_differs_by_axis": ((1, 4, 7, 10), (5, 4, 3, 3), False, dict(dilation=(1, 3), padding=(1, 2))),
    "groups_2": ((2, 6, 6, 6), (4, 3, 3, 3), True, dict(groups=2, padding=1)),
    "depthwise": ((2, 7, 6, 7), (7, 1, 3, 3), False, dict(groups=7, padding=1)),
    "depthwise_multiplier_2": ((2, 5, 6, 6), (10, 1, 3, 3), False, dict(groups=5, padding=1)),
    "depthwise_stride_2": ((2, 6, 9, 8), (6, 1, 5, 5), True, dict(groups=6, stride=2, padding=2)),
    "pointwise": ((3, 5, 6, 5), (7, 5, 1, 1), False, {}),
    "pointwise_with_bias_groups_3": ((2, 6, 5, 6), (9, 2, 1, 1), True, dict(groups=3)),
    "pointwise_stride_2": ((2, 5, 7, 6), (4, 5, 1, 1), False, dict(stride=2)),
    "row_kernel": ((2, 3, 5, 9), (4, 3, 1, 5), False, dict(padding=(0, 2))),
    "column_kernel": ((2, 3, 9, 5), (4, 3, 7, 1), True, dict(padding=(3, 0))),
    "even_kernel": ((2, 3, 7, 7), (4, 3, 4, 2), False, dict(padding=(1, 2, 0, 1))),
    "kernel_covers_input": ((4, 3, 5, 6), (7, 3, 5, 6), True, {}),
    "channels_17": ((1, 17, 5, 6), (3, 17, 3, 3), False, dict(padding=1)),
    "kernels_17_batch_4": ((4, 2, 5, 5), (17, 2, 3, 3), True, {}),
    "single_channel": ((1, 1, 9, 9), (1, 1, 3, 3), False, {}),
    "stem_7x7": ((1, 3, 15, 15), (4, 3, 7, 7), False, dict(stride=2, padding=3)),
    "everything_at_once": (
        (2, 6, 11, 10),
        (9, 2, 3, 2),
        True,
        dict(stride=(2, 3), padding=(3, 1, 0, 2), dilation=(2, 3), groups=3),
    ),
}


def conv_file(seed):
    file = GoldenFile("conv", seed)
    for name, (x_shape, weight_shape, with_bias, options) in CONV_CASES.items():
        draws, attributes = file.draws(name), conv_attributes(**options)
        x, weight = leaf(draws.normal(*x_shape)), leaf(draws.normal(*weight_shape))
        bias = leaf(draws.normal(weight_shape[0])) if with_bias else None
        output = convolve(x, weight, bias, attributes)
        grad_output = draws.like(output)
        output.backward(grad_output)
        file.add(
            name,
            attributes,
            dict(x=x, weight=weight, bias=bias, grad_output=grad_output),
            dict(output=output, grad_x=x.grad, grad_weight=weight.grad, grad_bias=gradient(bias)),
        )
    return file


# ---------------------------------------------------------------------------------------------------------------------
# Batch normalization, alone and after a convolution


# name: (shape of x, options of batch_norm_case)
BATCH_NORM_CASES = {
    "train": ((4, 3, 5, 4), {}),
    "train_no_affine": ((3, 5, 4, 3), dict(affine=False)),
    "train_one_channel": ((4, 1, 5, 5), {}),
    "train_one_image": ((1, 5, 4, 6), {}),
    "train_one_pixel": ((6, 4, 1, 1), {}),
    # With two values and a small eps the terms of the input gradient cancel, and only rounding errors are left.
    "train_two_values": ((2, 3, 1, 1), dict(eps=0.5)),
    "train_eps_and_momentum": ((3, 4, 4, 4), dict(eps=1e-3, momentum=0.3)),
    "train_momentum_zero": ((2, 3, 3, 3), dict(momentum=0.0)),
    "train_momentum_one": ((2, 3, 3, 3), dict(momentum=1.0)),
    "train_no_running_stats": ((3, 4, 4, 3), dict(track_running_stats=False)),
    "train_cumulative_first": ((3, 4, 3, 3), dict(momentum=None)),
    "train_cumulative_later": ((3, 4, 3, 3), dict(momentum=None, batches_before=3)),
    "train_cumulative_twice": ((3, 4, 3, 3), dict(momentum=None, forwards=2)),
    "train_twice": ((3, 4, 4, 3), dict(forwards=2)),
    "train_default_running_stats": ((2, 3, 4, 4), dict(fresh=True)),
    "train_relu": ((3, 4, 5, 4), dict(relu=True)),
    "train_large_mean": ((4, 3, 4, 4), dict(mean=1e4, std=0.1)),
    "train_constant_channel": ((2, 3, 4, 4), dict(constant_channel=1)),
    "eval": ((3, 4, 4, 3), dict(mode="eval")),
    "eval_no_affine": ((2, 5, 3, 3), dict(mode="eval", affine=False, eps=1e-3)),
    "eval_no_running_stats": ((3, 4, 3, 3), dict(mode="eval", track_running_stats=False)),
    "eval_one_value": ((1, 3, 1, 1), dict(mode="eval")),
    "eval_relu": ((2, 4, 4, 4), dict(mode="eval", relu=True)),
    "conv_bn_train": ((3, 3, 7, 6), dict(conv=((5, 3, 3, 3), False, dict(padding=1)))),
    "conv_bn_relu_train": ((3, 3, 7, 6), dict(conv=((5, 3, 3, 3), False, {}), relu=True)),
    "conv_bn_relu_train_twice": ((2, 3, 6, 6), dict(conv=((4, 3, 3, 3), False, {}), relu=True, forwards=2)),
    "conv_bn_relu_bias": ((2, 3, 7, 6), dict(conv=((4, 3, 3, 3), True, dict(stride=2, padding=1)), relu=True)),
    "conv_bn_relu_grouped": (
        (2, 6, 7, 7),
        dict(conv=((4, 3, 3, 3), False, dict(groups=2, padding=(0, 1, 1, 0), dilation=2)), relu=True, eps=1e-3),
    ),
    "conv_bn_no_affine": ((2, 3, 6, 6), dict(conv=((4, 3, 1, 1), False, {}), affine=False)),
    "conv_bn_relu_eval": ((2, 3, 7, 6), dict(conv=((5, 3, 3, 3), False, {}), relu=True, mode="eval")),
    "conv_bn_eval_bias": ((2, 3, 6, 6), dict(conv=((4, 3, 3, 3), True, dict(padding=1)), mode="eval")),
}

RELU_MARGIN = 1e-3  # no pre-activation is nearer to zero than this


def batch_norm_case(
    draws,
    x_shape,
    mode="train",
    eps=1e-5,
    momentum=0.1,
    affine=True,
    track_running_stats=True,
    relu=False,
    conv=None,
    forwards=1,
    batches_before=0,
    fresh=False,
    mean=0.5,
    std=1.5,
    constant_channel=None,
):
    """One case as (attributes, inputs, expected), or None when a pre-activation is too near to zero.

    `fresh` starts from PyTorch's initial running statistics, zeros and ones, in place of random ones. With two
    `forwards`, the gradients belong to the first, and the second uses the same parameters.
    """
    channels = conv[0][0] if conv else x_shape[1]
    layer = torch.nn.BatchNorm2d(channels, eps, momentum, affine, track_running_stats, dtype=torch.float64)
    layer.train(mode == "train")
    with torch.no_grad():
        if affine:
            layer.weight.copy_(draws.uniform(channels, low=0.5, high=1.5))
            layer.weight[-1].neg_()  # a negative scale catches code that assumes gamma > 0
            layer.bias.copy_(draws.normal(channels, std=0.5))
        if track_running_stats and not fresh:
            layer.running_mean.copy_(draws.normal(channels))
            layer.running_var.copy_(draws.uniform(channels, low=0.5, high=2.0))
            layer.num_batches_tracked.fill_(batches_before)

    def running(name):
        return getattr(layer, name).clone() if track_running_stats else None

    conv_weight = conv_bias = None
    attributes = dict(mode=mode, eps=eps, momentum=momentum, affine=affine, relu=relu, forwards=forwards)
    attributes.update(track_running_stats=track_running_stats, conv=None)
    if conv:
        weight_shape, with_bias, options = conv
        attributes["conv"] = conv_attributes(**options)
        conv_weight = leaf(draws.normal(*weight_shape, std=0.3))
        conv_bias = leaf(draws.normal(channels)) if with_bias else None

    def forward(x):
        before = convolve(x, conv_weight, conv_bias, attributes["conv"]) if conv else x
        normalized = layer(before)
        output = F.relu(normalized) if relu else normalized
        return output, normalized.abs().min().item()

    x = draws.normal(*x_shape, mean=mean, std=std)
    if constant_channel is not None:
        x[:, constant_channel] = 0.75
    x = leaf(x)
    inputs = dict(x=x, weight=layer.weight, bias=layer.bias, conv_weight=conv_weight, conv_bias=conv_bias)
    inputs.update(running_mean=running("running_mean"), running_var=running("running_var"))
    if track_running_stats:
        attributes["num_batches_tracked"] = layer.num_batches_tracked.item()

    output, margin = forward(x)
    grad_output = draws.like(output)
    output.backward(grad_output)
    inputs.update(grad_output=grad_output)
    expected = dict(output=output, grad_x=x.grad, grad_weight=gradient(layer.weight), grad_bias=gradient(layer.bias))
    expected.update(grad_conv_weight=gradient(conv_weight), grad_conv_bias=gradient(conv_bias))
    expected.update(running_mean_after=running("running_mean"), running_var_after=running("running_var"))
    if forwards == 2:
        second_x = draws.normal(*x_shape, mean=-1.0, std=0.7)
        second_output, second_margin = forward(second_x)
        margin = min(margin, second_margin)
        inputs.update(second_x=second_x)
        expected.update(second_output=second_output, running_mean_after_second=running("running_mean"))
        expected.update(running_var_after_second=running("running_var"))
    if track_running_stats:
        attributes["num_batches_tracked_after"] = layer.num_batches_tracked.item()
    if relu and margin < RELU_MARGIN:
        return None
    return attributes, inputs, expected


def batch_norm_file(seed):
    file = GoldenFile("batch_norm", seed)
    for name, (x_shape, options) in BATCH_NORM_CASES.items():
        attempts = (batch_norm_case(file.draws(name, attempt), x_shape, **options) for attempt in range(10_000))
        file.add(name, *next(case for case in attempts if case is not None))
    return file


# name: shape of x, the layer, the memory format besides contiguous, an order of the dimensions in memory
BATCH_NORM_RANKS = {
    "1d_2d": ((6, 3), torch.nn.BatchNorm1d, None, (1, 0)),
    "1d_3d": ((4, 3, 5), torch.nn.BatchNorm1d, None, (0, 2, 1)),
    "2d": ((3, 3, 4, 2), torch.nn.BatchNorm2d, torch.channels_last, (2, 0, 3, 1)),
    "3d": ((2, 3, 2, 3, 2), torch.nn.BatchNorm3d, torch.channels_last_3d, (0, 2, 4, 3, 1)),
}
BATCH_NORM_AFFINE = {"affine": (True, True), "weight": (True, False), "bias": (False, True), "none": (False, False)}
BATCH_NORM_MODES = {
    "train": dict(),
    "eval": dict(),
    "no_tracking": dict(track_running_stats=False),
    "cumulative": dict(momentum=None),
}


def batch_norm_cross_file(seed):
    """Every number of dimensions, with weight and bias or without, in every mode; two forwards, the first with a backward.

    Checks that PyTorch's results for channels-last and permuted inputs are those for contiguous ones.
    """
    file = GoldenFile("batch_norm_cross", seed)
    for rank, (shape, layer_of, memory_format, order) in BATCH_NORM_RANKS.items():
        draws = file.draws(rank)
        channels = shape[1]
        inputs = dict(x=draws.normal(*shape, mean=0.5, std=1.5), second_x=draws.normal(*shape, mean=-1.0, std=0.7))
        inputs.update(grad_output=draws.normal(*shape), weight=draws.uniform(channels, low=0.5, high=1.5))
        inputs["weight"][-1].neg_()  # a negative scale catches code that assumes gamma > 0
        inputs.update(bias=draws.normal(channels, std=0.5), running_mean=draws.normal(channels))
        inputs.update(running_var=draws.uniform(channels, low=0.5, high=2.0))
        file.add(f"inputs_{rank}", dict(inputs=True), inputs, {})

        def permuted(x):
            back = [order.index(dimension) for dimension in range(len(order))]
            return x.permute(order).contiguous().permute(back)

        layouts = [lambda x: x, permuted]
        if memory_format:
            layouts.append(lambda x: x.contiguous(memory_format=memory_format))
        for affine, (has_weight, has_bias) in BATCH_NORM_AFFINE.items():
            for mode, options in BATCH_NORM_MODES.items():
                results = [
                    batch_norm_cross_case(layer_of, inputs, (has_weight, has_bias), mode, options, layout)
                    for layout in layouts
                ]
                for other in results[1:]:
                    for name, tensor in results[0].items():
                        if tensor is not None:
                            torch.testing.assert_close(other[name], tensor, rtol=1e-12, atol=1e-12)
                attributes = dict(inputs=False, rank=rank, weight=has_weight, bias=has_bias, mode=mode)
                file.add(f"{rank}_{affine}_{mode}", attributes, {}, results[0])
    return file


def batch_norm_cross_case(layer_of, inputs, has, mode, options, layout):
    channels = inputs["weight"].numel()
    layer = layer_of(channels, dtype=torch.float64, **options)
    layer.weight = torch.nn.Parameter(inputs["weight"].clone()) if has[0] else None
    layer.bias = torch.nn.Parameter(inputs["bias"].clone()) if has[1] else None
    layer.train(mode in ("train", "cumulative"))
    if layer.running_mean is not None:
        layer.running_mean.copy_(inputs["running_mean"])
        layer.running_var.copy_(inputs["running_var"])
    x = leaf(layout(inputs["x"]))
    output = layer(x)
    output.backward(layout(inputs["grad_output"]))
    result = dict(output=output, grad_x=x.grad)
    result.update(grad_weight=gradient(layer.weight), grad_bias=gradient(layer.bias))
    with torch.no_grad():
        result["second_output"] = layer(layout(inputs["second_x"]))
    if layer.running_mean is not None:
        result.update(running_mean_after=layer.running_mean, running_var_after=layer.running_var)
        result["num_batches_tracked_after"] = layer.num_batches_tracked
    return {name: None if tensor is None else tensor.detach().clone() for name, tensor in result.items()}


def batch_norm_conventions_file(seed):
    """A convolution and a batch norm of every convention: batch or running statistics, the place of eps, weight and bias.

    PyTorch's layers know one convention: the others use the definition, differentiated by PyTorch. Where PyTorch has the
    convention, the two are checked to agree. Running statistics depend on the batch only, so each convention for them has
    one case.
    """
    file = GoldenFile("batch_norm_conventions", seed)
    draws, channels, eps, momentum = file.draws("inputs"), 3, 0.3, 0.2
    inputs = dict(x=draws.normal(3, 2, 4, 4), conv_weight=draws.normal(channels, 2, 3, 3, std=0.4))
    inputs.update(grad_output=draws.normal(3, channels, 2, 2), weight=draws.uniform(channels, low=0.5, high=1.5))
    inputs["weight"][-1].neg_()
    inputs.update(bias=draws.normal(channels, std=0.5), running_mean=draws.normal(channels))
    inputs.update(running_var=draws.uniform(channels, low=0.5, high=2.0))
    file.add("inputs", dict(eps=eps, momentum=momentum), inputs, {})
    wide = (1, channels, 1, 1)
    for place in ("inside", "outside"):
        for affine, has in BATCH_NORM_AFFINE.items():
            for constant in (False, True):
                leaves = {key: leaf(inputs[key]) for key in ("x", "conv_weight", "weight", "bias")}
                gamma = leaves["weight"] if has[0] else None
                beta = leaves["bias"] if has[1] else None
                y = F.conv2d(leaves["x"], leaves["conv_weight"])
                mean, variance = y.mean((0, 2, 3)), y.var((0, 2, 3), unbiased=False)
                if constant:
                    mean, variance = inputs["running_mean"], inputs["running_var"]
                divisor = (variance + eps).sqrt() if place == "inside" else variance.sqrt() + eps
                output = (y - mean.view(wide)) / divisor.view(wide)
                output = output if gamma is None else output * gamma.view(wide)
                output = output if beta is None else output + beta.view(wide)
                if place == "inside":
                    known = [inputs["running_mean"].clone(), inputs["running_var"].clone()]
                    layer = F.batch_norm(y, *known, gamma, beta, training=not constant, eps=eps)
                    torch.testing.assert_close(layer, output, rtol=1e-12, atol=1e-12)
                output.backward(inputs["grad_output"])
                result = dict(output=output, grad_x=leaves["x"].grad, grad_conv_weight=leaves["conv_weight"].grad)
                result.update(grad_weight=gradient(gamma), grad_bias=gradient(beta))
                attributes = dict(eps_place=place, weight=has[0], bias=has[1], constant=constant)
                file.add(f"{place}_{affine}_{'constant' if constant else 'batch'}", attributes, {}, result)
    y = F.conv2d(inputs["x"], inputs["conv_weight"])
    for of in ("new", "old"):
        for unbiased in (False, True):
            weight = momentum if of == "new" else 1 - momentum
            batch = dict(running_mean=y.mean((0, 2, 3)), running_var=y.var((0, 2, 3), unbiased=unbiased))
            after = {f"{key}_after": torch.lerp(inputs[key], new, weight) for key, new in batch.items()}
            attributes = dict(running=True, momentum_of=of, unbiased=unbiased)
            file.add(f"running_{of}_{'unbiased' if unbiased else 'biased'}", attributes, {}, after)
    return file


BATCH_NORM_HALVES = {"bf16": torch.bfloat16, "f16": torch.float16}


def batch_norm_halves_file(seed):
    """Inputs of 16 bits with parameters and statistics of 32, in training and evaluation.

    Checks that PyTorch's own results in these types have the types that the tests ask for, and are near the float64 ones.
    """
    file = GoldenFile("batch_norm_halves", seed)
    for name, dtype in BATCH_NORM_HALVES.items():
        draws = file.draws(name)
        shape, channels = (3, 5, 4, 3), 5
        inputs = dict(x=draws.normal(*shape, mean=3.0, std=0.5), grad_output=draws.normal(*shape))
        inputs = {key: tensor.to(dtype).double() for key, tensor in inputs.items()}
        inputs.update(weight=draws.uniform(channels, low=0.5, high=1.5), bias=draws.normal(channels, std=0.5))
        inputs["weight"][-1].neg_()
        inputs.update(running_mean=draws.normal(channels), running_var=draws.uniform(channels, low=0.5, high=2.0))
        for mode in ("train", "eval"):

            def run(x_dtype, parameter_dtype):
                layer = torch.nn.BatchNorm2d(channels, dtype=parameter_dtype).train(mode == "train")
                with torch.no_grad():
                    for key in ("weight", "bias", "running_mean", "running_var"):
                        getattr(layer, key).copy_(inputs[key])
                x = leaf(inputs["x"].to(x_dtype))
                output = layer(x)
                output.backward(inputs["grad_output"].to(x_dtype))
                result = dict(output=output, grad_x=x.grad)
                assert all(tensor.dtype == x_dtype for tensor in result.values())
                of_channels = dict(grad_weight=layer.weight.grad, grad_bias=layer.bias.grad)
                of_channels.update(running_mean_after=layer.running_mean, running_var_after=layer.running_var)
                assert all(tensor.dtype == parameter_dtype for tensor in of_channels.values())
                return result | of_channels

            expected = run(torch.float64, torch.float64)
            for key, tensor in run(dtype, torch.float32).items():
                scale = expected[key].abs().max()
                error = ((tensor.double() - expected[key]).abs().max() / scale).item()
                assert error < 0.02, f"PyTorch's {key} of {name} {mode} is off by {error}"
            file.add(f"{name}_{mode}", dict(dtype=name, mode=mode), inputs, expected)
    return file


def batch_norm_frameworks_file(seed):
    """Two training steps and an evaluation by the frameworks themselves, on N x C x H x W data.

    TensorFlow's fused operation computes in float32; Keras and ONNX's reference implementation in float64.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    import keras
    import onnx
    import tensorflow
    from onnx.reference import ReferenceEvaluator

    file = GoldenFile("batch_norm_frameworks", seed)
    file.versions = {"keras": keras.__version__, "tensorflow": tensorflow.__version__, "onnx": onnx.__version__}
    draws = file.draws("inputs")
    shape, channels = (3, 3, 4, 2), 3
    inputs = dict(x=draws.normal(*shape, mean=0.5, std=1.5), second_x=draws.normal(*shape, mean=-1.0, std=0.7))
    inputs.update(grad_output=draws.normal(*shape), weight=draws.uniform(channels, low=0.5, high=1.5))
    inputs.update(bias=draws.normal(channels, std=0.5), running_mean=draws.normal(channels))
    inputs.update(running_var=draws.uniform(channels, low=0.5, high=2.0))

    def last(tensor, dtype="float64"):
        return tensorflow.constant(tensor.permute(0, 2, 3, 1).contiguous().numpy(), dtype=dtype)

    def first(tensor):
        return torch.from_numpy(numpy.array(tensor, dtype="float64")).permute(0, 3, 1, 2).contiguous()

    def vector(array):
        return torch.from_numpy(numpy.array(array, dtype="float64"))

    def keras_case(momentum, eps):
        layer = keras.layers.BatchNormalization(momentum=momentum, epsilon=eps, dtype="float64")
        layer.build((None, shape[2], shape[3], channels))
        layer.set_weights([inputs[name].numpy() for name in ("weight", "bias", "running_mean", "running_var")])
        x = last(inputs["x"])
        with tensorflow.GradientTape() as tape:
            tape.watch(x)
            output = layer(x, training=True)
        gradients = tape.gradient(output, [x, *layer.trainable_weights], last(inputs["grad_output"]))
        second = layer(last(inputs["second_x"]), training=True)
        evaluated = layer(last(inputs["x"]), training=False)
        statistics = layer.get_weights()[2:]
        return output, gradients, second, evaluated, statistics

    def tensorflow_fused_case(momentum, eps):
        weight, bias = (tensorflow.constant(inputs[name].numpy(), dtype="float32") for name in ("weight", "bias"))
        options = dict(epsilon=eps, exponential_avg_factor=1.0 - momentum, is_training=True)
        statistics = [inputs[name].numpy().astype("float32") for name in ("running_mean", "running_var")]

        def step(x, statistics):
            return tensorflow.raw_ops.FusedBatchNormV3(
                x=x, scale=weight, offset=bias, mean=statistics[0], variance=statistics[1], **options
            )

        x = last(inputs["x"], "float32")
        with tensorflow.GradientTape() as tape:
            tape.watch([x, weight, bias])
            result = step(x, statistics)
        gradients = tape.gradient(result.y, [x, weight, bias], last(inputs["grad_output"], "float32"))
        second = step(last(inputs["second_x"], "float32"), [result.batch_mean, result.batch_variance])
        statistics = [second.batch_mean, second.batch_variance]
        evaluated = tensorflow.raw_ops.FusedBatchNormV3(
            x=x, scale=weight, offset=bias, mean=statistics[0], variance=statistics[1], epsilon=eps, is_training=False
        ).y
        return result.y, gradients, second.y, evaluated, statistics

    def add(name, convention, momentum, eps, result):
        output, gradients, second, evaluated, statistics = result
        expected = dict(output=first(output), second_output=first(second), evaluated=first(evaluated))
        if gradients is not None:
            expected.update(grad_x=first(gradients[0]), grad_weight=vector(gradients[1]), grad_bias=vector(gradients[2]))
        expected.update(running_mean_after=vector(statistics[0]), running_var_after=vector(statistics[1]))
        file.add(name, dict(convention=convention, momentum=momentum, eps=eps), inputs, expected)

    for suffix, momentum, eps in (("", 0.99, 1e-3), ("_fast", 0.4, 0.02)):
        add(f"keras{suffix}", "keras", momentum, eps, keras_case(momentum, eps))
        add(f"tensorflow_fused{suffix}", "tensorflow_fused", momentum, eps, tensorflow_fused_case(momentum, eps))

    def onnx_case(momentum, eps):
        names = ["x", "weight", "bias", "running_mean", "running_var"]

        def model(training):
            outputs = ["y", "mean_after", "var_after"] if training else ["y"]
            node = onnx.helper.make_node(
                "BatchNormalization", names, outputs, epsilon=eps, momentum=momentum, training_mode=int(training)
            )
            double = onnx.TensorProto.DOUBLE
            declare = lambda name: onnx.helper.make_tensor_value_info(name, double, None)  # noqa: E731
            graph = onnx.helper.make_graph([node], "bn", [declare(n) for n in names], [declare(n) for n in outputs])
            opset = onnx.helper.make_opsetid("", 15)
            return ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=[opset]))

        feeds = {name: inputs[name].numpy() for name in names}
        output, mean, variance = model(True).run(None, feeds)
        feeds.update(x=inputs["second_x"].numpy(), running_mean=mean, running_var=variance)
        second, mean, variance = model(True).run(None, feeds)
        feeds.update(x=inputs["x"].numpy(), running_mean=mean, running_var=variance)
        [evaluated] = model(False).run(None, feeds)
        back = [array.transpose(0, 2, 3, 1) for array in (output, second, evaluated)]
        return back[0], None, back[1], back[2], [mean, variance]

    for suffix, momentum, eps in (("", 0.9, 1e-5), ("_fast", 0.4, 0.02)):
        add(f"onnx{suffix}", "onnx", momentum, eps, onnx_case(momentum, eps))
    return file


def batch_norm_closeness_file(seed):
    """The root mean square error of PyTorch's float32 results against its float64 ones, in its better memory format.

    Shapes and values are random. The values are not stored: x, the gradient, weight and bias are `formula_fill` numbers
    with the tags tag, tag + 1, ... and the centers and bounds here.
    """
    file = GoldenFile("batch_norm_closeness", seed)
    draws = numpy.random.default_rng(zlib.crc32(f"{seed}/closeness".encode()))
    for index in range(32):
        batch, channels = int(draws.integers(1, 33)), int(draws.choice([1, 2, 3, 7, 16, 33, 64, 65, 130]))
        height, width = (int(size) for size in draws.integers(1, 30, size=2))
        batch += batch * height * width == 1
        center = float(numpy.float32(draws.choice([0.0, 0.5, -3.0, 100.0, 1e4])))
        bound = float(numpy.float32(draws.choice([0.1, 1.0, 30.0])))
        tag, shape = 5000 + 10 * index, (batch, channels, height, width)
        x = formula_fill(tag, math.prod(shape), bound, center).reshape(shape)
        dy = formula_fill(tag + 1, math.prod(shape), 1.0).reshape(shape)
        weight, bias = formula_fill(tag + 2, channels, 0.5, 1.0), formula_fill(tag + 3, channels, 0.5)

        def run(dtype, layout):
            leaves = [leaf(t.to(dtype)) for t in (x.contiguous(memory_format=layout), weight, bias)]
            output = F.batch_norm(leaves[0], None, None, leaves[1], leaves[2], training=True)
            output.backward(dy.to(dtype).contiguous(memory_format=layout))
            return [t.detach().double().contiguous() for t in (output, leaves[0].grad)]

        exact = run(torch.float64, torch.contiguous_format)
        errors = [
            min(
                (run(torch.float32, layout)[place] - exact[place]).square().mean().sqrt().item()
                for layout in (torch.contiguous_format, torch.channels_last)
            )
            for place in range(2)
        ]
        attributes = dict(shape=list(shape), center=center, bound=bound, tag=tag)
        attributes.update(output_error=errors[0], grad_x_error=errors[1])
        file.add(f"{index:02}", attributes, {}, {"output_rms": exact[0].square().mean().sqrt()})
    return file


# ---------------------------------------------------------------------------------------------------------------------
# Pooling


# name: (shape of x, kind of x, options)
MAX_POOL_CASES = {
    "max_2x2": ((2, 3, 6, 8), "normal", dict(kernel=2)),
    "max_overlapping": ((2, 3, 7, 8), "normal", dict(kernel=3, stride=2, padding=1)),
    "max_kernel_differs_by_axis": ((2, 2, 7, 6), "normal", dict(kernel=(3, 2), stride=(1, 2), padding=(1, 0))),
    "max_dilated": ((2, 2, 8, 9), "normal", dict(kernel=3, stride=2, padding=1, dilation=2)),
    "max_rows_left_over": ((2, 2, 7, 5), "normal", dict(kernel=2)),
    "max_ceil_mode": ((2, 2, 7, 6), "normal", dict(kernel=3, stride=2, ceil_mode=True)),
    # The last window would start inside the right padding, so PyTorch drops it even in ceil mode.
    "max_ceil_mode_drops_last": ((1, 2, 5, 5), "normal", dict(kernel=2, stride=3, padding=1, ceil_mode=True)),
    # The only window is larger than the input: a last window may be incomplete.
    "max_ceil_mode_over_the_end": ((1, 2, 2, 3), "normal", dict(kernel=3, stride=(2, 4), ceil_mode=True)),
    "max_ceil_mode_over_the_padding": (
        (1, 2, 1, 3), "normal", dict(kernel=(4, 3), stride=3, padding=(1, 0), dilation=(1, 2), ceil_mode=True)
    ),
    "max_ties": ((2, 2, 6, 6), "ties", dict(kernel=3, stride=2, padding=1)),
    "max_all_equal": ((1, 2, 4, 4), "constant", dict(kernel=2)),
    "max_nan": ((1, 2, 6, 6), "nan", dict(kernel=3, stride=2, padding=1)),
    "max_minus_infinity": ((1, 2, 4, 4), "minus_infinity", dict(kernel=2)),
    "max_whole_input": ((3, 4, 4, 3), "normal", dict(kernel=(4, 3))),
}

AVG_POOL_CASES = {
    "avg_2x2": ((2, 3, 6, 8), "normal", dict(kernel=2)),
    "avg_padding_counted": ((2, 3, 7, 6), "normal", dict(kernel=3, stride=2, padding=1)),
    "avg_padding_not_counted": ((2, 3, 7, 6), "normal", dict(kernel=3, stride=2, padding=1, count_include_pad=False)),
    "avg_differs_by_axis": ((2, 2, 7, 8), "normal", dict(kernel=(3, 2), stride=(2, 3), padding=(1, 0))),
    # In ceil mode the last window is cut at the *padded* edge: elements beyond it count in neither convention.
    "avg_ceil_mode_counted": ((2, 2, 6, 7), "normal", dict(kernel=3, stride=2, padding=1, ceil_mode=True)),
    "avg_ceil_mode_not_counted": (
        (2, 2, 6, 7),
        "normal",
        dict(kernel=3, stride=2, padding=1, ceil_mode=True, count_include_pad=False),
    ),
    "avg_ceil_mode_no_padding": ((1, 2, 7, 6), "normal", dict(kernel=(2, 4), stride=(2, 3), ceil_mode=True)),
    "avg_ceil_mode_over_the_end": ((1, 2, 2, 3), "normal", dict(kernel=3, stride=(2, 4), ceil_mode=True)),
    "avg_ceil_mode_over_the_padding_counted": (
        (1, 2, 1, 3), "normal", dict(kernel=(4, 5), stride=3, padding=(1, 0), ceil_mode=True)
    ),
    "avg_ceil_mode_over_the_padding_not_counted": (
        (1, 2, 1, 3), "normal", dict(kernel=(4, 5), stride=3, padding=(1, 0), ceil_mode=True, count_include_pad=False)
    ),
    "avg_whole_input": ((3, 4, 4, 3), "normal", dict(kernel=(4, 3))),
}


def pool_input(draws, shape, kind):
    if kind == "normal":
        return draws.normal(*shape)
    if kind == "ties":
        return draws.integers(*shape, below=3).double()
    if kind == "constant":
        return torch.full(shape, -1.5, dtype=torch.float64)
    x = draws.normal(*shape)
    if kind == "nan":
        # In the second channel one window holds two NaNs.
        x[0, 0, 2, 2] = x[0, 1, 4, 2] = x[0, 1, 4, 3] = math.nan
    elif kind == "minus_infinity":
        # One window is -inf everywhere, another everywhere except for its last element.
        x[0, 0, :2, :2] = -math.inf
        x[0, 1, :2, :2] = -math.inf
        x[0, 1, 1, 1] = -3.0
    return x


def pool_file(seed):
    file = GoldenFile("pool", seed)
    for operation, cases in (("max_pool2d", MAX_POOL_CASES), ("avg_pool2d", AVG_POOL_CASES)):
        for name, (shape, kind, options) in cases.items():
            draws = file.draws(name)
            attributes = dict(operation=operation, kernel=pair(options["kernel"]))
            attributes.update(stride=pair(options.get("stride", options["kernel"])))
            attributes.update(padding=pair(options.get("padding", 0)), ceil_mode=options.get("ceil_mode", False))
            window = (attributes["kernel"], attributes["stride"], attributes["padding"])
            x, indices = leaf(pool_input(draws, shape, kind)), None
            if operation == "max_pool2d":
                attributes.update(dilation=pair(options.get("dilation", 1)))
                output, indices = F.max_pool2d(
                    x, *window, attributes["dilation"], attributes["ceil_mode"], return_indices=True
                )
            else:
                attributes.update(count_include_pad=options.get("count_include_pad", True))
                output = F.avg_pool2d(x, *window, attributes["ceil_mode"], attributes["count_include_pad"])
            grad_output = draws.like(output)
            output.backward(grad_output)
            inputs = dict(x=x, grad_output=grad_output)
            file.add(name, attributes, inputs, dict(output=output, grad_x=x.grad, indices=indices))
    return file


# ---------------------------------------------------------------------------------------------------------------------
# Upsampling and joining channels


UPSAMPLE_CASES = {
    "nearest_2": ((2, 3, 3, 4), 2, "nearest"),
    "nearest_differs_by_axis": ((2, 2, 3, 2), (3, 1), "nearest"),
    "bilinear_1": ((1, 2, 3, 3), 1, "bilinear"),
    "bilinear_2": ((2, 3, 3, 4), 2, "bilinear"),
    "bilinear_3": ((1, 3, 4, 2), 3, "bilinear"),
    "bilinear_differs_by_axis": ((2, 2, 3, 4), (4, 2), "bilinear"),
    "bilinear_one_row": ((2, 3, 1, 4), (2, 5), "bilinear"),
}


def upsample_file(seed):
    file = GoldenFile("upsample", seed)
    for name, (shape, factor, mode) in UPSAMPLE_CASES.items():
        draws, factor = file.draws(name), pair(factor)
        x = leaf(draws.normal(*shape))
        corners = dict(align_corners=False) if mode == "bilinear" else {}
        output = F.interpolate(x, scale_factor=tuple(map(float, factor)), mode=mode, **corners)
        grad_output = draws.like(output)
        output.backward(grad_output)
        inputs = dict(x=x, grad_output=grad_output)
        file.add(name, dict(factor=factor, mode=mode), inputs, dict(output=output, grad_x=x.grad))
    return file


CONCAT_CASES = {
    "one": ((2, 3, 2, 2),),
    "two": ((2, 3, 3, 2), (2, 2, 3, 2)),
    "three": ((3, 1, 2, 4), (3, 4, 2, 4), (3, 2, 2, 4)),
    "matrices": ((3, 4), (3, 2)),
}


def concat_file(seed):
    """The tensors are named x, x1, x2 and so on."""
    file = GoldenFile("concat", seed)
    for name, shapes in CONCAT_CASES.items():
        draws = file.draws(name)
        inputs = {f"x{index or ''}": leaf(draws.normal(*shape)) for index, shape in enumerate(shapes)}
        output = torch.cat(list(inputs.values()), dim=1)
        grad_output = draws.like(output)
        output.backward(grad_output)
        gradients = {f"grad_{key}": x.grad for key, x in inputs.items()}
        file.add(name, {}, dict(inputs, grad_output=grad_output), dict(output=output, **gradients))
    return file


# ---------------------------------------------------------------------------------------------------------------------
# Broadcasting, sums over axes, products of matrices, changes of shape


def tied(x):
    """Halves only: many elements are equal."""
    return (x * 2).round().clamp(-2, 2) / 2


def with_zeros(x):
    """Zeros: one in the first row, two in the second, none in the others."""
    x = x.clone()
    x[0, 1], x[1, 0], x[1, 2] = 0, 0, 0
    return x


def positive(x):
    return (x.abs() + 0.5).float().double()


SQUEEZED, BIAS = ((2, 3, 4, 2), (2, 3, 1, 1)), ((2, 3, 4, 2), (3, 1, 1))
# Case: (operation, its arguments in the test, the inputs' shapes, how they are changed, the function in PyTorch).
SHAPES_CASES = {
    "add a bias": ("add", {}, BIAS, None, torch.add),
    "mul squeezed": ("mul", {}, SQUEEZED, None, torch.mul),
    "mul both": ("mul", {}, ((2, 1, 4), (3, 1)), None, torch.mul),
    "sub a longer shape": ("sub", {}, ((3, 1), (2, 1, 3, 2)), None, torch.sub),
    "div": ("div", {}, SQUEEZED, positive, torch.div),
    "pow": ("pow", {}, BIAS, positive, torch.pow),
    "pow of zeros": ("pow", {}, ((3, 3), (3,)), lambda x: tied(x.abs()) * 2, torch.pow),
    "maximum with ties": ("maximum", {}, ((2, 3, 4, 2), (1, 3, 4, 1)), tied, torch.maximum),
    "minimum with ties": ("minimum", {}, ((4, 5), (5,)), tied, torch.minimum),
    "expand": ("expand", {"sizes": [2, 3, 4, 2]}, ((3, 1, 2),), None, lambda x: x.expand(2, 3, 4, 2)),
    "sum": ("sum_dims", {"axes": [2, 3], "keep": True}, ((2, 3, 4, 2),), None, lambda x: x.sum((2, 3), keepdim=True)),
    "mean": ("mean_dims", {"axes": [0, -1], "keep": False}, ((2, 3, 4, 2),), None, lambda x: x.mean((0, -1))),
    "amax with ties": ("amax", {"axes": [1, 3], "keep": False}, ((2, 3, 4, 2),), tied, lambda x: x.amax((1, 3))),
    "amin with ties": ("amin", {"axes": [2], "keep": True}, ((2, 3, 4, 2),), tied, lambda x: x.amin(2, keepdim=True)),
    "prod": ("prod", {"axes": [1], "keep": False}, ((2, 5, 2),), None, lambda x: x.prod(1)),
    "prod with zeros": ("prod", {"axes": [1], "keep": False}, ((3, 4),), with_zeros, lambda x: x.prod(1)),
    "slice": (
        "slice",
        {"slices": [[1, 1, 3, 1], [2, 0, 4, 2]]},
        ((2, 4, 4, 3),),
        None,
        lambda x: x[:, 1:3, 0:4:2],
    ),
    "slice backwards": ("slice", {"slices": [[1, -1, -5, -2]]}, ((2, 4, 2),), None, lambda x: x.flip(1)[:, ::2]),
    "index_select": (
        "index_select",
        {"axis": 1, "indices": [2, 0, 2, 2]},
        ((2, 3, 2, 2),),
        None,
        lambda x: x.index_select(1, torch.tensor([2, 0, 2, 2])),
    ),
    "pad": (
        "pad",
        {"pads": [[0, 0], [0, 0], [1, -1], [2, 0]], "mode": "constant"},
        ((2, 3, 4, 2),),
        None,
        lambda x: F.pad(x, (2, 0, 1, -1), value=0.75),
    ),
    "pad reflect": (
        "pad",
        {"pads": [[0, 0], [0, 0], [2, 3], [1, -1]], "mode": "reflect"},
        ((1, 2, 4, 3),),
        None,
        lambda x: F.pad(x, (1, -1, 2, 3), mode="reflect"),
    ),
    "pad edge": (
        "pad",
        {"pads": [[0, 0], [0, 0], [2, 5], [0, 1]], "mode": "edge"},
        ((1, 2, 3, 3),),
        None,
        lambda x: F.pad(x, (0, 1, 2, 5), mode="replicate"),
    ),
    "pad wrap": (
        "pad",
        {"pads": [[0, 0], [0, 0], [2, 3], [1, 1]], "mode": "wrap"},
        ((1, 2, 3, 2),),
        None,
        lambda x: F.pad(x, (1, 1, 2, 3), mode="circular"),
    ),
    "permute": ("permute", {"axes": [0, 2, 3, 1]}, ((2, 3, 4, 2),), None, lambda x: x.permute(0, 2, 3, 1)),
    "pixel_shuffle": ("depth_to_space", {"block": 2}, ((2, 8, 2, 3),), None, lambda x: F.pixel_shuffle(x, 2)),
    "pixel_unshuffle": ("space_to_depth", {"block": 2}, ((2, 2, 4, 2),), None, lambda x: F.pixel_unshuffle(x, 2)),
    "channel_shuffle": (
        "channel_shuffle",
        {"groups": 3},
        ((2, 6, 2, 2),),
        None,
        lambda x: F.channel_shuffle(x, 3),
    ),
    "cat": ("cat", {"axis": -1}, ((2, 3, 4, 2), (2, 3, 4, 1)), None, lambda *xs: torch.cat(xs, -1)),
    "stack": ("stack", {"axis": 1}, ((2, 3, 2), (2, 3, 2)), None, lambda *xs: torch.stack(xs, 1)),
    "matmul": ("matmul", {}, ((2, 1, 3, 4), (3, 4, 2)), None, torch.matmul),
    "matmul of a vector": ("matmul", {}, ((4,), (2, 4, 3)), None, torch.matmul),
    "gemm": ("gemm", {}, ((4, 3), (5, 4), (5,)), None, lambda a, b, c: 0.5 * (a.T @ b.T) - 1.5 * c),
}


def shapes_file(seed):
    """The tensors are named x, x1 and x2; "arguments" are those of the operation, in the order of its function here."""
    file = GoldenFile("shapes", seed)
    for name, (operation, arguments, shapes, change, function) in SHAPES_CASES.items():
        draws = file.draws(name)
        drawn = [draws.normal(*shape) for shape in shapes]
        drawn = [change(x) for x in drawn] if change else drawn
        inputs = {f"x{index or ''}": leaf(x) for index, x in enumerate(drawn)}
        output = function(*inputs.values())
        grad_output = draws.like(output)
        output.backward(grad_output)
        gradients = {f"grad_{key}": x.grad for key, x in inputs.items()}
        attributes = {"operation": operation, **arguments}
        file.add(name, attributes, dict(inputs, grad_output=grad_output), dict(output=output, **gradients))
    return file


# ---------------------------------------------------------------------------------------------------------------------
# Linear, ReLU and the losses


def linear_cases(file):
    for name, x_shape, features, with_bias in (
        ("linear", (4, 7), 5, True),
        ("linear_no_bias", (3, 17), 5, False),
        ("linear_one_row", (1, 6), 3, True),
        ("linear_leading_dimensions", (2, 3, 5), 4, True),
    ):
        draws = file.draws(name)
        x, weight = leaf(draws.normal(*x_shape)), leaf(draws.normal(features, x_shape[-1]))
        bias = leaf(draws.normal(features)) if with_bias else None
        output = F.linear(x, weight, bias)
        grad_output = draws.like(output)
        output.backward(grad_output)
        file.add(
            name,
            dict(operation="linear"),
            dict(x=x, weight=weight, bias=bias, grad_output=grad_output),
            dict(output=output, grad_x=x.grad, grad_weight=weight.grad, grad_bias=gradient(bias)),
        )


def elementwise_cases(file):
    """ReLU and log-softmax: one input, one output of the same shape."""

    def special(x):
        x.view(-1)[:6] = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, 1e-40])
        return x

    def saturated(x):
        x[0, 0], x[0, 1] = 1e4, -1e4
        return x

    relu, log_softmax = F.relu, lambda x: F.log_softmax(x, 1)
    for name, operation, function, shape, std, change in (
        ("relu", "relu", relu, (2, 3, 4, 3), 1.0, None),
        ("relu_special_values", "relu", relu, (3, 4), 1.0, special),
        ("log_softmax", "log_softmax", log_softmax, (5, 10), 2.0, None),
        ("log_softmax_one_class", "log_softmax", log_softmax, (3, 1), 1.0, None),
        ("log_softmax_large", "log_softmax", log_softmax, (4, 7), 1e4, None),
        ("log_softmax_saturated", "log_softmax", log_softmax, (2, 5), 1.0, saturated),
        ("log_softmax_images", "log_softmax", log_softmax, (2, 5, 3, 4), 2.0, None),
        ("log_softmax_images_large", "log_softmax", log_softmax, (2, 3, 2, 2), 1e4, None),
    ):
        draws = file.draws(name)
        x = draws.normal(*shape, std=std)
        x = leaf(change(x) if change else x)
        output = function(x)
        grad_output = draws.like(output)
        output.backward(grad_output)
        inputs = dict(x=x, grad_output=grad_output)
        file.add(name, dict(operation=operation), inputs, dict(output=output, grad_x=x.grad))


def target_cases(file):
    """nll_loss (x holds log-probabilities) and cross_entropy (x holds logits) against integer targets."""
    for name, operation, shape, options in (
        ("nll_mean", "nll_loss", (6, 10), {}),
        ("nll_sum", "nll_loss", (6, 10), dict(reduction="sum")),
        ("nll_none", "nll_loss", (5, 7), dict(reduction="none")),
        ("nll_mean_ignored", "nll_loss", (7, 5), dict(ignored=3)),
        ("nll_sum_ignored_255", "nll_loss", (7, 5), dict(reduction="sum", ignore_index=255, ignored=2)),
        ("nll_none_ignored", "nll_loss", (5, 4), dict(reduction="none", ignored=2)),
        ("nll_mean_all_ignored", "nll_loss", (3, 4), dict(ignored=3)),
        ("nll_sum_all_ignored", "nll_loss", (3, 4), dict(reduction="sum", ignored=3)),
        ("nll_mean_class_weight", "nll_loss", (6, 4), dict(class_weight=True, ignored=1)),
        ("nll_sum_class_weight", "nll_loss", (6, 4), dict(class_weight=True, reduction="sum")),
        ("nll_images_mean", "nll_loss", (2, 4, 3, 3), {}),
        ("nll_images_mean_ignored_255", "nll_loss", (2, 4, 3, 3), dict(ignore_index=255, ignored=5)),
        ("nll_images_sum_class_weight", "nll_loss", (2, 4, 3, 3), dict(class_weight=True, reduction="sum")),
        ("cross_entropy_mean", "cross_entropy", (6, 10), {}),
        ("cross_entropy_sum", "cross_entropy", (5, 7), dict(reduction="sum")),
        ("cross_entropy_mean_ignored", "cross_entropy", (7, 5), dict(ignored=3)),
        ("cross_entropy_large", "cross_entropy", (4, 5), dict(std=1e4)),
        ("cross_entropy_images_mean_ignored_255", "cross_entropy", (2, 4, 3, 3), dict(ignore_index=255, ignored=5)),
        ("cross_entropy_smoothed", "cross_entropy", (6, 5), dict(smoothing=0.1, ignored=2)),
        ("cross_entropy_smoothed_whole_sum", "cross_entropy", (4, 3), dict(smoothing=1.0, reduction="sum")),
        ("cross_entropy_smoothed_class_weight", "cross_entropy", (6, 4), dict(smoothing=0.3, class_weight=True, ignored=1)),
        (
            "cross_entropy_images_smoothed_sum_class_weight",
            "cross_entropy",
            (2, 4, 3, 3),
            dict(smoothing=0.2, class_weight=True, reduction="sum", ignore_index=255, ignored=5),
        ),
        ("cross_entropy_images_class_weight", "cross_entropy", (2, 4, 3, 3), dict(class_weight=True, ignored=4)),
    ):
        draws = file.draws(name)
        ignore_index, reduction = options.get("ignore_index", -100), options.get("reduction", "mean")
        x = draws.normal(*shape, std=options.get("std", 2.0))
        if operation == "nll_loss":
            x = F.log_softmax(x, 1).float().double()
        x = leaf(x)
        target = draws.integers(shape[0], *shape[2:], below=shape[1])
        target.view(-1)[torch.randperm(target.numel(), generator=draws.generator)[: options.get("ignored", 0)]] = (
            ignore_index
        )
        class_weight = draws.uniform(shape[1], low=0.5, high=2.0) if options.get("class_weight") else None
        function = F.nll_loss if operation == "nll_loss" else F.cross_entropy
        smoothing = dict(label_smoothing=options["smoothing"]) if "smoothing" in options else {}
        output = function(x, target, class_weight, ignore_index=ignore_index, reduction=reduction, **smoothing)
        grad_output = draws.like(output)
        output.backward(grad_output)
        file.add(
            name,
            dict(operation=operation, reduction=reduction, ignore_index=ignore_index, **smoothing),
            dict(x=x, target=target, class_weight=class_weight, grad_output=grad_output),
            dict(output=output, grad_x=x.grad),
        )


def value_cases(file):
    """mse_loss and binary_cross_entropy_with_logits against targets of x's shape, which have a gradient too."""
    for name, operation, shape, options in (
        ("mse_mean", "mse_loss", (5, 3), {}),
        ("mse_sum_images", "mse_loss", (2, 3, 4, 3), dict(reduction="sum")),
        ("bce_mean", "binary_cross_entropy_with_logits", (6, 4), {}),
        ("bce_sum_images", "binary_cross_entropy_with_logits", (2, 3, 4, 3), dict(reduction="sum")),
        ("bce_large", "binary_cross_entropy_with_logits", (4, 5), dict(std=1e4)),
    ):
        draws = file.draws(name)
        reduction = options.get("reduction", "mean")
        x = leaf(draws.normal(*shape, std=options.get("std", 2.0)))
        target = leaf(draws.uniform(*shape, low=0.0, high=1.0))
        output = getattr(F, operation)(x, target, reduction=reduction)
        grad_output = draws.like(output)
        output.backward(grad_output)
        file.add(
            name,
            dict(operation=operation, reduction=reduction),
            dict(x=x, x_target=target, grad_output=grad_output),
            dict(output=output, grad_x=x.grad, grad_x_target=target.grad),
        )


def loss_file(seed):
    file = GoldenFile("loss", seed)
    linear_cases(file)
    elementwise_cases(file)
    target_cases(file)
    value_cases(file)
    return file


# ---------------------------------------------------------------------------------------------------------------------
# Pointwise functions

# name: (function of x, its parameters)
POINTWISE_CASES = {
    "sigmoid": (torch.sigmoid, {}),
    "tanh": (torch.tanh, {}),
    "silu": (F.silu, {}),
    "hardswish": (F.hardswish, {}),
    "hardsigmoid": (F.hardsigmoid, {}),
    "clip": (torch.clamp, dict(min=-1.0, max=2.0)),
    "clip_above": (torch.clamp, dict(max=0.5)),
    "hardtanh": (F.hardtanh, dict(min_val=-1.0, max_val=2.0)),
    "relu6": (F.relu6, {}),
    "gelu": (F.gelu, {}),
    "gelu_tanh": (F.gelu, dict(approximate="tanh")),
    "elu": (F.elu, dict(alpha=1.0)),
    "elu_alpha": (F.elu, dict(alpha=0.3)),
    "selu": (F.selu, {}),
    "celu": (F.celu, dict(alpha=1.7)),
    "mish": (F.mish, {}),
    "softplus": (F.softplus, dict(beta=1.0, threshold=20.0)),
    "softplus_beta": (F.softplus, dict(beta=2.5, threshold=3.0)),
    "softsign": (F.softsign, {}),
    "exp": (torch.exp, {}),
    "log": (torch.log, {}),
    "sqrt": (torch.sqrt, {}),
    "abs": (torch.abs, {}),
    "neg": (torch.neg, {}),
    "reciprocal": (torch.reciprocal, {}),
    "erf": (torch.erf, {}),
}

# Zeros, infinities, NaN, tiny and large numbers, and numbers at and near the functions' bends.
SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-30, -1e-30, 88.0, -88.0, 1e30, -1e30]
BENDS = [1.0, -1.0, 2.0, 0.5, 3.0, -3.0, 6.0, 20.0, 20.5, -20.0, 1.25, 1e-3, -1e-3, 0.93, -5.5]


def pointwise_file(seed):
    """Functions of each element, PReLU, and softmax along an axis.

    The gradients at NaN depend on PyTorch's vectors (some functions have 0, some 1, some NaN): do not compare them.
    """
    file = GoldenFile("pointwise", seed)
    for name, (function, parameters) in POINTWISE_CASES.items():
        draws = file.draws(name)
        numbers = torch.tensor(SPECIAL + BENDS, dtype=torch.float64).float().double()
        x = leaf(torch.cat([numbers, draws.normal(14, std=2.5)]))
        output = function(x, **parameters)
        grad_output = draws.like(output)
        output.backward(grad_output)
        attributes = dict(operation="pointwise", function=name, **parameters)
        file.add(name, attributes, dict(x=x, grad_output=grad_output), dict(output=output, grad_x=x.grad))
    for name, shape, slopes in (
        ("prelu_vector", (7,), 1),
        ("prelu_one", (2, 3, 2, 2), 1),
        ("prelu_channels", (2, 3, 2, 2), 3),
        ("prelu_rows", (5, 4), 4),
    ):
        draws = file.draws(name)
        x, weight = leaf(draws.normal(*shape)), leaf(draws.normal(slopes, std=0.5))
        output = F.prelu(x, weight)
        grad_output = draws.like(output)
        output.backward(grad_output)
        inputs = dict(x=x, weight=weight, grad_output=grad_output)
        expected = dict(output=output, grad_x=x.grad, grad_weight=weight.grad)
        file.add(name, dict(operation="prelu"), inputs, expected)
    for name, function, shape, axis, std in (
        ("softmax_vector", F.softmax, (5,), 0, 2.0),
        ("softmax_rows", F.softmax, (3, 4), 1, 2.0),
        ("softmax_columns", F.softmax, (3, 4), 0, 2.0),
        ("softmax_large", F.softmax, (3, 4), 1, 1e4),
        ("softmax_images_0", F.softmax, (2, 3, 2, 3), 0, 2.0),
        ("softmax_images_1", F.softmax, (2, 3, 2, 3), 1, 2.0),
        ("softmax_images_2", F.softmax, (2, 3, 2, 3), 2, 2.0),
        ("softmax_images_3", F.softmax, (2, 3, 2, 3), 3, 2.0),
        ("log_softmax_columns", F.log_softmax, (3, 4), 0, 2.0),
        ("log_softmax_images_3", F.log_softmax, (2, 3, 2, 3), 3, 2.0),
    ):
        draws = file.draws(name)
        x = leaf(draws.normal(*shape, std=std))
        output = function(x, axis)
        grad_output = draws.like(output)
        output.backward(grad_output)
        attributes = dict(operation=function.__name__, axis=axis)
        file.add(name, attributes, dict(x=x, grad_output=grad_output), dict(output=output, grad_x=x.grad))
    return file


# ---------------------------------------------------------------------------------------------------------------------
# Optimizers

OPTIMIZER_STEPS = 5
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, dict(lr=0.1, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False)),
    "adadelta": (torch.optim.Adadelta, dict(lr=1.0, rho=0.9, eps=1e-6, weight_decay=0.0)),
    "adamw": (torch.optim.AdamW, dict(lr=1e-3, betas=[0.9, 0.999], eps=1e-8, weight_decay=1e-2)),
    "adam": (torch.optim.Adam, dict(lr=1e-3, betas=[0.9, 0.999], eps=1e-8, weight_decay=0.0)),
}

# name: (optimizer, options that differ from OPTIMIZERS, StepLR options or None)
OPTIMIZER_CASES = {
    "sgd": ("sgd", {}, None),
    "sgd_momentum": ("sgd", dict(momentum=0.9), None),
    "sgd_dampening": ("sgd", dict(momentum=0.9, dampening=0.3), None),
    "sgd_nesterov": ("sgd", dict(momentum=0.8, nesterov=True), None),
    "sgd_weight_decay": ("sgd", dict(weight_decay=0.1), None),
    "sgd_nesterov_weight_decay": ("sgd", dict(lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4), None),
    "sgd_momentum_step_lr": ("sgd", dict(momentum=0.9), dict(step_size=2, gamma=0.1)),
    "adadelta": ("adadelta", {}, None),
    "adadelta_weight_decay": ("adadelta", dict(weight_decay=0.1), None),
    "adadelta_rho_eps": ("adadelta", dict(lr=0.5, rho=0.8, eps=1e-3), None),
    "adadelta_step_lr": ("adadelta", {}, dict(step_size=1, gamma=0.7)),
    "adamw": ("adamw", {}, None),
    "adamw_betas": ("adamw", dict(lr=0.01, betas=[0.8, 0.95], eps=1e-6), None),
    "adamw_no_weight_decay": ("adamw", dict(lr=0.01, weight_decay=0.0), None),
    "adamw_large_weight_decay": ("adamw", dict(lr=0.1, weight_decay=0.5), None),
    "adamw_step_lr": ("adamw", dict(lr=0.1), dict(step_size=3, gamma=0.5)),
    "adam": ("adam", {}, None),
    "adam_betas": ("adam", dict(lr=0.01, betas=[0.8, 0.95], eps=1e-6), None),
    "adam_weight_decay": ("adam", dict(lr=0.1, weight_decay=0.5), None),
    "adam_step_lr": ("adam", dict(lr=0.1, weight_decay=5e-4), dict(step_size=3, gamma=0.5)),
}


def optimizer_file(seed):
    """`parameter_after_I` is the parameter after step I, from 1; `learning_rates[I - 1]` is what that step used.

    With StepLR the scheduler advances after every optimizer step. The last gradient element is always zero.
    """
    file = GoldenFile("optimizer", seed)
    for name, (optimizer_name, changes, schedule) in OPTIMIZER_CASES.items():
        draws = file.draws(name)
        make, defaults = OPTIMIZERS[optimizer_name]
        options = {**defaults, **changes}
        initial = draws.normal(12)
        gradients = draws.normal(OPTIMIZER_STEPS, 12)
        gradients[:, 1] *= 1e-4  # where eps matters
        gradients[:, -1] = 0.0
        gradients = gradients.float().double()
        parameter = leaf(initial)
        optimizer = make([parameter], **options)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, **schedule) if schedule else None
        after, learning_rates = [], []
        for step in range(OPTIMIZER_STEPS):
            learning_rates.append(optimizer.param_groups[0]["lr"])
            parameter.grad = gradients[step].clone()
            optimizer.step()
            after.append(parameter.detach().clone())
            if scheduler:
                scheduler.step()
        file.add(
            name,
            dict(optimizer=optimizer_name, **options, step_lr=schedule, learning_rates=learning_rates),
            dict(parameter=initial, gradients=gradients),
            {f"parameter_after_{step + 1}": values for step, values in enumerate(after)},
        )
    for name, lr, schedule in (
        ("step_lr_epochs", 1.0, dict(step_size=1, gamma=0.7)),
        ("step_lr_every_third", 0.1, dict(step_size=3, gamma=0.1)),
    ):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, **schedule)
        learning_rates = []
        for _ in range(10):
            learning_rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        file.add(name, dict(optimizer=None, lr=lr, step_lr=schedule, learning_rates=learning_rates), {}, {})
    return file


# ---------------------------------------------------------------------------------------------------------------------
# One training step of the whole network


def mix(value):
    """The finalizer of MurmurHash3 on uint32 arrays: every input bit reaches every output bit."""
    value = value.astype(numpy.uint32)
    value ^= value >> numpy.uint32(16)
    value *= numpy.uint32(0x85EBCA6B)
    value ^= value >> numpy.uint32(13)
    value *= numpy.uint32(0xC2B2AE35)
    value ^= value >> numpy.uint32(16)
    return value


def formula_fill(tag, length, bound, center=0.0):
    """float32 numbers that Rust repeats exactly (testkit's `formula_fill`), so that large tensors are not stored.

        h_i     = mix(i * 2654435761 + mix(tag))              in 32-bit wrapping arithmetic
        value_i = float32(((h_i >> 8) / 2^24 - 0.5) * 2 * bound)       evaluated in float64
        result  = float32(center + value_i)

    Uniform in [-bound, bound) around `center`. A plain multiplicative hash (without `mix`) would repeat the same
    filter at Fibonacci distances, and the network would then have many nearly equal channels.
    """
    index = numpy.arange(length, dtype=numpy.uint32)
    hashed = mix(index * numpy.uint32(2654435761) + mix(numpy.array([tag]))) >> numpy.uint32(8)
    values = ((hashed.astype(numpy.float64) / 2**24 - 0.5) * 2.0 * bound).astype(numpy.float32)
    return torch.from_numpy((numpy.float64(center) + values.astype(numpy.float64)).astype(numpy.float32))


# name, shape, center, bound; the tag is the position in this list, from 1.
MNIST_CNN_PARAMETERS = [
    ("conv1.weight", (32, 1, 3, 3), 0.0, 1 / math.sqrt(9)),
    ("bn1.weight", (32,), 1.0, 0.25),
    ("bn1.bias", (32,), 0.0, 0.25),
    ("conv2.weight", (64, 32, 3, 3), 0.0, 1 / math.sqrt(288)),
    ("bn2.weight", (64,), 1.0, 0.25),
    ("bn2.bias", (64,), 0.0, 0.25),
    ("linear1.weight", (128, 9216), 0.0, 1 / math.sqrt(9216)),
    ("linear1.bias", (128,), 0.0, 1 / math.sqrt(9216)),
    ("linear2.weight", (10, 128), 0.0, 1 / math.sqrt(128)),
    ("linear2.bias", (10,), 0.0, 1 / math.sqrt(128)),
]
BATCH = 8
WHOLE_UP_TO = 2048  # larger parameters are stored as samples
SAMPLES = 64
STEP_MARGIN = 1e-5  # least distance of a ReLU's input from zero, and of a pooling maximum from the second largest


class MnistCnn(torch.nn.Module):
    """The article's network; dropout (p = 0 here) lies between linear1 and its ReLU and changes nothing."""

    def __init__(self, dtype):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(1, 32, 3, bias=False)
        self.bn1 = torch.nn.BatchNorm2d(32)
        self.conv2 = torch.nn.Conv2d(32, 64, 3, bias=False)
        self.bn2 = torch.nn.BatchNorm2d(64)
        self.linear1 = torch.nn.Linear(9216, 128)
        self.linear2 = torch.nn.Linear(128, 10)
        self.to(dtype)
        parameters = dict(self.named_parameters())
        assert list(parameters) == [name for name, *_ in MNIST_CNN_PARAMETERS]
        with torch.no_grad():
            for tag, (name, shape, center, bound) in enumerate(MNIST_CNN_PARAMETERS, 1):
                parameters[name].copy_(formula_fill(tag, math.prod(shape), bound, center).view(shape))

    def forward(self, x):
        first = self.bn1(self.conv1(x))
        second = self.bn2(self.conv2(F.relu(first)))
        pooled = F.max_pool2d(F.relu(second), 2)
        hidden = self.linear1(pooled.flatten(1))
        self.margin = min(first.abs().min(), second.abs().min(), hidden.abs().min(), runner_up_distance(second))
        return F.log_softmax(self.linear2(F.relu(F.dropout(hidden, 0.0))), 1)


def runner_up_distance(before_relu):
    """The least distance between the two largest of a 2x2 window, where the largest survives the ReLU."""
    windows = F.unfold(before_relu.flatten(0, 1).unsqueeze(1), 2, stride=2)
    largest = windows.topk(2, dim=1).values
    return (largest[:, 0] - largest[:, 1])[largest[:, 0] > 0].min()


def mnist_cnn_step(dtype, input_tag):
    """One Adadelta step; returns everything computed, by name, or None when an activation is within STEP_MARGIN."""
    model = MnistCnn(dtype)
    x = formula_fill(input_tag, BATCH * 28 * 28, 1.0).view(BATCH, 1, 28, 28).to(dtype)
    target = torch.arange(BATCH) * 7 % 10
    log_probabilities = model(x)
    if dtype == torch.float64 and model.margin < STEP_MARGIN:
        return None
    loss = F.nll_loss(log_probabilities, target)
    loss.backward()
    torch.optim.Adadelta(model.parameters(), lr=1.0).step()
    results = dict(target=target, loss=loss, log_probabilities=log_probabilities)
    for name, parameter in model.named_parameters():
        results[f"grad.{name}"], results[f"updated.{name}"] = parameter.grad, parameter
    for layer in ("bn1", "bn2"):
        for statistic in ("running_mean", "running_var"):
            results[f"{layer}.{statistic}"] = getattr(model, layer).get_buffer(statistic).clone()
    with torch.no_grad():
        results["eval_log_probabilities"] = model.eval()(x)
    return {name: tensor.detach() for name, tensor in results.items()}


def summarize(name, tensor):
    """sum.NAME and norm.NAME over all elements, and NAME itself: whole when small, else at SAMPLES fixed indices."""
    flat = tensor.flatten()
    summary = {f"sum.{name}": flat.sum(), f"norm.{name}": flat.norm(), name: flat}
    if flat.numel() > WHOLE_UP_TO:
        indices = torch.from_numpy(mix(numpy.arange(SAMPLES)).astype(numpy.int64)) % flat.numel()
        summary.update({f"indices.{name}": indices, name: flat[indices]})
    return summary


def mnist_cnn_step_file(seed):
    """Shapes, tags, centers and bounds of everything filled by formula are in the attributes.

    first.NAME (eight elements) and sum.initial.NAME let a test check the formula before it blames the network.
    """
    file = GoldenFile("mnist_cnn_step", seed)
    input_tag = next(tag for tag in range(1000, 11_000) if mnist_cnn_step(torch.float64, tag))
    results, single = mnist_cnn_step(torch.float64, input_tag), mnist_cnn_step(torch.float32, input_tag)
    attributes = dict(
        batch=BATCH,
        optimizer="adadelta",
        lr=1.0,
        x=dict(tag=input_tag, shape=[BATCH, 1, 28, 28], center=0.0, bound=1.0),
        parameters=[
            dict(name=name, tag=tag, shape=list(shape), center=center, bound=bound)
            for tag, (name, shape, center, bound) in enumerate(MNIST_CNN_PARAMETERS, 1)
        ],
    )
    expected = {}
    for entry in [dict(attributes["x"], name="x"), *attributes["parameters"]]:
        filled = formula_fill(entry["tag"], math.prod(entry["shape"]), entry["bound"], entry["center"]).double()
        expected[f"first.{entry['name']}"] = filled[:8]
        expected[f"sum.initial.{entry['name']}"] = filled.sum()
    for name, tensor in results.items():
        if name.startswith(("grad.", "updated.")):
            expected.update(summarize(name, tensor))
        elif name != "target":
            expected[name] = tensor
    file.add("step", attributes, dict(target=results["target"]), expected)

    def difference(name):
        return ((single[name].double() - results[name]).abs().max() / results[name].abs().max()).item()

    worst = max((name for name in results if name.startswith("grad.")), key=difference)
    print(f"mnist_cnn_step: input tag {input_tag}; PyTorch's own float32 differs by {difference('loss'):.1e} in the")
    print(f"    loss and by {difference(worst):.1e} of the largest element in {worst}, the worst gradient")
    return file


# ---------------------------------------------------------------------------------------------------------------------
# Residual networks: one step of the 20-layer one, and of single blocks


RESNET_BATCH, RESNET_IMAGE, RESNET_CLASSES = 3, (3, 12, 10), 5
RESNET_SAMPLES = 16  # of each gradient


class ConvBn(torch.nn.Module):
    """A convolution without bias that keeps the size at stride 1, and batch norm; `margin` is the least |pre-activation|."""

    def __init__(self, inputs, outputs, kernel, stride):
        super().__init__()
        self.conv = torch.nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        self.bn = torch.nn.BatchNorm2d(outputs)

    def forward(self, x, residual=None, relu=True):
        y = self.bn(self.conv(x))
        y = y if residual is None else y + residual
        self.margin = y.abs().min() if relu else torch.inf
        return F.relu(y) if relu else y


class ResidualBlock(torch.nn.Module):
    """Two 3x3 convolutions, or (`bottleneck`) 1x1 to a quarter, 3x3 with the stride, 1x1; a 1x1 shortcut if the shape changes."""

    def __init__(self, inputs, outputs, stride, bottleneck):
        super().__init__()
        width = outputs // 4
        sizes = [(inputs, outputs, 3, stride), (outputs, outputs, 3, 1)]
        if bottleneck:
            sizes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        for number, size in enumerate(sizes, 1):
            self.add_module(f"conv{number}", ConvBn(*size))
        self.depth = len(sizes)
        if stride != 1 or inputs != outputs:
            self.downsample = ConvBn(inputs, outputs, 1, stride)

    def forward(self, x):
        residual = self.downsample(x, relu=False) if hasattr(self, "downsample") else x
        for number in range(1, self.depth):
            x = self.get_submodule(f"conv{number}")(x)
        return self.get_submodule(f"conv{self.depth}")(x, residual)


class Resnet20(torch.nn.Module):
    """He et al.'s network for CIFAR, with 1x1 convolutions as shortcuts of the blocks that change the shape (option B)."""

    def __init__(self):
        super().__init__()
        self.conv1, inputs = ConvBn(RESNET_IMAGE[0], 16, 3, 1), 16
        for number, width in enumerate((16, 32, 64), 1):
            blocks = [ResidualBlock(inputs, width, 1 if number == 1 else 2, False)]
            blocks += [ResidualBlock(width, width, 1, False) for _ in range(2)]
            self.add_module(f"layer{number}", torch.nn.Sequential(*blocks))
            inputs = width
        self.fc = torch.nn.Linear(inputs, RESNET_CLASSES)

    def forward(self, x):
        x = self.layer3(self.layer2(self.layer1(self.conv1(x))))
        return F.log_softmax(self.fc(x.mean((2, 3))), 1)


def fill_by_formula(model):
    """Fills the parameters by formula, and lists how: the tag is the position in the list, from 1."""
    fills = []
    for tag, (name, parameter) in enumerate(model.named_parameters(), 1):
        if parameter.dim() > 1:
            # The standard deviation of Kaiming initialization by fan_in.
            center, bound = 0.0, math.sqrt(6 / math.prod(parameter.shape[1:]))
        else:
            center, bound = (1.0, 0.25) if name.endswith("bn.weight") else (0.0, 0.25)
        filled = formula_fill(tag, parameter.numel(), bound, center)
        fills.append(dict(name=name, tag=tag, shape=list(parameter.shape), center=center, bound=bound))
        with torch.no_grad():
            parameter.copy_(filled.view(parameter.shape))
    return fills


def residual_step(build, shape, dtype, tag, loss_of):
    """Forward and backward; everything computed, by name, or None when a pre-activation is too near to zero."""
    model = build()
    fills = fill_by_formula(model)
    model.to(dtype)
    x = leaf(formula_fill(tag, math.prod(shape), 1.0).view(shape).to(dtype))
    output = model(x)
    if min(module.margin for module in model.modules() if isinstance(module, ConvBn)) < STEP_MARGIN:
        return None
    loss = loss_of(output)
    loss.backward()
    expected = dict(loss=loss, output=output)
    gradients = {"x": x.grad, **{name: parameter.grad for name, parameter in model.named_parameters()}}
    for name, gradient in gradients.items():
        flat, name = gradient.flatten(), f"grad.{name}"
        indices = torch.from_numpy(mix(numpy.arange(RESNET_SAMPLES)).astype(numpy.int64)) % flat.numel()
        expected.update(
            {f"sum.{name}": flat.sum(), f"norm.{name}": flat.norm(), f"indices.{name}": indices, name: flat[indices]}
        )
    for name, statistic in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            expected[f"sum.{name}"] = statistic.sum()
    with torch.no_grad():
        expected["eval_output"] = model.eval()(x)
    return fills, {name: tensor.detach() for name, tensor in expected.items()}


def resnet_step_file(seed):
    """Parameters and inputs are filled by formula, as the attributes say. The loss of a block is the mean of its output times
    the values filled as `upstream` says; that of the network is the mean NLL of `target`."""
    file = GoldenFile("resnet_step", seed)
    target = torch.arange(RESNET_BATCH) * 7 % RESNET_CLASSES
    blocks = [("basic", 8, 8, 1, False), ("basic_past", 6, 8, 2, False), ("bottleneck", 8, 8, 1, True)]
    blocks.append(("bottleneck_past", 6, 16, 2, True))
    cases = [("resnet20", Resnet20, (RESNET_BATCH, *RESNET_IMAGE), {}, lambda y: F.nll_loss(y, target))]
    for name, inputs, outputs, stride, bottleneck in blocks:
        upstream = formula_fill(77, 2 * outputs * (6 // stride) * -(-5 // stride), 1.0)
        shape, block = (2, inputs, 6, 5), dict(inputs=inputs, outputs=outputs, stride=stride, bottleneck=bottleneck)
        cases.append(
            (
                name,
                lambda block=block: ResidualBlock(**block),
                shape,
                dict(block=block, upstream=dict(tag=77, shape=[upstream.numel()], center=0.0, bound=1.0)),
                lambda y, upstream=upstream: (y.flatten() * upstream.to(y.dtype)).mean(),
            )
        )
    for name, build, shape, attributes, loss_of in cases:
        tag = next(t for t in range(1000, 11_000) if residual_step(build, shape, torch.float64, t, loss_of))
        fills, expected = residual_step(build, shape, torch.float64, tag, loss_of)
        attributes |= dict(x=dict(tag=tag, shape=list(shape), center=0.0, bound=1.0), parameters=fills)
        file.add(name, attributes, dict(target=target) if name == "resnet20" else {}, expected)
        single = residual_step(build, shape, torch.float32, tag, loss_of)
        if single is None:
            print(f"resnet_step: {name}: input tag {tag}; PyTorch's own float32 comes nearer to a ReLU's edge")
            continue
        relative = lambda key: ((single[1][key].double() - expected[key]).abs().max() / expected[key].abs().max()).item()
        worst = max((key for key in expected if key.startswith("grad.")), key=relative)
        print(f"resnet_step: {name}: input tag {tag}; PyTorch's own float32 differs by {relative('loss'):.1e} in the loss")
        print(f"    and by {relative(worst):.1e} of the largest element in {worst}, the worst gradient")
    return file


# Operation, inputs by name with their shapes, the function, and the attributes that the tests read.
TRANSPOSED = {
    "u_net": ((2, 3, 3, 2), (3, 2, 2, 2), True, dict(stride=2)),
    "gan": ((1, 3, 3, 3), (3, 2, 4, 4), False, dict(stride=2, padding=1)),
    "output_padding": ((1, 2, 3, 4), (2, 3, 3, 3), True, dict(stride=(2, 3), padding=(1, 0), output_padding=(1, 2))),
    "groups": ((1, 4, 3, 3), (4, 2, 3, 2), True, dict(stride=2, groups=2, padding=(1, 1))),
    "depthwise": ((1, 3, 3, 2), (3, 1, 4, 4), False, dict(stride=2, padding=1, groups=3)),
    "dilation": ((1, 2, 3, 3), (2, 2, 3, 2), True, dict(dilation=(2, 3), padding=(1, 2))),
    "everything": ((1, 4, 3, 2), (4, 1, 3, 2), True, dict(stride=(3, 2), padding=1, output_padding=(2, 1), groups=2, dilation=2)),
}


def layers_file(seed):
    file = GoldenFile("layers", seed)

    def add(name, operation, shapes, function, **attributes):
        draws = file.draws(name)
        leaves = {key: leaf(draws.normal(*shape)) for key, shape in shapes.items()}
        output = function(**leaves)
        grad_output = draws.like(output)
        output.backward(grad_output)
        gradients = {f"grad_{key}": tensor.grad for key, tensor in leaves.items()}
        inputs = dict(**leaves, grad_output=grad_output)
        file.add(name, dict(operation=operation, **attributes), inputs, dict(output=output, **gradients))

    for name, (x, weight, bias, options) in TRANSPOSED.items():
        shapes = dict(x=x, weight=weight)
        if bias:
            shapes["bias"] = (weight[1] * options.get("groups", 1),)
        attributes = dict(
            stride=pair(options.get("stride", 1)),
            padding=four_sides(options.get("padding", 0)),
            output_padding=pair(options.get("output_padding", 0)),
            dilation=pair(options.get("dilation", 1)),
            groups=options.get("groups", 1),
        )
        transposed = lambda x, weight, bias=None, options=options: F.conv_transpose2d(x, weight, bias, **options)
        add(f"conv_transpose2d_{name}", "conv_transpose2d", shapes, transposed, **attributes)

    for name, x, weight, bias, options in (
        ("plain", (2, 3, 7), (4, 3, 3), True, dict(stride=1, padding=0, dilation=1, groups=1)),
        ("everything", (1, 4, 9), (6, 2, 3), True, dict(stride=2, padding=2, dilation=2, groups=2)),
        ("depthwise", (1, 3, 6), (3, 1, 4), False, dict(stride=1, padding=1, dilation=1, groups=3)),
    ):
        shapes = dict(x=x, weight=weight)
        if bias:
            shapes["bias"] = weight[:1]
        convolution = lambda x, weight, bias=None, options=options: F.conv1d(x, weight, bias, **options)
        add(f"conv1d_{name}", "conv1d", shapes, convolution, **options)
    for ceil in (False, True):
        options = dict(kernel_size=3, stride=2, padding=1, ceil_mode=ceil)
        attributes = dict(kernel=3, stride=2, padding=1, ceil_mode=ceil)
        add(f"max_pool1d_ceil_{ceil}", "max_pool1d", dict(x=(1, 2, 8)), lambda x: F.max_pool1d(x, **options), **attributes)
        add(f"avg_pool1d_ceil_{ceil}", "avg_pool1d", dict(x=(1, 2, 8)), lambda x: F.avg_pool1d(x, **options), **attributes)
    for name, x, size in (
        ("global", (2, 2, 3, 4), (1, 1)),
        ("overlapping", (1, 2, 7, 5), (3, 4)),
        ("larger", (1, 2, 2, 3), (5, 3)),
    ):
        for kind in ("avg", "max"):
            function = getattr(F, f"adaptive_{kind}_pool2d")
            operation = f"adaptive_{kind}_pool2d"
            add(f"{operation}_{name}", operation, dict(x=x), lambda x: function(x, size), size=pair(size))
    # Padding that differs by side: PyTorch pads first.
    top, bottom, left, right = sides = (0, 1, 1, 0)
    padded = lambda x, value: F.pad(x, (left, right, top, bottom), value=value)
    ones = torch.ones(1, 1, 6, 5, dtype=torch.float64)
    for counts in (False, True):
        counted = F.avg_pool2d(padded(ones, float(counts)), 3, 2)
        average = lambda x: F.avg_pool2d(padded(x, 0.0), 3, 2) / (1.0 if counts else counted)
        attributes = dict(kernel=3, stride=2, padding=list(sides), count_include_pad=counts, ceil_mode=False)
        add(f"avg_pool2d_sides_counted_{counts}", "avg_pool2d", dict(x=(1, 2, 6, 5)), average, **attributes)
    attributes = dict(kernel=3, stride=2, padding=list(sides), ceil_mode=False)
    largest = lambda x: F.max_pool2d(padded(x, -torch.inf), 3, 2)
    add("max_pool2d_sides", "max_pool2d", dict(x=(1, 2, 6, 5)), largest, **attributes)
    attributes = dict(kernel=3, stride=2, padding=[1] * 4, count_include_pad=True, ceil_mode=True)
    average = lambda x: F.avg_pool2d(x, 3, 2, 1, True, True, divisor_override=5)
    add("avg_pool2d_divisor", "avg_pool2d", dict(x=(1, 2, 6, 5)), average, divisor_override=5, **attributes)

    for name, x, to in (
        ("up", (1, 2, 3, 4), dict(size=(5, 7))),
        ("down", (1, 2, 7, 6), dict(size=(3, 4))),
        ("one", (1, 2, 4, 3), dict(size=(1, 1))),
        ("scales", (1, 2, 5, 4), dict(scale_factor=(1.7, 0.6))),
        ("scale_of_a_third", (1, 1, 7, 4), dict(scale_factor=(1 / 3, 2.5))),
    ):
        attributes = {"size": list(to["size"])} if "size" in to else {"scale": list(to["scale_factor"])}
        for mode in ("nearest",) if name == "one" else ("nearest", "nearest-exact"):
            add(f"resize_{mode}_{name}", "resize2d", dict(x=x), lambda x: F.interpolate(x, mode=mode, **to), mode=mode, **attributes)
        for corners in (False, True):
            bilinear = lambda x: F.interpolate(x, mode="bilinear", align_corners=corners, **to)
            if corners and "size" not in to:
                continue  # With corners aligned, a scale only chooses the size.
            add(f"resize_bilinear_{corners}_{name}", "resize2d", dict(x=x), bilinear, mode="bilinear", align_corners=corners, **attributes)

    for name, x, groups in (
        ("images", (2, 4, 3, 2), 2),
        ("one_group", (2, 3, 2, 2), 1),
        ("lines", (3, 4, 5), 2),
        ("matrix", (3, 6), 2),
    ):
        for affine in (False, True) if name == "images" else (True,):
            shapes = dict(x=x, weight=(x[1],), bias=(x[1],)) if affine else dict(x=x)
            norm = lambda x, weight=None, bias=None: F.group_norm(x, groups, weight, bias, 1e-3)
            add(f"group_norm_{name}_affine_{affine}", "group_norm", shapes, norm, groups=groups, eps=1e-3)
    for affine in (False, True):
        x = (2, 3, 3, 2)
        shapes = dict(x=x, weight=x[1:2], bias=x[1:2]) if affine else dict(x=x)
        norm = lambda x, weight=None, bias=None: F.instance_norm(x, weight=weight, bias=bias, eps=1e-3)
        add(f"instance_norm_affine_{affine}", "instance_norm", shapes, norm, eps=1e-3)
        shapes = dict(x=x, weight=x[1:2], bias=x[1:2]) if affine else dict(x=x)

        def channels(x, weight=None, bias=None):
            return F.layer_norm(x.permute(0, 2, 3, 1), x.shape[1:2], weight, bias, 1e-3).permute(0, 3, 1, 2)

        add(f"layer_norm_channels_affine_{affine}", "layer_norm", shapes, channels, axes=0, eps=1e-3)
        for axes in (1, 2, 3) if affine else (2,):
            last = x[-axes:]
            shapes = dict(x=x, weight=last, bias=last) if affine else dict(x=x)
            norm = lambda x, weight=None, bias=None: F.layer_norm(x, last, weight, bias, 1e-3)
            add(f"layer_norm_{axes}_affine_{affine}", "layer_norm", shapes, norm, axes=axes, eps=1e-3)
    for size in (4, 5):
        options = dict(alpha=0.3, beta=0.75, k=1.5)
        norm = lambda x: F.local_response_norm(x, size, **options)
        add(f"local_response_norm_{size}", "local_response_norm", dict(x=(1, 6, 2, 2)), norm, size=size, **options)
    return file


FILES = {
    "conv": conv_file,
    "batch_norm": batch_norm_file,
    "batch_norm_cross": batch_norm_cross_file,
    "batch_norm_conventions": batch_norm_conventions_file,
    "batch_norm_halves": batch_norm_halves_file,
    "batch_norm_frameworks": batch_norm_frameworks_file,
    "batch_norm_closeness": batch_norm_closeness_file,
    "pool": pool_file,
    "upsample": upsample_file,
    "concat": concat_file,
    "layers": layers_file,
    "shapes": shapes_file,
    "loss": loss_file,
    "pointwise": pointwise_file,
    "optimizer": optimizer_file,
    "mnist_cnn_step": mnist_cnn_step_file,
    "resnet_step": resnet_step_file,
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help=f"files to write (default: all): {', '.join(FILES)}")
    parser.add_argument("--out", type=Path, default=ROOT / "crates/testkit/golden", help="folder (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=2, help="seed of all random inputs (default: %(default)s)")
    arguments = parser.parse_args()
    unknown = set(arguments.files) - set(FILES)
    if unknown:
        parser.error(f"no such file: {', '.join(sorted(unknown))}")
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # the order of summation must not depend on the machine
    arguments.out.mkdir(parents=True, exist_ok=True)
    total = sum(FILES[name](arguments.seed).write(arguments.out) for name in arguments.files or FILES)
    print(f"{'total':28} {total:8} bytes  (limit {SIZE_LIMIT}), PyTorch {torch.__version__}")
    if total > SIZE_LIMIT:
        raise SystemExit("the golden files are too large to commit")


if __name__ == "__main__":
    main()
