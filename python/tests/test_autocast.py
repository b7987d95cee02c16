"""Autocast to bfloat16, and models in it: types of results and gradients are PyTorch's, values differ by what rounding explains."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_convoke
from conftest import Small, captures, images, in_convoke, loss_of, pair, reasons_of

pytestmark = pytest.mark.usefixtures("one_thread")

#: Results and gradients are rounded to 8 binary digits: in units of the largest value.
ROUNDING = 2.0**-7


def autocast(enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


def check_close(found: torch.Tensor, pytorch: torch.Tensor, exact: torch.Tensor, what: str) -> None:
    """Checks that convoke is about as far from float32 as PyTorch is."""
    assert found.dtype == pytorch.dtype, f"{what}: {found.dtype}, PyTorch gives {pytorch.dtype}"
    assert found.shape == pytorch.shape, what
    largest = exact.float().abs().max().item() or 1.0
    ours, theirs = ((each.float() - exact.float()).abs().max().item() / largest for each in (found, pytorch))
    assert ours <= 2 * theirs + ROUNDING, f"{what}: {ours:.3g} from float32, PyTorch {theirs:.3g}"


def compare(model: nn.Module, *inputs: torch.Tensor) -> nn.Module:
    """Forward and backward under autocast, in PyTorch and in convoke, against float32; gives the optimized model."""
    expected, found = pair(model)
    check_results([ran(each, inputs, enabled) for each, enabled in ((found, True), (expected, True), (copy.deepcopy(model), False))])
    # Every model has a report, which users ask for outside of autocast.
    torch_convoke.report(found)
    return found


def compare_in_bfloat16(model: nn.Module, *inputs: torch.Tensor, norms: torch.dtype = torch.bfloat16) -> nn.Module:
    """As `compare`, where parameters, statistics and inputs are bfloat16 and there is no autocast; batch norms may be of another type."""
    model = model.bfloat16()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.to(norms)
    inputs = [x.detach().bfloat16().requires_grad_(x.requires_grad) for x in inputs]
    expected, found = pair(model)
    exact = ran(copy.deepcopy(model).float(), [x.detach().float().requires_grad_(x.requires_grad) for x in inputs], False)
    check_results([ran(found, inputs, False), ran(expected, inputs, False), exact])
    return found


def ran(model: nn.Module, inputs, enabled: bool) -> list[torch.Tensor | None]:
    """Result, gradients and statistics of a step."""
    own = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    torch.manual_seed(5)
    with autocast(enabled):
        y = model(*own)
    y.float().square().mean().backward()
    return [y.detach(), *(x.grad for x in own if x.requires_grad), *(p.grad for p in model.parameters()), *model.buffers()]


def check_results(results) -> None:
    for place, tensors in enumerate(zip(*results, strict=True)):
        if tensors[1] is None:
            assert tensors[0] is None, f"tensor {place} has no gradient in PyTorch"
        else:
            check_close(*tensors, f"tensor {place}")


def test_a_model_runs_here():
    found = compare(Small(), images(dtype=torch.float32))
    assert in_convoke(found), reasons_of(captures(found))
    # Outside of autocast it computes in float32 again.
    assert found(images(dtype=torch.float32)).dtype == torch.float32


def test_a_region_without_autocast_inside_a_model():
    class Region(Small):
        def forward(self, x):
            x = self.relu(self.bn1(self.conv1(x)))
            with autocast(False):
                x = torch.exp(-x.float()).to(x.dtype)
            return self.fc(self.bn2(self.conv2(x)).mean((2, 3)))

    found = compare(Region(), images(dtype=torch.float32))
    # Before the region and after it convoke runs.
    assert in_convoke(found) >= 2, reasons_of(captures(found))


def test_precision_is_autocast():
    inside, outside = pair(Small())
    inside = torch_convoke.optimize(inside)
    outside = torch_convoke.optimize(outside, precision="bf16")
    x = images(dtype=torch.float32)
    with autocast():
        wanted = inside(x)
    found = outside(x)
    assert found.dtype == torch.bfloat16 and torch.equal(found, wanted)
    with pytest.raises(ValueError, match="bf16"):
        torch_convoke.optimize(Small(), precision="fp16")


class Call(nn.Module):
    """A convolution, and a function of what it gives."""

    def __init__(self, function, **state):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.function = function
        for name, value in state.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x, *others):
        return self.function(self, self.conv(x), *others)


FUNCTIONS = {
    "relu": lambda m, x: F.relu(x),
    "gelu": lambda m, x: F.gelu(x),
    "silu": lambda m, x: F.silu(x),
    "hardswish": lambda m, x: F.hardswish(x),
    "sigmoid times x": lambda m, x: x * torch.sigmoid(x),
    "max pool": lambda m, x: F.max_pool2d(x, 2),
    "average pool": lambda m, x: F.avg_pool2d(x, 2),
    "global average": lambda m, x: F.adaptive_avg_pool2d(x, 1).flatten(1),
    "mean": lambda m, x: x.mean((2, 3)),
    "batch norm": lambda m, x: F.batch_norm(x, None, None, m.weight, m.bias, training=True),
    "group norm": lambda m, x: F.group_norm(x, 2, m.weight, m.bias),
    "layer norm": lambda m, x: F.layer_norm(x.permute(0, 2, 3, 1), (8,), m.weight, m.bias),
    "linear": lambda m, x: F.linear(x.mean((2, 3)), m.matrix, m.bias),
    "matmul": lambda m, x: x.mean((2, 3)) @ m.matrix,
    "float32 parameter": lambda m, x: x * m.weight.view(1, -1, 1, 1),
    "softmax": lambda m, x: F.softmax(x, 1),
    "log softmax": lambda m, x: F.log_softmax(x.mean((2, 3)), 1),
    "cat": lambda m, x: torch.cat([x, F.relu(x)], 1),
    "cat with float32": lambda m, x: torch.cat([x, x.float()], 1),
    "add float32": lambda m, x: x + x.float(),
    "to float32": lambda m, x: F.relu(x.float()),
    "to bfloat16": lambda m, x: F.relu(x.to(torch.float32)).to(torch.bfloat16),
    "interpolate": lambda m, x: F.interpolate(x, scale_factor=2, mode="nearest"),
    "transposed": lambda m, x: F.conv_transpose2d(x, m.kernel),
    "convolved again": lambda m, x: F.conv2d(F.relu(x), m.kernel),
    "in float32": lambda m, x: autocast(False)(lambda y: F.conv2d(y.float(), m.kernel))(x),
    "numbers": lambda m, x: 2.5 * x - 1 / 3,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_operations_have_pytorch_s_types(name):
    torch.manual_seed(1)
    state = {"weight": torch.rand(8) + 0.5, "bias": torch.randn(8), "matrix": torch.randn(8, 8), "kernel": torch.randn(8, 8, 3, 3)}
    found = compare(Call(FUNCTIONS[name], **state), images(dtype=torch.float32, count=3))
    assert in_convoke(found), reasons_of(captures(found))


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "in float32"])
def test_operations_of_models_in_bfloat16(name):
    torch.manual_seed(1)
    state = {"weight": torch.rand(8) + 0.5, "bias": torch.randn(8), "matrix": torch.randn(8, 8), "kernel": torch.randn(8, 8, 3, 3)}
    found = compare_in_bfloat16(Call(FUNCTIONS[name], **state), images(dtype=torch.float32, count=3))
    assert in_convoke(found), reasons_of(captures(found))


class Smooth(Small):
    """Without what turns a rounding into another gradient: ReLU and max pooling."""

    def __init__(self):
        super().__init__()
        # Before a batch norm, a bias has no gradient but roundings.
        self.conv2.register_parameter("bias", None)

    def forward(self, x):
        x = F.avg_pool2d(F.silu(self.bn1(self.conv1(x))), 2)
        return self.fc(F.silu(self.bn2(self.conv2(x))).mean((2, 3)))


def test_a_model_in_bfloat16_runs_here():
    found = compare_in_bfloat16(Smooth(), images(dtype=torch.float32).requires_grad_())
    assert in_convoke(found) == 1, reasons_of(captures(found))
    # Evaluation reads the statistics.
    expected = copy.deepcopy(torch_convoke.revert(found)).eval()
    x = images(dtype=torch.bfloat16)
    wanted, exact = expected(x), copy.deepcopy(expected).float()(x.float())
    check_close(torch_convoke.optimize(found).eval()(x), wanted, exact, "evaluation")


def test_norms_in_float32_between_convolutions_in_bfloat16():
    found = compare_in_bfloat16(Smooth(), images(dtype=torch.float32).requires_grad_(), norms=torch.float32)
    assert found.bn1.weight.grad.dtype == found.bn1.running_var.dtype == torch.float32
    assert in_convoke(found) == 1, reasons_of(captures(found))


def test_a_second_input_in_float32():
    x, other = images(dtype=torch.float32), torch.randn(4, 8, 10, 10, requires_grad=True)
    compare(Call(lambda m, x, other: x + other), x, other)


def test_the_same_elements_are_dropped():
    model = Call(lambda m, x: F.dropout(x + 10, 0.3))
    expected, found = pair(model)
    results = []
    for each in (expected, found):
        torch.manual_seed(7)
        with autocast():
            results.append(each(images(dtype=torch.float32)) == 0)
    assert torch.equal(*results)
    assert "torch.dropout" not in torch_convoke.report(found) and in_convoke(found)


def test_memory_is_planned():
    model = torch_convoke.optimize(Small(), memory_budget="1GB", precision="bf16")
    loss_of(model(images(dtype=torch.float32)).float()).backward()
    assert in_convoke(model) and "of 1000.0 MB" in torch_convoke.report(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_stay_together(dtype):
    """Ten steps under autocast, and of a model in bfloat16, against how far two runs of PyTorch go apart whose first weights differ by a rounding."""

    def losses(model, optimized):
        model = copy.deepcopy(model)
        model = torch_convoke.optimize(model) if optimized else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        found = []
        for step in range(10):
            with autocast(dtype is torch.float32):
                y = model(images(dtype=dtype, count=16, seed=step % 3))
            loss = loss_of(y.float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return torch.tensor(found)

    torch.manual_seed(0)
    model = Small().to(dtype)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + 2.0**-8 * torch.randn_like(parameter).sign())
    wanted = losses(model, False)
    apart = (losses(other, False) - wanted).abs().max()
    found = (losses(model, True) - wanted).abs().max()
    assert found <= 4 * apart, f"{found:.3g}, two runs of PyTorch {apart:.3g}"


def test_some_parameters_in_bfloat16():
    class Mixed(Smooth):
        def forward(self, x):
            x = F.silu(self.bn1(self.conv1(x)))
            x = self.conv2(x.to(torch.bfloat16))
            return self.fc(self.bn2(x.float()).mean((2, 3)))

    model = Mixed()
    model.conv2.to(torch.bfloat16)
    (expected, found), x = pair(model), images(dtype=torch.float32)
    wanted = ran(expected, [x], False)
    check_results([ran(found, [x], False), wanted, wanted])
    assert in_convoke(found) == 1, reasons_of(captures(found))


def test_autocast_to_half_is_pytorch_s():
    expected, found = pair(Small())
    with torch.autocast("cpu", torch.float16):
        wanted = expected(images(dtype=torch.float32))
        given = found(images(dtype=torch.float32))
    assert torch.equal(given, wanted) and given.dtype == torch.float16
    assert not in_convoke(found)
    assert any("float16" in reason for reason in reasons_of(captures(found)))
