"""Networks of torchvision and segmentation_models_pytorch that give a class for each pixel."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch.nn import functional as F

from common import OF_HARDSIGMOID, images, masks, plain, program


def torchvision_model(name: str, dtype: torch.dtype) -> torch.nn.Module:
    import torchvision

    made = getattr(torchvision.models.segmentation, name)(
        weights=None, weights_backbone=None, num_classes=4, aux_loss=True
    )
    return made.to(dtype)


def of_torchvision(dtype: torch.dtype, sizes: tuple[int, ...] = (64, 96)) -> Callable[..., torch.Tensor]:
    """The loss of torchvision's reference training: the second head counts half."""

    def loss_of(model: torch.nn.Module, number: int) -> torch.Tensor:
        size = sizes[number % len(sizes)]
        result, wanted = model(images(number, 2, size, dtype)), masks(number, 2, size, 4)
        return F.cross_entropy(result["out"], wanted) + 0.5 * F.cross_entropy(result["aux"], wanted)

    return loss_of


@program("torchvision", precision=OF_HARDSIGMOID)
def deeplabv3_mobilenet(dtype):
    return torchvision_model("deeplabv3_mobilenet_v3_large", dtype), plain(of_torchvision(dtype))


@program("torchvision", steps=4)
def fcn_resnet50(dtype):
    return torchvision_model("fcn_resnet50", dtype), plain(of_torchvision(dtype, sizes=(64,)))


@program("torchvision", precision=OF_HARDSIGMOID)
def lraspp_mobilenet(dtype):
    import torchvision

    def loss_of(model, number):
        size = (64, 96)[number % 2]
        return F.cross_entropy(model(images(number, 2, size, dtype))["out"], masks(number, 2, size, 4))

    model = torchvision.models.segmentation.lraspp_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=4
    )
    return model.to(dtype), plain(loss_of)


def smp_model(name: str, dtype: torch.dtype, **options: Any) -> torch.nn.Module:
    import segmentation_models_pytorch as smp

    return getattr(smp, name)("resnet18", encoder_weights=None, classes=3, **options).to(dtype)


def dice(dtype: torch.dtype, sizes: tuple[int, ...] = (64, 96, 128)) -> Callable[..., torch.Tensor]:
    def loss_of(model: torch.nn.Module, number: int) -> torch.Tensor:
        import segmentation_models_pytorch as smp

        size = sizes[number % len(sizes)]
        result, wanted = model(images(number, 2, size, dtype)), masks(number, 2, size, 3)
        return smp.losses.DiceLoss("multiclass")(result, wanted) + F.cross_entropy(result, wanted)

    return loss_of


@program("segmentation_models_pytorch")
def smp_unet(dtype):
    return smp_model("Unet", dtype, decoder_attention_type="scse"), plain(dice(dtype))


@program("segmentation_models_pytorch")
def smp_fpn(dtype):
    return smp_model("FPN", dtype), plain(dice(dtype))


@program("segmentation_models_pytorch")
def smp_deeplabv3plus(dtype):
    return smp_model("DeepLabV3Plus", dtype), plain(dice(dtype))


@program("segmentation_models_pytorch")
def smp_unetplusplus(dtype):
    return smp_model("UnetPlusPlus", dtype), plain(dice(dtype, sizes=(64,)))


@program("segmentation_models_pytorch")
def smp_unet_with_classes(dtype):
    """A U-Net with a second head that classifies the image."""
    model = smp_model("Unet", dtype, aux_params={"classes": 5, "dropout": 0.3})

    def loss_of(model, number):
        result, found = model(images(number, 2, 64, dtype))
        return F.cross_entropy(result, masks(number, 2, 64, 3)) + F.cross_entropy(found, torch.tensor([1, 3]))

    return model, plain(loss_of)
