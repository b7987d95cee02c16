"""Operations on volumes N x C x D x H x W as operations on images: on the slices of a volume, and along its depth.

Volumes run in channels-last. There slices, and columns along the depth, lie in memory as images do, so naming them so,
and volumes again, costs nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Callable, Sequence, TypeAlias

if TYPE_CHECKING:
    from ._operators import Emitter, Value

#: Emits an operation on images, whose result has a shape.
OnImages: TypeAlias = "Callable[[Value, Sequence[int]], Value]"


def _images(to: Emitter, x: Value, batch: int, height: int, width: int) -> Value:
    """The elements of volumes as so many images of this size, with the same channels."""
    channels = x.shape[1]
    last = to.node({"Transpose": {"order": [0, 2, 3, 4, 1]}}, [x], (x.shape[0], *x.shape[2:], channels))
    flat = to.reshaped(last, (batch, height, width, channels))
    return to.node({"Transpose": {"order": [0, 3, 1, 2]}}, [flat], (batch, channels, height, width))


def _volumes(to: Emitter, images: Value, shape: Sequence[int]) -> Value:
    """Images as volumes of this shape."""
    batch, channels, height, width = images.shape
    last = to.node({"Transpose": {"order": [0, 2, 3, 1]}}, [images], (batch, height, width, channels))
    volumes = to.reshaped(last, (shape[0], *shape[2:], channels))
    return to.node({"Transpose": {"order": [0, 4, 1, 2, 3]}}, [volumes], shape)


def _of_slices(to: Emitter, op: OnImages, x: Value, height: int, width: int) -> Value:
    """An operation on slices, which get this size."""
    batch, channels, depth = x.shape[:3]
    slices = _images(to, x, batch * depth, *x.shape[3:])
    return _volumes(to, op(slices, (batch * depth, channels, height, width)), (batch, channels, depth, height, width))


def _along_depth(to: Emitter, op: OnImages, x: Value, depth: int) -> Value:
    """An operation on images whose height is the depth, which it changes, and whose width is height times width."""
    batch, channels, old, height, width = x.shape
    columns = _images(to, x, batch, old, height * width)
    return _volumes(to, op(columns, (batch, channels, depth, height * width)), (batch, channels, depth, height, width))


def pool(to: Emitter, kind: str, op: dict[str, Any], x: Value, shape: Sequence[int]) -> Value:
    """A pooling. Its numbers are for depth, height and width.

    Of equal values, PyTorch chooses the first one in the order of the axes, and of several NaNs the last one. With the
    depth at the end, both steps together choose the same.
    """

    def part(axes: Sequence[int], ones: int) -> OnImages:
        parts = {name: [op[name][axis] for axis in axes] + [1] * ones for name in ("kernel", "strides", "dilations")}
        pads = [op["pads"]["Explicit"][axis] for axis in axes] + [0] * ones
        node = {kind: {**op, **parts, "pads": {"Explicit": pads * 2}}}
        return lambda images, shape: to.node(node, [images], shape)

    return _along_depth(to, part([0], 1), _of_slices(to, part([1, 2], 0), x, *shape[3:]), shape[2])


def adaptive_average(to: Emitter, x: Value, shape: Sequence[int]) -> Value:
    """Means of as many windows as the output has elements."""

    def means(images: Value, shape: Sequence[int]) -> Value:
        return to.node({"AdaptiveAveragePool": list(shape[2:])}, [images], shape)

    # Along the depth, what is added up lies in long runs.
    return _of_slices(to, means, _along_depth(to, means, x, shape[2]), *shape[3:])


def resize(to: Emitter, op: dict[str, Any], x: Value, scales: Sequence[float] | None, shape: Sequence[int]) -> Value:
    """A resize by factors of depth, height and width, or else to the sizes of a shape."""

    def part(*factors: float) -> OnImages:
        def resized(images: Value, shape: Sequence[int]) -> Value:
            by = to.numbers([1.0, 1.0, *factors]) if factors else None
            return to.node({"Resize": op}, [images, None, by, None if factors else to.integers(shape)], shape)

        return resized

    deep, wide = (part(), part()) if scales is None else (part(scales[0], 1.0), part(*scales[1:]))
    # The step that enlarges most comes last.
    if shape[2] * math.prod(x.shape[3:]) < x.shape[2] * math.prod(shape[3:]):
        return _of_slices(to, wide, _along_depth(to, deep, x, shape[2]), *shape[3:])
    return _along_depth(to, deep, _of_slices(to, wide, x, *shape[3:]), shape[2])
