"""Operations and models of volumes, N x C x D x H x W, compared with eager PyTorch: results and gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import test_memory
import torch_convoke
from conftest import captures, check, check_state, compiled, in_convoke, reasons_of, recorded, tensors_of, train
from torch_convoke import _optimize
from test_operations import DTYPES, combinations, gradients, run_grid, tensor, through_graph

LAYOUTS = ["contiguous", "channels_last"]
SLOW = pytest.mark.slow


@pytest.fixture
def alone(everything_computes, one_thread):
    """Single operations get a subgraph each, on one thread."""


def volume(*shape, dtype=torch.float64, layout="contiguous"):
    x = tensor(*shape, dtype=dtype, grows=False)
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last_3d)
    return x.requires_grad_()


def between(function):
    """The function between a convolution with batch norm and a ReLU."""

    def surrounded(x, weight, *rest):
        return F.relu(function(F.batch_norm(F.conv3d(x, weight), None, None, training=True), *rest))

    return surrounded


def alone_and_between(text, function, x):
    weight = tensor(x.shape[1], x.shape[1], 1, 1, 1, dtype=x.dtype)
    yield f"alone {text}", function, [x], None
    yield f"between {text}", between(function), [x, weight], 1e-9 if x.dtype is torch.float64 else 1e-3


def convolution_cases(transposed):
    options = dict(
        kernel=[(3, 3, 3), (1, 1, 1), (3, 2, 4), (1, 3, 3), (3, 1, 1), (5, 1, 2)],
        stride=[1, 2, (2, 1, 1), (1, 2, 3), (3, 2, 1)],
        padding=[0, 1, (1, 0, 2), (2, 1, 0)] + ([] if transposed else ["same", "valid"]),
        dilation=[1, 2, (2, 1, 1), (1, 2, 3)],
        groups=[1, 2, 4],
        batch=[1, 2],
        bias=[True, False],
        layout=LAYOUTS,
        dtype=DTYPES,
    )
    if transposed:
        options["output_padding"] = [0, 0, 1, (0, 1, 0), (1, 0, 0)]
    name = "conv_transpose3d" if transposed else "conv3d"
    for case in combinations(150, **options):
        dtype, groups = case["dtype"], case["groups"]
        x = volume(case["batch"], 4, *((4, 3, 5) if transposed else (9, 6, 8)), dtype=dtype, layout=case["layout"])
        weight = volume(*((4, 8 // groups) if transposed else (8, 4 // groups)), *case["kernel"], dtype=dtype)
        tensors = [x, weight] + ([tensor(8, dtype=dtype)] if case["bias"] else [])
        names = ("stride", "padding", "dilation", "groups", "output_padding")
        named = {name: case[name] for name in names if name in case}
        function = getattr(F, name)
        try:
            function(x, weight, **named)
        except RuntimeError:
            # PyTorch refuses this combination.
            continue
        yield f"{name} {case}", lambda x, w, b=None, f=function, n=named: f(x, w, b, **n), tensors, None


@pytest.mark.parametrize("transposed", [False, True], ids=["conv3d", "conv_transpose3d"])
def test_convolutions_with_every_option(alone, transposed):
    run_grid(convolution_cases(transposed), least=60)


def pooling_cases():
    for case in combinations(
        80,
        kind=["max", "avg"],
        kernel=[2, 3, (3, 2, 2), (1, 2, 3), (2, 1, 1)],
        stride=[None, 1, 2, (2, 3, 1)],
        padding=[0, 1, (1, 0, 1)],
        dilation=[1, 2, (2, 1, 1)],
        ceil_mode=[False, True],
        include=[True, False],
        layout=LAYOUTS,
        dtype=DTYPES,
        size=[(7, 9, 8), (8, 8, 6)],
    ):
        named = dict(stride=case["stride"], padding=case["padding"], ceil_mode=case["ceil_mode"])
        named |= dict(dilation=case["dilation"]) if case["kind"] == "max" else dict(count_include_pad=case["include"])
        pool = F.max_pool3d if case["kind"] == "max" else F.avg_pool3d
        function = lambda y, f=pool, k=case["kernel"], n=named: f(y, k, **n)
        x = volume(2, 3, *case["size"], dtype=case["dtype"], layout=case["layout"])
        try:
            function(x)
        except RuntimeError:
            # PyTorch refuses more padding than half a window.
            continue
        yield from alone_and_between(case, function, x)


def test_pooling_with_every_option(alone):
    run_grid(pooling_cases(), least=60)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [(8, 8, 8), (7, 6, 9)])
def test_of_equal_values_the_one_that_pytorch_chooses_gets_the_gradient(alone, layout, size):
    pools = {
        "windows": lambda x: F.max_pool3d(x, 2),
        "windows that overlap": lambda x: F.max_pool3d(x, 3, 2, 1),
        "windows with dilation": lambda x: F.max_pool3d(x, (2, 3, 2), 1, (1, 1, 0), (2, 1, 2), ceil_mode=True),
        "the whole": lambda x: F.adaptive_max_pool3d(x, 1),
    }
    for name, pool in pools.items():
        for special in (None, torch.nan, torch.inf, -torch.inf):
            x = torch.randint(0, 3, (2, 3, *size)).to(torch.float64)
            if special is not None:
                x[torch.rand_like(x) < 0.05] = special
            if special != -torch.inf or layout == "contiguous":
                # In channels-last PyTorch 2.15 chooses an element outside of a window that has nothing but -inf.
                x[0, 0] = 0.0 if special is None else special
            x = x.contiguous(memory_format=torch.channels_last_3d) if layout == "channels_last" else x
            x.requires_grad_()
            graph, _ = recorded(pool, (x,), {})
            run, captured = compiled(graph)
            found, expected = tensors_of(run(x)), [pool(x)]
            check(found[0], expected[0], 0.0, name, nan=True)
            for one, other in zip(gradients(found, [x]), gradients(expected, [x]), strict=True):
                check(one, other, 1e-14, f"{name}, {special}: gradient")
            assert not reasons_of(captured), name


def adaptive_cases():
    for case in combinations(
        30,
        kind=["avg", "avg", "max"],
        size=[1, (1, 1, 1), 2, (3, 2, 4), (None, 2, 1), (1, 5, 7), (9, 11, 2)],
        layout=LAYOUTS,
        dtype=DTYPES,
    ):
        function = F.adaptive_avg_pool3d if case["kind"] == "avg" else F.adaptive_max_pool3d
        x = volume(2, 3, 7, 6, 8, dtype=case["dtype"], layout=case["layout"])
        yield from alone_and_between(case, lambda y, f=function, s=case["size"]: f(y, s), x)


def test_adaptive_pooling_with_every_size(alone):
    run_grid(adaptive_cases(), least=35)


def interpolation_cases():
    for case in combinations(
        80,
        size=[None, None, (9, 5, 3), 4, (3, 12, 7), (7, 6, 8), (1, 1, 1)],
        scale=[2, 0.5, (1.5, 2.5, 1.0), (2, 1, 3), 1.7, 3.0],
        mode=["nearest", "trilinear", "trilinear", "area", "nearest-exact"],
        align=[True, False],
        recompute=[None, True],
        layout=LAYOUTS,
        dtype=DTYPES,
    ):
        named = dict(size=case["size"], mode=case["mode"])
        if case["size"] is None:
            named |= dict(scale_factor=case["scale"], recompute_scale_factor=case["recompute"])
        if case["mode"] == "trilinear":
            named["align_corners"] = case["align"]
        x = volume(2, 3, 7, 6, 8, dtype=case["dtype"], layout=case["layout"])
        yield from alone_and_between(case, lambda y, n=named: F.interpolate(y, **n), x)


def test_interpolation_with_every_option(alone):
    run_grid(interpolation_cases(), least=70)


def norm_cases():
    for case in combinations(
        60,
        kind=["batch", "instance", "group", "layer"],
        shape=[(2, 6, 4, 3, 5), (1, 6, 3, 4, 4), (3, 6, 1, 2, 2)],
        training=[True, False],
        affine=[True, False],
        groups=[1, 2, 6],
        layout=LAYOUTS,
        dtype=DTYPES,
    ):
        dtype, shape, kind = case["dtype"], case["shape"], case["kind"]
        normalized = shape[-2:] if kind == "layer" else (6,)
        affine = [tensor(*normalized, dtype=dtype), tensor(*normalized, dtype=dtype)] if case["affine"] else []
        statistics = [tensor(6, dtype=dtype, grows=False), tensor(6, dtype=dtype, grows=False).abs() + 0.5]

        def run(x, *rest, case=case, normalized=normalized):
            if case["kind"] == "batch":
                return F.batch_norm(x, *rest, training=case["training"])
            if case["kind"] == "instance":
                weight, bias = rest or (None, None)
                return F.instance_norm(x, weight=weight, bias=bias)
            if case["kind"] == "group":
                return F.group_norm(x, case["groups"], *rest)
            return F.layer_norm(x, normalized, *rest)

        x = volume(*shape, dtype=dtype, layout=case["layout"])
        tensors = [x, *(statistics if kind == "batch" else []), *affine]
        yield f"{case}", run, tensors, 1e-3 if dtype is torch.float32 else 1e-9


def test_norms_with_every_option(alone):
    run_grid(norm_cases(), least=50)


def function_cases():
    functions = {
        "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
        "leaky_relu_": lambda x: F.leaky_relu(x * 1, 0.1, inplace=True),
        "prelu of one slope": lambda x: F.prelu(x, x.mean().reshape(1)),
        "silu": F.silu,
        "gelu": F.gelu,
        "softmax": lambda x: F.softmax(x, 1),
        "sigmoid": torch.sigmoid,
        "arithmetic": lambda x: 2 * x**3 - x / 3 + (1 - x) * x,
        "means": lambda x: x - x.mean((2, 3, 4), keepdim=True) + x.sum(1, keepdim=True),
        "attention": lambda x: x * torch.sigmoid(x.mean((2, 3, 4))).view(*x.shape[:2], 1, 1, 1),
        "cat": lambda x: torch.cat([x, x.relu()], 1),
        "cat along the depth": lambda x: torch.cat([x, x.relu()], 2),
        "chunk": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
        "slice": lambda x: x[:, :, 1:3, ::2, 1:-1] * 2,
        "pad": lambda x: F.pad(x, (1, 2, 0, 1, 2, 0)) * 2,
        "pad of a value": lambda x: F.pad(x, (1, 0, 0, 0, 0, 1), value=0.5) * 2,
        "reflect": lambda x: F.pad(x, (1, 2, 2, 1, 1, 0), mode="reflect") * 2,
        "replicate": lambda x: F.pad(x, (1, 2, 0, 1, 0, 1), mode="replicate") * 2,
        "circular": lambda x: F.pad(x, (1, 2, 0, 1, 1, 1), mode="circular") * 2,
        "dropout": lambda x: F.dropout(x, 0.4) * 2,
        "dropout3d": lambda x: F.dropout3d(x, 0.4) * 2,
        "flatten": lambda x: x.flatten(1) * 2,
        "frames as images": lambda x: F.max_pool2d(x.transpose(1, 2).flatten(0, 1), 2),
    }
    for name, function in functions.items():
        for layout in LAYOUTS:
            yield from alone_and_between(f"{name}, {layout}", function, volume(2, 4, 4, 6, 5, layout=layout))


def test_functions_alone_and_between_others(alone):
    run_grid(function_cases(), least=75)


def test_a_slope_for_each_channel(alone):
    cases = [(layout, F.prelu, [volume(2, 4, 4, 6, 5, layout=layout), tensor(4)], None) for layout in LAYOUTS]
    run_grid(cases, least=2)


@pytest.mark.parametrize("name", ["max_pool3d", "avg_pool3d"])
def test_a_pooling_without_a_batch_axis_is_left_to_pytorch(alone, name):
    # Windows that leave the shape as it is fit fewer axes as well.
    run = lambda x: getattr(F, name)(x, 3, 1, 1)
    assert through_graph(run, (tensor(5, 6, 7, 8),)) == ["its input has no batch axis"]


class Block(nn.Module):
    """Two convolutions with what stands between them, and a way around them."""

    def __init__(self, inputs, outputs, norm, act, stride=1):
        super().__init__()
        self.around = nn.Conv3d(inputs, outputs, 1 if stride == 1 else 3, stride, 0 if stride == 1 else 1)
        self.body = nn.Sequential(
            nn.Conv3d(inputs, outputs, 3, stride, 1, bias=False), norm(outputs), nn.Dropout(0.1), act(),
            nn.Conv3d(outputs, outputs, 3, 1, 1, bias=False), norm(outputs), nn.Dropout3d(0.1), act(),
        )

    def forward(self, x):
        return self.body(x) + self.around(x)


class UNet(nn.Module):
    """A U-Net of volumes: strided convolutions go down, and `up` makes what goes up."""

    def __init__(self, norm, act, up, widths=(4, 6, 8)):
        super().__init__()
        self.first = Block(1, widths[0], norm, act)
        self.down = nn.ModuleList(Block(one, other, norm, act, 2) for one, other in zip(widths, widths[1:]))
        self.up = nn.ModuleList(up(other, one) for one, other in zip(widths, widths[1:]))
        self.join = nn.ModuleList(Block(2 * one, one, norm, act) for one in widths[:-1])
        self.last = nn.Conv3d(widths[0], 2, 1)

    def forward(self, x):
        kept = [self.first(x)]
        for down in self.down:
            kept.append(down(kept[-1]))
        x = kept.pop()
        for up, join in zip(reversed(self.up), reversed(self.join)):
            x = join(torch.cat([kept.pop(), up(x)], 1))
        return self.last(x)


NETS = {
    "batch norm": lambda: UNet(
        nn.BatchNorm3d, nn.ReLU, lambda a, b: nn.ConvTranspose3d(a, b, 3, 2, 1, output_padding=1)
    ),
    "instance norm": lambda: UNet(nn.InstanceNorm3d, nn.PReLU, lambda a, b: nn.ConvTranspose3d(a, b, 2, 2)),
    "group norm": lambda: UNet(
        lambda c: nn.GroupNorm(2, c),
        nn.LeakyReLU,
        lambda a, b: nn.Sequential(nn.Conv3d(a, b, 1), nn.Upsample(scale_factor=2, mode="trilinear")),
    ),
    "poolings": lambda: nn.Sequential(
        nn.Conv3d(1, 6, (3, 5, 5), (1, 2, 2), (1, 2, 2), bias=False), nn.BatchNorm3d(6), nn.ReLU(inplace=True),
        nn.MaxPool3d((1, 3, 3), (1, 2, 2), (0, 1, 1)), nn.Conv3d(6, 8, (3, 1, 1), padding=(1, 0, 0)), nn.BatchNorm3d(8),
        nn.ReLU(inplace=True), nn.AvgPool3d(2), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(8, 5),
    ),
}


def volumes(count=3, batch=2, size=(8, 12, 8), dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(batch, 1, *size, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]


def check_steps(model, batches, tolerance):
    """Training with small steps must go as in PyTorch, and all of it but the counters of batch norms run in convoke."""
    expected, found = copy.deepcopy(model), torch_convoke.optimize(model)
    losses = []
    for one in (expected, found):
        torch.manual_seed(11)
        losses.append(train(one, batches, lr=1e-6))
    check(losses[1], losses[0], tolerance, "losses")
    check_state(found, expected, tolerance)
    left = [node for graph in captures(found) for node in graph.left if not str(node).startswith("add_")]
    assert not left and in_convoke(found) == 1, torch_convoke.report(found)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NETS)
def test_nets_train_as_in_pytorch(name, layout):
    model, batches = NETS[name]().double(), volumes()
    if layout == "channels_last":
        model = model.to(memory_format=torch.channels_last_3d)
        batches = [batch.contiguous(memory_format=torch.channels_last_3d) for batch in batches]
    check_steps(model, batches, 1e-9)


@pytest.mark.parametrize("name", NETS)
def test_nets_evaluate_as_in_pytorch(name):
    expected = NETS[name]().double().eval()
    found = torch_convoke.optimize(copy.deepcopy(expected))
    for batch in (*volumes(1), *volumes(1, batch=1)):
        with torch.no_grad():
            check(found(batch), expected(batch), 1e-10)
    assert in_convoke(found)


def test_the_gradient_of_the_input_is_as_in_pytorch():
    expected = NETS["batch norm"]().double()
    found = torch_convoke.optimize(copy.deepcopy(expected))
    gradients = []
    for model in (found, expected):
        torch.manual_seed(2)
        (x,) = volumes(1)
        model(x.requires_grad_()).square().sum().backward()
        gradients.append(x.grad)
    check(*gradients, 1e-9)
    check_state(found, expected, 1e-8)


def test_the_engine_uses_the_bytes_that_are_planned():
    (x,) = volumes(1, size=(8, 32, 32), dtype=torch.float32)
    for budget in (None, "1GB"):
        model = torch_convoke.optimize(NETS["batch norm"](), memory_budget=budget)
        _, bytes = test_memory.train(model, x)
        (specialization,) = _optimize.backend_of(model).captured[0].subgraphs[0].specializations.values()
        after, peak = torch_convoke._engine.step_memory(specialization.engine, [specialization.step])
        assert bytes[-1][0] == after
        assert bytes[-1][1] <= peak


MONAI = {
    "UNet": lambda nets: nets.UNet(3, 1, 2, (4, 8, 16), (2, 2), num_res_units=1),
    "UNet of batch norm": lambda nets: nets.UNet(3, 1, 2, (4, 8, 16), (2, 2), norm="batch", dropout=0.1),
    "SegResNet": lambda nets: nets.SegResNet(
        3, init_filters=8, blocks_down=(1, 1, 2), blocks_up=(1, 1), dropout_prob=0.1
    ),
    "DynUNet": lambda nets: nets.DynUNet(3, 1, 2, (3, 3, 3), (1, 2, 2), (2, 2), filters=(4, 8, 8)),
}


@pytest.mark.parametrize("name", MONAI)
def test_monai_s_models_train_as_in_pytorch(name):
    nets = pytest.importorskip("monai.networks.nets", reason="MONAI is not installed")
    check_steps(MONAI[name](nets).double(), volumes(size=(16, 16, 16)), 1e-8)


@pytest.mark.parametrize("name", ["r3d_18", *(pytest.param(name, marks=SLOW) for name in ("mc3_18", "r2plus1d_18"))])
def test_video_models_train_as_in_pytorch(name):
    video = pytest.importorskip("torchvision.models.video", reason="torchvision is not installed")
    torch.manual_seed(0)
    batches = [torch.randn(2, 3, 4, 32, 32, dtype=torch.float64)]
    check_steps(getattr(video, name)(num_classes=5).double(), batches, 1e-8)
