#!/usr/bin/env python3
"""Writes models of torchvision, and a U-Net, with random weights and what they compute, for crates/nn/tests/it/ready.rs.

    python tools/make_ready_models.py FOLDER

For each model: NAME.safetensors, the state dict; for some NAME.pth as well; and NAME.reference.safetensors, `input` and
`logits` in double precision. Needs torch, torchvision and safetensors.
"""

import os
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from safetensors.torch import save_file

CLASSES = 10
# The height and width of the input.
MODELS = {
    "resnet18": (64, 64),
    "resnet34": (64, 64),
    "resnet50": (64, 64),
    "resnet101": (64, 64),
    "resnext50_32x4d": (64, 64),
    "wide_resnet50_2": (64, 64),
    "vgg11_bn": (64, 64),
    "vgg16_bn": (64, 64),
    "mobilenet_v2": (64, 64),
    "mobilenet_v3_small": (64, 64),
    "mobilenet_v3_large": (64, 64),
    "densenet121": (64, 64),
    "efficientnet_b0": (64, 64),
    "efficientnet_b1": (64, 64),
    "efficientnet_b2": (64, 64),
    "efficientnet_b3": (64, 64),
    "regnet_y_400mf": (64, 64),
    "convnext_tiny": (64, 64),
    "fcn_resnet50": (56, 75),
    "deeplabv3_resnet50": (56, 75),
    "unet": (56, 72),
}
OF_PIXELS = {"fcn_resnet50", "deeplabv3_resnet50"}
PICKLED = {"resnet18", "resnet50", "vgg16_bn", "mobilenet_v2", "densenet121"}


class DoubleConv(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        conv = lambda inputs: nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        unit = lambda inputs: [conv(inputs), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
        self.double_conv = nn.Sequential(*unit(inputs), *unit(outputs))

    def forward(self, x):
        return self.double_conv(x)


class Down(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.maxpool_conv = nn.Sequential(nn.MaxPool2d(2), DoubleConv(inputs, outputs))

    def forward(self, x):
        return self.maxpool_conv(x)


class Up(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.up = nn.ConvTranspose2d(inputs, inputs // 2, 2, stride=2)
        self.conv = DoubleConv(inputs, outputs)

    def forward(self, x, level):
        x = self.up(x)
        rows, columns = level.size(2) - x.size(2), level.size(3) - x.size(3)
        x = F.pad(x, [columns // 2, columns - columns // 2, rows // 2, rows - rows // 2])
        return self.conv(torch.cat([level, x], 1))


class Out(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x):
        return self.conv(x)


class UNet(nn.Module):
    """The classic U-Net, with the names of github.com/milesial/Pytorch-UNet."""

    def __init__(self, channels, classes):
        super().__init__()
        self.inc = DoubleConv(channels, 64)
        self.down1, self.down2 = Down(64, 128), Down(128, 256)
        self.down3, self.down4 = Down(256, 512), Down(512, 1024)
        self.up1, self.up2 = Up(1024, 512), Up(512, 256)
        self.up3, self.up4 = Up(256, 128), Up(128, 64)
        self.outc = Out(64, classes)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        x4 = self.down3(x3)
        x5 = self.down4(x4)
        return self.outc(self.up4(self.up3(self.up2(self.up1(x5, x4), x3), x2), x1))


def made(name):
    if name == "unet":
        return UNet(3, CLASSES)
    if name in OF_PIXELS:
        make = getattr(torchvision.models.segmentation, name)
        return make(weights=None, weights_backbone=None, num_classes=CLASSES, aux_loss=False)
    return getattr(torchvision.models, name)(weights=None, num_classes=CLASSES)


def randomize(model):
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.weight.data.uniform_(0.5, 1.5)
            part.bias.data.normal_(0, 0.3)
            part.running_mean.normal_(0, 0.3)
            part.running_var.uniform_(0.5, 1.5)
            part.num_batches_tracked.fill_(5)
        elif isinstance(part, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)):
            if part.bias is not None:
                part.bias.data.normal_(0, 0.1)
            if isinstance(part, nn.Linear):
                part.weight.data.normal_(0, part.weight.shape[1] ** -0.5)
        elif isinstance(part, nn.LayerNorm):
            part.weight.data.uniform_(0.5, 1.5)
            part.bias.data.normal_(0, 0.3)
        elif isinstance(part, torchvision.models.convnext.CNBlock):
            part.layer_scale.data.uniform_(0.1, 0.5)


def main(folder):
    os.makedirs(folder, exist_ok=True)
    for name, size in MODELS.items():
        torch.manual_seed(7)
        model = made(name)
        randomize(model)
        model.eval()
        path = os.path.join(folder, name)
        x = torch.randn(2, 3, *size)
        if name in PICKLED:
            torch.save(model.state_dict(), f"{path}.pth")
        save_file({key: value.contiguous() for key, value in model.state_dict().items()}, f"{path}.safetensors")
        with torch.no_grad():
            x = x.double()
            y = model.double()(x)
            y = y["out"] if name in OF_PIXELS else y
        save_file({"input": x, "logits": y.contiguous()}, f"{path}.reference.safetensors")
        print(f"{name}: logits up to {y.abs().max():.3g}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
