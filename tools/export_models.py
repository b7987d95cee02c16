#!/usr/bin/env python3
"""Exports networks of torchvision, timm and segmentation_models_pytorch as ONNX files, each with what PyTorch computes.

    python3 -m venv venv
    venv/bin/pip install torch torchvision timm segmentation-models-pytorch onnx onnxscript onnxruntime safetensors
    venv/bin/python tools/export_models.py FOLDER                           # the default models
    venv/bin/python tools/export_models.py FOLDER --models resnet18 dla34   # these
    venv/bin/python tools/export_models.py FOLDER --models all

The files are too large to commit; tests that need them are skipped where they are missing. Each model gets a folder:

    model.onnx              batch norms kept, in evaluation mode, nothing folded
    training.onnx           the same in training mode: batch norms have `training_mode=1` and three outputs
    folded.onnx             what the exporter based on TorchScript does by default: batch norms folded into convolutions
    dynamo.onnx             the exporter based on torch.export, not optimized; its weights are external, as they are by default
    reference.safetensors   what PyTorch computes

All have one input, `input`, and one output, `output`, whose first dimension is dynamic and called `batch`. Every file is run
by onnxruntime here and compared with PyTorch; a file that fails is removed and reported, and the others are kept.

reference.safetensors holds, with every parameter, input and upstream gradient a float32 number:

    input.f64                   the images
    eval.f64, eval.f32          the output of evaluation mode, in both precisions
    upstream.f64                a random gradient of the training output
    train.f64                   the output of training mode
    grad.NAME.f64               the gradient of parameter NAME (the initializer's name too, unless an exporter renamed it)
    grad.input.f64              the gradient of the images
    buffer.NAME.f64             the running statistics after that one training step

Its metadata holds `float32_errors`: JSON that maps each result's name to the distance of PyTorch's own float32 result from
the float64 one, as a share of the latter's norm. It tells how far float32 can be trusted: where rounding switches a ReLU,
gradients are off by far more than rounding. Images are drawn anew, a few times, until that does not happen.
`parameters` is a JSON list of the parameters' names, `inert` of those whose gradient vanishes (a bias before a batch norm):
of their gradient float32 computes noise.

Nothing is downloaded. Weights are the library's random initialisation by --seed; then everything constant (biases, scales,
layer scales) is drawn too, else a test could not tell them apart, and the exporter would store equal ones once. Running
statistics are those of one batch of noise, then perturbed. Dropout and stochastic depth have probability 0, since no other
framework draws the same masks; two training passes are compared to check it.
"""

import argparse
import contextlib
import copy
import json
import re
import sys
import time
import traceback
import warnings
import zlib
from pathlib import Path

import onnx
import onnxruntime
import safetensors.torch
import torch

CLASSES = 10
FILES = ("model.onnx", "training.onnx", "folded.onnx", "dynamo.onnx")
TOLERANCE = 1e-3  # of the norm: catches a wrong export, not rounding
ATTEMPTS, CLEAN = 8, 1e-4  # images are drawn until no gradient of float32 is further off; a switched ReLU gives 1e-3


# ---------------------------------------------------------------------------------------------------------------------
# Models


def from_torchvision(name, **options):
    import torchvision

    return torchvision.models.get_model(name, weights=None, num_classes=CLASSES, **options)


def from_timm(name, **options):
    import timm

    return timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)


def from_smp(name, encoder):
    import segmentation_models_pytorch

    return getattr(segmentation_models_pytorch, name)(encoder_name=encoder, encoder_weights=None, classes=3)


def small_vgg(name):
    """VGG without its hundred million dense weights, which assume images of 224 pixels."""
    model = from_torchvision(name)
    model.avgpool = torch.nn.AdaptiveAvgPool2d(1)
    model.classifier = torch.nn.Sequential(
        torch.nn.Linear(512, 64), torch.nn.ReLU(True), torch.nn.Dropout(), torch.nn.Linear(64, CLASSES)
    )
    return model


MODELS = {
    # torchvision
    "resnet18": lambda: from_torchvision("resnet18"),
    "resnet50": lambda: from_torchvision("resnet50"),
    "resnext50_32x4d": lambda: from_torchvision("resnext50_32x4d"),
    "densenet121": lambda: from_torchvision("densenet121"),
    "mobilenet_v2": lambda: from_torchvision("mobilenet_v2"),
    "mobilenet_v3_small": lambda: from_torchvision("mobilenet_v3_small"),
    "efficientnet_b0": lambda: from_torchvision("efficientnet_b0"),
    "shufflenet_v2_x1_0": lambda: from_torchvision("shufflenet_v2_x1_0"),
    "googlenet": lambda: from_torchvision("googlenet", aux_logits=False, init_weights=False),
    "inception_v3": lambda: from_torchvision("inception_v3", aux_logits=False, init_weights=False),
    "squeezenet1_1": lambda: from_torchvision("squeezenet1_1"),
    "vgg11_bn": lambda: small_vgg("vgg11_bn"),
    "convnext_tiny": lambda: from_torchvision("convnext_tiny"),
    "mnasnet0_5": lambda: from_torchvision("mnasnet0_5"),
    "regnet_y_400mf": lambda: from_torchvision("regnet_y_400mf"),
    # timm; those called test_ have a few hundred thousand parameters
    **{
        name: lambda name=name: from_timm(name)
        for name in [
            "test_resnet",
            "test_byobnet",
            "test_efficientnet",
            "test_convnext",
            "resnet26d",
            "seresnet33ts",
            "skresnet18",
            "ecaresnet26t",
            "resnetv2_50d_gn",
            "res2net50_26w_4s",
            "ghostnet_100",
            "repvgg_a0",
            "mobileone_s0",
            "mixnet_s",
            "convnextv2_atto",
            "edgenext_xx_small",
            "efficientvit_b0",
            "fastvit_t8",
            "hrnet_w18_small",
            "dla34",
            "mobilenetv4_conv_small",
            "nf_regnet_b0",
            "cs3darknet_s",
            "hgnetv2_b0",
            "ese_vovnet19b_dw",
            "inception_next_atto",
            "starnet_s1",
            "lcnet_050",
        ]
    },
    # segmentation_models_pytorch
    "unet_resnet18": lambda: from_smp("Unet", "resnet18"),
    "fpn_resnet18": lambda: from_smp("FPN", "resnet18"),
    "deeplabv3plus_resnet18": lambda: from_smp("DeepLabV3Plus", "resnet18"),
    "linknet_resnet18": lambda: from_smp("Linknet", "resnet18"),
    "pan_mobilenet_v2": lambda: from_smp("PAN", "mobilenet_v2"),
}
DEFAULT = [
    "resnet18",
    "densenet121",
    "mobilenet_v3_small",
    "efficientnet_b0",
    "shufflenet_v2_x1_0",
    "googlenet",
    "repvgg_a0",
    "convnextv2_atto",
    "unet_resnet18",
    "deeplabv3plus_resnet18",
]
BATCH, SIZE = 4, 64
SIZES = {"inception_v3": 96, "pan_mobilenet_v2": 128}  # where 64 is too small


# ---------------------------------------------------------------------------------------------------------------------
# Weights


def draw_weights(model, images, generator):
    """Draws what initialisation leaves constant, and running statistics that suit the activations, but not exactly."""

    def normal(like, std):
        return std * torch.randn(like.shape, generator=generator)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.numel() == 1 or bool((parameter == parameter.flatten()[0]).all()):
                scale = name.endswith("weight")
                parameter.copy_(1 + normal(parameter, 0.2) if scale else normal(parameter, 0.2))
        norms = [module for module in model.modules() if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)]
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.momentum = 1.0
        model.train()(images)
        for norm, momentum in zip(norms, momenta):
            norm.momentum = momentum
            norm.num_batches_tracked.zero_()
            norm.running_mean += normal(norm.running_mean, 0.2) * norm.running_var.sqrt()
            norm.running_var *= torch.exp(normal(norm.running_var, 0.2))


def without_dropout(model):
    """Sets the probabilities of dropout and stochastic depth, under the names that the three libraries use, to 0.

    Dropout of whole channels becomes that of elements: the former has no ONNX operator.
    """
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Dropout2d):
                setattr(module, name, torch.nn.Dropout(child.p))
    for module in model.modules():
        is_dropout = isinstance(module, torch.nn.modules.dropout._DropoutNd) or type(module).__name__ == "StochasticDepth"
        for name in ("p",) if is_dropout else ("drop_prob", "drop_rate"):
            if isinstance(getattr(module, name, None), (int, float)):
                setattr(module, name, 0.0)
    return model


# ---------------------------------------------------------------------------------------------------------------------
# References


def training_step(model, images, upstream):
    """What one forward and backward pass of a copy of `model` gives, by name."""
    model = copy.deepcopy(model).train()
    images = images.clone().requires_grad_()
    output = model(images)
    output.backward(upstream)
    results = {"train": output.detach(), "grad.input": images.grad}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            results[f"grad.{name}"] = parameter.grad
    for name, buffer in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            results[f"buffer.{name}"] = buffer
    return results


def distance(a, b):
    """The distance of a from b, as a share of b's norm."""
    a, b = torch.as_tensor(a).double(), b.double()
    return float((a - b).norm() / b.norm().clamp_min(1e-300))


def reference(model, images, generator):
    """Tensors and metadata of the reference, and the largest error of float32 among gradients that do not vanish."""
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        evaluated, rough_evaluated = exact.eval()(images.double()), model.eval()(images)
        trained = copy.deepcopy(exact).train()(images.double())
    upstream = torch.randn(trained.shape, generator=generator)
    results, rough = training_step(exact, images.double(), upstream.double()), training_step(model, images, upstream)
    if not torch.equal(results["train"], trained):
        raise RuntimeError("two training passes differ: some dropout is left")
    if not all(bool(result.isfinite().all()) for result in (*results.values(), evaluated, rough_evaluated)):
        raise RuntimeError("a result is not finite")

    errors = {"eval": distance(rough_evaluated, evaluated)}
    errors |= {name: distance(rough[name], result) for name, result in results.items()}
    largest = max(float(result.norm()) for name, result in results.items() if name.startswith("grad."))
    parameters = [name for name, _ in model.named_parameters() if f"grad.{name}" in results]
    inert = [name for name in parameters if float(results[f"grad.{name}"].norm()) < 1e-12 * largest]
    tensors = {
        "input.f64": images.double(),
        "upstream.f64": upstream.double(),
        "eval.f64": evaluated,
        "eval.f32": rough_evaluated,
        **{f"{name}.f64": result for name, result in results.items()},
    }
    metadata = {
        "generator": "tools/export_models.py",
        "torch": torch.__version__,
        "parameters": json.dumps(parameters),
        "inert": json.dumps(inert),
        "float32_errors": json.dumps(errors),
    }
    return tensors, metadata, max(errors[f"grad.{name}"] for name in parameters if name not in inert)


def write_reference(model, size, generator, path):
    """Writes what PyTorch computes for images in whose case float32 switches no ReLU, as far as these are found.

    Gives the images and the outputs of both modes.
    """
    best = None
    for attempt in range(1, ATTEMPTS + 1):
        images = torch.randn(BATCH, 3, size, size, generator=generator)
        candidate = reference(model, images, generator)
        if best is None or candidate[2] < best[2]:
            best = candidate
        if best[2] < CLEAN:
            break
    tensors, metadata, worst = best
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)
    errors = json.loads(metadata["float32_errors"])
    inert, parameters = len(json.loads(metadata["inert"])), len(json.loads(metadata["parameters"]))
    print(
        f"    float32 is off by {errors['eval']:.1e} in evaluation, {errors['train']:.1e} in training, {worst:.1e} in the "
        f"worst gradient ({attempt} attempts); {inert} of {parameters} gradients vanish"
    )
    return tensors["input.f64"].float(), tensors["eval.f64"], tensors["train.f64"]


# ---------------------------------------------------------------------------------------------------------------------
# ONNX


def export(model, images, path, opset):
    """Writes the file that is called so, in the way its name stands for."""
    model = copy.deepcopy(model).train(path.name == "training.onnx")
    options = dict(input_names=["input"], output_names=["output"], opset_version=opset, verbose=False)
    if path.name == "dynamo.onnx":
        batch = torch.export.Dim("batch")
        options |= dict(dynamo=True, optimize=False, dynamic_shapes=({0: batch},))
    else:
        kept = path.name != "folded.onnx"
        mode = torch.onnx.TrainingMode
        options |= dict(
            dynamo=False,
            dynamic_axes={"input": {0: "batch"}, "output": {0: "batch"}},
            do_constant_folding=not kept,
            training=mode.TRAINING if path.name == "training.onnx" else mode.PRESERVE if kept else mode.EVAL,
        )
    torch.onnx.export(model, (images,), str(path), **options)


def check(path, model, images, evaluated, trained):
    """Checks the file, runs it with the whole batch and in evaluation mode with one image, and says what it holds."""
    onnx.checker.check_model(str(path), full_check=True)
    graph = onnx.load(path, load_external_data=False)
    opset = next(entry.version for entry in graph.opset_import if entry.domain in ("", "ai.onnx"))
    initializers = {tensor.name for tensor in graph.graph.initializer}
    parameters = [name for name, _ in model.named_parameters()]
    named = sum(name in initializers for name in parameters)
    said = f"opset {opset}, {len(graph.graph.node)} nodes, {named} of {len(parameters)} parameters by name"

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def off(count, expected):
        return distance(session.run(None, {"input": images[:count].numpy()})[0], expected[:count])

    training = path.name == "training.onnx"
    most = off(BATCH, trained) if training else max(off(BATCH, evaluated), off(1, evaluated))
    said += f", off by {most:.1e} in onnxruntime"
    if not most < TOLERANCE:
        raise RuntimeError(f"{said}: more than {TOLERANCE}")
    size = sum(part.stat().st_size for part in path.parent.glob(f"{path.name}*")) / 1e6
    print(f"    {path.name:14} {size:7.1f} MB  {said}")


def remove(path):
    for part in path.parent.glob(f"{path.name}*"):
        part.unlink()


def export_model(name, arguments):
    """Writes the folder of one model, and gives what failed."""
    started = time.monotonic()
    folder = arguments.folder / name
    folder.mkdir(parents=True, exist_ok=True)
    seed = zlib.crc32(f"{arguments.seed}/{name}".encode())
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    size = SIZES.get(name, SIZE)
    model = without_dropout(MODELS[name]())
    draw_weights(model, torch.randn(2 * BATCH, 3, size, size, generator=generator), generator)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{name}: {count / 1e6:.2f} million parameters, images of {size} pixels")
    images, evaluated, trained = write_reference(model, size, generator, folder / "reference.safetensors")
    failures = []
    for file in FILES:
        path = folder / file
        remove(path)
        try:
            with contextlib.redirect_stdout(sys.stderr if arguments.verbose else None):  # it prints the graph of a failure
                export(model, images, path, arguments.opset)
            check(path, model, images, evaluated, trained)
        except Exception as error:  # a model that one exporter cannot take is still useful for the others
            message = re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")
            print(f"    {file:14} FAILED  {message[:300]}")
            if arguments.verbose:
                traceback.print_exc()
            remove(path)
            failures.append(f"{name}/{file}")
    print(f"    {time.monotonic() - started:.0f} s", flush=True)
    return failures


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder to write")
    parser.add_argument(
        "--models", nargs="+", metavar="NAME", default=DEFAULT,
        help=f"all, or any of: {', '.join(MODELS)} (default: {', '.join(DEFAULT)})",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=1, help="seed of all random numbers (default: %(default)s)")
    parser.add_argument("--opset", type=int, help="version of the operators (default: the exporter's)")
    parser.add_argument("--verbose", action="store_true", help="print the exporters' warnings and where they failed")
    arguments = parser.parse_args()
    names = list(MODELS) if arguments.models == ["all"] else arguments.models
    unknown = sorted(set(names) - set(MODELS))
    if unknown:
        parser.error(f"no such model: {', '.join(unknown)}")
    if not arguments.verbose:
        warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # the order of summation must not depend on the machine
    failures = []
    for name in names:
        try:
            failures += export_model(name, arguments)
        except Exception:
            traceback.print_exc()
            failures.append(name)
    print(f"{len(names)} models, PyTorch {torch.__version__}, onnxruntime {onnxruntime.__version__}")
    if failures:
        sys.exit(f"failed: {', '.join(failures)}")


if __name__ == "__main__":
    main()
