"""timm's classifiers with what its training script does around them."""

from __future__ import annotations

from typing import Any, Callable

import torch

from common import OF_HARDSIGMOID, classifying, images, labels, plain, program, sgd


def timm_model(name: str, dtype: torch.dtype, **options: Any) -> torch.nn.Module:
    import timm

    return timm.create_model(name, pretrained=False, num_classes=10, **options).to(dtype)


def averaged(make_average: Callable[[torch.nn.Module], Any], dtype: torch.dtype) -> Callable[..., Any]:
    """`start` for a model of which an average is kept, and what the average says to a batch."""

    def start(model: torch.nn.Module) -> Callable[[int], Any]:
        optimizer, average, loss_of = sgd(model), make_average(model), classifying(dtype)

        def step(number: int) -> Any:
            optimizer.zero_grad()
            loss = loss_of(model, number)
            loss.backward()
            optimizer.step()
            average.update(model)
            with torch.no_grad():
                says = average.module(images(number + 50, 2, 64, dtype)).square().sum()
            return loss, says

        return step

    return start


@program("timm")
def timm_resnet_ema(dtype):
    from timm.utils import ModelEmaV3

    return timm_model("resnet18", dtype), averaged(lambda model: ModelEmaV3(model, decay=0.9, use_warmup=True), dtype)


@program("timm")
def timm_efficientnet_ema(dtype):
    """Paths and activations are dropped in training."""
    from timm.utils import ModelEmaV2

    model = timm_model("efficientnet_b0", dtype, drop_rate=0.2, drop_path_rate=0.2)
    return model, averaged(lambda model: ModelEmaV2(model, decay=0.9), dtype)


@program("timm", precision=OF_HARDSIGMOID)
def timm_mobilenetv3_mixup(dtype):
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy

    def loss_of(model, number):
        mix = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=10)
        batch, targets = mix(images(number, 4, 96, dtype), labels(number, 4))
        return SoftTargetCrossEntropy()(model(batch), targets.to(dtype))

    return timm_model("mobilenetv3_small_100", dtype), plain(loss_of)


@program("timm")
def timm_convnext_drop_path_schedule(dtype):
    """The share of paths that are dropped grows from step to step."""

    def start(model):
        optimizer, loss_of = torch.optim.AdamW(model.parameters(), 1e-4), classifying(dtype)
        paths = [module for module in model.modules() if type(module).__name__ == "DropPath"]

        def step(number):
            for place, path in enumerate(paths):
                path.drop_prob = 0.1 * number * place / len(paths) % 1
            optimizer.zero_grad()
            loss = loss_of(model, number)
            loss.backward()
            optimizer.step()
            return loss

        return step

    return timm_model("convnext_atto", dtype, drop_path_rate=0.1), start


def clipped(mode: str, value: float, dtype: torch.dtype) -> Callable[..., Any]:
    def start(model: torch.nn.Module) -> Callable[[int], torch.Tensor]:
        from timm.utils import dispatch_clip_grad

        optimizer, loss_of = sgd(model), classifying(dtype)

        def step(number: int) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, number)
            loss.backward()
            dispatch_clip_grad(model.parameters(), value, mode=mode)
            optimizer.step()
            return loss

        return step

    return start


@program("timm")
def timm_regnet_adaptive_clipping(dtype):
    return timm_model("regnety_002", dtype), clipped("agc", 0.02, dtype)


@program("timm")
def timm_densenet_clipping(dtype):
    return timm_model("densenet121", dtype), clipped("norm", 1.0, dtype)


@program("timm")
def timm_densenet_saving_memory(dtype):
    """Each dense layer is checkpointed."""
    return timm_model("densenet121", dtype, memory_efficient=True), plain(classifying(dtype))


@program("timm")
def timm_nfnet_adaptive_clipping(dtype):
    """Weights are standardized in each forward pass."""
    return timm_model("nf_resnet26", dtype), clipped("agc", 0.02, dtype)


@program("timm")
def timm_resnet_checkpointing(dtype):
    model = timm_model("resnet18", dtype)
    model.set_grad_checkpointing()
    return model, plain(classifying(dtype))


@program("timm", precision=OF_HARDSIGMOID)
def timm_features(dtype):
    """The features of several stages, as a list."""
    import timm

    model = timm.create_model("mobilenetv3_small_100", pretrained=False, features_only=True).to(dtype)

    def loss_of(model, number):
        return sum(feature.square().mean() for feature in model(images(number, 2, 64, dtype)))

    return model, plain(loss_of)


@program("timm")
def timm_optimizer_with_layer_decay(dtype):
    """Groups of parameters by depth, a schedule of the learning rate, and label smoothing."""

    def start(model):
        from timm.loss import LabelSmoothingCrossEntropy
        from timm.optim import create_optimizer_v2
        from timm.scheduler import CosineLRScheduler

        optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.7)
        schedule, loss_of = (
            CosineLRScheduler(optimizer, t_initial=10, warmup_t=2, warmup_lr_init=1e-5),
            LabelSmoothingCrossEntropy(),
        )

        def step(number):
            schedule.step(number)
            optimizer.zero_grad()
            loss = loss_of(model(images(number, 4, 64, dtype)), labels(number, 4))
            loss.backward()
            optimizer.step()
            return loss

        return step

    return timm_model("resnet18", dtype), start
