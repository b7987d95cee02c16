"""Detectors of ultralytics and torchvision, with their own losses; the size of the images changes each step."""

from __future__ import annotations

from typing import Any, Callable

import torch

from common import OF_HARDSIGMOID, generator, images, labels, masks, plain, program

#: Sizes that come in turn, as in training at several scales.
SIZES = (96, 128, 64, 160)


def boxes(number: int, count: int) -> torch.Tensor:
    """Boxes as x0, y0, x1, y1 between 0 and 1."""
    corners = torch.rand(count, 2, generator=generator(number), dtype=torch.float64) * 0.5
    return torch.cat(
        [corners, corners + 0.2 + 0.3 * torch.rand(count, 2, generator=generator(-number), dtype=torch.float64)], 1
    )


# --- ultralytics ----------------------------------------------------------------------------------------------------


def yolo(kind: str, file: str, dtype: torch.dtype) -> torch.nn.Module:
    from ultralytics.cfg import get_cfg
    from ultralytics.nn import tasks

    model = getattr(tasks, kind)(file, nc=4, verbose=False)
    model.args = get_cfg()
    return model.to(dtype).train()


def yolo_batch(number: int, dtype: torch.dtype, count: int = 2, each: int = 3) -> dict[str, torch.Tensor]:
    size = SIZES[number % len(SIZES)]
    corners = boxes(number, count * each)
    lengths = corners[:, 2:] - corners[:, :2]
    return {
        "img": images(number, count, size, dtype).sigmoid(),
        "cls": labels(number, count * each, 4)[:, None].to(dtype),
        "bboxes": torch.cat([corners[:, :2] + lengths / 2, lengths], 1).to(dtype),
        "batch_idx": torch.arange(count).repeat_interleave(each).to(dtype),
        # With masks that overlap, a pixel has the number of its object, from 1; 0 is the background.
        "masks": masks(number, count, size // 4, each + 1).to(dtype),
    }


def yolo_start(dtype: torch.dtype) -> Callable[..., Any]:
    """What ultralytics' trainer does: the model gives a batch's loss, gradients are clipped, and an average is kept."""

    def start(model: torch.nn.Module) -> Callable[[int], Any]:
        from ultralytics.utils.torch_utils import ModelEMA

        for name, parameter in model.named_parameters():
            parameter.requires_grad = ".dfl" not in name
        optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9, nesterov=True)
        average = ModelEMA(model)

        def step(number: int) -> Any:
            loss, parts = model(yolo_batch(number, dtype))
            loss.sum().backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=10.0)
            optimizer.step()
            optimizer.zero_grad()
            average.update(model)
            averaged = sum(value.double().abs().sum() for value in average.ema.state_dict().values())
            return loss.sum(), norm, averaged

        return step

    return start


@program("ultralytics", dtype=torch.float32, quick=True)
def yolov8n_detect(dtype):
    return yolo("DetectionModel", "yolov8n.yaml", dtype), yolo_start(dtype)


@program("ultralytics", dtype=torch.float32)
def yolo11n_detect(dtype):
    return yolo("DetectionModel", "yolo11n.yaml", dtype), yolo_start(dtype)


@program("ultralytics", dtype=torch.float32)
def yolov8n_segment(dtype):
    return yolo("SegmentationModel", "yolov8n-seg.yaml", dtype), yolo_start(dtype)


@program("ultralytics", dtype=torch.float32)
def yolo11n_segment(dtype):
    return yolo("SegmentationModel", "yolo11n-seg.yaml", dtype), yolo_start(dtype)


@program("ultralytics")
def yolov8n_classify(dtype):
    def loss_of(model, number):
        size = SIZES[number % len(SIZES)]
        loss, _ = model({"img": images(number, 4, size, dtype), "cls": labels(number, 4, 4)})
        return loss

    return yolo("ClassificationModel", "yolov8n-cls.yaml", dtype), plain(loss_of)


@program("ultralytics")
def yolo_with_predictions_between(dtype):
    """A classifier of ultralytics that predicts between its steps, and keeps what it says."""
    model = yolo("ClassificationModel", "yolo11n-cls.yaml", dtype)

    def start(model):
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

        def step(number):
            model.train()
            optimizer.zero_grad()
            loss, _ = model({"img": images(number, 4, 64, dtype), "cls": labels(number, 4, 4)})
            loss.backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                found = model(images(number + 50, 2, 96, dtype))
            return loss, found[0].square().sum()

        return step

    return model, start


# --- torchvision ----------------------------------------------------------------------------------------------------


def detecting(
    dtype: torch.dtype, with_masks: bool = False, count: int = 2, each: int = 2
) -> Callable[..., torch.Tensor]:
    """The sum of a torchvision detector's losses. Heights and widths of the images differ."""

    def loss_of(model: torch.nn.Module, number: int) -> torch.Tensor:
        pictures, targets = [], []
        for place in range(count):
            height, width = SIZES[(number + place) % len(SIZES)], SIZES[(number + 2 * place + 1) % len(SIZES)]
            seed = 10 * number + place
            pictures.append(torch.rand(3, height, width, generator=generator(seed), dtype=torch.float64).to(dtype))
            scale = torch.tensor([width, height, width, height], dtype=torch.float64)
            target = {"boxes": (boxes(seed, each) * scale).to(dtype), "labels": 1 + labels(seed, each, 3)}
            if with_masks:
                drawn = torch.zeros(each, height, width, dtype=torch.uint8)
                for mask, (x0, y0, x1, y1) in zip(drawn, target["boxes"].int().tolist()):
                    mask[y0:y1, x0:x1] = 1
                target["masks"] = drawn
            targets.append(target)
        return sum(model(pictures, targets).values())

    return loss_of


def detector(name: str, dtype: torch.dtype, **options: Any) -> torch.nn.Module:
    import torchvision

    if "rcnn" in name:
        # Fewer candidates than usual, as each costs as much as a small image.
        options |= {"box_batch_size_per_image": 16, "rpn_batch_size_per_image": 32, "rpn_post_nms_top_n_train": 50}
    made = getattr(torchvision.models.detection, name)(weights=None, weights_backbone=None, num_classes=4, **options)
    return made.to(dtype).train()


def slow_sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        (parameter for parameter in model.parameters() if parameter.requires_grad), 1e-3, momentum=0.9
    )


@program("torchvision", steps=4, precision=OF_HARDSIGMOID)
def fasterrcnn_mobilenet_320(dtype):
    model = detector("fasterrcnn_mobilenet_v3_large_320_fpn", dtype, min_size=96, max_size=160)
    return model, plain(detecting(dtype), slow_sgd)


@program("torchvision", steps=4, precision=OF_HARDSIGMOID)
def ssdlite320_mobilenet(dtype):
    return detector("ssdlite320_mobilenet_v3_large", dtype), plain(detecting(dtype), slow_sgd)


@program("torchvision", steps=4)
def retinanet_resnet50(dtype):
    return detector("retinanet_resnet50_fpn", dtype, min_size=64, max_size=128), plain(detecting(dtype), slow_sgd)


@program("torchvision", steps=4)
def maskrcnn_resnet50(dtype):
    model = detector("maskrcnn_resnet50_fpn", dtype, min_size=64, max_size=128)
    return model, plain(detecting(dtype, with_masks=True), slow_sgd)


@program("torchvision", steps=4, parts=("backbone",), precision=OF_HARDSIGMOID)
def fasterrcnn_backbone_only(dtype):
    """A detector of which only the backbone is optimized."""
    model = detector("fasterrcnn_mobilenet_v3_large_320_fpn", dtype, min_size=96, max_size=160)
    return model, plain(detecting(dtype), slow_sgd)
