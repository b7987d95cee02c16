"""What the programs share: their list, synthetic batches, and a plain training step.

A program is a function that takes the type to compute in and gives two things:

- the model, in that type; with several networks, a `torch.nn.ModuleDict` of them;
- `start(model)`, which makes the optimizer and gives `step(number)`, a training step that returns its loss: one number,
  or a tuple of all numbers that ought to agree.

A program whose library has a training loop of its own gives `train(model, steps, done)` instead, which calls
`done(loss)` after each step.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any, Callable

import torch
from torch.nn import functional as F

#: The files with programs.
GROUPS = [
    "techniques",
    "detection",
    "segmentation",
    "medical",
    "generative",
    "augmentation",
    "training_loops",
    "timm_models",
]
#: How many threads PyTorch and convoke use.
THREADS = 2


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of the suite. Its name is that of its function, its group that of its file."""

    make: Callable[[torch.dtype], tuple[torch.nn.Module, Callable[..., Any]]]
    #: The packages that it needs, beside PyTorch.
    needs: tuple[str, ...]
    #: The type in which both runs are compared.
    dtype: torch.dtype
    #: The number of steps that are compared.
    steps: int
    #: The type of whose precision results are, if not of `dtype`.
    precision: torch.dtype | None
    #: The names of the submodules that are optimized; "" is the model itself.
    parts: tuple[str, ...]
    #: Whether its second result is `train` and not `start`.
    own_loop: bool
    #: Whether CI runs it.
    quick: bool

    @property
    def name(self) -> str:
        return self.make.__name__

    @property
    def group(self) -> str:
        return self.make.__module__


#: The precision of networks with F.hardsigmoid: in its gradient, PyTorch has 1/6 in float32, whatever the type.
OF_HARDSIGMOID = torch.float32

#: All programs by name, in the order in which they are defined.
PROGRAMS: dict[str, Program] = {}


def load() -> dict[str, Any]:
    """All programs by name."""
    for group in GROUPS:
        importlib.import_module(group)
    return PROGRAMS


def program(
    *needs: str,
    dtype: torch.dtype = torch.float64,
    steps: int = 6,
    precision: torch.dtype | None = None,
    parts: tuple[str, ...] = ("",),
    own_loop: bool = False,
    quick: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds a function to the list of programs."""

    def add(make: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[make.__name__] = Program(make, needs, dtype, steps, precision, parts, own_loop, quick)
        return make

    return add


def generator(number: int) -> torch.Generator:
    """Random numbers of a batch, which are the same in each run."""
    return torch.Generator().manual_seed(1000 + number)


def images(number: int, count: int, size: int, dtype: torch.dtype, channels: int = 3, axes: int = 2) -> torch.Tensor:
    """The images of a batch, or volumes where there are three axes."""
    return torch.randn(count, channels, *[size] * axes, generator=generator(number), dtype=torch.float64).to(dtype)


def labels(number: int, count: int, classes: int = 10) -> torch.Tensor:
    """A class for each image of a batch."""
    return torch.randint(classes, (count,), generator=generator(number))


def masks(number: int, count: int, size: int, classes: int, axes: int = 2) -> torch.Tensor:
    """A class for each pixel of a batch."""
    return torch.randint(classes, (count, *[size] * axes), generator=generator(number))


def sgd(model: torch.nn.Module, lr: float = 0.02) -> torch.optim.Optimizer:
    return torch.optim.SGD((parameter for parameter in model.parameters() if parameter.requires_grad), lr, momentum=0.9)


def plain(
    loss_of: Callable[[torch.nn.Module, int], torch.Tensor], make_optimizer: Callable[..., Any] = sgd
) -> Callable[..., Any]:
    """`start` for a program whose step is forward, backward and one step of an optimizer."""

    def start(model: torch.nn.Module) -> Callable[[int], torch.Tensor]:
        optimizer = make_optimizer(model)

        def step(number: int) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, number)
            loss.backward()
            optimizer.step()
            return loss

        return step

    return start


def classifying(dtype: torch.dtype, count: int = 4, size: int = 64) -> Callable[[torch.nn.Module, int], torch.Tensor]:
    """The loss of a classifier of ten classes on a batch."""

    def loss_of(model: torch.nn.Module, number: int) -> torch.Tensor:
        return F.cross_entropy(model(images(number, count, size, dtype)), labels(number, count))

    return loss_of


def resnet10(dtype: torch.dtype, classes: int = 10) -> torch.nn.Module:
    """The smallest of torchvision's residual networks: one block in each of four stages."""
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=classes).to(dtype)
