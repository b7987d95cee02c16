"""What users do with models beside plain training: modes, frozen layers, hooks, changing sizes, several backwards, autocast, writes in
place, ranks. Each must end as in PyTorch."""

from __future__ import annotations

import copy
import itertools
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import torch_convoke
from conftest import (
    Small,
    captures,
    check,
    check_gradients,
    check_state,
    check_training,
    convolutions,
    images,
    in_convoke,
    loss_of,
    pair,
    reasons_of,
    tensors_of,
    train,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def both(model, run):
    """`run` on a copy in PyTorch and on the optimized model; results and the models must be equal."""
    expected, found = pair(model)
    torch.manual_seed(3)
    wanted = run(expected)
    torch.manual_seed(3)
    given = run(found)
    for index, (one, other) in enumerate(zip(given, wanted, strict=True)):
        check(one, other, what=f"result {index}")
    check_state(found, expected)
    assert in_convoke(found), torch_convoke.report(found)
    return found


def test_modes_change_between_calls():
    def run(model):
        results = []
        for training, grad in itertools.product((True, False), repeat=2):
            model.train(training)
            with torch.set_grad_enabled(grad):
                results.append(model(images(seed=len(results))))
            assert results[-1].requires_grad == grad
            if grad:
                loss_of(results[-1]).backward()
        with torch.inference_mode():
            results.append(model(images(seed=9)))
        assert results[-1].is_inference()
        return [*results[:-1], results[-1].clone()]

    both(Small().double(), run)


@pytest.mark.parametrize("names", [["conv1", "bn1"], ["bn1", "bn2"], ["conv2"], ["conv1", "bn1", "conv2", "bn2"], ["fc"]])
def test_frozen_layers(names):
    model = Small().double()
    for name in names:
        model.get_submodule(name).requires_grad_(False)
    check_training(model, [images(seed=seed) for seed in range(3)])


def test_layers_are_frozen_and_thawed_while_training():
    def freeze(model, step):
        model.conv1.requires_grad_(step != 1)
        model.bn1.train(step != 2)
        model.bn2.requires_grad_(step != 3)

    expected, found = pair(Small().double())
    for model in (expected, found):
        for step in range(5):
            freeze(model, step)
            loss_of(model(images(seed=step))).backward()
    check_state(found, expected)
    assert in_convoke(found)


@pytest.mark.parametrize("p", [0.3, 1.0])
def test_dropout_draws_what_pytorch_draws(p):
    check_training(Small(dropout=p).double(), [images(seed=seed) for seed in range(3)])


def test_sizes_change_without_a_storm_of_captures():
    model = check_training(Small().double(), [images(count, seed=count) for count in (4, 7, 3, 4, 9, 2, 5, 6, 1, 8)])
    assert len(captures(model)) <= 3
    sizes = [images(2, size, seed=size) for size in (12, 14, 16, 12, 18, 20, 22)]
    model = check_training(Small().double(), sizes)
    assert len(captures(model)) <= 3


def test_the_last_batch_of_each_epoch():
    model = check_training(Small().double(), [images(count) for _ in range(3) for count in (8, 8, 8, 3)])
    assert len(captures(model)) <= 2


def test_an_empty_batch_runs_or_fails_as_in_pytorch():
    expected, found = pair(Small().double().eval())
    check(found(images(0)), expected(images(0)))
    for model in (expected, found):
        model(images(2))
        model.train()
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            nn.Sequential(model.bn2)(torch.zeros(1, 12, 1, 1, dtype=torch.float64))


def test_several_calls_before_one_backward():
    def run(model):
        results = [model(images(count, seed=count)) for count in (4, 3, 4)]
        sum(loss_of(result) for result in results).backward()
        return results

    both(Small().double(), run)


def test_gradients_accumulate():
    def run(model):
        results = []
        for seed in range(3):
            results.append(model(images(seed=seed)))
            loss_of(results[-1]).backward()
        return results

    both(Small().double(), run)


def test_gradients_of_the_input():
    x = images().requires_grad_()
    grads = {}

    def run(model):
        x.grad = None
        y = model(x)
        loss_of(y).backward()
        grads[model] = x.grad
        return [y, x.grad.clone()]

    both(Small().double(), run)


def test_backward_again_on_a_retained_graph():
    def run(model):
        y = model(images())
        loss = loss_of(y)
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        return [y]

    found = both(Small().double(), run)
    loss = loss_of(found(images()))
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_part_of_the_gradients():
    def run(model):
        y = model(images())
        parameters = [model.conv1.weight, model.bn2.bias]
        return [y, *torch.autograd.grad(loss_of(y), parameters)]

    both(Small().double(), run)


def test_second_derivatives_are_pytorch_s():
    expected, found = pair(Small(dropout=0.4).double())
    for model in (expected, found):
        torch.manual_seed(4)
        x = images().requires_grad_()
        loss = loss_of(model(x))
        gradients = torch.autograd.grad(loss, [x, *model.parameters()], create_graph=True)
        assert all(gradient.requires_grad for gradient in gradients[:2])
        (loss + 10 * sum(gradient.square().sum() for gradient in gradients)).backward()
    assert in_convoke(found)
    check_state(found, expected, 1e-9)


def test_a_parameter_that_changes_before_backward_is_found():
    model = torch_convoke.optimize(Small().double())
    loss = loss_of(model(images()))
    with torch.no_grad():
        model.conv2.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_optimizers_that_step_in_backward():
    expected, found = pair(Small().double())
    for model in (expected, found):
        optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

        def step(parameter, optimizers=optimizers):
            optimizers[parameter].step()
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for seed in range(3):
            loss_of(model(images(seed=seed))).backward()
    check_state(found, expected)


@pytest.mark.parametrize("when", ["before", "after optimize", "after a step"])
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "of the model"])
def test_hooks_run(kind, when):
    expected, found = Small().double(), None
    seen = {}

    def hook(model):
        seen[model] = []
        if kind == "forward":
            model.bn1.register_forward_hook(lambda module, args, output: seen[model].append(output.detach().clone()))
        elif kind == "forward_pre":
            model.conv2.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        elif kind == "full_backward":
            model.conv2.register_full_backward_hook(lambda module, inputs, outputs: seen[model].append(outputs[0].clone()))
        else:
            model.register_forward_hook(lambda module, args, output: output * 3)

    # Copies share the closures of hooks.
    found = copy.deepcopy(expected)
    for model in (expected, found):
        if when == "before":
            hook(model)
        if model is found:
            torch_convoke.optimize(model)
        if when == "after optimize":
            hook(model)
        loss_of(model(images())).backward()
        if when == "after a step":
            hook(model)
        for seed in range(2):
            y = model(images(seed=seed))
            loss_of(y).backward()
        seen[model].append(y)
    check_state(found, expected)
    for one, other in zip(seen[found], seen[expected], strict=True):
        check(one, other)


def test_a_hook_that_is_removed():
    def run(model):
        handle = model.relu.register_forward_hook(lambda module, args, output: output + 1)
        first = model(images())
        handle.remove()
        return [first, model(images())]

    both(Small().double(), run)


def test_hooks_of_tensors_and_parameters():
    def run(model):
        handle = model.conv1.weight.register_hook(lambda gradient: gradient * 2)
        y = model(images())
        y.register_hook(lambda gradient: gradient * 3)
        loss_of(y).backward()
        handle.remove()
        return [y]

    both(Small().double(), run)


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_layouts_and_strides(layout):
    class Trunk(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn, self.up = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 4, 2, 2)

        def forward(self, x):
            y = F.relu(self.bn(self.conv(x)))
            return y, self.up(y), F.max_pool2d(y, 2)

    model = Trunk().double().to(memory_format=layout)
    expected, found = pair(model)
    inputs = [images().to(memory_format=layout), images(4, 13)[:, :, :12, 1:], images(8)[::2], images().transpose(2, 3)]
    for x in inputs:
        for one, other in zip(found(x), expected(x), strict=True):
            check(one, other)
            if x is inputs[0]:
                assert one.stride() == other.stride()
        loss_of(found(x)).backward(), loss_of(expected(x)).backward()
        check_gradients(found, expected)
    for (name, one), other in zip(found.named_parameters(), expected.parameters()):
        assert one.grad.stride() == other.grad.stride(), name


def test_a_region_of_autocast_inside_a_model():
    class Region(Small):
        def forward(self, x):
            x = self.relu(self.bn1(self.conv1(x)))
            with torch.autocast("cpu", torch.bfloat16):
                x = self.conv2(x)
            return self.fc(self.bn2(x.float()).mean((2, 3)))

    expected, found = pair(Region())
    x = images(dtype=torch.float32)
    check(found(x), expected(x), 1e-2)
    loss_of(found(x)).backward(), loss_of(expected(x)).backward()
    check_state(found, expected, 2e-2)
    # Before the region, in it, and after it, convoke runs.
    assert convolutions(found) == (2, 2) and in_convoke(found) >= 2


def test_models_in_half_precision_are_pytorch_s():
    expected, found = pair(Small().half())
    x = images(dtype=torch.float16)
    check(found(x), expected(x), 2e-2)
    assert not in_convoke(found) and reasons_of(captures(found))


def test_tensors_elsewhere_are_pytorch_s():
    model = torch_convoke.optimize(Small().to("meta"))
    assert model(torch.zeros(2, 3, 12, 12, device="meta")).shape == (2, 5)
    assert not in_convoke(model)


def test_checkpointing():
    class Checkpointed(Small):
        def forward(self, x):
            x = checkpoint(lambda x: self.relu(self.conv1(x)), x, use_reentrant=False)
            return self.fc(self.bn2(self.conv2(self.pool(self.bn1(x)))).mean((2, 3)))

    expected, found = pair(Checkpointed().double())
    check(train(found, [images()] * 2), train(expected, [images()] * 2))
    check_state(found, expected)


@pytest.mark.parametrize("parametrize", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrized_weights(parametrize):
    def made():
        torch.manual_seed(5)
        model = Small().double()
        parametrize(model.conv2)
        return model

    expected, found = made(), torch_convoke.optimize(made())
    for model in (expected, found):
        for seed in range(3):
            loss_of(model(images(seed=seed))).backward()
    check_state(found, expected, 1e-8)
    assert convolutions(found) == (2, 2)


def test_shared_layers():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.conv, self.bn = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

        def forward(self, x):
            x = self.stem(x)
            for _ in range(3):
                x = x + F.relu(self.bn(self.conv(x)))
            return x

    check_training(Shared().double(), [images(seed=seed) / 4 for seed in range(3)])


WRITES = {
    "relu_ on a block": lambda m, x: F.relu_(m.bn(m.conv(x))),
    "add_ of the input": lambda m, x: m.bn(m.conv(x)).add_(m.conv(x)),
    "mul_ after a reader": lambda m, x: (lambda y: (y.sum((2, 3)), y.mul_(2)))(m.conv(x)),
    "write between readers": lambda m, x: (lambda y: (m.bn(y), y.add_(1), m.bn(y)))(m.conv(x).clone()),
    "a part is set": lambda m, x: (lambda y: (y.__setitem__((slice(None), 0), 0.0), m.bn(y))[1])(m.conv(x).clone()),
    "through a view": lambda m, x: (lambda y: (y[:, :2].mul_(3), m.bn(y))[1])(m.conv(x).clone()),
    "relu_ twice": lambda m, x: m.bn(F.relu_(F.relu_(m.conv(x)) - 0.5)),
    "iadd of a residual": lambda m, x: F.relu_(m.bn(m.conv(x)) + m.conv(x)).mul_(0.5),
    "copy_": lambda m, x: m.conv(x).copy_(m.bn(m.conv(x))),
    "zero_ of a half": lambda m, x: (lambda y: (y.narrow(1, 0, 2).zero_(), F.relu(y))[1])(m.bn(m.conv(x))),
    "detached": lambda m, x: m.bn(m.conv(x)) * m.conv(x).detach().relu_(),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_in_place(name):
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)

        def forward(self, x):
            return WRITES[name](self, x)

    expected, found = pair(Writes().double())
    wanted, results = expected(images()), found(images())
    for one, other in zip(tensors_of(results), tensors_of(wanted), strict=True):
        check(one, other)
    assert found.bn.num_batches_tracked == expected.bn.num_batches_tracked
    try:
        loss_of(wanted).backward()
    except RuntimeError as error:
        # PyTorch needs what was overwritten; convoke may have kept something else.
        assert "modified by an inplace operation" in str(error)
        return
    loss_of(results).backward()
    check_state(found, expected)


def test_a_write_to_the_input_is_seen():
    class Writes(Small):
        def forward(self, x):
            x.mul_(2)
            return super().forward(x)

    expected, found = pair(Writes().double())
    x, other = images(), images()
    check(found(x), expected(other))
    check(x, other)


def test_a_buffer_of_the_user_counts():
    class Counts(Small):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))

        def forward(self, x):
            self.calls += 1
            self.mean = self.mean * 0.9 + x.mean((0, 2, 3)).detach() * 0.1
            return super().forward(x)

    check_training(Counts().double(), [images(seed=seed) for seed in range(4)])


def test_several_inputs_and_results():
    class Several(Small):
        def forward(self, x, scale=None, *, again=False):
            y = self.relu(self.bn1(self.conv1(x)))
            if scale is not None:
                y = y * scale
            head = [super().forward(x), y.mean((1, 2, 3))]
            return {"features": y, "head": head, "number": 3} if again else (y, y.sum((2, 3)))

    def run(model):
        results = model(images(), scale=torch.full((8, 1, 1), 0.5, dtype=torch.float64), again=True)
        assert results["number"] == 3
        loss_of(results).backward()
        return [results["features"], *results["head"], *model(images())]

    both(Several().double(), run)


@pytest.mark.parametrize("training", [True, False])
def test_batch_norms_whose_results_nobody_reads(training):
    class Unread(Small):
        def forward(self, x):
            y = self.relu(self.bn1(self.conv1(x)))
            super().forward(x)
            return y

    class NothingElse(Small):
        def forward(self, x):
            self.bn2(self.conv2(x.repeat(1, 3, 1, 1)[:, :8]))
            return x * 2

    both(Unread().double().train(training), lambda model: [model(images(seed=seed)) for seed in range(2)])
    expected, found = pair(NothingElse().double().train(training))
    check(found(images()), expected(images()))
    check_state(found, expected)


def test_control_flow_on_values():
    class Branches(Small):
        def forward(self, x):
            x = self.bn1(self.conv1(x))
            if x[0, 0, 0, 0] > 0:
                x = x * 2
            return self.fc(self.bn2(self.conv2(self.relu(x))).mean((2, 3)))

    check_training(Branches().double(), [images(seed=seed) * (-1) ** seed for seed in range(4)])


def test_an_error_of_the_user_comes_through():
    expected, found = pair(Small().double())
    for bad in (images(channels=4), torch.zeros(3), images(dtype=torch.float32), "no tensor"):
        with pytest.raises(Exception) as wanted:
            expected(bad)
        with pytest.raises(type(wanted.value)):
            found(bad)
    check(found(images()), expected(images()))


def test_nan_and_infinity_in_a_step():
    expected, found = pair(Small().double())
    x = images()
    x[0, 0, 0, 0] = float("nan")
    check(found(x), expected(x), nan=True)
    loss_of(found(x)).backward(), loss_of(expected(x)).backward()
    for one, other in zip(found.parameters(), expected.parameters()):
        assert torch.equal(one.grad.isnan(), other.grad.isnan())


RANKS = """
import copy, os, sys, torch, torch.distributed as dist
import torch.multiprocessing as mp
sys.path.insert(0, {tests!r})

def rank_main(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.set_num_threads(1)
    import torch_convoke
    from torch.nn.parallel import DistributedDataParallel as DDP
    from conftest import Small, check, check_state, images, in_convoke, train
    torch.manual_seed(0)
    expected = Small().double()
    found = copy.deepcopy(expected)
    if {order!r} == "inside":
        torch_convoke.optimize(found)
        wrapped = DDP(found)
    else:
        wrapped = DDP(found)
        torch_convoke.optimize(wrapped if {order!r} == "outside" else wrapped.module)
    reference = DDP(expected)
    batches = [images(4, seed=10 * rank + step) for step in range(4)]
    check(train(wrapped, batches), train(reference, batches), 1e-10, "losses")
    check_state(found, expected, 1e-10)
    assert in_convoke(wrapped if {order!r} == "outside" else found)
    total = sum(parameter.sum() for parameter in found.parameters()).detach()
    gathered = [torch.zeros_like(total) for _ in range(2)]
    dist.all_gather(gathered, total)
    assert gathered[0] == gathered[1]
    dist.destroy_process_group()
    # A thread of gloo that still holds a tensor of Python's while the interpreter ends would abort the process, without convoke too.
    os._exit(0)

if __name__ == "__main__":
    import socket
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(rank_main, (port,), nprocs=2)
    print("equal")
"""


@pytest.mark.parametrize("order", ["inside", "after", "outside"])
def test_distributed_data_parallel(order, tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS.format(tests=os.path.dirname(__file__), order=order))
    environment = {**os.environ, "CONVOKE_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0 and "equal" in done.stdout, done.stderr[-4000:]
