"""`nn.FusedConvBN2d` compared with PyTorch's layers and with the module of PyTorch's tutorial, whose formula is written out here."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from conftest import check, check_strides, collected
from torch import nn

import torch_convoke
from torch_convoke import _threads, nn as ours
from torch_convoke.nn import FusedConvBN2d

F64 = torch.float64
ACTIVATIONS = {
    None: lambda y: y,
    "relu": F.relu,
    "leaky_relu": lambda y: F.leaky_relu(y, 0.01),
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "silu": F.silu,
}
FORMATS = [torch.contiguous_format, torch.channels_last]


class Tutorial(nn.Module):
    """The tutorial's module, with the gradient left to autograd."""

    def __init__(self, in_channels, out_channels, kernel_size, exp_avg_factor=0.1, eps=1e-3, device=None, dtype=None):
        super().__init__()
        shape = (out_channels, in_channels, kernel_size, kernel_size)
        self.conv_weight = nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))
        self.num_features, self.eps = out_channels, eps
        nn.init.kaiming_uniform_(self.conv_weight, a=math.sqrt(5))

    def forward(self, x):
        x = F.conv2d(x, self.conv_weight)
        mean, deviation = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), unbiased=True, keepdim=True).sqrt()
        return (x - mean) / (deviation + self.eps)


class Separate(nn.Module):
    """Layers of PyTorch's, with other values than the initial ones."""

    def __init__(self, bias, affine, running, activation, dtype=F64, momentum=0.1, eps=1e-3, **options):
        super().__init__()
        options = {"in_channels": 4, "out_channels": 6, "kernel_size": 3} | options
        self.conv = nn.Conv2d(bias=bias, dtype=dtype, **options)
        self.bn = nn.BatchNorm2d(self.conv.out_channels, eps, momentum, affine, running, dtype=dtype)
        self.activation = activation
        with torch.no_grad():
            if affine:
                self.bn.weight.uniform_(-2, 2)
                self.bn.bias.uniform_(-1, 1)
            if running:
                self.bn.running_mean.normal_()
                self.bn.running_var.uniform_(0.5, 2)

    def forward(self, x):
        return ACTIVATIONS[self.activation](self.bn(self.conv(x)))


def run(model, x, upstream=None):
    """Output, gradients of the input and of all parameters, and buffers."""
    x = x.detach().clone().requires_grad_()
    output = model(x)
    upstream = torch.randn(output.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1)) if upstream is None else upstream
    gradients = torch.autograd.grad(output, [x, *model.parameters()], upstream)
    return [output, *gradients, *model.buffers()]


def check_all(found, expected, tolerance):
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        check(one, other, tolerance)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("memory_format", FORMATS)
def test_equals_separate_layers(activation, training, memory_format, one_thread):
    x = torch.randn(3, 4, 7, 6, dtype=F64).contiguous(memory_format=memory_format)
    count = 0
    flags = (True, False)
    for bias, affine, running, stride, padding, groups in itertools.product(
        flags, flags, flags, (1, 2), (0, (1, 2), "same"), (1, 2)
    ):
        if stride == 2 and padding == "same":
            continue
        options = {"stride": stride, "padding": padding, "groups": groups}
        theirs = Separate(bias, affine, running, activation, **options).train(training)
        modules = copy.deepcopy(theirs)
        fused = FusedConvBN2d.from_modules(modules.conv, modules.bn, activation, recompute=bool(count % 2))
        found, expected = run(fused, x), run(theirs, x)
        check_all(found, expected, 1e-12)
        check_strides(found[0], expected[0])
        count += 1
    assert count == 8 * 2 * 5


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_dilation_kernels_and_options_of_the_constructor(activation):
    options = {"in_channels": 4, "out_channels": 6, "kernel_size": (3, 2), "stride": (1, 2), "dilation": (2, 1), "groups": 2}
    theirs = Separate(True, True, True, activation, **options)
    fused = FusedConvBN2d(bias=True, affine=True, track_running_stats=True, activation=activation, dtype=F64, **options)
    names = {"conv_weight": "conv.weight", "conv_bias": "conv.bias", "bn_weight": "bn.weight", "bn_bias": "bn.bias"}
    state = theirs.state_dict()
    fused.load_state_dict({name: state[names.get(name, f"bn.{name}")].clone() for name in fused.state_dict()})
    x = torch.randn(3, 4, 9, 8, dtype=F64)
    for training in (True, False):
        check_all(run(fused.train(training), x), run(theirs.train(training), x), 1e-12)


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("recompute", [True, False])
def test_float32(memory_format, recompute):
    # Without a bias: before a batch norm its gradient is 0, and what is computed is rounding errors.
    theirs = Separate(False, True, True, "relu", torch.float32, in_channels=16, out_channels=24, padding=1)
    modules = copy.deepcopy(theirs)
    fused = FusedConvBN2d.from_modules(modules.conv, modules.bn, "relu", recompute=recompute)
    x = torch.randn(8, 16, 14, 14).contiguous(memory_format=memory_format)
    for training in (True, False):
        check_all(run(fused.train(training), x), run(theirs.train(training), x), 1e-4)


def test_the_tutorial_is_the_default():
    torch.manual_seed(3)
    theirs = Tutorial(3, 5, 3, 0.2, 1e-2, None, F64)
    torch.manual_seed(3)
    fused = FusedConvBN2d(3, 5, 3, 0.2, 1e-2, None, F64)
    assert fused.state_dict().keys() == theirs.state_dict().keys() == {"conv_weight"}
    assert torch.equal(fused.conv_weight, theirs.conv_weight)
    assert (fused.num_features, fused.eps, fused.formula) == (5, 1e-2, "tutorial")
    for shape in [(10, 3, 7, 7), (1, 3, 4, 4), (2, 3, 3, 3)]:
        # Small values, so that it shows where eps is added.
        x = 0.05 * torch.randn(shape, dtype=F64)
        for training in (True, False):
            check_all(run(fused.train(training), x), run(theirs.train(training), x), 1e-12)


@pytest.mark.parametrize("running", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_the_tutorials_formula_with_options(affine, running):
    options = {"affine": affine, "track_running_stats": running, "padding": 1, "bias": True, "activation": "relu"}
    fused = FusedConvBN2d(3, 5, 3, dtype=F64, formula="tutorial", **options)
    plain = copy.deepcopy(fused)
    plain.forward = lambda x: plain._in_pytorch(x, *arguments(plain))

    def arguments(layer):
        given = None if layer.training or not running else (layer.running_mean, layer.running_var)
        updated = (layer.running_mean, layer.running_var) if layer.training and running else None
        if updated:
            layer.num_batches_tracked.add_(1)
        return given, updated, 0.1

    x = 0.05 * torch.randn(4, 3, 6, 6, dtype=F64)
    for training in (True, True, False):
        check_all(run(fused.train(training), x), run(plain.train(training), x), 1e-12)


def test_only_the_formula_tells_the_two_apart():
    x = torch.randn(2, 3, 5, 5, dtype=F64)
    layers = {}
    for formula in ("tutorial", "batch_norm"):
        torch.manual_seed(0)
        layers[formula] = FusedConvBN2d(3, 4, 3, dtype=F64, formula=formula)
    one, other = (layer(x) for layer in layers.values())
    assert 1e-3 < (one - other).abs().max() < 1e-1
    check(other, F.batch_norm(F.conv2d(x, layers["batch_norm"].conv_weight), None, None, training=True, eps=1e-3), 1e-12)


GRADCHECKS = [
    dict(),
    dict(bias=True, padding="same"),
    dict(affine=True, track_running_stats=True, activation="silu", stride=2),
    dict(affine=True, groups=2, activation="hardswish", recompute=False),
    dict(track_running_stats=True, activation="leaky_relu", negative_slope=0.3),
    dict(affine=True, formula="tutorial", activation="relu6"),
]


@pytest.mark.parametrize("options", GRADCHECKS, ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_gradcheck(options, training):
    layer = FusedConvBN2d(4, 4, 3, dtype=F64, **options).train(training)
    names = [name for name, _ in layer.named_parameters()]

    def function(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values)), (x,))

    values = [parameter.detach().clone().uniform_(0.5, 1.5).requires_grad_() for parameter in layer.parameters()]
    x = torch.randn(2, 4, 5, 5, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(function, (x, *values))


def test_training_by_an_optimizer_of_the_modules():
    torch.manual_seed(0)
    theirs = Separate(False, True, True, "relu", padding=1)
    modules = copy.deepcopy(theirs)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in (theirs, modules)]
    fused = FusedConvBN2d.from_modules(modules.conv, modules.bn, "relu")
    x, target = torch.randn(10, 3, 4, 6, 6, dtype=F64), torch.randn(3, 6, 6, 6, dtype=F64)
    for batch in x:
        losses = []
        for model, optimizer in zip((theirs, fused), optimizers):
            optimizer.zero_grad()
            losses.append(F.mse_loss(model(batch), target))
            losses[-1].backward()
            optimizer.step()
        check(*losses, 1e-12)
    check_all([*modules.parameters(), *modules.buffers()], [*theirs.parameters(), *theirs.buffers()], 1e-11)
    assert modules.bn.num_batches_tracked == 10


def test_from_modules_shares():
    conv, bn = nn.Conv2d(3, 4, 3, padding="same"), nn.BatchNorm2d(4, momentum=None).eval()
    state = torch.get_rng_state()
    fused = FusedConvBN2d.from_modules(conv, bn, "relu6")
    assert torch.equal(state, torch.get_rng_state()), "it draws nothing"
    assert fused.conv_weight is conv.weight and fused.conv_bias is conv.bias
    assert fused.bn_weight is bn.weight and fused.bn_bias is bn.bias
    assert fused.running_mean is bn.running_mean and fused.running_var is bn.running_var
    assert fused.num_batches_tracked is bn.num_batches_tracked
    assert not fused.training and (fused.eps, fused.exp_avg_factor, fused.formula) == (1e-5, None, "batch_norm")
    without = FusedConvBN2d.from_modules(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4, affine=False, track_running_stats=False))
    assert list(without.state_dict()) == ["conv_weight"] and without.formula == "batch_norm"


def test_cumulative_average():
    theirs = Separate(False, False, True, None, momentum=None)
    modules = copy.deepcopy(theirs)
    fused = FusedConvBN2d.from_modules(modules.conv, modules.bn)
    for _ in range(4):
        x = torch.randn(3, 4, 5, 5, dtype=F64)
        check_all(run(fused, x), run(theirs, x), 1e-12)


def test_state_copies_and_pickles():
    full = FusedConvBN2d(4, 6, 3, bias=True, affine=True, track_running_stats=True, activation="relu", groups=2)
    names = ["conv_weight", "conv_bias", "bn_weight", "bn_bias", "running_mean", "running_var", "num_batches_tracked"]
    assert list(full.state_dict()) == names
    x = torch.randn(2, 4, 6, 6)
    full(x)
    file = io.BytesIO()
    torch.save(full.state_dict(), file)
    file.seek(0)
    other = FusedConvBN2d(4, 6, 3, bias=True, affine=True, track_running_stats=True, activation="relu", groups=2)
    other.load_state_dict(torch.load(file))
    for layer in (other, copy.deepcopy(full), pickle.loads(pickle.dumps(full))):
        check(layer.eval()(x), full.eval()(x), 0.0)
        assert layer.state_dict().keys() == full.state_dict().keys()
    assert "groups=2" in repr(full) and "formula=batch_norm" in repr(full)
    with torch.no_grad():
        full.reset_parameters()
    assert full.num_batches_tracked == 0 and torch.equal(full.running_var, torch.ones(6))


def test_initial_values_are_those_of_a_convolution():
    torch.manual_seed(5)
    conv = nn.Conv2d(4, 6, 3, groups=2)
    torch.manual_seed(5)
    fused = FusedConvBN2d(4, 6, 3, bias=True, groups=2)
    assert torch.equal(conv.weight, fused.conv_weight) and torch.equal(conv.bias, fused.conv_bias)


def saved_by(model, x):
    """Bytes that PyTorch keeps for backward, parameters left out."""
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        if tensor.data_ptr() not in parameters:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(x)
    return sum(kept.values()), output


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("memory_format", FORMATS)
def test_keeps_at_most_half_of_what_separate_layers_keep(activation, memory_format):
    theirs = Separate(False, True, True, activation, torch.float32, in_channels=32, out_channels=32, padding=1)
    theirs.to(memory_format=memory_format)
    x = torch.randn(8, 32, 28, 28).contiguous(memory_format=memory_format).requires_grad_()
    engine = _threads.engine()
    eager, _ = saved_by(theirs, x)
    modules = copy.deepcopy(theirs)
    kept = {}
    for recompute in (True, False):
        fused = FusedConvBN2d.from_modules(modules.conv, modules.bn, activation, recompute=recompute)
        parameters = sum(parameter.nbytes for parameter in fused.parameters())
        before = collected()
        output = fused(x)
        live, _, borrowed, _ = engine.memory()
        # What it computed for itself, and the input. A weight in channels-last is copied.
        kept[recompute] = live - before[0] + borrowed - before[1] - parameters
        del output
        assert collected() == before
    weight = modules.conv.weight.nbytes if memory_format is torch.channels_last else 0
    assert x.nbytes <= kept[True] <= x.nbytes + weight + 4096
    assert kept[True] <= 0.5 * eager + weight, f"{kept[True]} of {eager} bytes"
    if activation is not None:
        assert kept[True] <= 0.5 * eager
    assert kept[False] <= 2 * x.nbytes + weight + 4096


def test_errors():
    with pytest.raises(ValueError, match="no activation 'gelu': use None or one of relu"):
        FusedConvBN2d(3, 4, 3, activation="gelu")
    with pytest.raises(ValueError, match="no formula"):
        FusedConvBN2d(3, 4, 3, formula="keras")
    with pytest.raises(ValueError, match="above 0"):
        FusedConvBN2d(3, 4, 3, negative_slope=math.nan)
    with pytest.raises(ValueError, match="2 groups do not divide 3 and 4"):
        FusedConvBN2d(3, 4, 3, groups=2)
    layer = FusedConvBN2d(3, 4, 3)
    with pytest.raises(ValueError, match=r"expected 4D input \(got 3D"):
        layer(torch.randn(3, 5, 5))
    with pytest.raises(RuntimeError, match="to have 3 channels, but got 4 channels instead"):
        layer(torch.randn(1, 4, 5, 5))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(torch.randn(1, 3, 3, 3))


@pytest.mark.parametrize("formula", ["tutorial", "batch_norm"])
@pytest.mark.parametrize("activation", [None, "relu", "leaky_relu", "relu6", "hardswish", "silu"])
@pytest.mark.parametrize("training", [True, False])
def test_second_derivatives_are_pytorch_s(formula, activation, training):
    layer = FusedConvBN2d(3, 4, 3, padding=1, formula=formula, activation=activation, affine=True, track_running_stats=True, dtype=F64).train(training)
    with torch.no_grad():
        layer.bn_weight.uniform_(0.5, 1.5), layer.bn_bias.uniform_(-1, 1)
    x = torch.randn(2, 3, 5, 5, dtype=F64)
    found = []
    for run in (layer, lambda x: layer._in_pytorch(x, None if training else (layer.running_mean, layer.running_var), None, None)):
        leaves = [x.clone().requires_grad_(), *layer.parameters()]
        gradients = torch.autograd.grad(run(leaves[0]).square().sum(), leaves, create_graph=True)
        penalty = sum(gradient.square().sum() for gradient in gradients)
        found.append(torch.autograd.grad(penalty, leaves, allow_unused=True))
    for one, other in zip(*found, strict=True):
        check(one, other)


class Own(nn.Conv2d):
    def forward(self, x):
        return 2 * super().forward(x)


def test_modules_that_cannot_be_fused():
    conv, bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
    for pair, kind, words in [
        ((bn, conv), TypeError, "expected a torch.nn.Conv2d, got BatchNorm2d"),
        ((nn.Conv1d(3, 4, 3), bn), TypeError, "got Conv1d"),
        ((conv, nn.BatchNorm1d(4)), TypeError, "got BatchNorm1d"),
        ((Own(3, 4, 3), bn), TypeError, "forward of its own"),
        ((nn.LazyConv2d(4, 3), bn), TypeError, "run the model once"),
        ((nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), bn), TypeError, "parametrization"),
        ((nn.Conv2d(3, 4, 3, padding_mode="reflect"), bn), ValueError, "'reflect', only 'zeros'"),
        ((conv, nn.BatchNorm2d(5)), ValueError, "gives 4 channels, the batch norm takes 5"),
    ]:
        with pytest.raises(kind, match=words):
            FusedConvBN2d.from_modules(*pair)


def test_a_change_between_forward_and_backward_is_found():
    for name in ("conv_weight", "bn_weight", "x"):
        layer = FusedConvBN2d(3, 4, 3, affine=True)
        x = torch.randn(2, 3, 5, 5)
        output = layer(x)
        with torch.no_grad():
            (x if name == "x" else getattr(layer, name)).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_several_forwards_then_backwards():
    theirs = Separate(True, True, True, "relu")
    modules = copy.deepcopy(theirs)
    fused = FusedConvBN2d.from_modules(modules.conv, modules.bn, "relu")
    batches = torch.randn(3, 2, 4, 6, 6, dtype=F64)
    for model in (theirs, fused):
        first, *rest = [model(batch).square().sum() for batch in batches]
        first.backward(retain_graph=True)
        for loss in (*rest, first):
            loss.backward()
    for one, other in zip(fused.parameters(), theirs.parameters()):
        check(one.grad, other.grad, 1e-12)


def test_what_pytorch_computes():
    layer = FusedConvBN2d(3, 4, 3, track_running_stats=True, affine=True, activation="relu")
    before = layer.running_mean.clone()
    assert layer(torch.randn(0, 3, 5, 5)).shape == (0, 4, 3, 3)
    assert torch.equal(layer.running_mean, before)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(2, 3, 5, 5)).dtype is torch.bfloat16
    half = copy.deepcopy(layer).bfloat16()
    assert half(torch.randn(2, 3, 5, 5, dtype=torch.bfloat16)).dtype is torch.bfloat16
    meta = FusedConvBN2d(3, 4, 3, device="meta")
    assert meta(torch.randn(2, 3, 5, 5, device="meta")).shape == (2, 4, 3, 3)
    assert FusedConvBN2d(3, 4, 3)(torch.randn(0, 3, 5, 5)).shape == (0, 4, 3, 3)


class Net(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.first = FusedConvBN2d(3, 6, 3, dtype=F64, **options)
        self.second = FusedConvBN2d(6, 6, 3, dtype=F64, activation="relu", **options)
        self.head = nn.Linear(6, 2, dtype=F64)

    def forward(self, x):
        return self.head(F.relu(self.second(self.first(x))).mean((2, 3)))


@pytest.mark.parametrize("options", [dict(affine=True, track_running_stats=True), dict()], ids=["batch_norm", "tutorial"])
def test_in_an_optimized_model(options):
    model = Net(**options)
    optimized = torch_convoke.optimize(copy.deepcopy(model))
    x = torch.randn(4, 3, 8, 8, dtype=F64)
    for training in (True, False):
        check_all(run(optimized.train(training), x), run(model.train(training), x), 1e-12)
    assert torch_convoke.nn is ours
    report = str(torch_convoke.report(optimized))
    assert report


def test_nothing_is_kept():
    layer = FusedConvBN2d(3, 4, 3, affine=True, track_running_stats=True, activation="silu")
    x = torch.randn(2, 3, 16, 16, requires_grad=True)
    # What other tests compiled goes in several rounds.
    while (before := collected()) != collected():
        pass
    for _ in range(3):
        layer(x).sum().backward()
    with torch.no_grad():
        layer.eval()(x)
    assert collected() == before
