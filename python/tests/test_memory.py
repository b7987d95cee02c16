"""What is kept for backward, budgets, and that everything is given back."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import torch_convoke
from conftest import collect
from torch_convoke import _memory, _optimize, _threads


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + x)


def small(width=16):
    layers = [nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, Residual(width), Residual(width), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5))


def engine_of(model):
    backend = _optimize.backend_of(model)
    return _threads.engine(None, backend if backend.options.memory_budget is not None else None)


def train(model, x, steps=3):
    """Losses, and for each step the bytes in use after forward and at the peak."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses, bytes = [], []
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        if isinstance(model._compiled_call_impl, _optimize.Optimized):
            engine = engine_of(model)
            gc.collect()
            engine.reset_peak()
        loss = model(x).square().mean()
        if isinstance(model._compiled_call_impl, _optimize.Optimized):
            after = engine.memory()[0] + engine.memory()[3]
            peak = engine.memory()[1]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if isinstance(model._compiled_call_impl, _optimize.Optimized):
            bytes.append((after, max(peak, engine.memory()[1])))
        del loss
    return losses, bytes


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(4, 3, 24, 24)


@pytest.mark.parametrize("text, count", [("2GB", 2 * 10**9), ("512 MiB", 2**29), ("1.5k", 1500), (77, 77), ("10", 10)])
def test_sizes_are_read(text, count):
    assert _memory.parse_size(text) == count


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", 0, -3, "2 parsecs", True, 1.5, "nan"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="2GB"):
        torch_convoke.optimize(small(), memory_budget=text)


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_at_most_half_of_what_pytorch_keeps_is_kept(x, precision):
    model = torch_convoke.optimize(small(), precision=precision)
    train(model, x, 1)
    (subgraph,) = _optimize.backend_of(model).captured[0].subgraphs
    (specialization,) = subgraph.specializations.values()
    theirs = _memory.saved_by_pytorch(subgraph, specialization.sizes)
    counted = []
    reference = small()
    own = {tensor.untyped_storage()._cdata for tensor in reference.state_dict().values()}

    def pack(tensor):
        counted.append(tensor)
        return tensor

    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
    with autocast, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = reference(x)
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in counted}
    expected = sum(size for key, size in storages.items() if key not in own)
    # A weight that autocast has converted may be shared there.
    assert theirs == expected if precision == "f32" else abs(theirs - expected) <= expected // 1000
    after, peak = torch_convoke._engine.step_memory(specialization.engine, [specialization.step])
    assert 0 < after <= theirs / 2 and after < peak
    del loss


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return 2 * x

    @staticmethod
    def backward(context, gradient):
        return 2 * gradient


@pytest.mark.usefixtures("measured")
def test_reports_tell_of_writes_to_results_of_others(x):
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)

        def forward(self, x):
            return self.last(nn.functional.relu(Doubled.apply(self.first(x)), inplace=True)).sum()

    model = torch_convoke.optimize(Writes())
    model(x).backward()
    assert torch_convoke.report(model).count("PyTorch would keep") == 2


def test_the_engine_uses_the_bytes_that_the_report_tells(x):
    model = torch_convoke.optimize(small())
    _, bytes = train(model, x)
    (specialization,) = _optimize.backend_of(model).captured[0].subgraphs[0].specializations.values()
    after, peak = torch_convoke._engine.step_memory(specialization.engine, [specialization.step])
    # In `train`, gradients of the step before are gone when forward ends, so what has left is this step's.
    assert bytes[-1][0] == after
    assert bytes[-1][1] <= peak
    assert f"{after / 1e6:.1f} MB" in torch_convoke.report(model)


def test_a_budget_is_kept_and_changes_no_value(x):
    free, planned = small(), None
    planned = copy.deepcopy(free)
    tight = copy.deepcopy(free)
    expected, _ = train(torch_convoke.optimize(free), x)
    torch_convoke.optimize(planned, memory_budget="1GB")
    found, _ = train(planned, x)
    # Each has an engine of its own, which may choose other algorithms.
    assert found == pytest.approx(expected, rel=1e-5)
    least = _optimize.backend_of(planned).captured[0].budget.plan
    with pytest.raises(Exception, match="no plan fits the memory budget.*at least"):
        train(torch_convoke.optimize(copy.deepcopy(tight), memory_budget=10_000), x)
    # Between the least and what is free.
    held = sum(least.held.values())
    budget = held + int(0.8 * least.peak)
    torch_convoke.optimize(tight, memory_budget=budget)
    found, bytes = train(tight, x)
    assert found == pytest.approx(expected, rel=1e-5)
    plan = _optimize.backend_of(tight).captured[0].budget.plan
    assert plan.peak + sum(plan.held.values()) <= budget
    assert max(peak for _, peak in bytes[1:]) <= plan.peak
    assert "memory budget" in torch_convoke.report(tight)


def test_everything_is_given_back_with_the_model(x):
    engine = _threads.engine()
    collect()
    before = engine.memory()
    model = torch_convoke.optimize(small())
    train(model, x)
    train(model, torch.randn(7, 3, 24, 24))
    alive = weakref.ref(model)
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    del model
    collect()
    assert alive() is None
    assert not [parameter for parameter in parameters if parameter() is not None]
    after = engine.memory()
    assert (after[0], after[2], after[3]) == (before[0], before[2], before[3])
