#!/usr/bin/env python3
"""Time single operations, forward and backward, in PyTorch and in convoke, in turn, and print the ratio of their medians.

    python tools/peers/operations.py [--rounds 3] [--threads 2] [--compile]

PyTorch runs eagerly on channels-last images, with an allocator that keeps memory; with --compile also through torch.compile, and
the better of the two counts. Each round runs convoke's program once and all of PyTorch's operations once; a figure is the median
of the rounds' medians. A ratio above 1 means that convoke is faster.

Needs Python 3.9 with torch, and `cargo build --release --example operation_times`.
"""

import argparse
import statistics
import subprocess
import time
from pathlib import Path

from convolutions import keep_memory

PROGRAM = Path(__file__).parents[2] / "target" / "release" / "examples" / "operation_times"
RUNS = 15


def cases(torch):
    f = torch.nn.functional
    images = (32, 64, 56, 56)
    norm = lambda x, w, b: f.layer_norm(x, (64,), w, b)
    return {
        "relu": ([images], f.relu),
        "hardswish": ([images], f.hardswish),
        "silu": ([images], f.silu),
        "gelu": ([images], f.gelu),
        "sigmoid": ([images], torch.sigmoid),
        "multiply_by_channel": ([images, (32, 64, 1, 1)], torch.mul),
        "add": ([images, images], torch.add),
        "global_average": ([images], lambda x: f.adaptive_avg_pool2d(x, 1)),
        "layer_norm": ([(32, 3136, 64), (64,), (64,)], norm),
        "group_norm": ([images, (64,), (64,)], lambda x, w, b: f.group_norm(x, 8, w, b)),
        "softmax": ([(4096, 1000)], lambda x: f.softmax(x, 1)),
        "resize_bilinear": ([(32, 64, 28, 28)], lambda x: f.interpolate(x, size=(42, 42), mode="bilinear")),
        "resize_nearest": ([(32, 64, 28, 28)], lambda x: f.interpolate(x, size=(42, 42), mode="nearest")),
        "conv_transpose": (
            [(16, 64, 28, 28), (64, 32, 4, 4)],
            lambda x, w: f.conv_transpose2d(x, w, stride=2, padding=1),
        ),
        "concat": ([images, images], lambda a, b: torch.cat([a, b], 1)),
    }


def operand(torch, shape):
    x = torch.randn(shape)
    if len(shape) == 4 and shape[0] != shape[1]:
        x = x.to(memory_format=torch.channels_last)
    return x.requires_grad_()


def time_torch(torch, shapes, function):
    """Median milliseconds of forward and backward."""
    operands = [operand(torch, shape) for shape in shapes]
    upstream = torch.randn_like(function(*operands).detach())
    times = []
    for index in range(RUNS + 3):
        for x in operands:
            x.grad = None
        start = time.perf_counter()
        function(*operands).backward(upstream)
        if index >= 3:
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def time_convoke(threads):
    lines = subprocess.run([PROGRAM, str(RUNS), str(threads)], check=True, capture_output=True, text=True).stdout
    return {line.split()[0]: float(line.split()[1]) for line in lines.splitlines()}


def main():
    keep_memory()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compile", action="store_true", help="also time torch.compile")
    options = parser.parse_args()
    import torch

    torch.set_num_threads(options.threads)
    all_cases = cases(torch)
    compiled = {name: torch.compile(function) for name, (_, function) in all_cases.items()} if options.compile else {}
    ours, eager, best = ({name: [] for name in all_cases} for _ in range(3))
    for _ in range(options.rounds):
        for name, milliseconds in time_convoke(options.threads).items():
            ours[name].append(milliseconds)
        for name, (shapes, function) in all_cases.items():
            milliseconds = time_torch(torch, shapes, function)
            eager[name].append(milliseconds)
            others = [time_torch(torch, shapes, compiled[name])] if options.compile else []
            best[name].append(min([milliseconds, *others]))
    print(f"torch {torch.__version__}, {options.threads} threads; milliseconds of forward and backward")
    print(f"{'operation':<22}{'convoke':>9}{'eager':>9}{'best':>9}{'ratio':>7}")
    for name in all_cases:
        ms = [statistics.median(times[name]) for times in (ours, eager, best)]
        print(f"{name:<22}{ms[0]:>9.2f}{ms[1]:>9.2f}{ms[2]:>9.2f}{ms[2] / ms[0]:>7.2f}")


if __name__ == "__main__":
    main()
