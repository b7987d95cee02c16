#!/usr/bin/env python3
"""Writes ONNX models of one random node each, with random inputs and what onnxruntime computes, as ONNX's own tests of operators.

    python3 tools/make_random_nodes.py --count 2000 target/nodes
    CONVOKE_ONNX_NODE_TESTS=target/nodes cargo test --test it -- every_node --nocapture

What onnxruntime refuses is left out, and where it deviates from ONNX's text: padding that makes outputs of a size (SAME) takes no
account of a max pooling's dilation, and makes none where a transposed convolution's windows have gaps between them. Needs onnx,
onnxruntime and numpy.
"""

import argparse
import collections
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

OPSETS = [7, 9, 10, 11, 13, 17, 18, 19, 21, 22]


class Case:
    """A node: attributes, and its inputs with their values. Inputs that files usually store are initializers."""

    def __init__(self, operator, inputs, stored=(), **attributes):
        self.operator, self.inputs, self.stored, self.attributes = operator, inputs, stored, attributes


def floats(rng, *shape):
    return rng.uniform(-2, 2, shape).astype(np.float32)


def maybe(rng, attributes, share=0.5):
    """Some of the attributes."""
    return {name: value for name, value in attributes.items() if rng.random() < share}


def spatial(rng, least=1, most=9):
    """Sizes of one or two axes; mostly two."""
    return [int(size) for size in rng.integers(least, most, 1 if rng.random() < 0.2 else 2)]


def numbers(rng, count, least, most):
    return [int(number) for number in rng.integers(least, most, count)]


def ends(rng, axes, most):
    """Explicit padding or one of the ways to say it."""
    kind = rng.choice(["none", "pads", "SAME_UPPER", "SAME_LOWER", "VALID"], p=[0.2, 0.4, 0.15, 0.15, 0.1])
    if kind == "none":
        return {}
    return {"pads": numbers(rng, 2 * axes, 0, most)} if kind == "pads" else {"auto_pad": str(kind)}


def pool(rng, opset, operator, **attributes):
    size = spatial(rng, 2, 12)
    kernel = numbers(rng, len(size), 1, 5)
    attributes |= maybe(rng, {"strides": numbers(rng, len(size), 1, 5)}, 0.8) | ends(rng, len(size), 3)
    if opset >= 10:
        attributes |= maybe(rng, {"ceil_mode": 1})
    return Case(operator, [floats(rng, *numbers(rng, 2, 1, 4), *size)], kernel_shape=kernel, **attributes)


def average_pool(rng, opset):
    return pool(rng, opset, "AveragePool", **maybe(rng, {"count_include_pad": 1}))


def max_pool(rng, opset):
    case = pool(rng, opset, "MaxPool")
    if opset >= 10 and not case.attributes.get("auto_pad", "").startswith("SAME") and rng.random() < 0.3:
        case.attributes["dilations"] = numbers(rng, len(case.attributes["kernel_shape"]), 1, 3)
    return case


def conv(rng, opset):
    size, groups = spatial(rng, 3, 10), int(rng.integers(1, 3))
    channels, filters = groups * int(rng.integers(1, 4)), groups * int(rng.integers(1, 4))
    kernel = numbers(rng, len(size), 1, 4)
    inputs = [floats(rng, int(rng.integers(1, 3)), channels, *size), floats(rng, filters, channels // groups, *kernel)]
    inputs += [floats(rng, filters)] if rng.random() < 0.5 else []
    attributes = {"strides": numbers(rng, len(size), 1, 5), "dilations": numbers(rng, len(size), 1, 3), "kernel_shape": kernel}
    return Case("Conv", inputs, (1, 2), group=groups, **maybe(rng, attributes, 0.6), **ends(rng, len(size), 3))


def conv_transpose(rng, opset):
    size, groups = spatial(rng, 2, 7), int(rng.integers(1, 3))
    channels, filters = groups * int(rng.integers(1, 4)), int(rng.integers(1, 4))
    kernel, strides, dilations = (numbers(rng, len(size), 1, most) for most in (4, 4, 3))
    inputs = [floats(rng, int(rng.integers(1, 3)), channels, *size), floats(rng, channels, filters, *kernel)]
    inputs += [floats(rng, filters * groups)] if rng.random() < 0.5 else []
    attributes = {"strides": strides, "dilations": dilations, "group": groups}
    if rng.random() < 0.4:
        attributes["output_padding"] = [int(rng.integers(0, max(pair))) for pair in zip(strides, dilations)]
    padding = ends(rng, len(size), 2)
    gaps = any((taps - 1) * dilation + 1 < stride for taps, stride, dilation in zip(kernel, strides, dilations))
    if gaps and padding.get("auto_pad", "").startswith("SAME"):
        padding = {}
    return Case("ConvTranspose", inputs, (1, 2), **attributes, **padding)


def resize(rng, opset):
    x = floats(rng, 1, 2, *numbers(rng, 2, 1, 8))
    scales = rng.choice([0.5, 0.6, 1.0, 1.3, 1.5, 2.0, 2.6, 3.0, 0.3333], 2).astype(np.float32)
    scales = np.concatenate([np.ones(2, np.float32), scales])
    if opset < 11:
        mode = str(rng.choice(["nearest", "linear"]))
        return Case("Upsample" if opset < 10 else "Resize", [x, scales], (1,), mode=mode)
    mode = str(rng.choice(["nearest", "linear", "cubic"]))
    ways = ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"] + (["half_pixel_symmetric"] if opset >= 19 else [])
    attributes = {"mode": mode, "coordinate_transformation_mode": str(rng.choice(ways))}
    if mode == "nearest":
        roundings = ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"]
        attributes |= maybe(rng, {"nearest_mode": str(rng.choice(roundings))}, 0.8)
    empty = np.zeros(0, np.float32)
    if rng.random() < 0.5:
        return Case("Resize", [x, empty, scales], (1, 2), **attributes)
    sizes = np.array([*x.shape[:2], *numbers(rng, 2, 1, 12)], np.int64)
    return Case("Resize", [x, empty, empty, sizes], (1, 2, 3), **attributes)


def pad(rng, opset):
    x = floats(rng, *numbers(rng, 4, 2, 6))
    modes = ["constant", "reflect", "edge"] + (["wrap"] if opset >= 19 else [])
    mode = str(rng.choice(modes))
    pads = [0, 0, *numbers(rng, 2, 0, 2), 0, 0, *numbers(rng, 2, -1 if mode == "constant" else 0, 2)]
    if opset < 11:
        return Case("Pad", [x], mode=mode, pads=pads, **({"value": 1.5} if mode == "constant" else {}))
    inputs = [x, np.array(pads, np.int64)]
    return Case("Pad", inputs + ([np.float32(1.5).reshape(())] if mode == "constant" else []), (1, 2), mode=mode)


def reduction(rng, opset):
    operator = str(rng.choice(["ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSumExp"]))
    rank = int(rng.integers(1, 5))
    axes = sorted({int(axis) for axis in rng.integers(-rank, rank, rng.integers(1, rank + 1))}, key=lambda axis: axis % rank)
    axes = [axis for number, axis in enumerate(axes) if axis % rank not in {other % rank for other in axes[:number]}]
    x, keep = floats(rng, *numbers(rng, rank, 1, 5)), maybe(rng, {"keepdims": int(rng.integers(0, 2))})
    as_input = opset >= (13 if operator == "ReduceSum" else 18)
    if as_input:
        return Case(operator, [x, np.array(axes, np.int64)], (1,), **keep)
    return Case(operator, [x], axes=axes, **keep)


def softmax(rng, opset):
    rank = int(rng.integers(1, 5))
    operator = str(rng.choice(["Softmax", "LogSoftmax"]))
    return Case(operator, [floats(rng, *numbers(rng, rank, 1, 6))], **maybe(rng, {"axis": int(rng.integers(0, rank))}))


def gemm(rng, opset):
    rows, columns, inner = numbers(rng, 3, 1, 6)
    first, second = maybe(rng, {"transA": 1}), maybe(rng, {"transB": 1})
    a = floats(rng, *((inner, rows) if first else (rows, inner)))
    b = floats(rng, *((columns, inner) if second else (inner, columns)))
    c = floats(rng, *[(rows, columns), (columns,), (rows, 1), (1, columns), (1,)][rng.integers(0, 5)])
    inputs = [a, b] if opset >= 11 and rng.random() < 0.3 else [a, b, c]
    return Case("Gemm", inputs, (1, 2), **first, **second, **maybe(rng, {"alpha": 0.5, "beta": -1.5}, 0.3))


def matmul(rng, opset):
    rows, inner, columns = numbers(rng, 3, 1, 5)
    shapes = [((rows, inner), (inner, columns)), ((inner,), (inner, columns)), ((rows, inner), (inner,))]
    shapes += [((2, rows, inner), (inner, columns)), ((2, 1, rows, inner), (3, inner, columns))]
    first, second = shapes[rng.integers(0, len(shapes))]
    return Case("MatMul", [floats(rng, *first), floats(rng, *second)])


def two(rng, opset):
    operator = str(rng.choice(["Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "PRelu"]))
    shape = numbers(rng, int(rng.integers(1, 5)), 1, 5)
    other = [1 if rng.random() < 0.4 else size for size in shape][int(rng.integers(0, len(shape))):]
    x, y = floats(rng, *shape), floats(rng, *other)
    return Case(operator, [np.abs(x) if operator == "Pow" else x, y], (1,) if operator == "PRelu" else ())


def pointwise(rng, opset):
    choices = {
        "Relu": {}, "Sigmoid": {}, "Tanh": {}, "Exp": {}, "Neg": {}, "Abs": {}, "Reciprocal": {}, "Floor": {}, "Ceil": {}, "Erf": {},
        "Softplus": {}, "Softsign": {}, "LeakyRelu": {"alpha": 0.3}, "Elu": {"alpha": 1.5}, "Selu": {}, "HardSigmoid": {"alpha": 0.3},
        "HardSwish": {}, "Mish": {}, "Celu": {"alpha": 0.7}, "ThresholdedRelu": {"alpha": 0.4}, "Round": {}, "Sign": {}, "Gelu": {},
        "Sin": {}, "Cos": {}, "Sqrt": {}, "Log": {}, "Identity": {},
    }
    operator = str(rng.choice(list(choices)))
    x = floats(rng, *numbers(rng, int(rng.integers(1, 5)), 1, 6))
    return Case(operator, [np.abs(x) if operator in ("Sqrt", "Log") else x], **maybe(rng, choices[operator]))


def normalization(rng, opset):
    kind = str(rng.choice(["BatchNormalization", "InstanceNormalization", "LRN", "LpNormalization", "LayerNormalization", "GroupNormalization"]))
    channels = 2 * int(rng.integers(1, 4))
    x = floats(rng, 2, channels, *spatial(rng, 1, 6))
    if kind == "LRN":
        return Case(kind, [x], size=int(rng.choice([1, 3, 5])), **maybe(rng, {"alpha": 0.1, "beta": 0.5, "bias": 2.0}))
    if kind == "LpNormalization":
        return Case(kind, [x], **maybe(rng, {"axis": 1, "p": int(rng.integers(1, 3))}))
    if kind == "LayerNormalization":
        axis = int(rng.integers(1, x.ndim))
        return Case(kind, [x, floats(rng, *x.shape[axis:]), floats(rng, *x.shape[axis:])], (1, 2), axis=axis)
    if kind == "GroupNormalization":
        shape = channels if opset >= 21 else 2
        return Case(kind, [x, floats(rng, shape), floats(rng, shape)], (1, 2), num_groups=2)
    inputs = [x, floats(rng, channels), floats(rng, channels)]
    if kind == "BatchNormalization":
        inputs += [floats(rng, channels), np.abs(floats(rng, channels)) + np.float32(0.1)]
    return Case(kind, inputs, (1, 2, 3, 4), **maybe(rng, {"epsilon": 1e-3}))


def slicing(rng, opset):
    shape = numbers(rng, int(rng.integers(1, 5)), 1, 7)
    axes = [int(axis) for axis in rng.permutation(len(shape))[: rng.integers(1, len(shape) + 1)]]
    starts, stops = numbers(rng, len(axes), -8, 8), numbers(rng, len(axes), -8, 8)
    if opset < 10:
        return Case("Slice", [floats(rng, *shape)], axes=axes, starts=starts, ends=stops)
    steps = [int(step) for step in rng.choice([-2, -1, 1, 2, 3], len(axes))]
    inputs = [floats(rng, *shape)] + [np.array(part, np.int64) for part in (starts, stops, axes, steps)]
    return Case("Slice", inputs, (1, 2, 3, 4))


def gather(rng, opset):
    shape = numbers(rng, int(rng.integers(1, 4)), 1, 6)
    axis = int(rng.integers(-len(shape), len(shape)))
    size = shape[axis]
    indices = rng.integers(-size if opset >= 11 else 0, size, numbers(rng, int(rng.integers(0, 3)), 1, 4)).astype(np.int64)
    return Case("Gather", [floats(rng, *shape), np.asarray(indices)], (1,), axis=axis)


def gather_nd(rng, opset):
    shape = numbers(rng, int(rng.integers(1, 5)), 1, 5)
    batch = int(rng.integers(0, len(shape))) if opset >= 12 else 0
    depth = int(rng.integers(1, len(shape) - batch + 1))
    outer = [*shape[:batch], *numbers(rng, int(rng.integers(0, 3)), 1, 4)]
    places = [rng.integers(-size, size, outer) for size in shape[batch : batch + depth]]
    indices = np.stack([np.asarray(place) for place in places], -1).astype(np.int64)
    return Case("GatherND", [floats(rng, *shape), indices], (1,), **({"batch_dims": batch} if batch else {}))


def einsum(rng, opset):
    """Up to three operands over some of five axes, each of which has one size; outputs of some of the axes."""
    sizes = dict(zip("abcde", numbers(rng, 5, 1, 4)))
    terms = ["".join(str(axis) for axis in rng.permutation(list(sizes))[: rng.integers(0, 5)]) for _ in range(rng.integers(1, 4))]
    used = sorted(set("".join(terms)))
    output = "".join(str(axis) for axis in rng.permutation(used)[: rng.integers(0, len(used) + 1)]) if used else ""
    equation = ",".join(terms) + (f"->{output}" if rng.random() < 0.9 else "")
    return Case("Einsum", [floats(rng, *(sizes[axis] for axis in term)) for term in terms], equation=equation)


def shapes(rng, opset):
    shape = numbers(rng, int(rng.integers(1, 5)), 1, 5)
    x, kind = floats(rng, *shape), str(rng.choice(["Transpose", "Flatten", "Reshape", "Expand", "Tile", "Concat", "DepthToSpace", "SpaceToDepth", "Trilu"]))
    if kind == "Transpose":
        return Case(kind, [x], **maybe(rng, {"perm": [int(axis) for axis in rng.permutation(len(shape))]}))
    if kind == "Flatten":
        return Case(kind, [x], **maybe(rng, {"axis": int(rng.integers(0, len(shape) + 1))}))
    if kind == "Reshape":
        return Case(kind, [x, np.array([[-1], [0, -1], [1, -1, 1], [-1, shape[-1]]][rng.integers(0, 4)], np.int64)], (1,))
    if kind == "Expand":
        wide = [int(rng.integers(1, 4)) if size == 1 else size for size in shape]
        return Case(kind, [x, np.array(([2] if rng.random() < 0.3 else []) + wide, np.int64)], (1,))
    if kind == "Tile":
        return Case(kind, [x, np.array(numbers(rng, len(shape), 1, 4), np.int64)], (1,))
    if kind == "Concat":
        return Case(kind, [x, floats(rng, *shape), x], axis=int(rng.integers(-len(shape) if opset >= 11 else 0, len(shape))))
    if kind == "DepthToSpace":
        return Case(kind, [floats(rng, 1, 8, 2, 3)], blocksize=2, **(maybe(rng, {"mode": "CRD"}) if opset >= 11 else {}))
    if kind == "SpaceToDepth":
        return Case(kind, [floats(rng, 1, 2, 4, 6)], blocksize=2)
    return Case(kind, [floats(rng, 2, 4, 5), np.int64(rng.integers(-3, 4)).reshape(())], (1,), **maybe(rng, {"upper": 0}))


def ranked(rng, opset):
    """What goes along an axis. Some elements are equal."""
    shape = numbers(rng, int(rng.integers(1, 5)), 1, 6)
    x, axis = floats(rng, *shape), int(rng.integers(-len(shape) if opset >= 11 else 0, len(shape)))
    x = x.round() if rng.random() < 0.5 else x
    kind = str(rng.choice(["CumSum", "ArgMax", "ArgMin", "TopK"]))
    if kind == "CumSum":
        return Case(kind, [x, np.int64(axis).reshape(())], (1,), **maybe(rng, {"exclusive": 1, "reverse": 1}))
    if kind.startswith("Arg"):
        return Case(kind, [x], axis=axis, **maybe(rng, {"keepdims": 0} | ({"select_last_index": 1} if opset >= 12 else {})))
    k = int(rng.integers(1, shape[axis] + 1))
    if opset < 10:
        return Case(kind, [x], axis=axis, k=k)
    return Case(kind, [x, np.array([k], np.int64)], (1,), axis=axis, **(maybe(rng, {"largest": 0}) if opset >= 11 else {}))


MAKERS = [average_pool, max_pool, conv, conv_transpose, resize, pad, reduction, softmax, gemm, matmul, two, pointwise, normalization, slicing, gather, gather_nd, shapes, ranked, einsum]
#: Windows and resizes have the most corners.
WEIGHTS = np.array([3, 3, 2, 3, 5] + [1] * (len(MAKERS) - 5), float)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    onnxruntime.set_default_logger_severity(4)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    refused, written = collections.Counter(), collections.Counter()
    for number in range(args.count):
        rng = np.random.default_rng([args.seed, number])
        opset = int(rng.choice(OPSETS))
        case = MAKERS[rng.choice(len(MAKERS), p=WEIGHTS / WEIGHTS.sum())](rng, opset)
        names = [f"x{place}" for place in range(len(case.inputs))]
        model_inputs, initializers = [], []
        values = {}
        for place, (name, value) in enumerate(zip(names, case.inputs)):
            value = np.asarray(value)
            if place in case.stored:
                initializers.append(numpy_helper.from_array(value, name))
            else:
                kind = TensorProto.FLOAT if value.dtype == np.float32 else TensorProto.INT64
                model_inputs.append(helper.make_tensor_value_info(name, kind, value.shape))
                values[name] = value
        count = 2 if case.operator == "TopK" else 1
        outputs = [f"y{place}" for place in range(count)]
        node = helper.make_node(case.operator, names, outputs, **case.attributes)
        kinds = [TensorProto.FLOAT, TensorProto.INT64] if case.operator == "TopK" else [TensorProto.INT64 if case.operator.startswith("Arg") else TensorProto.FLOAT]
        infos = [helper.make_tensor_value_info(name, kind, None) for name, kind in zip(outputs, kinds)]
        graph = helper.make_graph([node], "node", model_inputs, infos, initializers)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
        try:
            found = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"]).run(None, values)
        except Exception:
            refused[case.operator] += 1
            continue
        written[case.operator] += 1
        data = args.folder / f"{number:06}_{case.operator}_{opset}" / "test_data_set_0"
        data.mkdir(parents=True, exist_ok=True)
        onnx.save(model, data.parent / "model.onnx")
        for kind, arrays in (("input", values.values()), ("output", found)):
            for place, array in enumerate(arrays):
                (data / f"{kind}_{place}.pb").write_bytes(numpy_helper.from_array(np.asarray(array)).SerializeToString())
    print("written:", ", ".join(f"{name} {count}" for name, count in sorted(written.items())))
    print("refused by onnxruntime:", ", ".join(f"{name} {count}" for name, count in sorted(refused.items())) or "none")


if __name__ == "__main__":
    main()
