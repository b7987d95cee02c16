"""What `optimize` and `revert` change of a model, and what they leave as it was."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn

import torch_convoke
from conftest import Small, captures, check, check_gradients, check_state, check_training, collect, collected, images, in_convoke, loss_of, on_threads, pair, train


def test_the_model_has_the_same_parts_afterwards():
    model = Small().double()
    text, keys, names = repr(model), list(model.state_dict()), [name for name, _ in model.named_modules()]
    parameters, buffers, modules = dict(model.named_parameters()), dict(model.named_buffers()), list(model.modules())
    assert torch_convoke.optimize(model) is model
    loss_of(model(images())).backward()
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name]
        assert type(parameter) is nn.Parameter and parameter.is_leaf
    for name, buffer in model.named_buffers():
        assert buffer is buffers[name]
    assert all(one is other for one, other in zip(model.modules(), modules, strict=True))
    assert repr(model) == text
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_modules()] == names
    assert type(model) is Small
    assert "forward" not in vars(model)
    assert in_convoke(model)


def test_only_this_instance_changes():
    one, other = Small(), Small()
    class_members = {name: value for name, value in vars(Small).items()}
    torch_convoke.optimize(one)
    assert other._compiled_call_impl is None
    assert nn.Module._compiled_call_impl is None
    assert {name: value for name, value in vars(Small).items()} == class_members
    one(images(dtype=torch.float32)), other(images(dtype=torch.float32))
    with pytest.raises(ValueError, match="not optimized"):
        torch_convoke.report(other)


def test_revert_runs_pytorch_again():
    model = torch_convoke.optimize(Small().double())
    model(images())
    assert in_convoke(model)
    assert torch_convoke.revert(model) is model
    assert model._compiled_call_impl is None
    expected = copy.deepcopy(model)
    check(train(model, [images()] * 2), train(expected, [images()] * 2))
    check_state(model, expected)
    torch_convoke.revert(model)


def test_a_model_can_be_optimized_again():
    model = Small().double()
    expected = copy.deepcopy(model)
    for _ in range(3):
        torch_convoke.optimize(model)
        check(train(model, [images()]), train(expected, [images()]))
    torch_convoke.revert(model)
    torch_convoke.optimize(model)
    check(train(model, [images()]), train(expected, [images()]))
    assert in_convoke(model)
    check_state(model, expected)


def test_what_is_no_module_or_compiled_already_is_refused():
    with pytest.raises(TypeError, match="torch.nn.Module"):
        torch_convoke.optimize(lambda x: x)
    model = Small()
    model.compile(backend="eager")
    with pytest.raises(RuntimeError, match="already compiled"):
        torch_convoke.optimize(model)
    with pytest.raises(ValueError, match="threads"):
        torch_convoke.optimize(Small(), threads=0)


def test_copies_and_pickles_are_models_that_are_not_optimized():
    model = torch_convoke.optimize(Small().double())
    train(model, [images()] * 2)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [
        copy.deepcopy(model),
        copy.copy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
    ]
    expected = copies[0](images())
    for other in copies:
        assert other._compiled_call_impl is None
        assert repr(other) == repr(model)
    for other in (copies[2], copies[3]):
        check(other(images()), expected)
        check(torch_convoke.optimize(other)(images()), copies[0](images()))
        assert in_convoke(other)


def test_a_state_dict_goes_in_and_out():
    model, other = torch_convoke.optimize(Small().double()), torch_convoke.optimize(Small().double())
    train(model, [images()] * 2)
    other(images())
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    assert other.load_state_dict(torch.load(buffer)).missing_keys == []
    model.eval(), other.eval()
    check(other(images()), model(images()))
    plain = Small().double().eval()
    plain.load_state_dict(model.state_dict())
    check(plain(images()), model(images()))


def test_assigned_parameters_are_read():
    expected, model = pair(Small().double())
    model(images())
    expected(images())
    for one in (model, expected):
        torch.manual_seed(5)
        one.conv1.weight = nn.Parameter(torch.randn(8, 3, 3, 3, dtype=torch.float64))
        one.load_state_dict({k: v * 1.5 for k, v in one.state_dict().items()}, assign=True)
        one.fc.bias.data = torch.ones(5, dtype=torch.float64)
    check(train(model, [images()] * 2), train(expected, [images()] * 2))
    check_state(model, expected)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adadelta", "RMSprop"])
def test_optimizers_made_before_or_after_work(kind):
    torch.manual_seed(2)
    expected = Small().double()
    before, after = copy.deepcopy(expected), copy.deepcopy(expected)
    optimizers = {before: getattr(torch.optim, kind)(before.parameters())}
    for model in (before, after):
        torch_convoke.optimize(model)
    optimizers |= {model: getattr(torch.optim, kind)(model.parameters()) for model in (after, expected)}
    for step in range(4):
        for model, optimizer in optimizers.items():
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss_of(model(images(seed=step))).backward()
            optimizer.step()
    for model in (before, after):
        check_state(model, expected, 1e-9)
        assert in_convoke(model)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"momentum": 0.9, "nesterov": True}])
def test_variants_of_sgd_work(options):
    expected, model = pair(Small().double())
    for one in (expected, model):
        optimizer = torch.optim.SGD(one.parameters(), 0.05, **options)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(one(images(seed=step))).backward()
            torch.nn.utils.clip_grad_norm_(one.parameters(), 1.0)
            optimizer.step()
    check_state(model, expected)


def test_a_part_of_a_model_can_be_optimized():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.part, self.head = Small().double(), nn.Linear(5, 2).double()

        def forward(self, x):
            return self.head(self.part(x).relu())

    expected = Whole()
    model = copy.deepcopy(expected)
    torch_convoke.optimize(model.part)
    check(train(model, [images()] * 3), train(expected, [images()] * 3))
    check_state(model, expected)
    assert in_convoke(model.part)
    # And then the whole around it.
    torch_convoke.optimize(model)
    check(train(model, [images()] * 3), train(expected, [images()] * 3))
    check_state(model, expected)


def test_a_model_of_two_types_in_turn():
    expected, model = pair(Small())
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.float64, 1e-9), (torch.float32, 1e-4)):
        expected.to(dtype), model.to(dtype)
        expected.load_state_dict(model.state_dict())
        batches = [images(dtype=dtype)] * 2
        check(train(model, batches), train(expected, batches), tolerance)
        check_state(model, expected, tolerance)
        assert model(batches[0]).dtype == dtype


def test_forward_itself_stays_pytorch_s():
    model = torch_convoke.optimize(Small().double())
    check(model.forward(images()), model(images()))
    assert len(captures(model)) == 1


def test_each_number_of_threads_gives_the_same():
    for threads in (1, 2, None):
        model = Small().double()
        expected = copy.deepcopy(model)
        torch_convoke.optimize(model, threads=threads)
        check(train(model, [images()] * 2), train(expected, [images()] * 2))
        assert in_convoke(model)


def test_the_number_of_threads_follows_pytorch_s():
    expected, model = pair(Small().double())
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 1):
            torch.set_num_threads(count)
            check(train(model, [images()] * 2), train(expected, [images()] * 2))
    finally:
        torch.set_num_threads(threads)
    check_state(model, expected)
    assert len(captures(model)) <= 2


def test_the_backend_has_a_name():
    from torch._dynamo import list_backends

    assert "convoke" in list_backends()
    model = Small().double()
    expected = copy.deepcopy(model)
    compiled = torch.compile(model, backend="convoke")
    check(train(compiled, [images()] * 3), train(expected, [images()] * 3))
    check_state(model, expected)
    function = torch.compile(lambda x, w: torch.conv2d(x, w).relu(), backend="convoke")
    x, w = images().requires_grad_(), torch.randn(4, 3, 3, 3, dtype=torch.float64, requires_grad=True)
    found, wanted = function(x, w), torch.conv2d(x, w).relu()
    check(found, wanted)
    for one, other in zip(torch.autograd.grad(loss_of(found), [x, w]), torch.autograd.grad(loss_of(wanted), [x, w])):
        check(one, other)
    with pytest.raises(Exception, match="convoke has no option"):
        torch.compile(Small(), backend="convoke", options={"speed": 2})(images(dtype=torch.float32))


def test_module_compile_with_the_backend():
    model = Small().double()
    expected = copy.deepcopy(model)
    model.compile(backend="convoke")
    check(train(model, [images()] * 2), train(expected, [images()] * 2))
    check_state(model, expected)


def test_many_models_in_one_process():
    # TorchDynamo compiles a function no more than 8 times, and all models share Module.__call__.
    expected = Small().double()
    models = [torch_convoke.optimize(copy.deepcopy(expected)) for _ in range(12)]
    losses = train(expected, [images()] * 2)
    for model in models:
        check(train(model, [images()] * 2), losses)
        check_state(model, expected)
        assert in_convoke(model)
        assert len(captures(model)) == 1
    # None of them was forgotten.
    for model in models:
        model(images())
        assert len(captures(model)) == 1


def test_models_of_one_class_one_after_the_other():
    for _ in range(20):
        model = torch_convoke.optimize(Small().double())
        model(images())
        assert in_convoke(model)


def test_nothing_is_left_of_a_model_that_is_gone():
    model = Small()
    torch_convoke.optimize(model)
    train(model, [images(dtype=torch.float32)] * 2)
    del model
    before = collected()
    for count in (4, 3):
        model = torch_convoke.optimize(Small())
        parameter = weakref.ref(model.conv1.weight)
        gone = weakref.ref(model)
        result = None
        train(model, [images(count, dtype=torch.float32)] * 3)
        model.eval()
        with torch.no_grad():
            result = model(images(dtype=torch.float32))
        assert collected()[1] > before[1]
        del model, result
        collect()
        assert gone() is None
        assert parameter() is None
        assert collected() == before


def test_reverting_frees_what_was_built():
    model = torch_convoke.optimize(Small())
    train(model, [images(dtype=torch.float32)] * 2)
    torch_convoke.revert(model)
    first = collected()
    for _ in range(3):
        torch_convoke.optimize(model)
        train(model, [images(dtype=torch.float32)] * 2)
        torch_convoke.revert(model)
    assert collected() == first


def test_steps_leave_nothing_behind():
    model = torch_convoke.optimize(Small())
    batch = images(dtype=torch.float32)
    train(model, [batch] * 3)
    model.zero_grad()
    before = collected()
    for _ in range(10):
        loss_of(model(batch)).backward()
        # A forward whose backward never runs, and one that fails.
        model(batch)
        with pytest.raises(Exception):
            model(batch[:, :2])
        model.zero_grad()
    assert collected() == before


def test_a_result_outlives_its_model():
    model = torch_convoke.optimize(Small().double())
    expected = copy.deepcopy(model)(images())
    result = model(images())
    weight = model.conv1.weight
    del model
    collect()
    check(result, expected)
    loss_of(result).backward()
    assert bool(weight.grad.isfinite().all()) and weight.grad.abs().sum() > 0


def test_fifty_threads_call_one_model_without_gradients():
    model = torch_convoke.optimize(Small().double().eval())
    batches = [images(2 + number % 3, seed=number) for number in range(50)]
    expected = copy.deepcopy(model)

    def call(batch):
        with torch.no_grad():
            for _ in range(3):
                check(model(batch), expected(batch))

    on_threads([functools.partial(call, batch) for batch in batches])


def test_threads_train_models_of_their_own():
    expected = Small().double()
    models = [torch_convoke.optimize(copy.deepcopy(expected)) for _ in range(6)]
    losses = train(expected, [images()] * 4)

    def work(model):
        check(train(model, [images()] * 4), losses)
        check_state(model, expected)

    on_threads([functools.partial(work, model) for model in models])


def test_backward_on_another_thread():
    expected, model = pair(Small().double())
    found, wanted = loss_of(model(images())), loss_of(expected(images()))
    thread = threading.Thread(target=found.backward)
    thread.start()
    thread.join(60)
    wanted.backward()
    check_gradients(model, expected)


def test_the_report_says_what_runs_where():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)

        def forward(self, x):
            return self.second(torch.special.i0(self.first(x)))

    model = torch_convoke.optimize(Mixed())
    assert "not run yet" in torch_convoke.report(model)
    model(images(dtype=torch.float32))
    text = torch_convoke.report(model)
    assert "i0" in text
    assert in_convoke(model) == 2
    check_training(Mixed().double(), [images()] * 3)
