"""convoke's models in PyTorch, layer by layer."""

import torch
from torch import nn
from torch.nn import functional as F


def conv_bn(channels, width, kernel=3, stride=1, padding=None, relu=True):
    padding = kernel // 2 if padding is None else padding
    layers = [nn.Conv2d(channels, width, kernel, stride, padding, bias=False), nn.BatchNorm2d(width)]
    return nn.Sequential(*layers, *([nn.ReLU()] if relu else []))


def mnist_cnn():
    """The network of PyTorch's tutorial "Fusing Convolution and Batch Norm using Custom Function", in separate layers."""
    return nn.Sequential(
        conv_bn(1, 32, padding=0),
        conv_bn(32, 64, padding=0),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(9216, 128),
        nn.Dropout(0.5),
        nn.ReLU(),
        nn.Linear(128, 10),
        nn.LogSoftmax(1),
    )


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, channels, width, stride):
        super().__init__()
        self.path = nn.Sequential(conv_bn(channels, width, 3, stride), conv_bn(width, width, relu=False))
        same = stride == 1 and channels == width
        self.shortcut = nn.Identity() if same else conv_bn(channels, width, 1, stride, relu=False)

    def forward(self, x):
        return F.relu(self.path(x) + self.shortcut(x))


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, channels, width, stride):
        super().__init__()
        self.path = nn.Sequential(
            conv_bn(channels, width, 1), conv_bn(width, width, 3, stride), conv_bn(width, 4 * width, 1, relu=False)
        )
        same = stride == 1 and channels == 4 * width
        self.shortcut = nn.Identity() if same else conv_bn(channels, 4 * width, 1, stride, relu=False)

    def forward(self, x):
        return F.relu(self.path(x) + self.shortcut(x))


def residual(stem, block, channels, widths, counts, classes):
    stages = []
    for stage, (width, count) in enumerate(zip(widths, counts)):
        for index in range(count):
            stages.append(block(channels, width, 2 if stage > 0 and index == 0 else 1))
            channels = width * block.expansion
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes), nn.LogSoftmax(1)]
    model = nn.Sequential(stem, *stages, *head)
    # As torchvision's ResNets start, and convoke's.
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return model


def resnet20():
    return residual(conv_bn(3, 16), BasicBlock, 16, [16, 32, 64], [3, 3, 3], 10)


def resnet50():
    stem = nn.Sequential(conv_bn(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1))
    return residual(stem, Bottleneck, 64, [64, 128, 256, 512], [3, 4, 6, 3], 1000)


class Segnet(nn.Module):
    """A U-Net with bilinear upsampling."""

    def __init__(self, channels=3, classes=11):
        super().__init__()
        first, second, third, deepest = 16, 32, 64, 128

        def level(channels, width):
            return nn.Sequential(conv_bn(channels, width), conv_bn(width, width))

        self.down = nn.ModuleList([level(channels, first), level(first, second), level(second, third)])
        self.bottleneck = level(third, deepest)
        self.up = nn.ModuleList([level(deepest + third, third), level(third + second, second), level(second + first, first)])
        self.classify = nn.Conv2d(first, classes, 1)

    def forward(self, x):
        skipped = []
        for level in self.down:
            skipped.append(level(x))
            x = F.max_pool2d(skipped[-1], 2)
        x = self.bottleneck(x)
        for level in self.up:
            x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
            x = level(torch.cat([x, skipped.pop()], 1))
        return F.log_softmax(self.classify(x), 1)


def parts(model):
    """What users checkpoint: each block of a residual network, each level of the U-Net, each convolution of a plain network."""
    if isinstance(model, Segnet):
        return [*model.down, model.bottleneck, *model.up]
    return [part for part in model if isinstance(part, (BasicBlock, Bottleneck, nn.Sequential))]


def adadelta(parameters):
    return torch.optim.Adadelta(parameters, lr=1.0)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True)


# Model, shape of an image, classes, whether pixels have labels, optimizer.
MODELS = {
    "mnist-cnn": (mnist_cnn, (1, 28, 28), 10, False, adadelta),
    "resnet20": (resnet20, (3, 32, 32), 10, False, sgd),
    "resnet50": (resnet50, (3, 224, 224), 1000, False, sgd),
    "segnet": (Segnet, (3, 120, 160), 11, True, sgd),
}
