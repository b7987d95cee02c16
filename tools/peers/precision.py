#!/usr/bin/env python3
"""Train in f32 and in bf16 with the same settings and seeds, and compare accuracies and losses.

    python tools/peers/precision.py MNIST_DIR CIFAR10_DIR [--settings mnist,cifar] [--seeds 1,2,3,4,5] [--json FILE] [--svg FILE]

    mnist       mnist-cnn on MNIST, 3 epochs, Adadelta
    cifar       resnet20 on as many batches of CIFAR-10 as are there, 10 epochs, SGD with a cosine schedule
    scratch     resnet18 on 1,600 photographs of ten classes (JPEGs made of CIFAR-10), 6 epochs, the default recipe
    fine-tuned  resnet18 on 400 photographs of five classes, 4 epochs, from weights that were trained on the five others

Both precisions of a seed start from the same weights and see the same images in the same order. They still part soon, as two orders of
adding would, so the means over the seeds are what can be compared: beside their difference stands its standard error. --svg draws the
losses of the first seed side by side. All of it takes an hour on two cores.

Needs Python 3.9 with numpy and Pillow, and `cargo build --release`.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

from convolutions import run_convoke

PRECISIONS = ["f32", "bf16"]
PHOTOGRAPHS = ["--data", "folder", "--model", "resnet18", "--image-size", 64, "--batch-size", 32]
SETTINGS = {
    "mnist": ["--data", "mnist", "--model", "mnist-cnn", "--optimizer", "adadelta", "--epochs", 3, "--lr", 1, "--lr-gamma", 0.7],
    "cifar": ["--data", "cifar10", "--model", "resnet20", "--batch-size", 128, "--epochs", 10, "--optimizer", "sgd", "--lr", 0.1]
    + ["--momentum", 0.9, "--weight-decay", 1e-4, "--schedule", "cosine"],
    "scratch": [*PHOTOGRAPHS, "--epochs", 6, "--lr", 0.003],
    "fine-tuned": [*PHOTOGRAPHS, "--epochs", 4, "--lr", 0.001, "--head-lr", 0.01, "--freeze-bn"],
}
# Classes of the pretrained weights and of the photographs that they are tuned for.
OTHERS, TUNED = "airplane,bird,deer,frog,ship", "automobile,cat,dog,horse,truck"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mnist", type=Path, help="folder with the four IDX files, packed or not")
    parser.add_argument("cifar10", type=Path, help="folder with the .bin files, or with cifar-10-binary.tar.gz")
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--seeds", default="1,2,3,4,5")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--convoke", default=Path(__file__).parents[2] / "target/release/convoke", type=Path)
    parser.add_argument("--json", type=Path, help="write every accuracy and the losses here")
    parser.add_argument("--svg", type=Path, help="draw the losses of the first seed here")
    args = parser.parse_args()
    seeds = [int(seed) for seed in args.seeds.split(",")]
    if len(seeds) < 2:
        parser.error("--seeds: two or more are needed to tell a difference from chance")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.settings.split(","):
            if name not in SETTINGS:
                parser.error(f"--settings: {name} is not one of {', '.join(SETTINGS)}")
            flags = SETTINGS[name] + source(name, Path(folder), args)
            found[name] = {precision: [] for precision in PRECISIONS}
            for seed in seeds:
                for precision in PRECISIONS:
                    found[name][precision].append(train(flags, precision, seed, args))
                shown = ", ".join(f"{precision} {found[name][precision][-1]['accuracy']:.2%}" for precision in PRECISIONS)
                print(f"{name}, seed {seed}: {shown}", flush=True)
            print(summary(name, found[name]), flush=True)
            # After each setting, as all take an hour or more.
            if args.json:
                args.json.write_text(json.dumps(found))
            if args.svg:
                args.svg.write_text(picture(found))


def source(name, folder, args):
    """Where a setting's data is, and the weights to start from; made where need be."""
    if name in ("mnist", "cifar"):
        return ["--data-dir", args.mnist if name == "mnist" else args.cifar10]
    if name == "scratch":
        return ["--data-dir", photographs(folder / "all", ["--train", 1600, "--val", 2000], args)]
    others = photographs(folder / "others", ["--train", 3000, "--val", 500, "--classes", OTHERS], args)
    run = folder / "pretrained"
    if not run.exists():
        print("weights to start from: training on the other classes", flush=True)
        run_convoke([args.convoke, "train", *SETTINGS["scratch"], "--data-dir", others, "--output", run, "--json", "-"])
    tuned = photographs(folder / "tuned", ["--train", 400, "--val", 2000, "--classes", TUNED], args)
    return ["--data-dir", tuned, "--weights", run / "best.safetensors"]


def photographs(folder, flags, args):
    if not folder.exists():
        maker = Path(__file__).with_name("make_photographs.py")
        subprocess.run([sys.executable, maker, args.cifar10, folder, *map(str, flags)], check=True, stdout=subprocess.DEVNULL)
    return folder


def train(flags, precision, seed, args):
    """The accuracy after the last epoch, 0 to 1, and the loss of each step."""
    command = [args.convoke, "train", *flags, "--precision", precision, "--seed", seed, "--threads", args.threads, "--json", "-"]
    [result] = run_convoke(command)["runs"]
    return {"seed": seed, "accuracy": result["validation"][-1]["accuracy"], "losses": result["train_loss"]}


def summary(name, runs):
    f32, bf16 = ([run["accuracy"] for run in runs[precision]] for precision in PRECISIONS)
    differences = [100 * (b - a) for a, b in zip(f32, bf16)]
    error = statistics.stdev(differences) / len(differences) ** 0.5
    means = f"f32 {statistics.mean(f32):.2%}, bf16 {statistics.mean(bf16):.2%}"
    return f"{name}, mean of {len(f32)}: {means}: {statistics.mean(differences):+.2f} points, standard error {error:.2f}"


WIDTH, HEIGHT, LEFT, TOP = 360, 220, 44, 40
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #57606a; } .name { font-weight: 600; fill: #24292f; }
path { fill: none; stroke-width: 1.5; } .f32 { stroke: #6e7781; } .bf16 { stroke: #0969da; } .axis { stroke: #d0d7de; }
@media (prefers-color-scheme: dark) {
  text { fill: #9198a1; } .name { fill: #e6edf3; } .f32 { stroke: #9198a1; } .bf16 { stroke: #388bfd; } .axis { stroke: #3d444d; }
}
"""


def picture(found):
    """Smoothed losses of the first seed, a panel a setting."""
    height = (len(found) + 1) // 2 * HEIGHT + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {height}" role="img" '
        'aria-label="Losses in training, in f32 and in bf16">',
        f"<style>{STYLE}</style>",
        f'<path class="f32" d="M{LEFT} 12h24"/><text x="{LEFT + 30}" y="16">f32</text>',
        f'<path class="bf16" d="M{LEFT + 70} 12h24"/><text x="{LEFT + 100}" y="16">bf16</text>',
    ]
    for index, (name, runs) in enumerate(found.items()):
        x, y = index % 2 * WIDTH + LEFT, index // 2 * HEIGHT + TOP
        curves = {precision: smooth(runs[precision][0]["losses"]) for precision in PRECISIONS}
        top = max(max(curve) for curve in curves.values())
        wide, tall = WIDTH - LEFT - 16, HEIGHT - 50
        parts += [
            f'<text class="name" x="{x}" y="{y - 4}">{escape(name)}</text>',
            f'<path class="axis" d="M{x} {y}v{tall}h{wide}"/>',
            f'<text x="{x - 6}" y="{y + 10}" text-anchor="end">{top:.1f}</text>',
            f'<text x="{x - 6}" y="{y + tall}" text-anchor="end">0</text>',
            f'<text x="{x + wide}" y="{y + tall + 15}" text-anchor="end">step {len(runs["f32"][0]["losses"])}</text>',
        ]
        for precision, curve in curves.items():
            points = thinned(curve, wide)
            line = "L".join(f"{x + wide * at:.1f} {y + tall * (1 - loss / top):.1f}" for at, loss in points)
            parts.append(f'<path class="{precision}" d="M{line}"/>')
    return "\n".join([*parts, "</svg>\n"])


def smooth(losses):
    """Means of the last twentieth of all steps so far."""
    window = max(1, len(losses) // 20)
    return [statistics.fmean(losses[max(0, step - window + 1) : step + 1]) for step in range(len(losses))]


def thinned(curve, most):
    """At most so many points: their places, 0 to 1, and values."""
    steps = max(1, len(curve) // most)
    last = max(1, len(curve) - 1)
    return [(step / last, curve[step]) for step in range(0, len(curve), steps)]


if __name__ == "__main__":
    main()
