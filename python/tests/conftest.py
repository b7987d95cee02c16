"""What the tests share: an engine that times nothing, captures that can be looked at, and comparisons that fail on NaN."""

from __future__ import annotations

import copy
import dataclasses
import gc
import operator
import os
import threading

import pytest
import torch
from torch.overrides import TorchFunctionMode

import torch_convoke
from torch_convoke import _engine, _operators, _optimize, _pace, _run, _threads, tuning
from torch_convoke._backend import Backend, Options



TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4}


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes minutes; runs where CONVOKE_TORCH_MODELS=1")


def pytest_collection_modifyitems(config, items):
    if os.environ.get("CONVOKE_TORCH_MODELS") != "1":
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="CONVOKE_TORCH_MODELS is not 1"))


@pytest.fixture(scope="session", autouse=True)
def estimates():
    """Algorithms are chosen by estimates, and nothing is written to the user's cache of measured ones."""
    kept = dict(_threads._engines)
    for threads in range(1, _engine.available_threads() + 1):
        _threads._engines[os.getpid(), threads] = _engine.Engine(threads, cache=None, effort="heuristic")
    yield
    _threads._engines.clear()
    _threads._engines.update(kept)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Each test starts with nothing compiled, and the same seed. Models are captured at once, and no subgraph runs in PyTorch by turns."""
    monkeypatch.setenv("CONVOKE_CAPTURE_AFTER", "0")
    monkeypatch.setattr(_run.Subgraph, "measures_by_default", False)
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.fixture(params=["empty cache", "full cache"])
def measured(request, monkeypatch, tmp_path):
    """Subgraphs run in convoke and in PyTorch by turns, with a cache that is empty, or has what a first run of the test measured.

    Gives a function that runs its argument once, or twice.
    """
    monkeypatch.setattr(_run.Subgraph, "measures_by_default", True)
    monkeypatch.setattr(_pace.Pace, "is_settled", lambda self: True)
    monkeypatch.setattr(tuning, "path", lambda: str(tmp_path))

    def run(test):
        test()
        if request.param == "full cache":
            torch._dynamo.reset()
            test()

    return run


@pytest.fixture
def one_thread():
    """For small tensors, where threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def everything_computes(monkeypatch):
    """Operations that alone are not worth a subgraph get one, so that their translation is tested."""
    for table in (_operators._FUNCTIONS, _operators._METHODS):
        for key, entry in table.items():
            monkeypatch.setitem(table, key, dataclasses.replace(entry, computes=True))


def collect():
    """Collects garbage: models first, and then what TorchDynamo compiled for them, which it holds where the collector does not see."""
    gc.collect()
    gc.collect()


def collected():
    """What the engine holds, and has borrowed, when garbage is gone."""
    collect()
    live, _, borrowed, _ = _threads.engine().memory()
    return live, borrowed


def check(found, expected, tolerance=None, what="result", nan=False, least=1.0):
    """Fails where two tensors differ by more than a share of the largest expected value, in shape or in type.

    If the largest is below `least`, that counts in its place. Infinite values must be the same. NaN fails, unless `nan` says that it is
    right where it is expected.
    """
    assert found.shape == expected.shape, f"{what}: shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
    assert found.dtype == expected.dtype, f"{what}: {found.dtype} instead of {expected.dtype}"
    found, expected = found.detach(), expected.detach()
    if not expected.dtype.is_floating_point:
        assert torch.equal(found, expected), what
        return
    assert nan or not expected.isnan().any(), f"{what}: NaN is expected"
    finite = expected.isfinite()
    same = (found == expected) | (found.isnan() & expected.isnan())
    assert bool((same | finite).all()), f"{what}: other values where infinity or NaN is expected"
    found, expected = found[finite], expected[finite]
    if not expected.numel():
        return
    tolerance = TOLERANCES[expected.dtype] if tolerance is None else tolerance
    bound = tolerance * max(least, expected.abs().max().item())
    error = (found - expected).abs().max().item()
    assert error <= bound, f"{what}: differs by {error}, more than {bound}"


def check_strides(found, expected, what="result"):
    """Fails where a dimension of more than one element has another stride than expected."""
    pairs = [
        (size, one, other) for size, one, other in zip(expected.shape, found.stride(), expected.stride()) if size > 1
    ]
    same = all(one == other for _, one, other in pairs) or not expected.numel()
    assert same, f"{what}: strides {found.stride()} instead of {expected.stride()} for {tuple(expected.shape)}"


def on_threads(calls, seconds=120):
    """Makes each call on a thread of its own, all at once. Fails if one has not ended in time, or with the first error of any."""
    failures = []

    def run(call):
        try:
            call()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
        assert not thread.is_alive()
    assert not failures, failures[0]


class Recorder(TorchFunctionMode):
    """Records the calls of a function of tensors as TorchDynamo would capture them, in a thousandth of the time."""

    OPERATORS = {
        "__add__": "add",
        "__sub__": "sub",
        "__mul__": "mul",
        "__truediv__": "truediv",
        "__pow__": "pow",
        "__matmul__": "matmul",
        "__neg__": "neg",
        "__getitem__": "getitem",
        "__iadd__": "iadd",
        "__isub__": "isub",
        "__imul__": "imul",
        "__setitem__": "setitem",
    }
    SWAPPED = {
        "__radd__": "add",
        "__rsub__": "sub",
        "__rmul__": "mul",
        "__rdiv__": "truediv",
        "__rtruediv__": "truediv",
        "__rpow__": "pow",
    }

    def __init__(self):
        self.graph = torch.fx.Graph()
        self.nodes = {}
        self.kept = []

    def knows(self, tensor, node):
        node.meta["example_value"] = tensor
        self.nodes[id(tensor)] = node
        self.kept.append(tensor)

    def placeholder(self, tensor):
        self.knows(tensor, self.graph.placeholder(f"arg{len(self.kept)}"))

    def node_of(self, value):
        if isinstance(value, torch.Tensor):
            if id(value) not in self.nodes:
                node = self.graph.placeholder(f"made{len(self.kept)}")
                self.knows(value, node)
            return self.nodes[id(value)]
        if isinstance(value, (tuple, list)):
            made = [self.node_of(part) for part in value]
            return made if type(value) is list else tuple(made)
        if isinstance(value, dict):
            return {key: self.node_of(part) for key, part in value.items()}
        if isinstance(value, slice):
            return slice(self.node_of(value.start), self.node_of(value.stop), self.node_of(value.step))
        return value

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name == "__get__" or name in ("size", "stride", "dim", "numel", "is_floating_point", "is_complex"):
            return function(*args, **kwargs)
        new_args, new_kwargs = self.node_of(tuple(args)), self.node_of(dict(kwargs))
        result = function(*args, **kwargs)
        is_method = function is getattr(torch.Tensor, name, None) or function.__module__ == "torch._tensor"
        if name in self.SWAPPED:
            node = self.graph.call_function(getattr(operator, self.SWAPPED[name]), new_args[::-1])
        elif is_method and name in self.OPERATORS:
            node = self.graph.call_function(getattr(operator, self.OPERATORS[name]), new_args)
        elif is_method:
            node = self.graph.call_method(name, new_args, new_kwargs)
        else:
            node = self.graph.call_function(function, new_args, new_kwargs)
        node.meta["example_value"] = result
        if isinstance(result, torch.Tensor):
            self.knows(result, node)
        elif isinstance(result, (tuple, list)):
            for index, part in enumerate(result):
                picked = self.graph.call_function(operator.getitem, (node, index))
                self.knows(part, picked)
        return result


def tensors_of(value):
    """The tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for part in value for tensor in tensors_of(part)]
    if isinstance(value, dict):
        return [tensor for part in value.values() for tensor in tensors_of(part)]
    return []


def replaced(value, new):
    """Nested lists, tuples and dictionaries with other tensors in the same places: `new` maps ids."""
    if isinstance(value, torch.Tensor):
        return new[id(value)]
    if isinstance(value, (tuple, list)):
        parts = [replaced(part, new) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {key: replaced(part, new) for key, part in value.items()}
    return value


def recorded(function, args, kwargs):
    """The graph of `function(*args, **kwargs)` as a backend gets it, and the tensors that it takes."""
    recorder = Recorder()
    inputs = []
    for tensor in tensors_of((args, kwargs)):
        if id(tensor) not in recorder.nodes:
            recorder.placeholder(tensor)
            inputs.append(tensor)
    count = len(recorder.kept)
    with recorder:
        result = function(*args, **kwargs)
    results = tensors_of(result)
    for node in recorder.graph.nodes:
        if node.op == "placeholder" and node.name.startswith("made"):
            raise RuntimeError("the function makes tensors that cannot be recorded")
    assert count == len(inputs)
    recorder.graph.output(tuple(recorder.nodes[id(tensor)] for tensor in results))
    return torch.fx.GraphModule(torch.nn.Module(), recorder.graph), inputs


def compiled(graph):
    """What the backend makes of a graph, and its account of it."""
    backend = Backend(Options(measure=False))
    return backend(graph, []), backend.captured


def reasons_of(captured):
    """Why something is left to PyTorch; empty if nothing is."""
    found = []
    for graph in captured:
        if graph.reason is not None:
            found.append(graph.reason)
        found += graph.left.values()
        found += [subgraph.reason for subgraph in graph.subgraphs if subgraph.reason is not None]
    return found


class Small(torch.nn.Module):
    """Two convolutions with batch norm, pooling and a linear layer: 3 x 12 x 12 pixels to 5 classes."""

    def __init__(self, dropout=0.0):
        super().__init__()
        nn = torch.nn
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(2)
        self.conv2 = nn.Conv2d(8, 12, 3)
        self.bn2 = nn.BatchNorm2d(12)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(12, 5)

    def forward(self, x):
        x = self.pool(self.relu(self.bn1(self.conv1(x))))
        x = self.dropout(self.relu(self.bn2(self.conv2(x))))
        return self.fc(x.mean((2, 3)))


def images(count=4, size=12, dtype=torch.float64, seed=0, channels=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, channels, size, size, generator=generator, dtype=torch.float64).to(dtype)


def pair(model):
    """A copy of the model that runs in PyTorch, and the model, optimized."""
    return copy.deepcopy(model), torch_convoke.optimize(model)


def captures(model):
    """What the backend was given for an optimized model."""
    return _optimize.backend_of(model).captured


def in_convoke(model):
    """How many subgraphs of an optimized model run in convoke."""
    return sum(subgraph.reason is None for graph in captures(model) for subgraph in graph.subgraphs)


def convolutions(model):
    """How many convolutions of the last call of an optimized model ran in convoke, and how many there were."""
    here, _, there = torch_convoke.report(model).split(" convolutions")[0].split(" ")
    return int(here), int(there)


def check_state(found, expected, tolerance=None):
    """Parameters, buffers and gradients of two models must be equal."""
    assert list(found.state_dict()) == list(expected.state_dict())
    for (name, one), other in zip(found.state_dict().items(), expected.state_dict().values()):
        check(one, other, tolerance, name)
    check_gradients(found, expected, tolerance)


def check_gradients(found, expected, tolerance=None):
    """The gradients of two models must be equal.

    Some are 0 but for rounding, such as those of biases before a batch norm. What they round grows with the others.
    """
    gradients = [other.grad.abs() for other in expected.parameters() if other.grad is not None]
    largest = max((part.max().item() for each in gradients if len(part := each[each.isfinite()])), default=0.0)
    for (name, one), other in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert one.requires_grad == other.requires_grad, name
        if one.grad is None or other.grad is None:
            assert one.grad is other.grad, f"gradient of {name}: {one.grad} instead of {other.grad}"
        else:
            check(one.grad, other.grad, tolerance, f"gradient of {name}", least=max(1.0, largest / 10))


def train(model, batches, lr=0.05, before=None):
    """Losses of steps of SGD with momentum."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr, momentum=0.9)
    losses = []
    for number, batch in enumerate(batches):
        if before is not None:
            before(model, number)
        optimizer.zero_grad()
        loss = loss_of(model(batch))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def loss_of(results):
    """A loss in which every element of the results counts differently."""
    loss = 0
    for result in tensors_of(results):
        weights = torch.linspace(-1, 1.5, result.numel(), dtype=result.dtype).reshape(result.shape)
        loss = loss + (result * weights).sum() / result.shape[0] + result.square().mean() / 2
    return loss


def check_training(model, batches, tolerance=None, before=None, convoke=True):
    """Steps of an optimized model must equal those of a copy in PyTorch: losses, parameters, statistics, gradients."""
    expected, found = pair(model)
    torch.manual_seed(11)
    wanted = train(expected, batches, before=before)
    torch.manual_seed(11)
    check(train(found, batches, before=before), wanted, tolerance, "losses")
    check_state(found, expected, tolerance)
    assert not convoke or in_convoke(found), torch_convoke.report(found)
    return found
