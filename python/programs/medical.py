"""MONAI's networks for images and for volumes."""

from __future__ import annotations

from typing import Callable

import torch
from torch.nn import functional as F

from common import images, masks, plain, program


def dice(dtype: torch.dtype, axes: int, size: int) -> Callable[..., torch.Tensor]:
    def loss_of(model: torch.nn.Module, number: int) -> torch.Tensor:
        from monai.losses import DiceCELoss

        wanted = masks(number, 2, size, 3, axes)[:, None]
        result = model(images(number, 2, size, dtype, channels=1, axes=axes))
        return DiceCELoss(to_onehot_y=True, softmax=True)(result, wanted)

    return loss_of


@program("monai")
def monai_unet(dtype):
    from monai.networks.nets import UNet

    model = UNet(2, 1, 3, channels=(8, 16, 32), strides=(2, 2), num_res_units=2, dropout=0.1)
    return model.to(dtype), plain(dice(dtype, 2, 64))


@program("monai")
def monai_basic_unet(dtype):
    from monai.networks.nets import BasicUNet

    return BasicUNet(2, 1, 3, features=(8, 8, 16, 32, 32, 8)).to(dtype), plain(dice(dtype, 2, 64))


@program("monai", quick=True)
def monai_unet_3d(dtype):
    from monai.networks.nets import UNet

    model = UNet(3, 1, 3, channels=(8, 16, 32), strides=(2, 2), num_res_units=1, norm="BATCH")
    return model.to(dtype), plain(dice(dtype, 3, 24))


@program("monai", steps=4)
def monai_segresnet_3d(dtype):
    from monai.networks.nets import SegResNet

    return SegResNet(3, 8, 1, 3, dropout_prob=0.2).to(dtype), plain(dice(dtype, 3, 32))


@program("monai", steps=4)
def monai_dynunet_3d(dtype):
    """A network with results of several depths, which count less the smaller they are."""
    from monai.networks.nets import DynUNet

    model = DynUNet(
        3, 1, 3, [3, 3, 3, 3], [1, 2, 2, 2], [2, 2, 2], filters=[8, 16, 24, 32], deep_supervision=True, deep_supr_num=2
    )

    def loss_of(model, number):
        wanted = masks(number, 2, 32, 3, 3)
        results = model(images(number, 2, 32, dtype, channels=1, axes=3)).unbind(1)
        return sum(0.5**depth * F.cross_entropy(result, wanted) for depth, result in enumerate(results))

    return model.to(dtype), plain(loss_of)


@program("monai")
def monai_dynunet(dtype):
    from monai.networks.nets import DynUNet

    model = DynUNet(2, 1, 3, [3, 3, 3, 3], [1, 2, 2, 2], [2, 2, 2], filters=[8, 16, 24, 32], res_block=True)
    return model.to(dtype), plain(dice(dtype, 2, 64))
