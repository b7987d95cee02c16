"""kornia's augmentations, as layers of the model that is trained."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from common import classifying, images, labels, plain, program, resnet10


class Augmented(nn.Module):
    """Changes images at random before they go into a network, in training only."""

    def __init__(self, augmentations: list[nn.Module], net: nn.Module):
        super().__init__()
        self.augment = nn.Sequential(*augmentations)
        self.net = net

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.net(self.augment(batch) if self.training else batch)


@program("kornia", "torchvision")
def kornia_augmentations(dtype):
    from kornia import augmentation

    augmentations = [
        augmentation.RandomHorizontalFlip(p=0.5),
        augmentation.ColorJitter(0.2, 0.2, 0.2, 0.1, p=0.8),
        augmentation.RandomAffine(degrees=15, translate=(0.1, 0.1), scale=(0.9, 1.1), p=0.7),
    ]

    def loss_of(model, number):
        return F.cross_entropy(model(images(number, 4, 64, dtype).sigmoid()), labels(number, 4))

    return Augmented(augmentations, resnet10(dtype)).to(dtype), plain(loss_of)


@program("kornia", "torchvision")
def kornia_filters(dtype):
    """Blur and edges, which are convolutions with fixed weights for each channel."""
    from kornia import filters

    class Edges(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = resnet10(dtype)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.net(filters.sobel(filters.gaussian_blur2d(batch, (5, 5), (1.5, 1.5))))

    return Edges(), plain(classifying(dtype))
