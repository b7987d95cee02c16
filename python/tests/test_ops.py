"""The five functions of batch norm, compared with plain formulas in float64 and with PyTorch's own batch norm."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F

from conftest import on_threads
from torch_convoke import ops
from torch_convoke._threads import engine

EPS = 1e-5
SHAPES = [(5, 3), (64, 130), (1, 4), (4, 3, 7), (6, 5, 9, 11), (3, 1, 4, 4), (7, 6, 1, 1), (1, 2, 33, 65)]
SHAPES += [(2, 4, 3, 5, 2)]
TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
LAYOUTS = ["contiguous", "channels_last", "strided"]
grid = pytest.mark.parametrize(
    ("shape", "layout", "dtype"),
    [
        pytest.param(shape, layout, dtype, id=f"{'x'.join(map(str, shape))}-{layout}-{str(dtype)[6:]}")
        for shape in SHAPES
        for layout in LAYOUTS
        for dtype in TYPES
    ],
)


def random(shape, dtype=torch.float64, layout="contiguous", seed=0):
    """Values that are the same in every layout, and whose channels differ in mean and scale."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    channels = torch.arange(shape[1]).reshape(1, -1, *[1] * (len(shape) - 2)) % 5
    return laid_out((x * (1 + channels) + channels - 1).to(dtype), layout)


def laid_out(x, layout):
    match layout:
        case "contiguous":
            return x
        case "channels_last":
            return x.movedim(1, -1).contiguous().movedim(-1, 1)
        case "strided":
            return torch.stack([x, torch.full_like(x, torch.nan)], dim=-1)[..., 0]


def check(found, expected, epsilons=4, dtype=None):
    """Fails where they differ by more than some epsilons of the type, times the largest expected value, and for NaN."""
    dtype = found.dtype if dtype is None else dtype
    assert found.dtype == dtype and found.shape == expected.shape
    largest = max(1.0, expected.abs().max().item())
    tolerance = epsilons * torch.finfo(dtype).eps * largest
    assert bool(((found.double() - expected).abs() <= tolerance).all()), f"{found}\n{expected}"


def formulas(x):
    """Mean and biased variance in float64."""
    values = x.double().transpose(0, 1).flatten(1)
    return values.mean(1), values.var(1, correction=0)


def by_channel(vector, x):
    return vector.double().reshape(1, -1, *[1] * (x.dim() - 2))


def accumulate(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


@grid
def test_stats_are_those_of_the_formula(shape, layout, dtype):
    x = random(shape, dtype, layout)
    mean, variance = formulas(x)
    found_mean, found_invstd = ops.batch_norm_stats(x, EPS)
    check(found_mean, mean, dtype=accumulate(dtype))
    check(found_invstd, (variance + EPS).rsqrt(), 16, dtype=accumulate(dtype))


@grid
def test_elemt_is_the_formula_in_the_input_s_type_and_layout(shape, layout, dtype):
    x, kind = random(shape, dtype, layout), accumulate(dtype)
    mean, variance = formulas(x)
    mean, invstd = mean.to(kind), (variance + EPS).rsqrt().to(kind)
    weight, bias = random((1, shape[1]), kind, seed=1)[0], random((1, shape[1]), kind, seed=2)[0]
    for weight_, bias_ in [(weight, bias), (None, bias), (weight, None), (None, None)]:
        y = ops.batch_norm_elemt(x, weight_, bias_, mean, invstd, EPS)
        expected = (x.double() - by_channel(mean, x)) * by_channel(invstd, x)
        expected = expected * (1 if weight_ is None else by_channel(weight_, x))
        check(y, expected + (0 if bias_ is None else by_channel(bias_, x)), dtype=dtype)
        assert y.is_contiguous() or (layout == "channels_last" and y.stride() == x.stride())


@grid
def test_backward_is_the_formula_and_returns_what_is_asked_for(shape, layout, dtype):
    x, dy, kind = random(shape, dtype, layout), random(shape, dtype, layout, seed=3), accumulate(dtype)
    mean, variance = formulas(x)
    mean, invstd = mean.to(kind), (variance + EPS).rsqrt().to(kind)
    weight = random((1, shape[1]), kind, seed=1)[0]
    other = [axis for axis in range(x.dim()) if axis != 1]
    centered = x.double() - by_channel(mean, x)
    sum_dy, sum_dy_xmu = dy.double().sum(other), (dy.double() * centered).sum(other)
    # Terms of both signs cancel, so errors are relative to their sizes.
    size = 1 + (dy.double() * centered).abs().sum(other).max().item() / max(1.0, sum_dy_xmu.abs().max().item())

    found = ops.batch_norm_backward_reduce(dy, x, mean, invstd, weight, True, True, True)
    check(found[0], sum_dy, 4 * size, dtype=kind)
    check(found[1], sum_dy_xmu, 4 * size, dtype=kind)
    check(found[2], sum_dy_xmu * invstd.double(), 4 * size, dtype=kind)
    check(found[3], sum_dy, 4 * size, dtype=kind)
    some = ops.batch_norm_backward_reduce(dy, x, mean, invstd, None, True, False, False)
    assert [part is None for part in some] == [False, False, True, True]
    some = ops.batch_norm_backward_reduce(dy, x, mean, invstd, weight, False, True, True)
    assert [part is None for part in some] == [True, True, False, False]

    counts = torch.tensor([x.numel() // shape[1], 3], dtype=torch.int32)
    n = counts.sum().item()
    sums = sum_dy.to(kind), sum_dy_xmu.to(kind)
    for weight_ in (weight, None):
        dx = ops.batch_norm_backward_elemt(dy, x, mean, invstd, weight_, *sums, counts)
        expected = dy.double() - by_channel(sums[0], x) / n
        expected = expected - centered * by_channel(invstd, x) ** 2 * by_channel(sums[1], x) / n
        expected = expected * by_channel(invstd, x) * (1 if weight_ is None else by_channel(weight_, x))
        # With one value and a variance of 0, invstd is as large as 1 / sqrt(eps).
        check(dx, expected, 8, dtype=dtype)
        assert dx.is_contiguous() or (layout == "channels_last" and dx.stride() == x.stride())


@pytest.mark.parametrize("running_dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gather_takes_uneven_ranks_together_and_updates_running_statistics(dtype, running_dtype):
    x = random((23, 6, 4, 3), dtype)
    parts = x.split([9, 1, 13])
    stats = [ops.batch_norm_stats(part, EPS) for part in parts]
    # A rank without values, whose statistics are never looked at.
    nothing = torch.full((6,), torch.nan, dtype=dtype)
    means = torch.stack([stats[0][0], nothing, stats[1][0], stats[2][0]])
    invstds = torch.stack([stats[0][1], nothing, stats[1][1], stats[2][1]])
    counts = torch.tensor([9 * 12, 0, 12, 13 * 12], dtype=dtype)
    running_mean = random((1, 6), running_dtype, seed=4)[0]
    running_var = running_mean.abs() + 1
    before = running_mean.double().clone(), running_var.double().clone()
    versions = running_mean._version, running_var._version

    found = ops.batch_norm_gather_stats_with_counts(x, means, invstds, running_mean, running_var, 0.3, EPS, counts)
    mean, variance = formulas(x)
    check(found[0], mean, 4, dtype=dtype)
    # The variance comes back from 1 / sqrt(variance + eps), which costs some digits.
    check(found[1], (variance + EPS).rsqrt(), 32, dtype=dtype)
    coarser = max(torch.finfo(dtype).eps, torch.finfo(running_dtype).eps) / torch.finfo(running_dtype).eps
    check(running_mean, 0.7 * before[0] + 0.3 * mean, 16 * coarser)
    check(running_var, 0.7 * before[1] + 0.3 * variance * (276 / 275), 16 * coarser)
    assert running_mean._version > versions[0] and running_var._version > versions[1]
    # Without running statistics, and with counts of another type.
    again = ops.batch_norm_gather_stats_with_counts(x, means, invstds, None, None, 0.3, EPS, counts.int())
    assert all(torch.equal(*pair) for pair in zip(found, again))


def test_parts_give_what_autograd_gives_for_the_whole_batch():
    x, dy = random((11, 4, 5, 6)), random((11, 4, 5, 6), seed=3)
    weight, bias = random((1, 4), seed=1)[0], random((1, 4), seed=2)[0]
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    running = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    y = F.batch_norm(leaves[0], *running, *leaves[1:], training=True)
    y.backward(dy)

    cuts = [3, 0, 8]
    parts, counts = x.split(cuts), torch.tensor([30 * images for images in cuts])
    stats = [torch.stack(both) for both in zip(*(ops.batch_norm_stats(part, EPS) for part in parts))]
    ours = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    mean, invstd = ops.batch_norm_gather_stats_with_counts(x, *stats, *ours, 0.1, EPS, counts)
    check(torch.cat([ops.batch_norm_elemt(part, weight, bias, mean, invstd, EPS) for part in parts]), y.detach(), 64)
    reduced = [
        ops.batch_norm_backward_reduce(dy_part, part, mean, invstd, weight, True, True, True)
        for dy_part, part in zip(dy.split(cuts), parts)
    ]
    sum_dy, sum_dy_xmu, grad_weight, grad_bias = (sum(each) for each in zip(*reduced))
    gradients = [
        ops.batch_norm_backward_elemt(dy_part, part, mean, invstd, weight, sum_dy, sum_dy_xmu, counts)
        for dy_part, part in zip(dy.split(cuts), parts)
    ]
    check(torch.cat(gradients), leaves[0].grad, 64)
    check(grad_weight, leaves[1].grad, 64)
    check(grad_bias, leaves[2].grad, 64)
    for found, expected in zip(ours, running):
        check(found, expected, 64)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(0, 3), (0, 3, 4, 5), (2, 3, 0, 5)])
def test_empty_batches_have_statistics_of_nothing_and_gradients_of_zero(shape, dtype):
    x, kind = torch.empty(shape, dtype=dtype), accumulate(dtype)
    mean, invstd = ops.batch_norm_stats(x, 0.25)
    assert mean.tolist() == [0, 0, 0] and invstd.tolist() == [2, 2, 2]
    y = ops.batch_norm_elemt(x, None, None, mean, invstd, 0.25)
    assert y.shape == x.shape and y.dtype == dtype
    sums = ops.batch_norm_backward_reduce(x, x, mean, invstd, None, True, True, True)
    assert [part.tolist() for part in sums] == [[0.0] * 3] * 4 and sums[0].dtype == kind
    # Other ranks may have had values.
    dx = ops.batch_norm_backward_elemt(x, x, mean, invstd, None, mean + 1, mean + 1, torch.tensor([0, 7]))
    assert dx.shape == x.shape and dx.dtype == dtype
    running = torch.ones(3), torch.ones(3)
    ops.batch_norm_gather_stats_with_counts(x, mean[None], invstd[None], *running, 0.5, 0.25, torch.zeros(1))
    assert running[0].tolist() == running[1].tolist() == [1, 1, 1]


def test_statistics_keep_their_digits_where_the_mean_is_large():
    x = (1e4 + 0.1 * random((64, 3, 16, 16), seed=5)).float()
    mean, variance = formulas(x)
    found_mean, found_invstd = ops.batch_norm_stats(x, EPS)
    check(found_mean, mean, 1)
    check(found_invstd, (variance + EPS).rsqrt(), 1)


def test_a_constant_channel_without_eps_gives_its_bias():
    x = torch.full((4, 2, 3), 7.5)
    mean, invstd = ops.batch_norm_stats(x, 0.0)
    assert invstd.tolist() == [0, 0]
    gathered = ops.batch_norm_gather_stats_with_counts(
        x, mean[None], invstd[None], None, None, 0.1, 0.0, torch.tensor([12.0])
    )
    y = ops.batch_norm_elemt(x, None, torch.tensor([1.0, -2.0]), *gathered, 0.0)
    assert y[:, 0].eq(1).all() and y[:, 1].eq(-2).all()


def test_nan_goes_through_and_fails_a_check():
    x = random((4, 3, 5))
    x[1, 2, 3] = torch.nan
    mean, invstd = ops.batch_norm_stats(x, EPS)
    assert mean.isnan().tolist() == invstd.isnan().tolist() == [False, False, True]
    ranks = mean[None], invstd[None]
    gathered = ops.batch_norm_gather_stats_with_counts(x, *ranks, None, None, 0.1, EPS, torch.tensor([20]))
    assert gathered[0].isnan().tolist() == gathered[1].isnan().tolist() == [False, False, True]
    with pytest.raises(AssertionError):
        check(mean, torch.zeros(3, dtype=torch.float64), 1e30)


def test_parameters_of_a_half_type_and_halves_with_float32_parameters():
    x, dy = random((8, 4, 6, 6), torch.bfloat16), random((8, 4, 6, 6), torch.bfloat16, seed=3)
    mean, invstd = ops.batch_norm_stats(x, EPS)
    half, single = random((1, 4), torch.bfloat16, seed=1)[0], random((1, 4), torch.bfloat16, seed=1)[0].float()
    of = [ops.batch_norm_elemt(x, weight, weight, mean, invstd, EPS) for weight in (half, single)]
    assert torch.equal(*of)
    grads = [ops.batch_norm_backward_reduce(dy, x, mean, invstd, each, False, True, True) for each in (half, single)]
    assert grads[0][2].dtype == grads[0][3].dtype == torch.bfloat16 and grads[1][2].dtype == torch.float32
    assert torch.equal(grads[0][2], grads[1][2].bfloat16())


def test_gradients_of_another_layout_are_read_in_the_input_s():
    for layout in LAYOUTS:
        x, vectors = random((4, 3, 5, 6), layout=layout), random((3, 3))
        expanded = torch.ones(()).double().expand(x.shape)
        for dy in (random(x.shape, layout=other, seed=3) for other in LAYOUTS):
            dx = ops.batch_norm_backward_elemt(dy, x, *vectors[:2], None, *vectors[1:], torch.tensor([120]))
            expected = ops.batch_norm_backward_elemt(
                dy.contiguous(), x.contiguous(), *vectors[:2], None, *vectors[1:], torch.tensor([120])
            )
            check(dx, expected)
        sums = ops.batch_norm_backward_reduce(expanded, x, *vectors[:2], None, True, False, True)
        assert sums[3].tolist() == [120] * 3


def test_nothing_records_gradients_and_inputs_stay_as_they_are():
    x = random((4, 3, 5)).requires_grad_()
    copy = x.detach().clone()
    mean, invstd = ops.batch_norm_stats(x, EPS)
    y = ops.batch_norm_elemt(x, None, None, mean, invstd, EPS)
    assert not (mean.requires_grad or invstd.requires_grad or y.requires_grad)
    # Results are ordinary tensors, which may be changed.
    y.relu_()
    mean.zero_()
    assert torch.equal(x.detach(), copy)


def test_wrong_operands_are_errors_that_say_what_is_wrong():
    x, three, four = random((2, 3, 4)), random((1, 3))[0], random((1, 4))[0]
    with pytest.raises(RuntimeError, match="at least 2 dimensions"):
        ops.batch_norm_stats(three, EPS)
    with pytest.raises(RuntimeError, match="eps is -1"):
        ops.batch_norm_stats(x, -1.0)
    with pytest.raises(RuntimeError, match="eps is NaN"):
        ops.batch_norm_stats(x, float("nan"))
    with pytest.raises(TypeError, match="expected floating-point numbers"):
        ops.batch_norm_stats(torch.ones(2, 3, dtype=torch.int32), EPS)
    with pytest.raises(RuntimeError, match="the mean"):
        ops.batch_norm_elemt(x, None, None, four, three, EPS)
    with pytest.raises(RuntimeError, match="the weight"):
        ops.batch_norm_elemt(x, four, None, three, three, EPS)
    with pytest.raises(RuntimeError, match="f32"):
        ops.batch_norm_backward_reduce(x.float(), x, three, three, None, True, True, True)
    with pytest.raises(RuntimeError, match=r"\[2, 3, 3\]"):
        ops.batch_norm_backward_reduce(x[..., :3], x, three, three, None, True, True, True)
    with pytest.raises(RuntimeError, match="the sums"):
        ops.batch_norm_backward_elemt(x, x, three, three, None, four, four, torch.tensor([8]))
    with pytest.raises(RuntimeError, match="no values"):
        ops.batch_norm_backward_elemt(x, x, three, three, None, three, three, torch.tensor([0]))
    with pytest.raises(RuntimeError, match="counts of shape"):
        ops.batch_norm_gather_stats_with_counts(x, three, three, None, None, 0.1, EPS, torch.tensor([8]))
    with pytest.raises(RuntimeError, match="1.5 values"):
        ops.batch_norm_gather_stats_with_counts(x, three[None], three[None], None, None, 0.1, EPS, torch.tensor([1.5]))
    with pytest.raises((RuntimeError, ValueError, BufferError, NotImplementedError)):
        ops.batch_norm_stats(torch.ones(2, 3, device="meta"), EPS)


def test_threads_of_python_may_call_at_the_same_time():
    x = random((16, 8, 14, 14), torch.float32)
    expected = ops.batch_norm_stats(x, EPS)

    def work():
        for _ in range(20):
            assert all(torch.equal(*pair) for pair in zip(expected, ops.batch_norm_stats(x, EPS)))

    on_threads([work] * 4, seconds=30)


def test_memory_is_given_back():
    gc.collect()
    live, _, borrowed, exported = engine().memory()
    for _ in range(3):
        x = random((8, 4, 6, 6), torch.float32)
        mean, invstd = ops.batch_norm_stats(x, EPS)
        y = ops.batch_norm_elemt(x, None, None, mean, invstd, EPS)
        with pytest.raises(RuntimeError):
            ops.batch_norm_elemt(x, y, None, mean, invstd, EPS)
        assert engine().memory()[3] > exported
        del x, mean, invstd, y
    gc.collect()
    after = engine().memory()
    assert (after[0], after[2], after[3]) == (live, borrowed, exported)
