"""Values and gradients where functions have kinks, poles and bounds, at infinity, and beside NaN, compared with eager
PyTorch: each function of one tensor, all pairs of them, functions of two tensors, and what reduces rows. Upstream
gradients are 0 and infinite, too.

NaN must be where PyTorch has NaN, and zeros must have PyTorch's signs, which a reciprocal of them would show.
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from conftest import compiled, reasons_of, recorded

pytestmark = pytest.mark.usefixtures("everything_computes", "one_thread")

inf, nan = float("inf"), float("nan")
DTYPES = [torch.float32, torch.float64]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "f64"])

#: Kinks and bounds of the functions below, and points between and far beyond them.
POINTS = [0.0, -0.0, inf, -inf, nan, 1.0, -1.0, 3.0, -3.0, 6.0, -6.0, 0.5, -0.5, 0.25, 2.0, -2.0, 2.5, 0.3, -0.7, 10.5]
#: As far as exponentials go without a reciprocal whose square overflows. For dy = 0, PyTorch's gradient is NaN there.
FAR = {torch.float32: 20.0, torch.float64: 40.0}
UPSTREAM = [1.0, 0.0, inf, -inf, nan, -0.0, 2.0]

FUNCTIONS = {
    "relu": F.relu,
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "hardtanh of bounds": lambda x: F.hardtanh(x, -0.5, 0.25),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "clamp to 0 and 1": lambda x: torch.clamp(x, 0, 1),
    "clamp of min": lambda x: x.clamp(min=0.5),
    "clamp of min 0": lambda x: x.clamp(min=0),
    "clamp of max": lambda x: x.clamp(max=0.5),
    "clip of max 0": lambda x: torch.clip(x, max=0.0),
    "clamp of crossed bounds": lambda x: x.clamp(1.0, -1.0),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": F.silu,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "selu": F.selu,
    "elu": F.elu,
    "elu of 0.7": lambda x: F.elu(x, 0.7),
    "elu of 0": lambda x: F.elu(x, 0.0),
    "celu": F.celu,
    "celu of 1.3": lambda x: F.celu(x, 1.3),
    "mish": F.mish,
    "gelu": F.gelu,
    "gelu of tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": F.softplus,
    "softplus of 2, 1": lambda x: F.softplus(x, 2.0, 1.0),
    "softsign": F.softsign,
    "leaky_relu": F.leaky_relu,
    "leaky_relu of -0.5": lambda x: F.leaky_relu(x, -0.5),
    "leaky_relu of 0": lambda x: F.leaky_relu(x, 0.0),
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "abs": torch.abs,
    "neg": torch.neg,
    "reciprocal": torch.reciprocal,
    "erf": torch.erf,
    "square": torch.square,
    **{
        f"pow of {exponent!r}": lambda x, exponent=exponent: x.pow(exponent)
        for exponent in (0, 0.0, 0.5, 1, 2, 3, 4, -1, -2, -3, -0.5, 1.5, 2.5, 1 / 3)
    },
    "x + 1": lambda x: x + 1,
    "x - 1": lambda x: x - 1,
    "1 - x": lambda x: 1 - x,
    "2 x": lambda x: 2 * x,
    "0 x": lambda x: x * 0.0,
    "x / 3": lambda x: x / 3,
    "x / 0": lambda x: x / 0.0,
    "1 / x": lambda x: 1 / x,
    "x x": lambda x: x * x,
    "x / x": lambda x: x / x,
    "x + x": lambda x: x + x,
    "x - x": lambda x: x - x,
    "maximum of x, x": lambda x: torch.maximum(x, x),
    "maximum of x, -x": lambda x: torch.maximum(x, -x),
    "minimum of x, -x": lambda x: torch.minimum(x, -x),
}

#: Products that run as one function: PyTorch's gradient of infinity is NaN there, as a sum of infinities.
PRODUCTS = {"swish": lambda x: x * torch.sigmoid(x), "hard-swish": lambda x: F.hardsigmoid(x) * x}

#: PyTorch multiplies by 1/6 and 1/alpha in float32, in float64 too.
SINGLE = ("hardsigmoid", "hard-swish", "celu of 1.3")

counts: Counter = Counter()


@pytest.fixture(autouse=True)
def none_counted():
    counts.clear()


def grid(dtype):
    """Every point with every upstream gradient."""
    points = [*POINTS, FAR[dtype], -FAR[dtype]]
    return columns(itertools.product(points, UPSTREAM), dtype)


def columns(rows, dtype):
    """A tensor for each column. Ones fill them up to whole vectors of every processor: PyTorch treats NaN and zeros in
    the few elements after the last vector in another way."""
    rows = list(rows)
    rows += [(1.0,) * len(rows[0])] * (-len(rows) % 64)
    return torch.tensor(rows, dtype=dtype).T.contiguous().unbind()


def results(functions, inputs, upstream):
    """For each function of its inputs the value and the gradients, of convoke and of PyTorch. All are one graph."""

    def all_of(args):
        return [function(*own) for function, own in zip(functions, args)]

    def leaves():
        return [[tensor.clone().requires_grad_() for tensor in own] for own in inputs]

    def gradients(values, args):
        flat = [tensor for own in args for tensor in own]
        return values, iter(torch.autograd.grad(list(values), flat, upstream))

    graph, _ = recorded(all_of, (leaves(),), {})
    run, captured = compiled(graph)
    assert not reasons_of(captured)
    args = leaves()
    values, found = gradients(run(*[tensor for own in args for tensor in own]), args)
    args = leaves()
    eager, expected = gradients(all_of(args), args)
    for value, other, own in zip(values, eager, inputs):
        yield [value.detach(), *(next(found) for _ in own)], [other.detach(), *(next(expected) for _ in own)]


def agree(found, expected, bound):
    """Where two results are the same, NaN included, or finite and within a bound of each other."""
    same = (found == expected) | (found.isnan() & expected.isnan())
    return same | (expected.isfinite() & ((found - expected).abs() <= bound))


def failures_of(ok, what, found, expected, *operands):
    """Says where results differ, and counts."""
    counts["compared"] += ok.numel()
    counts["differ"] += int((~ok).sum())
    places = (~ok).nonzero()
    if not len(places):
        return []

    def line(place):
        at = ", ".join(str(tensor[place].item()) for tensor in operands)
        return f"{at}: {found[place]} instead of {expected[place]}"

    return [f"{what}, {len(places)} times: " + "; ".join(line(tuple(place)) for place in places[:4])]


def finish(failures, least):
    print(dict(counts))
    assert not failures, "\n".join(failures[:10]) + f"\n{len(failures)} in all"
    assert counts["compared"] >= least


def lost(derivative, other):
    """Where a derivative is a rounding error, here or in PyTorch. Infinity times it is infinite or NaN by chance."""
    size = torch.maximum(derivative.abs(), other.abs())
    return (size > 0) & (size < 16 * torch.finfo(derivative.dtype).eps)


def spread(values):
    """The values of the first upstream gradient, which is 1, for all of them."""
    count = (len(POINTS) + 2) * len(UPSTREAM)
    each = values[:count].reshape(-1, len(UPSTREAM))[:, :1].expand(-1, len(UPSTREAM)).reshape(-1)
    return torch.cat([each, values[count:]])


def tolerance_of(names, dtype):
    return 2e-5 if dtype is torch.float32 else 1e-6 if any(name in SINGLE for name in names) else 1e-10


def values_agree(found, expected, tolerance):
    """Where two results agree, the signs of zeros included."""
    signs = (found.signbit() == expected.signbit()) | (found != 0)
    return agree(found, expected, tolerance * expected.abs().clamp(min=1.0)) & signs


@each_dtype
def test_each_function(dtype):
    failures = []
    x, upstream = grid(dtype)
    size = upstream.abs().nan_to_num(0.0, posinf=0.0)
    names = [*FUNCTIONS, *PRODUCTS]
    functions = [*FUNCTIONS.values(), *PRODUCTS.values()]
    every = results(functions, [[x]] * len(functions), [upstream] * len(functions))
    for name, (found, expected) in zip(names, every):
        tolerance = tolerance_of([name], dtype)
        ok = values_agree(found[0], expected[0], tolerance)
        if name == "gelu" and dtype is torch.float32:
            # PyTorch's polynomial gives NaN at infinity, in float32 alone.
            ok |= x == inf
        failures += failures_of(ok, f"{name} at x", found[0], expected[0], x)
        ok = agree(found[1], expected[1], tolerance * torch.maximum(expected[1].abs(), size))
        ok |= upstream.isinf() & lost(spread(found[1]), spread(expected[1]))
        if name in PRODUCTS:
            ok |= ~upstream.isfinite()
        failures += failures_of(ok, f"gradient of {name} at x, dy", found[1], expected[1], x, upstream)
    finish(failures, least=26_000)


@each_dtype
def test_all_pairs_of_functions(dtype):
    failures, left_out = [], 0
    x, upstream = grid(dtype)
    size = upstream.abs().nan_to_num(0.0, posinf=0.0)
    names, functions = list(FUNCTIONS), list(FUNCTIONS.values())
    singles = results(functions, [[x]] * len(functions), [upstream] * len(functions))
    for (inner, function), (found, expected) in zip(FUNCTIONS.items(), singles):
        # Where the inner value or derivative is a rounding error, nothing follows from it: PyTorch's GELUs at -6, say.
        digits = 5e-5 if dtype is torch.float32 else tolerance_of([inner], dtype)
        exact = agree(found[0], expected[0], digits * expected[0].abs())
        exact &= spread(agree(found[1], expected[1], digits * expected[1].abs()))
        composed = [lambda x, outer=outer, inner=function: outer(inner(x)) for outer in functions]
        every = results(composed, [[x]] * len(composed), [upstream] * len(composed))
        for outer, (found, expected) in zip(names, every):
            what, tolerance = f"{outer} of {inner}", 10 * tolerance_of([inner, outer], dtype)
            ok = values_agree(found[0], expected[0], tolerance)
            if outer == "gelu" and dtype is torch.float32:
                ok |= found[0] == inf
            left_out += int((~exact).sum())
            failures += failures_of(ok | ~exact, f"{what} at x", found[0], expected[0], x)
            ok = agree(found[1], expected[1], tolerance * torch.maximum(expected[1].abs(), size))
            ok |= upstream.isinf() & lost(spread(found[1]), spread(expected[1]))
            failures += failures_of(ok | ~exact, f"gradient of {what} at x, dy", found[1], expected[1], x, upstream)
    counts["left out"] = left_out
    assert left_out < 0.02 * counts["compared"]
    finish(failures, least=1_700_000)


OF_TWO = {
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "add": lambda a, b: a + b,
    "add of alpha": lambda a, b: torch.add(a, b, alpha=-2),
    "sub": lambda a, b: a - b,
    "rsub": torch.rsub,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
}


@each_dtype
def test_functions_of_two_tensors(dtype):
    failures = []
    some = [0.0, -0.0, inf, -inf, nan, 1.0, -1.0, 3.0, 0.5, -2.0]
    a, b, upstream = columns(itertools.product(some, some, UPSTREAM), dtype)
    functions, count = list(OF_TWO.values()), len(OF_TWO)
    for name, (found, expected) in zip(OF_TWO, results(functions, [[a, b]] * count, [upstream] * count)):
        for what, one, other in zip(("value", "gradient of a", "gradient of b"), found, expected):
            tolerance = tolerance_of([], dtype)
            ok = values_agree(one, other, tolerance) if what == "value" else agree(one, other, tolerance * other.abs())
            failures += failures_of(ok, f"{name}, {what} at a, b, dy", one, other, a, b, upstream)
    # Each operand broadcast to the other: gradients are sums.
    column, row = torch.tensor(some, dtype=dtype)[:, None], torch.tensor(some, dtype=dtype)[None]
    for number in UPSTREAM:
        upstream = torch.full((len(some), len(some)), number, dtype=dtype)
        for name, (found, expected) in zip(OF_TWO, results(functions, [[column, row]] * count, [upstream] * count)):
            for what, one, other in zip(("value", "gradient of a", "gradient of b"), found, expected):
                ok = agree(one, other, tolerance_of([], dtype) * other.abs().clamp(min=1.0))
                failures += failures_of(ok, f"{name} broadcast, dy {number}, {what}", one, other)
    finish(failures, least=20_000)


OF_ROWS = {
    "sum": lambda x: x.sum(1),
    "mean": lambda x: x.mean(1, keepdim=True),
    "amax": lambda x: x.amax(1),
    "amin": lambda x: torch.amin(x, 1, keepdim=True),
    "amax of columns": lambda x: x.transpose(0, 1).amax(0),
    "softmax": lambda x: F.softmax(x, 1),
    "softmax of columns": lambda x: torch.softmax(x.transpose(0, 1), 0),
    "log_softmax": lambda x: F.log_softmax(x, 1),
    "log_softmax of columns": lambda x: torch.log_softmax(x.transpose(0, 1), 0),
    "mean of images": lambda x: x.reshape(x.shape[0], 1, 1, -1).mean((2, 3)),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x.reshape(x.shape[0], 1, 1, -1), 1),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x.reshape(x.shape[0], 1, -1, 3), 1),
    "adaptive_max_pool1d": lambda x: F.adaptive_max_pool1d(x.reshape(x.shape[0], 1, -1), 1),
    "max_pool2d": lambda x: F.max_pool2d(x.reshape(x.shape[0], 1, 1, -1), (1, 3)),
    "max_pool1d": lambda x: F.max_pool1d(x.reshape(x.shape[0], 1, -1), 3, 2, 1),
}


@each_dtype
@pytest.mark.parametrize("width", [3, 48])
def test_reductions_softmax_and_pooling(dtype, width):
    """Rows of all triples, with ties, infinities and NaN; long rows repeat the first element."""
    failures = []
    some = [0.0, -0.0, 1.0, -1.0, inf, -inf, nan, 2.0]
    x = torch.tensor([*itertools.product(some, repeat=3)], dtype=dtype)
    x = torch.cat([x, x[:, :1].repeat(1, width - 3)], 1)
    functions = list(OF_ROWS.values())
    shapes = [function(x).shape for function in functions]
    for number in [*UPSTREAM, "mixed"]:
        numbers = torch.tensor(UPSTREAM if number == "mixed" else [number], dtype=dtype)
        upstream = [numbers.repeat(shape.numel())[: shape.numel()].reshape(shape) for shape in shapes]
        for name, (found, expected) in zip(OF_ROWS, results(functions, [[x]] * len(functions), upstream)):
            for what, one, other in zip(("value", "gradient"), found, expected):
                # Sums of terms of about 1.
                ok = agree(one, other, tolerance_of([], dtype) * other.abs().clamp(min=1.0))
                failures += failures_of(ok, f"{what} of {name}, dy {number}", one, other)
    finish(failures, least=100_000)


@each_dtype
def test_prelu(dtype):
    failures = []
    x, upstream = grid(dtype)
    for slope, both in itertools.product([0.25, 0.0, -0.5, 1.0, inf, nan], [False, True]):
        # One slope for each element, whose gradient is no sum; or one for all.
        slopes = torch.full((1 if both else len(x),), slope, dtype=dtype)
        ((found, expected),) = results([F.prelu], [[x[None], slopes]], [upstream[None]])
        for what, one, other in zip(("value", "gradient of x", "gradient of the slope"), found, expected):
            ok = agree(one, other, tolerance_of([], dtype) * other.abs().clamp(min=1.0))
            operands = (x[None], upstream[None]) if one.dim() == 2 else () if both else (x, upstream)
            failures += failures_of(ok, f"prelu of slope {slope}, {what} at x, dy", one, other, *operands)
    finish(failures, least=5_000)
