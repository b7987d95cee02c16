"""SyncBatchNorm on several gloo processes, compared with BatchNorm on the whole batch; and its conversion.

Starting processes takes seconds, so each number of ranks is started once and runs all cases, one after the other. Every
rank makes the same whole batch, takes its own part, and compares with the whole batch by itself.
"""

from __future__ import annotations

import copy
import datetime
import inspect
import json
import os
import pickle
import time
import traceback
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.multiprocessing.spawn import ProcessException

import torch_convoke.nn as ours

TIMEOUT = 20.0
SPLITS = {
    2: {"even": [4, 4], "uneven": [1, 6], "empty": [0, 8], "last empty": [5, 0]},
    3: {"even": [3, 3, 3], "uneven": [1, 5, 2], "empty": [0, 5, 4], "two empty": [0, 0, 9]},
}
PLAIN = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
CASES = {}
# The largest errors of this rank where the usual tolerances hold, by type: printed with -s.
errors: dict[str, float] = {}


def case(function):
    CASES[function.__name__] = function
    return function


def random(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def check(found, expected, tolerance=None):
    """Fails where they differ by more than 1e-12 (f64) or 1e-5 (f32) of the largest value or 1, and for NaN."""
    assert found is not None and found.dtype == expected.dtype and found.shape == expected.shape
    if found.numel() == 0:
        return
    error = ((found - expected).abs().max() / expected.abs().max().clamp(min=1)).item()
    if tolerance is None:
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}[found.dtype]
        errors[str(found.dtype)] = max(errors.get(str(found.dtype), 0.0), error)
    assert error <= tolerance, f"an error of {error}: {found}, {expected}"


def check_state(found, expected):
    for name, value in expected.state_dict().items():
        if value.is_floating_point():
            check(found.state_dict()[name], value)
        else:
            assert torch.equal(found.state_dict()[name], value), name


def layers(channels, dimensions, dtype=torch.float64, **options):
    """BatchNorm and SyncBatchNorm, with equal parameters."""
    plain = PLAIN[dimensions](channels, dtype=dtype, **options)
    synced = ours.SyncBatchNorm(channels, dtype=dtype, **options)
    with torch.no_grad():
        for seed, parameter in enumerate(plain.parameters()):
            parameter.copy_(1 + 0.5 * random(channels, seed=seed + 10))
    synced.load_state_dict(plain.state_dict())
    return plain, synced


def summed(gradient):
    """Over the ranks: the sum of their parts."""
    total = gradient.clone()
    dist.all_reduce(total)
    return total


def own(tensor, split, rank):
    return tensor.split(split)[rank].detach().clone()


def compare(rank, split, shape, layout=torch.contiguous_format, dtype=torch.float64, **options):
    """Three steps of training, then evaluation."""
    plain, synced = layers(shape[0], len(shape) + 1, dtype, **options)
    for step in range(3):
        whole = (3 * random(sum(split), *shape, seed=step, dtype=dtype) + 5).requires_grad_()
        gradient = random(sum(split), *shape, seed=step + 50, dtype=dtype)
        part = own(whole, split, rank).contiguous(memory_format=layout).requires_grad_()
        expected = plain(whole)
        found = synced(part)
        check(found.detach(), own(expected, split, rank))
        plain.zero_grad()
        synced.zero_grad()
        expected.backward(gradient)
        found.backward(own(gradient, split, rank))
        check(part.grad, own(whole.grad, split, rank))
        for each in (part.grad, found):
            assert each.numel() == 0 or each.is_contiguous(memory_format=layout)
        for ours_, theirs in zip(synced.parameters(), plain.parameters()):
            check(summed(ours_.grad), theirs.grad)
        check_state(synced, plain)
    if plain.track_running_stats:
        check(synced.eval()(part).detach(), own(plain.eval()(whole), split, rank))


@contextmanager
def counted():
    """The collectives that are called within, as (name, number of elements)."""
    calls = []
    kept = {name: getattr(dist, name) for name in ("all_gather", "all_reduce", "broadcast", "all_gather_into_tensor")}

    def counting(name):
        def call(*args, **kwargs):
            calls.append((name, (args[1] if name == "all_gather" else args[0]).numel()))
            return kept[name](*args, **kwargs)

        return call

    for name in kept:
        setattr(dist, name, counting(name))
    try:
        yield calls
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


@case
def every_split_and_shape_in_f64(rank, world):
    for split in SPLITS[world].values():
        for shape in [(3,), (3, 7), (3, 4, 5), (2, 3, 2, 4), (5, 1, 1)]:
            compare(rank, split, shape)


@case
def every_split_and_shape_in_f32(rank, world):
    for split in SPLITS[world].values():
        for shape in [(3,), (3, 7), (70, 8, 9), (2, 3, 2, 4)]:
            compare(rank, split, shape, dtype=torch.float32)


@case
def channels_last(rank, world):
    for split in SPLITS[world].values():
        for dtype in (torch.float32, torch.float64):
            compare(rank, split, (6, 4, 5), torch.channels_last, dtype)
            compare(rank, split, (6, 4, 2, 3), torch.channels_last_3d, dtype)


@case
def every_option(rank, world):
    for split in SPLITS[world].values():
        options = [{"momentum": None}, {"momentum": 0.7, "eps": 0.1}, {"affine": False}, {"track_running_stats": False}]
        if "bias" in inspect.signature(nn.BatchNorm2d).parameters:
            options.append({"bias": False})
        for each in options:
            compare(rank, split, (3, 4, 5), **each)


@case
def statistics_keep_their_digits_where_the_mean_is_large_and_eps_dominates(rank, world):
    split = SPLITS[world]["uneven"]
    whole = 1e4 + random(sum(split), 4, 6, 6) * torch.tensor([1e-1, 1e-3, 1.0, 0.0]).double().reshape(4, 1, 1)
    plain, synced = layers(4, 4)
    expected, found = plain(whole), synced(own(whole, split, rank))
    # An x of 1e4 has digits down to 2e-12; where the deviation is 1e-3, those are 2e-9 of it.
    check(found.detach(), own(expected, split, rank), 1e-8)
    check_state(synced, plain)


@case
def half_types_are_normalized_by_statistics_in_f32(rank, world):
    split = SPLITS[world]["uneven"]
    for dtype, tolerance in ((torch.bfloat16, 2**-7), (torch.float16, 2**-10)):
        plain, synced = layers(4, 4, torch.float32)
        whole = random(sum(split), 4, 5, 5, dtype=dtype).float().requires_grad_()
        gradient = random(sum(split), 4, 5, 5, seed=1, dtype=dtype)
        part = own(whole, split, rank).to(dtype).requires_grad_()
        expected, found = plain(whole), synced(part)
        expected.backward(gradient.float())
        found.backward(own(gradient, split, rank))
        assert found.dtype == part.grad.dtype == dtype and synced.weight.grad.dtype == torch.float32
        check(found.float().detach(), own(expected, split, rank), tolerance)
        check(part.grad.float(), own(whole.grad, split, rank), tolerance)
        check(summed(synced.weight.grad), plain.weight.grad)
        check_state(synced, plain)


@case
def one_all_gather_forward_and_one_all_reduce_backward(rank, world):
    synced = ours.SyncBatchNorm(5)
    for images in (2, 0 if rank == 0 else 3):
        x = torch.randn(images, 5, 3, requires_grad=True)
        with counted() as calls:
            y = synced(x)
        assert calls == [("all_gather", 11)], calls
        with counted() as calls:
            y.sum().backward()
        assert calls == [("all_reduce", 10)], calls
    # The first layer of a model: only the parameters have gradients, which are each rank's own.
    with counted() as calls:
        synced(torch.randn(2, 5, 3)).sum().backward()
    assert calls == [("all_gather", 11)], calls


@case
def evaluation_and_frozen_layers_do_not_communicate(rank, world):
    plain, synced = layers(3, 4)
    compare_with = random(4, 3, 2, 2)
    with counted() as calls:
        assert torch.equal(synced.eval()(compare_with), plain.eval()(compare_with))
        assert synced.num_batches_tracked.item() == 0
    assert calls == []
    # Frozen parameters, training statistics.
    plain, synced = layers(3, 4)
    split = SPLITS[world]["uneven"]
    whole = random(sum(split), 3, 4, 4).requires_grad_()
    part = own(whole, split, rank).requires_grad_()
    plain.requires_grad_(False)
    synced.requires_grad_(False)
    plain(whole).pow(3).sum().backward()
    synced(part).pow(3).sum().backward()
    check(part.grad, own(whole.grad, split, rank))
    assert synced.weight.grad is None and synced.bias.grad is None
    # Only the bias is trained.
    synced.bias.requires_grad_(True)
    synced(part.detach()).sum().backward()
    assert synced.weight.grad is None and synced.bias.grad.tolist() == [16.0 * split[rank]] * 3
    with torch.no_grad():
        plain(whole)
        plain(whole)
        synced(part)
    check_state(synced, plain)


@case
def backward_again_and_accumulation(rank, world):
    split = SPLITS[world]["empty"]
    plain, synced = layers(3, 4)
    for seed in (1, 2):
        whole = random(sum(split), 3, 4, 4, seed=seed).requires_grad_()
        part = own(whole, split, rank).requires_grad_()
        losses = plain(whole).pow(3).sum(), synced(part).pow(3).sum()
        for loss in losses:
            loss.backward(retain_graph=True)
            loss.backward()
        check(part.grad, own(whole.grad, split, rank))
    for found, expected in zip(synced.parameters(), plain.parameters()):
        check(summed(found.grad), expected.grad)


@case
def several_forwards_before_backward(rank, world):
    split = SPLITS[world]["uneven"]
    plain, synced = layers(3, 4)
    whole = [random(sum(split), 3, 4, 4, seed=seed).requires_grad_() for seed in (1, 2)]
    parts = [own(each, split, rank).requires_grad_() for each in whole]
    (plain(whole[0]) * plain(whole[1])).sum().backward()
    (synced(parts[0]) * synced(parts[1])).sum().backward()
    for found, expected in zip(parts, whole):
        check(found.grad, own(expected.grad, split, rank))


@case
def the_output_may_be_changed_in_place_and_the_input_may_not(rank, world):
    synced = ours.SyncBatchNorm(3)
    x = torch.randn(2, 3, 4, requires_grad=True)
    torch.relu_(synced(x)).sum().backward()
    source = torch.randn(2, 3, 4, requires_grad=True)
    x = source * 2
    y = synced(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@case
def double_backward_is_refused(rank, world):
    x = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
    y = ours.SyncBatchNorm(3, dtype=torch.float64)(x)
    (gradient,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        gradient.sum().backward()


@case
def wrong_inputs_are_refused_on_all_ranks(rank, world):
    synced = ours.SyncBatchNorm(3)
    # One value per channel in all.
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        synced(torch.randn(1 if rank == 0 else 0, 3))
    assert synced.running_mean.tolist() == [0, 0, 0]
    # One on each rank is enough.
    assert synced(torch.randn(1, 3)).isfinite().all()
    for shape, error in [((3,), ValueError), ((2, 0, 4), ValueError), ((2, 4, 4), RuntimeError)]:
        with pytest.raises(error):
            synced(torch.randn(shape))


@case
def no_values_at_all_change_nothing_but_the_counter(rank, world):
    plain, synced = layers(3, 4)
    x = torch.empty(0, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    y = synced(x)
    y.sum().backward()
    plain(x.detach())
    assert y.shape == x.shape == x.grad.shape
    assert synced.weight.grad.tolist() == synced.bias.grad.tolist() == [0, 0, 0]
    check_state(synced, plain)


@case
def pytorch_s_own_layer_refuses_the_same_tensors(rank, world):
    with pytest.raises(ValueError, match="expected input tensor to be on GPU"):
        nn.SyncBatchNorm(3)(torch.randn(4, 3, 2, 2))
    with pytest.raises(ValueError, match="only work with GPU modules"):
        nn.parallel.DistributedDataParallel(nn.SyncBatchNorm(3))


@case
def groups_of_some_ranks(rank, world):
    # Every rank makes every group, also those that it is not in.
    ends = dist.new_group([0, world - 1])
    alone = [dist.new_group([each]) for each in range(world)]
    plain, synced = layers(3, 4)
    x = random(4, 3, 2, 2, seed=rank)
    synced.process_group = alone[rank]
    assert torch.equal(synced(x), plain(x))
    if rank in (0, world - 1):
        plain, synced = layers(3, 4)
        synced.process_group = ends
        whole = torch.cat([random(4, 3, 2, 2, seed=each) for each in (0, world - 1)])
        check(synced(x).detach(), own(plain(whole), [4, 4], int(rank > 0)))
        check_state(synced, plain)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.body = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4))
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(4 * 36, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 3))

    def forward(self, x):
        x = self.stem(x)
        return self.head(torch.relu(self.body(x) + x))


@case
def under_distributed_data_parallel(rank, world):
    for split in SPLITS[world].values():
        torch.manual_seed(0)
        alone = Net().double()
        parallel = ours.convert_sync_batchnorm(copy.deepcopy(alone))
        parallel = nn.parallel.DistributedDataParallel(parallel)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in (alone, parallel)]
        for step in range(4):
            whole = random(sum(split), 2, 6, 6, seed=step)
            target = torch.arange(sum(split)) % 3
            loss = nn.functional.cross_entropy(alone(whole), target)
            # The mean over all ranks' samples. DistributedDataParallel takes the mean over ranks.
            outputs, targets = parallel(own(whole, split, rank)), own(target, split, rank)
            mine = nn.functional.cross_entropy(outputs, targets, reduction="sum") * world / sum(split)
            for each, optimizer in zip((loss, mine), optimizers):
                optimizer.zero_grad()
                each.backward()
            for (name, found), expected in zip(parallel.module.named_parameters(), alone.parameters()):
                check(found.grad, expected.grad)
            for optimizer in optimizers:
                optimizer.step()
            check_state(parallel.module, alone)


@case
def inside_a_compiled_model_without_a_break(rank, world):
    # Compiling takes seconds, so one number of ranks is enough.
    if world > 2:
        return
    split = SPLITS[world]["uneven"]
    plain, synced = layers(4, 4)
    rest = nn.Conv2d(2, 4, 3).double(), nn.ReLU(inplace=True)
    # Every rank needs the same weights.
    for parameter in rest[0].parameters():
        dist.broadcast(parameter.detach(), 0)
    alone, ranked = nn.Sequential(rest[0], plain, rest[1]), nn.Sequential(copy.deepcopy(rest[0]), synced, rest[1])
    compiled = torch.compile(ranked, backend="aot_eager", fullgraph=True)
    for seed in range(2):
        whole = random(sum(split), 2, 5, 5, seed=seed)
        expected, found = alone(whole), compiled(own(whole, split, rank))
        check(found.detach(), own(expected, split, rank))
        expected.pow(2).sum().backward()
        found.pow(2).sum().backward()
    for ours_, theirs in zip(ranked.parameters(), alone.parameters()):
        check(summed(ours_.grad), theirs.grad)
    check_state(ranked, alone)


def run_rank(rank, world, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )
    results = dict.fromkeys(CASES, "not reached")
    for name, function in CASES.items():
        try:
            function(rank, world)
            results[name] = None
        except BaseException:
            results[name] = traceback.format_exc()
        with open(f"{folder}/{rank}.json", "w") as file:
            json.dump({**results, "errors": errors}, file)
        # After a failure, ranks are not at the same place.
        dist.barrier()
    dist.destroy_process_group()
    # See `RANKS` in test_semantics.py.
    os._exit(0)


@pytest.fixture(scope="module", params=[2, 3], ids=["2 ranks", "3 ranks"])
def ranks(request, tmp_path_factory):
    """The results of all cases, by rank."""
    world, folder = request.param, tmp_path_factory.mktemp("ranks")
    context = multiprocessing.spawn(run_rank, args=(world, str(folder)), nprocs=world, join=False)
    deadline = time.monotonic() + 4 * TIMEOUT
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < deadline, "the ranks hang"
    except ProcessException as error:
        # The results say which case failed.
        print(error)
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    results = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
    print(f"\n{world} ranks, largest relative errors:", *(each["errors"] for each in results))
    return results


@pytest.mark.parametrize("name", CASES)
def test_on_several_ranks(ranks, name):
    for rank, results in enumerate(ranks):
        assert results[name] is None, f"rank {rank}:\n{results[name]}"


def test_checks_fail_for_nan():
    with pytest.raises(AssertionError):
        check(torch.tensor([1.0, torch.nan]), torch.ones(2))


def test_it_is_built_printed_and_saved_as_pytorch_s():
    mine, theirs = (inspect.signature(kind.__init__).parameters for kind in (ours.SyncBatchNorm, nn.SyncBatchNorm))
    assert list(mine)[: len(theirs)] == list(theirs)
    assert all(mine[name].default == parameter.default for name, parameter in theirs.items())
    for options in [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None, "eps": 1e-3}]:
        theirs, mine = nn.SyncBatchNorm(4, **options), ours.SyncBatchNorm(4, **options)
        assert repr(mine) == repr(theirs)
        assert list(mine.state_dict()) == list(theirs.state_dict())
        assert mine.state_dict()._metadata == theirs.state_dict()._metadata
        mine.load_state_dict(theirs.state_dict())
        theirs.load_state_dict(mine.state_dict())
        assert vars(mine).keys() == vars(theirs).keys()
    assert ours.SyncBatchNorm(4, 1e-3, 0.2, True, True, None, "cpu", torch.float64).weight.dtype == torch.float64


def test_without_ranks_it_is_batch_norm_to_the_last_bit():
    for options in [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}]:
        plain, mine = nn.BatchNorm2d(3, **options), ours.SyncBatchNorm(3, **options)
        for seed in range(3):
            x = random(4, 3, 5, 5, seed=seed, dtype=torch.float32)
            assert torch.equal(plain(x), mine(x))
        assert torch.equal(plain.eval()(x), mine.eval()(x))
        assert all(torch.equal(*pair) for pair in zip(mine.state_dict().values(), plain.state_dict().values()))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        ours.SyncBatchNorm(3)(torch.randn(1, 3))


def test_tensors_elsewhere_go_to_pytorch_s_own_forward():
    y = ours.SyncBatchNorm(3, device="meta")(torch.empty(2, 3, 4, 4, device="meta"))
    assert y.device.type == "meta" and y.shape == (2, 3, 4, 4)


def test_conversion_keeps_everything_but_the_class():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared = nn.BatchNorm2d(4)
            layers = [nn.BatchNorm1d(3), nn.BatchNorm3d(3, affine=False), nn.SyncBatchNorm(3), self.shared]
            self.parts = nn.ModuleList(layers)
            self.other = nn.Sequential(nn.Linear(2, 2), nn.GroupNorm(1, 2), nn.InstanceNorm2d(3))

    model = Wrapper()
    called = []
    handle = model.shared.register_forward_hook(lambda layer, inputs, output: called.append(layer))
    model.shared.register_load_state_dict_pre_hook(lambda layer, *rest: called.append(layer))
    model.shared.weight.requires_grad_(False)
    model.shared.note = "mine"
    model.parts[0].eval()
    before = dict(model.named_modules(remove_duplicate=False))
    tensors = {name: id(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    flags = [(name, layer.training) for name, layer in model.named_modules()]
    group = object()
    assert ours.convert_sync_batchnorm(model, group) is model
    assert dict(model.named_modules(remove_duplicate=False)) == before
    assert {name: id(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]} == tensors
    assert [(name, layer.training) for name, layer in model.named_modules()] == flags
    assert all(type(layer) is ours.SyncBatchNorm and layer.process_group is group for layer in model.parts)
    assert model.shared is model.parts[3] and model.shared.note == "mine" and not model.shared.weight.requires_grad
    assert [type(layer) for layer in model.other] == [nn.Linear, nn.GroupNorm, nn.InstanceNorm2d]
    model.shared(torch.randn(2, 4, 3, 3))
    model.load_state_dict(model.state_dict())
    assert called == [model.shared] * 3, "the hooks, the second for each of its names"
    handle.remove()
    model.shared(torch.randn(2, 4, 3, 3))
    assert len(called) == 3
    # Again, by the class, and back to the default group.
    assert ours.SyncBatchNorm.convert_sync_batchnorm(model) is model and model.shared.process_group is None
    for same in (copy.deepcopy(model.shared), pickle.loads(pickle.dumps(model.parts[0]))):
        assert type(same) is ours.SyncBatchNorm
    layer = nn.BatchNorm2d(3)
    assert ours.convert_sync_batchnorm(layer) is layer and type(layer) is ours.SyncBatchNorm


def test_layers_that_do_more_than_batch_norm_are_left_with_a_warning():
    class WithActivation(nn.BatchNorm2d):
        def forward(self, x):
            return super().forward(x).relu()

    class Renamed(nn.BatchNorm2d):
        pass

    parametrized = nn.utils.parametrizations.weight_norm(nn.BatchNorm2d(3), dim=None)
    model = nn.Sequential(WithActivation(3), Renamed(3), parametrized)
    with pytest.warns(UserWarning) as warned:
        ours.convert_sync_batchnorm(model)
    assert ["WithActivation" in str(warned[0].message), len(warned)] == [True, 2]
    assert type(model[0]) is WithActivation and type(model[1]) is ours.SyncBatchNorm and model[2] is parametrized
    with pytest.raises(ValueError, match="run the model once"):
        ours.convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm2d()))
