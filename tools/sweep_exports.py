#!/usr/bin/env python3
"""Takes torchvision's models through PyTorch's two ONNX exporters and convoke, and tells what fails.

    cargo build --release --bins
    python3 tools/sweep_exports.py                                      # classification and segmentation, 96 and 224 pixels
    python3 tools/sweep_exports.py --models resnet18 'convnext*' --sizes 96
    python3 tools/sweep_exports.py --library timm --exporters dynamo --sizes 97 225

For each model, exporter and image size the exported file is written again by `convoke export`, onnxruntime runs both files on the same
images, and `convoke train` takes two steps with the exported file on photographs that are made here. One line tells the result:

    model  exporter  size  opset of the exported file -> of convoke's  the largest difference, as a share of the largest output  losses

It ends with the numbers of files that passed and failed, and with exit code 1 if one failed that PyTorch could export. Differences may
be 1e-4. Weights are random, and drawn as tools/export_models.py draws them: initialisation leaves blocks without effect. A model
that does not take a size is exported at another one, which the line shows.

Nothing is downloaded, and each model's files are removed before the next. A model's process ends with it, so that a crash costs one
model. Needs torch, torchvision, onnx, onnxscript, onnxruntime, safetensors, numpy and Pillow; for --library timm also timm.
"""

import argparse
import contextlib
import copy
import fnmatch
import io
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
import zlib
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from export_models import draw_weights
from PIL import Image

TOLERANCE = 1e-4  # of the largest output
EXPORTERS = ("torchscript", "dynamo")
BATCH = 2
CLASSES = 3  # of the photographs; classifiers have more, so their last layers are replaced
CLASSES_OF_MASKS = 21  # as torchvision's models have, some of which end in a sum of two layers
#: Networks of convolutions in timm, one or two of each family. They have few weights for their family.
TIMM = (
    "bat_resnext26ts botnet26t_256 coat_lite_tiny coatnet_nano_rw_224 convmixer_768_32 convnextv2_femto cs3darknet_focus_s darknet53 "
    "dla46x_c dpn48b eca_botnext26ts_256 eca_halonext26ts eca_nfnet_l0 edgenext_x_small efficientformer_l1 efficientnet_es "
    "efficientvit_b1 efficientvit_m0 ese_vovnet19b_slim fasternet_t0 fastvit_sa12 fbnetv3_b focalnet_tiny_srf gcresnext26ts gernet_s "
    "ghostnet_050 ghostnetv2_100 halonet26t hardcorenas_a hgnet_tiny hrnet_w18_small inception_next_tiny lambda_resnet26t "
    "lamhalobotnet50ts_256 legacy_xception levit_conv_128s mambaout_femto mixnet_s mobilenetv4_hybrid_medium mobileone_s1 mobilevit_xxs "
    "mobilevitv2_050 nf_resnet26 pit_ti_224 poolformer_s12 pvt_v2_b0 regnetz_005 repghostnet_050 repvit_m0_9 res2net50_14w_8s "
    "resnest14d resnetblur18 resnetv2_50x1_bit rexnet_100 sebotnet33ts_256 selecsls42 shvit_s1 skresnet18 starnet_s050 swiftformer_xs "
    "test_nfnet tf_efficientnetv2_b0 tf_mixnet_s tiny_vit_5m_224 tresnet_m visformer_tiny vovnet39a xcit_nano_12_p16_224"
).split()
#: The models that take images of no other size, though timm does not say so.
OWN_SIZE = (
    "bat_resnext26ts coat_lite_tiny coatnet_nano_rw_224 dla46x_c eca_botnext26ts_256 eca_halonext26ts efficientformer_l1 halonet26t "
    "hrnet_w18_small lambda_resnet26t lamhalobotnet50ts_256 levit_conv_128s pit_ti_224"
).split()


# ---------------------------------------------------------------------------------------------------------------------
# Models


def names_of(library):
    """All models of a library that are swept."""
    if library == "timm":
        import timm

        return [name for name in TIMM if timm.is_model(name)]
    from torchvision import models

    return models.list_models(models) + models.list_models(models.segmentation)


def is_segmentation(name):
    from torchvision import models

    return name in models.list_models(models.segmentation)


def make(library, name, size):
    """A model for images of this size."""
    if library == "timm":
        import timm

        return timm.create_model(name, pretrained=False)
    from torchvision import models

    options = {"init_weights": False, "aux_logits": False} if name in ("googlenet", "inception_v3") else {}
    if is_segmentation(name):
        options["weights_backbone"] = None
    elif name.startswith("vit_"):
        options["image_size"] = size
    return models.get_model(name, weights=None, **options)


def size_of(library, name, size):
    """The size that a model is exported at where this one is asked for."""
    if library == "timm":
        import timm

        own = timm.get_pretrained_cfg(name)
        return own.input_size[-1] if own.fixed_input_size or name in OWN_SIZE else size
    if name == "maxvit_t":
        return 224
    return -(-size // 14) * 14 if name == "vit_h_14" else size


# ---------------------------------------------------------------------------------------------------------------------
# Files


def export(model, images, exporter, path):
    """Exports a model with its batch norms, with an open batch."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        if exporter == "dynamo":
            batch = torch.export.Dim("batch")
            options = dict(dynamo=True, optimize=False, dynamic_shapes=({0: batch},), verbose=False)
        else:
            mode = torch.onnx.TrainingMode.PRESERVE
            options = dict(dynamo=False, opset_version=17, training=mode, do_constant_folding=False)
            options |= dict(input_names=["input"], output_names=["output"], dynamic_axes={"input": {0: "batch"}, "output": {0: "batch"}})
        torch.onnx.export(model, (images,), str(path), **options)


def words(error):
    """An error in one line."""
    return re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")[:300]


def opset_of(path):
    model = onnx.load(path, load_external_data=False)
    return next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))


def run(path, images):
    """The first output of a file in onnxruntime."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    # Joined operators round otherwise, which networks of random weights amplify: to 1e-2 in efficientnet_v2_s, as PyTorch in single precision
    # is from double precision.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: images.numpy()})[0]


def difference(found, expected):
    """The largest difference, as a share of the largest expected value."""
    if found.shape != expected.shape:
        raise RuntimeError(f"outputs have the shape {found.shape}, expected {expected.shape}")
    return float(np.abs(found - expected).max() / (np.abs(expected).max() or 1.0))


def photographs(folder, size, masks):
    """Writes photographs of noise: a folder for each class, or masks beside them."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 2 * BATCH), ("val", 2)):
        for number in range(count):
            place = folder / part / ("images" if masks else f"class{number % CLASSES}")
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (size, size, 3), dtype=np.uint8)).save(place / f"{number}.png")
            if masks:
                (folder / part / "masks").mkdir(exist_ok=True)
                mask = rng.integers(0, CLASSES_OF_MASKS, (size, size), dtype=np.uint8)
                Image.fromarray(mask).save(folder / part / "masks" / f"{number}.png")


# ---------------------------------------------------------------------------------------------------------------------
# convoke


def convoke(program, *arguments):
    """What the program prints; an error has its last words."""
    done = subprocess.run([str(program), *map(str, arguments)], capture_output=True, text=True, timeout=1200)
    if done.returncode:
        said = "error:" + done.stderr.rpartition("error:")[2]
        said = re.sub(r"\S*/exported.onnx: ", "", said.strip())
        raise RuntimeError(f"convoke {arguments[0]}: {said} (exit code {done.returncode})")
    return done.stdout


def losses(program, path, data, size, masks):
    """The losses of two steps of training."""
    text = convoke(
        program, "train", "--model", path, "--data", "masks" if masks else "folder", "--data-dir", data, "--image-size", size,
        "--augment", "none", "--batch-size", BATCH, "--steps", 2, "--epochs", 1, "--effort", "heuristic", "--optimizer", "sgd",
        "--lr", 1e-4, "--quiet", "--json", "-",
    )  # fmt: skip
    found = re.search(r'"train_loss":\s*\[([^\]]*)\]', text)
    return [float(loss) if loss.strip() != "null" else math.nan for loss in found.group(1).split(",")]


def check(arguments, model, name, exporter, size, folder):
    """The line of one model, exporter and size without its beginning, and whether it passed: None if PyTorch did not export it."""
    exported, written = folder / "exported.onnx", folder / "written.onnx"
    images = torch.randn(BATCH, 3, size, size, generator=torch.Generator().manual_seed(1))
    began = time.monotonic()
    try:
        export(copy.deepcopy(model).eval(), images, exporter, exported)
    except Exception as error:
        return f"not exported: {words(error)}", None
    seconds = [time.monotonic() - began]
    said, failures = [], []
    try:
        convoke(arguments.program, "export", exported, "--to", written)
        said.append(f"opset {opset_of(exported)} -> {opset_of(written)}")
        off = difference(run(written, images), run(exported, images))
        said.append(f"off by {off:.1e}")
        if not off <= TOLERANCE:
            failures.append("DIFFERS")
    except Exception as error:
        failures.append(f"FAILED {words(error)}")
    seconds.append(time.monotonic() - began)
    if arguments.training:
        try:
            masks = arguments.library == "torchvision" and is_segmentation(name)
            photographs(folder / "photos", size, masks)
            found = losses(arguments.program, exported, folder / "photos", size, masks)
            said.append("losses " + " ".join(f"{loss:.3f}" for loss in found))
            if len(found) != 2 or not all(map(math.isfinite, found)):
                failures.append("LOSSES")
        except Exception as error:
            failures.append(f"FAILED {words(error)}")
    seconds.append(time.monotonic() - began)
    return "  ".join(said + failures) + "  " + "/".join(f"{second:.0f}" for second in seconds) + " s", not failures


def sweep_model(arguments, name, results):
    """Sends a line and whether it passed for each exporter and size of one model. Runs in a process of its own."""
    # PyTorch prints the graph of a failure.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    torch.manual_seed(zlib.crc32(name.encode()))
    done, model, made = set(), None, None
    for asked in arguments.sizes:
        size = size_of(arguments.library, name, asked)
        if size in done:
            continue
        done.add(size)
        try:
            if model is None or arguments.library == "timm" or name.startswith("vit_"):
                model, made = make(arguments.library, name, size), size
                generator = torch.Generator().manual_seed(made)
                draw_weights(model, torch.randn(2 * BATCH, 3, size, size, generator=generator), generator)
        except Exception as error:
            results.send((f"{name:28} {size:4}  not made: {words(error)}", None))
            model = None
            continue
        for exporter in arguments.exporters:
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                line, passed = check(arguments, model, name, exporter, size, Path(folder))
            results.send((f"{name:28} {exporter:11} {size:4}  {line}", passed))


def sweep(arguments, names):
    """Runs each model in a process of its own, some at a time, and gives whether each of their files passed."""
    context, left, running, found = multiprocessing.get_context("fork"), list(names), {}, []
    while left or running:
        while left and len(running) < arguments.jobs:
            name = left.pop(0)
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=sweep_model, args=(arguments, name, there))
            process.start()
            there.close()
            running[here] = (name, process)
        for here in multiprocessing.connection.wait(list(running)):
            try:
                line, passed = here.recv()
            except EOFError:
                name, process = running.pop(here)
                process.join()
                if process.exitcode == 0:
                    continue
                line, passed = f"{name:28} ended with exit code {process.exitcode}", False
            print(line, flush=True)
            found.append(passed)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=Path, default=Path("target/release/convoke"), help="(default: %(default)s)")
    parser.add_argument("--library", choices=["torchvision", "timm"], default="torchvision", help="(default: %(default)s)")
    parser.add_argument("--models", nargs="+", metavar="PATTERN", default=["*"], help="names, with * for any text (default: all)")
    parser.add_argument("--without", nargs="+", metavar="PATTERN", default=[], help="leave these out")
    parser.add_argument("--sizes", nargs="+", type=int, metavar="N", default=[96, 224], help="(default: 96 224)")
    parser.add_argument("--exporters", nargs="+", choices=EXPORTERS, default=list(EXPORTERS), help="(default: both)")
    parser.add_argument("--no-training", dest="training", action="store_false", help="take no steps of training")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="models at a time (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where files lie while they are needed (default: the system's)")
    arguments = parser.parse_args()
    arguments.program = arguments.program.resolve()

    def matches(name, patterns):
        return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)

    names = [name for name in names_of(arguments.library) if matches(name, arguments.models) and not matches(name, arguments.without)]
    if not names:
        sys.exit("there are no such models")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # processes can be forked only while there is one thread
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        # The exporters import much when they are first used, which the forked processes then have.
        for exporter in arguments.exporters:
            export(torch.nn.Conv2d(3, 4, 3).eval(), torch.zeros(BATCH, 3, 8, 8), exporter, Path(folder) / "first.onnx")
    results = sweep(arguments, names)
    passed, failed, not_exported = (results.count(kind) for kind in (True, False, None))
    print(f"{len(names)} models: {passed} files passed, {failed} failed, {not_exported} not exported", end="; ")
    print(f"PyTorch {torch.__version__}, onnxruntime {onnxruntime.__version__}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
