"""What users of PyTorch do around their models. Each test compares training with eager PyTorch, measuring included."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import torch_convoke
from conftest import Small, captures, check, check_state, check_training, convolutions, images, in_convoke, loss_of, pair, train
from torch_convoke import _optimize


@pytest.mark.usefixtures("one_thread")
def test_measuring_changes_no_step(measured):
    class Noisy(nn.Module):
        """Stochastic depth writes to the noise that it draws, and adds in place."""

        def __init__(self):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
            self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

        def forward(self, x):
            x = F.relu(self.bn1(self.conv1(x)))
            noise = torch.empty(x.shape[0], 1, 1, 1, dtype=x.dtype).bernoulli_(0.8)
            noise.div_(0.8)
            y = F.dropout(F.silu(self.bn2(self.conv2(x)), inplace=True) * noise, 0.1)
            y += x
            return y.mean((2, 3))

    measured(lambda: check_training(Noisy().double(), [images(seed=seed) for seed in range(12)]))


@pytest.mark.usefixtures("one_thread")
def test_gradient_penalties(measured):
    """R1 and WGAN-GP differentiate gradients."""

    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)
            self.norm, self.fc = nn.InstanceNorm2d(8, affine=True), nn.Linear(8, 1)

        def forward(self, x):
            x = F.leaky_relu(self.conv1(x), 0.2)
            x = F.leaky_relu(self.norm(self.conv2(x)), 0.2)
            return self.fc(x.mean((2, 3)))

    def test():
        models = pair(Critic().double())
        for model in models:
            optimizer = torch.optim.Adam(model.parameters(), 1e-3, betas=(0.0, 0.9))
            for step in range(9):
                x = images(seed=step).requires_grad_()
                y = model(x)
                (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
                assert gradient.requires_grad
                penalty = gradient.square().sum((1, 2, 3)).mean() + (gradient.norm() - 1).square()
                optimizer.zero_grad()
                (y.mean() + 10 * penalty).backward()
                optimizer.step()
        check_state(models[1], models[0], 1e-8)
        assert in_convoke(models[1])

    measured(test)


def test_a_penalty_after_the_last_step_in_eval_mode():
    """Gradients of gradients read the statistics that forward read."""
    expected, found = pair(Small().double().eval())
    for model in (expected, found):
        x = images().requires_grad_()
        (gradient,) = torch.autograd.grad(loss_of(model(x)), x, create_graph=True)
        gradient.square().sum().backward()
    check_state(found, expected, 1e-9)
    x = images().requires_grad_()
    y = loss_of(found(x))
    found.bn1.running_mean.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, x, create_graph=True)


INDICES = {
    "None": lambda y: y[:, None],
    "Nones": lambda y: y.mean((2, 3))[:, :, None, None],
    "Ellipsis": lambda y: y[..., 1:],
    "Ellipsis and None": lambda y: y[..., None, 0],
    "list": lambda y: y[:, [0, 2]],
    "lists": lambda y: y[[1, 0], [0, 2]],
    "list after a slice": lambda y: y[:, :, [0, 2, -1], 1:3],
    "tensor": lambda y: y[:, torch.tensor([1, 1, 0])],
    "mask": lambda y: y * (y > 0) + y[y > 0.5].sum(),
    "mask of an axis": lambda y: y[torch.tensor([True, False, True, False])],
    "steps": lambda y: y[::2, -3:, 1::2],
    "bool": lambda y: y[True],
    "numbers": lambda y: y[1, -1],
}


@pytest.mark.parametrize("name", INDICES)
def test_indices_cost_no_convolution(name):
    class Indexed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.bn, self.conv2 = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 4, 3)

        def forward(self, x):
            return INDICES[name](self.conv2(F.relu(self.bn(self.conv1(x)))))

    model = check_training(Indexed().double(), [images(seed=seed) for seed in range(3)])
    assert convolutions(model) == (2, 2)


def test_an_unsupported_operation_costs_itself_only():
    class Between(Small):
        def forward(self, x):
            x = self.relu(self.bn1(self.conv1(x)))
            x = torch.roll(x, 1, 2) + torch.special.i0(x) * 1e-3
            return self.fc(self.bn2(self.conv2(x)).mean((2, 3)))

    model = check_training(Between().double(), [images(seed=seed) for seed in range(3)])
    assert convolutions(model) == (2, 2)
    (captured,) = captures(model)
    assert {node.name for node, reason in captured.left.items() if "convoke has no" in reason} == {"x_3", "i0"} or len(captured.left) < 8


def test_writes_through_views_cost_no_convolution():
    """kornia's augmentations scale channels of the input in place, through views."""

    class Augmented(Small):
        def forward(self, x):
            y = x.clone()
            part = y[:, 1]
            part *= 1.5
            y[:, 0] += part * 0.1
            part.add_(y[:, 2])
            return super().forward(y)

    model = check_training(Augmented().double(), [images(seed=seed) for seed in range(3)])
    assert convolutions(model) == (2, 2)


def test_a_teacher_without_gradients():
    class Distilled(nn.Module):
        def __init__(self):
            super().__init__()
            self.student, self.teacher = Small(), Small()

        def forward(self, x):
            y = self.student(x)
            with torch.no_grad():
                for one, other in zip(self.teacher.parameters(), self.student.parameters()):
                    one.mul_(0.9).add_(other, alpha=0.1)
                wanted = self.teacher(x)
            return (y - wanted).square() + y

    model = check_training(Distilled().double(), [images(seed=seed) for seed in range(3)])
    assert convolutions(model) == (4, 4)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant, measured):
    class Checkpointed(Small):
        def first(self, x):
            return self.relu(self.bn1(self.conv1(x)))

        def second(self, x):
            return F.dropout(self.bn2(self.conv2(x)), 0.3)

        def forward(self, x):
            run = lambda part, x: torch.utils.checkpoint.checkpoint(part, x, use_reentrant=use_reentrant)
            return self.fc(run(self.second, run(self.first, x)).mean((2, 3)))

    def test():
        models = pair(Checkpointed().double())
        losses = []
        for model in models:
            torch.manual_seed(2)
            losses.append(train(model, [images(seed=seed).requires_grad_() for seed in range(6)]))
        check(losses[1], losses[0])
        check_state(models[1], models[0])
        assert models[1].bn1.num_batches_tracked == 12
        assert convolutions(models[1]) == (2, 2)

    measured(test)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_keeps_less(use_reentrant):
    """What a region keeps is dropped after its forward."""
    from torch_convoke import _threads

    class Deep(nn.Module):
        def __init__(self, checkpointed):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 3, 1)) for _ in range(4))
            self.checkpointed = checkpointed

        def forward(self, x):
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=use_reentrant) if self.checkpointed else block(x)
            return x

    kept = []
    for checkpointed in (False, True):
        model = torch_convoke.optimize(Deep(checkpointed).double())
        x = images(8, 40).requires_grad_()
        loss_of(model(x)).backward()
        before = _threads.engine().memory()[0]
        loss = loss_of(model(x))
        kept.append(_threads.engine().memory()[0] - before)
        del loss
        assert convolutions(model) == (8, 8)
    assert kept[1] < kept[0] / 2, kept


def test_an_optimized_model_inside_a_checkpoint():
    expected, found = pair(Small(dropout=0.2).double())
    for use_reentrant in (False, True):
        for model in (expected, found):
            for step in range(4):
                torch.manual_seed(step)
                x = images(seed=step).requires_grad_()
                loss_of(torch.utils.checkpoint.checkpoint(model, x, use_reentrant=use_reentrant)).backward()
    check_state(found, expected)
    assert in_convoke(found)


def test_saved_tensors_that_are_moved():
    """Hooks such as `save_on_cpu` copy what is saved for backward."""
    expected, found = pair(Small(dropout=0.2).double())
    for model in (expected, found):
        torch.manual_seed(1)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
            loss = loss_of(model(images()))
        loss.backward()
    check_state(found, expected)
    assert in_convoke(found)


def test_gradients_of_features_that_hooks_keep():
    """Grad-CAM."""
    expected, found = pair(Small().double())
    gradients = []
    for model in (expected, found):
        kept = {}
        for name in ("conv1", "bn1", "bn2"):
            getattr(model, name).register_forward_hook(lambda module, args, result, name=name: kept.__setitem__(name, result.clone()) or kept[name])
        score = model(images())[:, 1].sum()
        gradients.append(torch.autograd.grad(score, [kept["conv1"], kept["bn1"], kept["bn2"]]))
    for one, other in zip(gradients[1], gradients[0], strict=True):
        check(one, other)
    assert convolutions(found) == (2, 2)


def test_retain_grad_and_hooks_of_features():
    class Features(Small):
        def forward(self, x):
            first = self.pool(F.relu(self.bn1(self.conv1(x))))
            second = F.relu(self.bn2(self.conv2(first)))
            return first, second, self.fc(second.mean((2, 3)))

    found = []
    models = pair(Features().double())
    for model in models:
        first, second, y = model(images())
        first.retain_grad()
        second.register_hook(lambda gradient: gradient * 2)
        loss_of((y, first)).backward()
        found.append(first.grad)
    check(found[1], found[0])
    check_state(models[1], models[0])
    assert convolutions(models[1]) == (2, 2)


def test_options_of_torch_compile():
    model = Small().double()
    compiled = torch.compile(model, backend="convoke", options={"threads": 1, "verbose": False})
    check(compiled(images()), model(images()))
    for wrong, match in (({"thread": 1}, "no option 'thread'"), ({"threads": 0}, "threads must be 1"), ({"memory_budget": "x"}, "memory_budget")):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=match):
            torch.compile(model, backend="convoke", options=wrong)(images())


def test_errors_are_pytorch_s():
    """Also for mistakes after the first capture."""
    expected, found = pair(Small().double())
    for wrong in (images(channels=5), images().float(), images()[0, 0], "text", None):
        with pytest.raises(Exception) as wanted:
            expected(wrong)
        for _ in range(2):
            with pytest.raises(type(wanted.value)) as error:
                found(wrong)
            assert str(error.value) == str(wanted.value)
        # Afterwards everything goes on.
        check(found(images()), expected(images()))
    assert in_convoke(found)


def test_layers_are_frozen_one_by_one():
    """More kinds of captures than TorchDynamo's limit of 8."""
    layers = [nn.Sequential(nn.Conv2d(3 if index == 0 else 6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()) for index in range(11)]
    model = nn.Sequential(*layers).double()

    def freeze(model, number):
        model[number].requires_grad_(False)

    found = check_training(model, [images(2, 6, seed=seed) for seed in range(10)], before=freeze)
    assert convolutions(found) == (11, 11)
    assert "captured 10 times" in torch_convoke.report(found)


def test_numbers_that_change():
    """Schedules of drop rates, temperatures, momentum."""

    class Schedules(Small):
        scale, momentum = 0.0, 0.1

        def forward(self, x):
            x = self.relu(self.bn1(self.conv1(x)) * self.scale) + self.scale / 2
            return self.fc((self.bn2(self.conv2(x)) * (1 - self.scale)).mean((2, 3)))

    def change(model, number):
        model.scale = number / 20
        model.bn2.momentum = 0.1 + number / 100

    found = check_training(Schedules().double(), [images(2, seed=seed) for seed in range(8)], before=change)
    assert convolutions(found) == (2, 2)


def test_too_many_captures_are_reported():
    class Names(Small):
        name = ""

        def forward(self, x):
            return super().forward(x) / len(self.name)

    def change(model, number):
        model.name = "x" * (number + 1)

    count = _optimize.MOST_CAPTURES + 4
    model = check_training(Names().double(), [images(2, seed=seed) for seed in range(count)], before=change)
    assert f"4 of {count} calls ran in PyTorch" in torch_convoke.report(model)


def test_modules_that_are_not_called_themselves():
    """A LightningModule's `training_step` is called, and that calls the network inside."""

    class Lit(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.loss = Small(), nn.MSELoss()

        def forward(self, x):
            return self.net(x)

        def training_step(self, x):
            return self.loss(self.net(x), torch.zeros(x.shape[0], 5, dtype=x.dtype))

    expected, found = pair(Lit().double())
    for model in (expected, found):
        for seed in range(3):
            model.training_step(images(seed=seed)).backward()
    check_state(found, expected)
    assert torch_convoke.report(found).startswith("net: 2 of 2 convolutions")
    check(found(images()), expected(images()))
    assert torch_convoke.report(found).startswith("2 of 2 convolutions")
    torch_convoke.revert(found)
    assert found.net._compiled_call_impl is None


@pytest.mark.usefixtures("one_thread")
def test_the_first_second_runs_in_pytorch(monkeypatch):
    monkeypatch.setenv("CONVOKE_CAPTURE_AFTER", "0.2")
    model = torch_convoke.optimize(Small().double())
    assert torch_convoke.report(model).startswith("0 of 2 convolutions: the model has not run yet")
    train(model, [images()] * 2)
    assert not captures(model)
    assert torch_convoke.report(model).startswith("0 of 2 convolutions: the model runs in PyTorch for its first 0.2 s")
    while not captures(model):
        train(model, [images()])
    train(model, [images()])
    assert convolutions(model) == (2, 2)
    monkeypatch.setenv("CONVOKE_CAPTURE_AFTER", "soon")
    with pytest.raises(ValueError, match="CONVOKE_CAPTURE_AFTER must be a number of seconds, not 'soon'"):
        torch_convoke.optimize(Small())


@pytest.mark.usefixtures("one_thread")
def test_sizes_that_have_changed_are_captured_once(monkeypatch):
    monkeypatch.setenv("CONVOKE_CAPTURE_AFTER", "0.2")
    expected, found = pair(Small().double())
    sizes = itertools.cycle([8, 12, 10])
    while not captures(found):
        x = images(next(sizes), 9)
        check(found(x), expected(x))
    for size in (6, 14, 11):
        x = images(size, 9)
        check(found(x), expected(x))
    assert len(_optimize.backend_of(found).captured) == 1
    assert "calls ran in PyTorch" not in torch_convoke.report(found)


@pytest.mark.usefixtures("one_thread")
def test_captures_take_no_more_time_than_training(monkeypatch):
    """A model that is another one in each step would be captured in each step, which takes ten times as long as to run it."""
    monkeypatch.setenv("CONVOKE_CAPTURE_AFTER", "0.2")

    class Names(Small):
        name = ""

        def forward(self, x):
            return super().forward(x) / (1 + len(self.name))

    expected, found = pair(Names().double())
    optimized = _optimize.optimized_of(found)
    start, longest = time.monotonic(), 0.0
    while time.monotonic() - start < 3 or not optimized.postponed:
        expected.name, found.name = expected.name + "x", found.name + "x"
        began = time.monotonic()
        check(found(images()), expected(images()))
        longest = max(longest, time.monotonic() - began)
    assert captures(found)
    spent, whole = optimized.pace.spent, time.monotonic() - start
    assert spent <= (whole - spent) + longest, (spent, whole, longest)
    assert f"{optimized.postponed} of {optimized.calls} calls ran in PyTorch, as inputs" in torch_convoke.report(found)


def test_sizes_that_change_each_step():
    """Detection models compute sizes from sizes: whatever a subgraph needs of them is that of the call."""

    class Sizes(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.bn, self.c = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.Conv2d(16, 4, 1)

        def forward(self, x):
            n, _, height, width = x.shape
            y = torch.roll(self.a(x), 1, 2)
            z = F.dropout(F.relu(self.bn(self.b(y))), 0.3)
            pooled = F.interpolate(F.adaptive_avg_pool2d(z, 1), size=z.shape[2:], mode="bilinear", align_corners=False)
            z = self.c(torch.cat([z, pooled], 1))
            z = z.view(n, 2, 2, z.shape[2], z.shape[3]).flatten(1, 2)
            flat = z.flatten(2).view(n * 4, z.shape[2] * z.shape[3]).mean(1)
            return F.interpolate(z, size=(height, width), mode="bilinear", align_corners=False) + flat.view(n, 4, 1, 1)

    sizes = [(2, 16, 16), (2, 24, 20), (3, 20, 28), (2, 17, 23), (1, 32, 16), (2, 16, 16)]
    batches = [torch.randn(n, 3, height, width, dtype=torch.float64) for n, height, width in sizes]
    model = check_training(Sizes().double(), batches)
    assert convolutions(model) == (3, 3)
    assert len(captures(model)) <= 4


def test_a_mistake_of_ours_loses_no_training(monkeypatch):
    from torch_convoke import _partition

    def fails(*_):
        raise KeyError("a node")

    monkeypatch.setattr(_partition, "fuse", fails)
    model = check_training(Small().double(), [images(seed=seed) for seed in range(3)], convoke=False)
    assert "an internal error, KeyError: 'a node'; please report it" in torch_convoke.report(model)
