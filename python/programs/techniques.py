"""Ways to train that people write themselves, around torchvision's networks."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from common import OF_HARDSIGMOID, classifying, images, labels, plain, program, resnet10, sgd


def features_of(resnet: nn.Module) -> nn.Sequential:
    """The part of one of torchvision's residual networks before its pooling."""
    return nn.Sequential(*list(resnet.children())[:-2])


# --- Modes and sizes that change ------------------------------------------------------------------------------------


@program("torchvision", quick=True)
def resnet18_with_changes(dtype):
    """Something changes each step: number and size of the images, frozen layers, mode, memory format, a hook."""
    import torchvision

    def start(model):
        optimizer, seen = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9), []

        def step(number):
            turn, hook, says = number % 6, None, torch.tensor(0.0)
            count, size = (4, 3, 2, 4, 4, 4)[turn], (64, 96, 64, 64, 64, 64)[turn]
            batch = images(number, count, size, dtype)
            model.layer1.requires_grad_(turn != 2)
            model.train(turn != 3)
            if turn == 4:
                batch = batch.to(memory_format=torch.channels_last)
            if turn == 5:
                hook = model.layer2.register_forward_hook(
                    lambda module, args, result: seen.append(result.detach().sum())
                )
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch), labels(number, count))
            loss.backward()
            optimizer.step()
            if hook is not None:
                hook.remove()
            if turn == 3:
                with torch.no_grad():
                    says = model(batch[:2]).square().sum()
            return loss, says, sum(seen, torch.tensor(0.0))

        return step

    return torchvision.models.resnet18(num_classes=10).to(dtype), start


@program("torchvision", precision=OF_HARDSIGMOID)
def evaluation_between(dtype):
    """A model that is evaluated after each step, and once calibrates its batch norms."""
    import torchvision

    def start(model):
        optimizer, loss_of = sgd(model, 1e-3), classifying(dtype)

        def step(number):
            model.train()
            optimizer.zero_grad()
            loss = loss_of(model, number)
            loss.backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                without = loss_of(model, number + 50)
            with torch.inference_mode():
                inferred = loss_of(model, number + 51)
            if number == 2:
                model.train()
                with torch.no_grad():
                    model(images(99, 6, 64, dtype))
            return loss, without, inferred

        return step

    return torchvision.models.mobilenet_v3_small(num_classes=10).to(dtype), start


@program("torchvision", steps=10)
def many_sizes(dtype):
    """Another size of images in each step, of a network that takes any."""

    def loss_of(model, number):
        height, width, count = 32 + 8 * (number % 7), 40 + 8 * (number % 5), 1 + number % 4
        batch = images(number, count, 96, dtype)[:, :, :height, :width]
        return F.cross_entropy(model(batch), labels(number, count))

    return resnet10(dtype), plain(loss_of)


# --- Recomputing ----------------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Computes the stages of a residual network again in backward."""

    def __init__(self, resnet: nn.Module, reentrant: bool):
        super().__init__()
        self.resnet, self.reentrant = resnet, reentrant
        self.dropout = nn.Dropout(0.1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        net = self.resnet
        x = net.maxpool(net.relu(net.bn1(net.conv1(batch))))
        for stage in (net.layer1, net.layer2, net.layer3, net.layer4):
            x = checkpoint(lambda x, stage=stage: self.dropout(stage(x)), x, use_reentrant=self.reentrant)
        return net.fc(net.avgpool(x).flatten(1))


@program("torchvision", quick=True)
def checkpointing(dtype):
    return Checkpointed(resnet10(dtype), False), plain(classifying(dtype))


@program("torchvision")
def checkpointing_reentrant(dtype):
    return Checkpointed(resnet10(dtype), True), plain(classifying(dtype))


@program("torchvision")
def checkpointing_outside(dtype):
    """The optimized model itself is what is computed again in backward."""

    def loss_of(model, number):
        result = checkpoint(model, images(number, 4, 64, dtype), use_reentrant=False)
        return F.cross_entropy(result, labels(number, 4))

    return resnet10(dtype), plain(loss_of)


@program("torchvision")
def checkpointing_sequential(dtype):
    class Segments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features, self.head = features_of(resnet10(dtype)), nn.Linear(512, 10, dtype=dtype)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.head(checkpoint_sequential(self.features, 2, batch, use_reentrant=False).mean((2, 3)))

    return Segments(), plain(classifying(dtype))


# --- Optimizers and what stands around them -------------------------------------------------------------------------


@program("torchvision")
def gradient_accumulation(dtype):
    """Three batches of different sizes for each step."""

    def start(model):
        optimizer = sgd(model)

        def step(number):
            optimizer.zero_grad()
            losses = []
            for part, count in enumerate((4, 4, 2)):
                seed = 10 * number + part
                loss = F.cross_entropy(model(images(seed, count, 64, dtype)), labels(seed, count)) / 3
                loss.backward()
                losses.append(loss.detach())
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
            optimizer.step()
            return tuple(losses)

        return step

    return resnet10(dtype), start


@program("torchvision")
def stochastic_weight_averaging(dtype):
    """The average's batch norms are set by `update_bn` after the last step of each three."""

    def start(model):
        from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

        optimizer, loss_of = sgd(model), classifying(dtype)
        average, schedule = AveragedModel(model), SWALR(optimizer, swa_lr=0.01, anneal_epochs=2)

        def step(number):
            optimizer.zero_grad()
            loss = loss_of(model, number)
            loss.backward()
            optimizer.step()
            average.update_parameters(model)
            schedule.step()
            if number % 3 == 2:
                update_bn([images(seed, 4, 64, dtype) for seed in range(2)], average)
            average.eval()
            with torch.no_grad():
                says = average(images(number + 50, 2, 64, dtype)).square().sum()
            return loss, says

        return step

    return resnet10(dtype), start


@program("torchvision")
def ema_of_averaged_model(dtype):
    """An exponential average of parameters and buffers, which itself is called."""

    def start(model):
        from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

        optimizer, loss_of = torch.optim.AdamW(model.parameters(), 1e-3), classifying(dtype)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)

        def step(number):
            optimizer.zero_grad()
            loss = loss_of(model, number)
            loss.backward()
            optimizer.step()
            average.update_parameters(model)
            with torch.no_grad():
                return loss, loss_of(average, number + 50)

        return step

    return resnet10(dtype), start


@program("torchvision")
def ema_by_deepcopy(dtype):
    """A copy of the model after its first step follows it, and is optimized by nobody."""

    def start(model):
        optimizer, loss_of, followers = sgd(model), classifying(dtype), []

        def step(number):
            optimizer.zero_grad()
            loss = loss_of(model, number)
            loss.backward()
            optimizer.step()
            if not followers:
                followers.append(copy.deepcopy(model).eval().requires_grad_(False))
            with torch.no_grad():
                for kept, current in zip(followers[0].state_dict().values(), model.state_dict().values()):
                    if kept.is_floating_point():
                        kept.lerp_(current, 0.3)
                    else:
                        kept.copy_(current)
            return loss, loss_of(followers[0], number + 50)

        return step

    return resnet10(dtype), start


@program("torchvision", steps=4)
def lbfgs(dtype):
    """An optimizer that calls the model as often as it likes."""

    def start(model):
        optimizer = torch.optim.LBFGS(
            model.parameters(), lr=0.1, max_iter=3, history_size=4, line_search_fn="strong_wolfe"
        )
        loss_of = classifying(dtype)

        def step(number):
            def closure():
                optimizer.zero_grad()
                loss = loss_of(model, 0)
                loss.backward()
                return loss

            return optimizer.step(closure)

        return step

    return resnet10(dtype), start


@program("torchvision")
def sharpness_aware_minimization(dtype):
    """Two gradients for each step: the second at parameters moved along the first. Statistics are kept once."""

    def start(model):
        optimizer, loss_of = sgd(model), classifying(dtype)
        norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]

        def step(number):
            optimizer.zero_grad()
            loss = loss_of(model, number)
            loss.backward()
            parameters = list(model.parameters())
            with torch.no_grad():
                norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
                moves = [parameter.grad * (0.05 / (norm + 1e-12)) for parameter in parameters]
                torch._foreach_add_(parameters, moves)
            momenta = [norm.momentum for norm in norms]
            for norm in norms:
                norm.momentum = 0.0
            optimizer.zero_grad()
            second = loss_of(model, number)
            second.backward()
            for norm, momentum in zip(norms, momenta):
                norm.momentum = momentum
            with torch.no_grad():
                torch._foreach_sub_(parameters, moves)
            optimizer.step()
            return loss, second

        return step

    return resnet10(dtype), start


@program("torchvision")
def step_in_backward(dtype):
    """Each parameter is changed as soon as its gradient is complete."""

    def start(model):
        optimizers = {parameter: torch.optim.SGD([parameter], 0.02) for parameter in model.parameters()}

        def change(parameter):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in optimizers:
            parameter.register_post_accumulate_grad_hook(change)
        loss_of = classifying(dtype)

        def step(number):
            loss = loss_of(model, number)
            loss.backward()
            return loss

        return step

    return resnet10(dtype), start


@program("torchvision", dtype=torch.float32)
def autocast_bfloat16(dtype):
    def loss_of(model, number):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = model(images(number, 4, 64, torch.float32))
            return F.cross_entropy(result, labels(number, 4))

    return resnet10(torch.float32), plain(loss_of)


@program("torchvision")
def grad_scaler_disabled(dtype):
    """What a script for GPUs does on a CPU: autocast and a scaler that are both off."""

    def start(model):
        optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", enabled=False)

        def step(number):
            optimizer.zero_grad(set_to_none=False)
            with torch.autocast("cpu", enabled=False):
                loss = F.cross_entropy(model(images(number, 4, 64, dtype)), labels(number, 4))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            return loss

        return step

    return resnet10(dtype), start


@program("torchvision", dtype=torch.float32)
def half_of_the_model_in_bfloat16(dtype):
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = features_of(resnet10(torch.float32))
            self.first, self.last = layers[:6], layers[6:].to(torch.bfloat16)
            self.head = nn.Linear(512, 10)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            x = self.last(self.first(batch).to(torch.bfloat16))
            return self.head(x.float().mean((2, 3)))

    return Mixed(), plain(classifying(torch.float32), lambda model: sgd(model, 1e-3))


@program("torchvision")
def progressive_unfreezing(dtype):
    """The head is trained first; the layers before it come in one by one, and go again."""

    def start(model):
        optimizer, loss_of = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9), classifying(dtype)
        stages = [model.fc, model.layer4, model.layer3, model.layer2, model.layer1]

        def step(number):
            model.requires_grad_(False)
            for stage in stages[: 1 + number % 5]:
                stage.requires_grad_(True)
            optimizer.zero_grad()
            loss = loss_of(model, number)
            loss.backward()
            optimizer.step()
            return loss

        return step

    return resnet10(dtype), start


@program("torchvision")
def frozen_batch_norms(dtype):
    """A model in training whose batch norms are in evaluation, and whose stem is frozen."""

    def start(model):
        model.conv1.requires_grad_(False)
        optimizer, loss_of = sgd(model), classifying(dtype)

        def step(number):
            model.train()
            for module in model.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()
            optimizer.zero_grad()
            loss = loss_of(model, number)
            loss.backward()
            optimizer.step()
            return loss

        return step

    return resnet10(dtype), start


# --- Several passes through networks --------------------------------------------------------------------------------


class Distilled(nn.Module):
    """Gives the student's results and the loss against a teacher, which runs without gradients."""

    def __init__(self, student: nn.Module, teacher: nn.Module):
        super().__init__()
        self.student, self.teacher = student, teacher.requires_grad_(False)

    def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            wanted = F.softmax(self.teacher(batch) / 2, 1)
        found = self.student(batch)
        return found, F.kl_div(F.log_softmax(found / 2, 1), wanted, reduction="batchmean")


@program("torchvision")
def distillation(dtype):
    import torchvision

    teacher = torchvision.models.resnet18(num_classes=10).to(dtype)

    def start(model):
        optimizer = sgd(model.student)

        def step(number):
            model.train()
            model.teacher.eval()
            optimizer.zero_grad()
            found, distance = model(images(number, 4, 64, dtype))
            loss = F.cross_entropy(found, labels(number, 4)) + 4 * distance
            loss.backward()
            optimizer.step()
            return loss

        return step

    return Distilled(resnet10(dtype), teacher), start


@program("torchvision")
def siamese(dtype):
    """One encoder for two images."""

    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = resnet10(dtype)

        def forward(self, one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.encoder(one), self.encoder(other)

    def loss_of(model, number):
        one, other = model(images(number, 4, 64, dtype), other=images(number + 50, 4, 64, dtype))
        same = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=dtype)
        return F.cosine_embedding_loss(one, other, same, margin=0.2)

    return Siamese(), plain(loss_of)


class Momentum(nn.Module):
    """BYOL: a predictor on top of an encoder says what another one gives, which follows the first in each forward."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.online = resnet10(dtype, 32)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.predictor = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32)).to(dtype)

    @torch.no_grad()
    def follow(self) -> None:
        for kept, current in zip(self.target.parameters(), self.online.parameters()):
            kept.mul_(0.9).add_(current, alpha=0.1)

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        self.follow()
        with torch.no_grad():
            wanted = [self.target(batch) for batch in (other, one)]
        found = [self.predictor(self.online(batch)) for batch in (one, other)]
        return sum(2 - 2 * F.cosine_similarity(one, other, dim=1).mean() for one, other in zip(found, wanted))


@program("torchvision")
def byol(dtype):
    def start(model):
        optimizer = sgd(model)

        def step(number):
            optimizer.zero_grad()
            loss = model(images(number, 4, 64, dtype), images(number + 50, 4, 64, dtype))
            loss.backward()
            optimizer.step()
            return loss

        return step

    return Momentum(dtype), start


class Queue(nn.Module):
    """MoCo: keys of an encoder that follows another one, and a queue of keys that is written to in each forward."""

    def __init__(self, dtype: torch.dtype, keys: int = 32):
        super().__init__()
        self.query = resnet10(dtype, 16)
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(16, keys, dtype=dtype), dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def enqueue(self, keys: torch.Tensor) -> None:
        place, count = int(self.place), keys.shape[0]
        self.queue[:, place : place + count] = keys.T
        self.place[0] = (place + count) % self.queue.shape[1]

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        queries = F.normalize(self.query(one), dim=1)
        with torch.no_grad():
            for kept, current in zip(self.key.parameters(), self.query.parameters()):
                kept.data = kept.data * 0.9 + current.data * 0.1
            order = torch.randperm(other.shape[0])
            keys = F.normalize(self.key(other[order]), dim=1)[torch.argsort(order)]
        positive = torch.einsum("nc,nc->n", queries, keys)[:, None]
        negative = torch.einsum("nc,ck->nk", queries, self.queue.clone().detach())
        self.enqueue(keys)
        return torch.cat([positive, negative], 1) / 0.1, torch.zeros(one.shape[0], dtype=torch.long)


@program("torchvision")
def moco(dtype):
    def loss_of(model, number):
        return F.cross_entropy(*model(images(number, 4, 64, dtype), images(number + 50, 4, 64, dtype)))

    return Queue(dtype), plain(loss_of)


# --- Looking inside -------------------------------------------------------------------------------------------------


@program("torchvision")
def grad_cam(dtype):
    """Maps of what counted for a class, from a feature that a hook keeps."""

    def start(model):
        kept = {}
        model.layer4.register_forward_hook(lambda module, args, result: kept.update(feature=result))
        optimizer = sgd(model)

        def step(number):
            optimizer.zero_grad()
            result = model(images(number, 4, 64, dtype))
            scores = result.gather(1, labels(number, 4)[:, None]).sum()
            (gradient,) = torch.autograd.grad(scores, kept["feature"], retain_graph=True)
            maps = F.relu((gradient.mean((2, 3), keepdim=True) * kept["feature"]).sum(1))
            loss = F.cross_entropy(result, labels(number, 4)) + 0.1 * maps.mean()
            loss.backward()
            optimizer.step()
            return loss, maps.sum()

        return step

    return resnet10(dtype), start


class Retaining(nn.Module):
    """Keeps its features, with their gradient."""

    def __init__(self, resnet: nn.Module):
        super().__init__()
        self.features, self.head = features_of(resnet), resnet.fc

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.kept = self.features(batch)
        if self.kept.requires_grad:
            self.kept.retain_grad()
        return self.head(self.kept.mean((2, 3)))


@program("torchvision")
def retain_grad_inside(dtype):
    def start(model):
        optimizer, loss_of = sgd(model), classifying(dtype)

        def step(number):
            optimizer.zero_grad()
            loss = loss_of(model, number)
            loss.backward()
            optimizer.step()
            return loss, model.kept.grad.square().sum()

        return step

    return Retaining(resnet10(dtype)), start


@program("torchvision")
def retain_grad_outside(dtype):
    """A feature that a hook keeps gets its gradient from a loss on it and from the layers behind it."""

    def start(model):
        kept = {}
        model.layer3.register_forward_hook(lambda module, args, result: kept.update(feature=result))
        optimizer = sgd(model)

        def step(number):
            optimizer.zero_grad()
            result = model(images(number, 4, 64, dtype))
            kept["feature"].retain_grad()
            loss = F.cross_entropy(result, labels(number, 4)) + 0.1 * kept["feature"].square().mean()
            loss.backward()
            optimizer.step()
            return loss, kept["feature"].grad.square().sum()

        return step

    return resnet10(dtype), start


@program("torchvision")
def backward_hooks(dtype):
    """Gradients are scaled on their way through a stage, and written down at another."""

    def start(model):
        norms = []
        model.layer3.register_full_backward_hook(lambda module, taken, given: (taken[0] * 0.5,))
        model.layer1.register_full_backward_hook(lambda module, taken, given: norms.append(given[0].norm()))
        model.fc.weight.register_hook(lambda gradient: gradient * 2)
        optimizer, loss_of = sgd(model), classifying(dtype)

        def step(number):
            optimizer.zero_grad()
            loss = loss_of(model, number)
            loss.backward()
            optimizer.step()
            return loss, norms.pop()

        return step

    return resnet10(dtype), start


@program("torchvision")
def adversarial_examples(dtype):
    """Images are changed along the gradient of the loss before the model is trained on them."""

    def start(model):
        optimizer = sgd(model)

        def step(number):
            batch, wanted = images(number, 4, 64, dtype), labels(number, 4)
            model.eval()
            attacked = batch.clone()
            for _ in range(2):
                attacked = attacked.detach().requires_grad_()
                (gradient,) = torch.autograd.grad(F.cross_entropy(model(attacked), wanted), attacked)
                attacked = torch.clamp(attacked + 0.01 * gradient.sign(), batch - 0.02, batch + 0.02)
            model.train()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(attacked.detach()), wanted)
            loss.backward()
            optimizer.step()
            return loss, gradient.norm()

        return step

    return resnet10(dtype), start


# --- Networks of other shapes ---------------------------------------------------------------------------------------


@program("torchvision")
def branches_on_data(dtype):
    """What is computed depends on values, by `if` and by a loop."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = features_of(resnet10(dtype))
            self.stem, self.one, self.other = layers[:5], layers[5:], copy.deepcopy(layers[5:])
            self.again = nn.Conv2d(512, 512, 3, padding=1, groups=32, dtype=dtype)
            self.head = nn.Linear(512, 10, dtype=dtype)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            x = self.stem(batch)
            x = self.one(x) if batch.mean() > 0 else self.other(x)
            for _ in range(1 + int(batch.abs().sum()) % 2):
                x = F.relu(self.again(x))
            return self.head(x.mean((2, 3)))

    return Branching(), plain(classifying(dtype))


@program("torchvision")
def lstm_after_cnn(dtype):
    """The frames of a video one by one, and then in their order."""

    class Video(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frames, self.lstm, self.head = (
                resnet10(dtype, 32),
                nn.LSTM(32, 24, batch_first=True),
                nn.Linear(24, 10),
            )

        def forward(self, video: torch.Tensor) -> torch.Tensor:
            count, length = video.shape[:2]
            features = self.frames(video.flatten(0, 1)).reshape(count, length, -1)
            return self.head(self.lstm(features)[0][:, -1])

    def loss_of(model, number):
        video = images(number, 6, 64, dtype).unflatten(0, (2, 3))
        return F.cross_entropy(model(video), labels(number, 2))

    return Video().to(dtype), plain(loss_of)


@program("torchvision")
def attention_after_cnn(dtype):
    """Positions of a feature map are the words of a transformer."""

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features, self.project = features_of(resnet10(dtype)), nn.Conv2d(512, 32, 1)
            layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
            self.encoder, self.word = nn.TransformerEncoder(layer, 2), nn.Parameter(torch.zeros(1, 1, 32))
            self.head = nn.Linear(32, 10)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            x = self.project(self.features(batch)).flatten(2).transpose(1, 2)
            x = torch.cat([self.word.expand(len(x), -1, -1), x], 1)
            return self.head(self.encoder(x)[:, 0])

    return Attending().to(dtype), plain(classifying(dtype, size=96))


class Rounded(torch.autograd.Function):
    """Rounds to steps of 1/16; its gradient is that of what it rounds."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return (x * 16).round() / 16

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@program("torchvision")
def straight_through(dtype):
    """Activations are rounded before each ReLU, which writes to what it gets."""

    class Quantized(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(Rounded.apply(x), inplace=True)

    model = resnet10(dtype)
    for module in list(model.modules()):
        if hasattr(module, "relu"):
            module.relu = Quantized()
    return model, plain(classifying(dtype))


@dataclasses.dataclass
class Output:
    """A model's results by name."""

    classes: torch.Tensor
    features: list[torch.Tensor]
    count: int
    nothing: None = None


@program("torchvision")
def inputs_and_outputs_of_many_kinds(dtype):
    """A dictionary with a tuple goes in; a dataclass with a list, a number and None comes out."""

    class Structured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = features_of(resnet10(dtype))
            self.first, self.last, self.head = layers[:6], layers[6:], nn.Linear(516, 10, dtype=dtype)

        def forward(self, inputs: dict[str, Any], *, scale: float = 1.0) -> Output:
            picture, (first, second) = inputs["picture"], inputs["numbers"]
            middle = self.first(picture * scale)
            last = self.last(middle)
            joined = torch.cat([last.mean((2, 3)), first, second], 1)
            return Output(self.head(joined), [middle, last], picture.shape[0])

    def loss_of(model, number):
        numbers = images(number, 4, 2, dtype, channels=1).flatten(1).split(2, 1)
        result = model({"picture": images(number, 4, 64, dtype), "numbers": numbers}, scale=0.5)
        return (
            F.cross_entropy(result.classes, labels(number, 4))
            + sum(x.square().mean() for x in result.features) / result.count
        )

    return Structured(), plain(loss_of)


@program("torchvision")
def functional_call_and_grad(dtype):
    """Gradients by `torch.func`, for parameters that are given to the model."""

    def start(model):
        model.train()
        moving = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}

        def step(number):
            parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
            buffers = dict(model.named_buffers())

            def loss_of(parameters):
                result = torch.func.functional_call(model, (parameters, buffers), (images(number, 4, 64, dtype),))
                return F.cross_entropy(result, labels(number, 4))

            gradients, loss = torch.func.grad_and_value(loss_of)(parameters)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter -= 0.02 * moving[name].mul_(0.9).add_(gradients[name])
            return loss

        return step

    # Group norms: torch.func allows no change of buffers in a function that it differentiates.
    import torchvision

    norm = lambda channels: nn.GroupNorm(8, channels)
    block = torchvision.models.resnet.BasicBlock
    return torchvision.models.resnet.ResNet(block, [1, 1, 1, 1], num_classes=10, norm_layer=norm).to(dtype), start


@program("torchvision")
def functional_call(dtype):
    """Parameters that a step of gradient descent inside of the loss has changed, as in MAML of the first order."""

    def start(model):
        optimizer = sgd(model)

        def step(number):
            parameters = dict(model.named_parameters())
            call = lambda parameters, seed: F.cross_entropy(
                torch.func.functional_call(model, parameters, (images(seed, 4, 64, dtype),)), labels(seed, 4)
            )
            inner = call(parameters, number)
            gradients = torch.autograd.grad(inner, list(parameters.values()))
            changed = {name: value - 0.01 * gradient for (name, value), gradient in zip(parameters.items(), gradients)}
            optimizer.zero_grad()
            loss = call(changed, number + 50)
            loss.backward()
            optimizer.step()
            return inner, loss

        return step

    return resnet10(dtype), start


@program("torchvision")
def shared_and_dilated_convolutions(dtype):
    """One layer that is applied three times, at three dilations of its weights, and results that are added."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.norm = features_of(resnet10(dtype))[:6], nn.BatchNorm2d(128, dtype=dtype)
            self.weight = nn.Parameter(0.03 * torch.randn(128, 128, 3, 3, dtype=dtype))
            self.head = nn.Linear(128, 10, dtype=dtype)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            x = self.stem(batch)
            for dilation in (1, 2, 3):
                x = x + F.relu(self.norm(F.conv2d(x, self.weight, padding=dilation, dilation=dilation)))
            return self.head(x.mean((2, 3)))

    return Shared(), plain(classifying(dtype))
