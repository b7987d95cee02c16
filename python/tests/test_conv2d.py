"""`ops.conv2d` compared with PyTorch's, also where it must refuse or leave the work to PyTorch."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from conftest import check, check_strides, collected, on_threads

from torch_convoke import _conv, ops

CASES = [
    # input, weight, options
    ((2, 3, 9, 8), (4, 3, 3, 3), {}),
    ((2, 3, 9, 8), (4, 3, 3, 3), {"padding": 1}),
    ((2, 4, 9, 8), (6, 2, 3, 3), {"stride": 2, "padding": (1, 2), "groups": 2}),
    ((2, 4, 9, 8), (4, 1, 3, 5), {"padding": "same", "groups": 4}),
    ((2, 3, 9, 8), (4, 3, 2, 4), {"padding": "same", "dilation": (2, 1)}),
    ((2, 3, 9, 8), (4, 3, 3, 3), {"padding": "valid", "stride": (2, 3)}),
    ((2, 3, 9, 8), (4, 3, 1, 1), {}),
    ((2, 3, 1, 1), (4, 3, 1, 1), {}),
    ((3, 1, 7, 7), (2, 1, 3, 3), {"padding": [1, 1], "stride": [2]}),
    ((2, 3, 5, 5), (4, 3, 5, 5), {"dilation": 1}),
    ((2, 3, 7, 9), (4, 3, 3, 3), {"padding": 4, "stride": 3, "dilation": 2}),
    ((3, 9, 8), (4, 3, 3, 3), {"padding": 1}),
]
FORMATS = [torch.contiguous_format, torch.channels_last]


def tensors(x_shape, weight_shape, dtype, bias=True, x_format=torch.contiguous_format, weight_format=torch.contiguous_format):
    x = torch.randn(x_shape, dtype=dtype)
    x = x.to(memory_format=x_format) if x.dim() == 4 else x
    weight = torch.randn(weight_shape, dtype=dtype).to(memory_format=weight_format)
    made = [x, weight, torch.randn(weight_shape[0], dtype=dtype) if bias else None]
    return [part if part is None else part.requires_grad_() for part in made]


def both(operands, options, upstream=None):
    """Output and gradients of ours and of PyTorch's."""
    results = []
    for function in (ops.conv2d, F.conv2d):
        output = function(*operands, **options)
        upstream = torch.randn_like(output) if upstream is None else upstream
        wanted = [part for part in operands if part is not None and part.requires_grad]
        results.append([output, *torch.autograd.grad(output, wanted, upstream)])
    return results


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_and_gradients(case, dtype):
    for x_format, weight_format, bias in itertools.product(FORMATS, FORMATS, (True, False)):
        operands = tensors(*case[:2], dtype, bias, x_format, weight_format)
        assert _conv.steps_of(*operands, *ordered(case[2])) is not None, "convoke does not compute it"
        ours, theirs = both(operands, case[2])
        for found, expected, what in zip(ours, theirs, ("output", "input", "weight", "bias")):
            check(found, expected, {torch.float64: 1e-12, torch.float32: 1e-5}[dtype], what)
        check_strides(ours[0], theirs[0])


def ordered(options):
    defaults = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    return (defaults | options).values()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}")
def test_gradcheck(case):
    operands = tensors(*case[:2], torch.float64)
    assert torch.autograd.gradcheck(lambda *parts: ops.conv2d(*parts, **case[2]), operands, fast_mode=True)


@pytest.mark.parametrize("needs", list(itertools.product((True, False), repeat=3)))
def test_only_the_gradients_that_are_needed(needs):
    operands = tensors((2, 3, 6, 6), (4, 3, 3, 3), torch.float64)
    for part, needed in zip(operands, needs):
        part.requires_grad_(needed)
    output = ops.conv2d(*operands)
    assert output.requires_grad == any(needs)
    if any(needs):
        ours, theirs = both(operands, {})
        for found, expected in zip(ours, theirs):
            check(found, expected, 1e-12)


def test_inputs_and_gradients_of_other_strides():
    x = torch.randn(2, 6, 10, 9, dtype=torch.float64)[:, ::2, 1:, ::2].requires_grad_()
    weight = torch.randn(3, 3, 3, 4, dtype=torch.float64).permute(1, 0, 3, 2)[:, :, :3].requires_grad_()
    bias = torch.randn(6, dtype=torch.float64)[::2].requires_grad_()
    upstream = torch.ones((), dtype=torch.float64).expand(2, 3, 7, 3)
    ours, theirs = both([x, weight, bias], {}, upstream)
    for found, expected in zip(ours, theirs):
        check(found, expected, 1e-12)


def test_without_gradients():
    operands = tensors((2, 3, 6, 6), (4, 3, 3, 3), torch.float32)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            output = ops.conv2d(*operands)
            check(output, F.conv2d(*operands), 1e-5)
        assert not output.requires_grad
    assert output.is_inference()


REFUSED = {
    "channels": lambda: ((torch.randn(1, 3, 4, 4), torch.randn(2, 4, 3, 3)), {}),
    "kernel": lambda: ((torch.randn(1, 3, 4, 4), torch.randn(2, 3, 5, 3)), {}),
    "types": lambda: ((torch.randn(1, 3, 4, 4), torch.randn(2, 3, 3, 3).double()), {}),
    "bias": lambda: ((torch.randn(1, 3, 4, 4), torch.randn(2, 3, 3, 3), torch.randn(3)), {}),
    "groups": lambda: ((torch.randn(1, 4, 4, 4), torch.randn(3, 2, 3, 3)), {"groups": 2}),
    "no groups": lambda: ((torch.randn(1, 4, 4, 4), torch.randn(3, 2, 3, 3)), {"groups": 0}),
    "stride": lambda: ((torch.randn(1, 3, 4, 4), torch.randn(2, 3, 3, 3)), {"stride": 0}),
    "strides": lambda: ((torch.randn(1, 3, 4, 4), torch.randn(2, 3, 3, 3)), {"stride": (1, 2, 3)}),
    "padding": lambda: ((torch.randn(1, 3, 4, 4), torch.randn(2, 3, 3, 3)), {"padding": -1}),
    "word": lambda: ((torch.randn(1, 3, 4, 4), torch.randn(2, 3, 3, 3)), {"padding": "full"}),
    "same": lambda: ((torch.randn(1, 3, 4, 4), torch.randn(2, 3, 3, 3)), {"padding": "same", "stride": 2}),
    "dilation": lambda: ((torch.randn(1, 3, 4, 4), torch.randn(2, 3, 3, 3)), {"dilation": 0}),
    "float": lambda: ((torch.randn(1, 3, 4, 4), torch.randn(2, 3, 3, 3)), {"stride": 1.5}),
    "dimensions": lambda: ((torch.randn(3, 4), torch.randn(2, 3, 3, 3)), {}),
    "weight": lambda: ((torch.randn(1, 3, 4, 4), torch.randn(2, 3, 3)), {}),
    "no tensor": lambda: (([1.0], torch.randn(2, 3, 3, 3)), {}),
    "no channels": lambda: ((torch.randn(1, 0, 4, 4), torch.randn(2, 3, 3, 3)), {}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_are_those_of_pytorch(name):
    operands, options = REFUSED[name]()
    with pytest.raises(Exception) as theirs:
        F.conv2d(*operands, **options)
    with pytest.raises(type(theirs.value)) as ours:
        ops.conv2d(*operands, **options)
    # What does not fit any signature is listed with the arguments as they came, and these have defaults here.
    words = (str(error.value).split(" - got" if name in ("float", "no tensor") else "\0")[0] for error in (ours, theirs))
    assert next(words) == next(words)


def test_what_is_left_to_pytorch():
    x, weight = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3)
    for dtype in (torch.bfloat16, torch.float16):
        check(ops.conv2d(x.to(dtype), weight.to(dtype)), F.conv2d(x.to(dtype), weight.to(dtype)), 0.0)
    assert ops.conv2d(x.to("meta"), weight.to("meta")).shape == (2, 4, 4, 4)
    assert ops.conv2d(x[:0], weight).shape == (0, 4, 4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.conv2d(x, weight).dtype is torch.bfloat16
    mapped = torch.func.vmap(lambda part: ops.conv2d(part, weight))(x[None])
    check(mapped[0], F.conv2d(x, weight), 1e-5)
    derivative = torch.func.jvp(lambda part: ops.conv2d(part, weight), (x,), (x,))[1]
    check(derivative, F.conv2d(x, weight), 1e-5)


def test_under_compile_it_is_the_call_that_backends_know():
    graphs = []

    def backend(module, _):
        graphs.append(module.graph)
        return module.forward

    x, weight = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3)
    check(torch.compile(ops.conv2d, backend=backend, fullgraph=True)(x, weight, padding=1), F.conv2d(x, weight, padding=1))
    assert [node.target for node in graphs[0].nodes if node.op == "call_function"] == [torch.conv2d]


def test_backward_twice():
    operands = tensors((2, 3, 6, 6), (4, 3, 3, 3), torch.float64)
    output = ops.conv2d(*operands).sum()
    first = torch.autograd.grad(output, operands, retain_graph=True)
    second = torch.autograd.grad(output, operands)
    for one, other in zip(first, second):
        check(one, other, 0.0)
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(output, operands)


@pytest.mark.parametrize("options", [{}, {"padding": "same", "dilation": 2}, {"stride": 2, "padding": (1, 0)}])
def test_second_derivatives_are_pytorch_s(options):
    found, (x, weight, bias) = [], tensors((2, 3, 6, 6), (4, 3, 2, 3), torch.float64)
    for conv2d in (F.conv2d, ops.conv2d):
        gradients = torch.autograd.grad(conv2d(x, weight, bias, **options).square().sum(), (x, weight, bias), create_graph=True)
        found.append(torch.autograd.grad(sum(gradient.square().sum() for gradient in gradients), (x, weight, bias)))
    for one, other in zip(found[1], found[0], strict=True):
        check(one, other)


@pytest.mark.parametrize("place", [0, 1])
def test_a_change_between_forward_and_backward_is_found(place):
    operands = tensors((2, 3, 6, 6), (4, 3, 3, 3), torch.float64)
    output = ops.conv2d(*operands)
    with torch.no_grad():
        operands[place].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_nothing_is_kept():
    operands = tensors((2, 3, 16, 16), (4, 3, 3, 3), torch.float32, x_format=torch.channels_last)
    before = collected()
    for _ in range(3):
        ops.conv2d(*operands).sum().backward()
    output = ops.conv2d(*operands)
    assert collected() != before
    del output
    assert collected() == before


def test_threads():
    operands = tensors((2, 3, 16, 16), (4, 3, 3, 3), torch.float64)
    expected = F.conv2d(*operands, padding=1)
    gradients = torch.autograd.grad(expected.sum(), operands)

    def work():
        for _ in range(10):
            output = ops.conv2d(*operands, padding=1)
            check(output, expected, 1e-12)
            for found, gradient in zip(torch.autograd.grad(output.sum(), operands), gradients):
                check(found, gradient, 1e-12)

    on_threads([work] * 8)
