#!/usr/bin/env python3
"""Time PyTorch's CPU batch norm and convoke's side by side.

    python tools/peers/batch_norm.py [SHAPE...] [--threads 2] [--rounds 5] [--json FILE]

Forward and backward of a layer in training, alone and with a ReLU behind it (two operations in PyTorch, one in convoke).
Both are timed in turn, --rounds times; the medians of a round are compared, and the median of those ratios counts.
PyTorch is timed in contiguous and in channels-last memory, of which the better counts, and its allocator is told to keep
memory, as fresh memory costs page faults; so is convoke, by `convoke bench-norm`. Printed is PyTorch time / convoke time:
above 1 convoke is faster; and convoke's part of the speed at which memory is copied, measured in the same run.

Needs Python 3.9 with torch, and `cargo build --release`.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

from convolutions import keep_memory, run_convoke

SHAPES = ["256x32x26x26", "64x64x56x56", "64x256x14x14", "64x512x7x7"]
PASSES = ["forward", "backward"]
FORMATS = ["nchw", "nhwc"]


def main():
    keep_memory()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=SHAPES, metavar="SHAPE")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="time for each measurement")
    parser.add_argument("--convoke", default=Path(__file__).parents[2] / "target/release/convoke", type=Path)
    parser.add_argument("--json", type=Path, help="write every time here")
    args = parser.parse_args()

    import torch

    torch.set_num_threads(args.threads)
    rows = []
    for relu in (False, True):
        for shape in args.shapes:
            rounds = [(time_pytorch(shape, relu, args), time_convoke(shape, relu, args)) for _ in range(args.rounds)]
            for name in PASSES:
                row = {"shape": shape, "relu": relu, "pass": name}
                for side, index in (("pytorch", 0), ("convoke", 1)):
                    times = {f: statistics.median(r[index][f, name][0] for r in rounds) for f in FORMATS}
                    row[side] = times
                row["ratio"] = statistics.median(
                    min(theirs[f, name][0] for f in FORMATS) / min(ours[f, name][0] for f in FORMATS)
                    for theirs, ours in rounds
                )
                row["of_copying"] = {f: statistics.median(r[1][f, name][1] for r in rounds) for f in FORMATS}
                rows.append(row)
                both = "  ".join(
                    f"{side} {' '.join(f'{f} {row[side][f] * 1e3:7.3f}' for f in FORMATS)} ms"
                    for side in ("pytorch", "convoke")
                )
                part = " ".join(f"{f} {row['of_copying'][f]:4.0%}" for f in FORMATS)
                label = name + (" +ReLU" if relu else "")
                print(f"{row['ratio']:6.2f}  {label:<15} {shape:<14} {both}  of copying {part}", flush=True)
    print("\nPyTorch time / convoke time, each in its better format: geometric mean and least")
    for relu in (False, True):
        for name in [*PASSES, "both"]:
            ratios = [r["ratio"] for r in rows if r["relu"] == relu and name in (r["pass"], "both")]
            mean = statistics.geometric_mean(ratios)
            print(f"{name + (' +ReLU' if relu else ''):<20} {mean:6.2f} {min(ratios):6.2f}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


def time_pytorch(shape, relu, args):
    """Median seconds by format and pass."""
    import torch

    sizes = [int(size) for size in shape.split("x")]
    found = {}
    for name, layout in zip(FORMATS, (torch.contiguous_format, torch.channels_last)):
        x = torch.randn(sizes).contiguous(memory_format=layout).requires_grad_()
        layer = torch.nn.BatchNorm2d(sizes[1])

        def forward():
            y = layer(x)
            return torch.nn.functional.relu(y) if relu else y

        with torch.no_grad():
            dy = torch.randn_like(x)
        inputs = [x, layer.weight, layer.bias]
        times = {key: [] for key in PASSES}
        begin = time.perf_counter()
        while len(times["forward"]) < 8 or time.perf_counter() - begin < args.seconds:
            start = time.perf_counter()
            y = forward()
            middle = time.perf_counter()
            gradients = torch.autograd.grad(y, inputs, dy)
            end = time.perf_counter()
            del y, gradients
            times["forward"].append(middle - start)
            times["backward"].append(end - middle)
        for key in PASSES:
            found[name, key] = (statistics.median(times[key][1:]), None)
    return found


def time_convoke(shape, relu, args):
    """Median seconds and part of the copy bandwidth, by format and pass."""
    command = [args.convoke, "bench-norm", shape, "--json", "-", "--threads", str(args.threads)]
    command += ["--budget", str(args.seconds), *(["--relu"] if relu else [])]
    return {
        (row["format"], row["pass"]): (
            row["seconds_median"],
            row["bytes_per_second"] / row["copy_bytes_per_second"],
        )
        for row in run_convoke(command)
    }


if __name__ == "__main__":
    main()
