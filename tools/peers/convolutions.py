#!/usr/bin/env python3
"""Time PyTorch's CPU convolutions and convoke's tuned ones side by side, problem by problem.

    python tools/peers/convolutions.py SUITE... [--threads 2] [--dtype bf16] [--skip onednn*] [--json FILE]

SUITE is a file of problems in benchdnn notation, one a line. For every problem and pass PyTorch and convoke are timed in turn,
--rounds times, and the best round of each counts: machines that are shared have seconds at half speed. PyTorch is timed
in contiguous and in channels-last memory, of which the better counts, and its allocator is told to keep memory, as
fresh memory costs page faults. convoke is `convoke bench`, whose chosen algorithm is timed again alone, as PyTorch is.
Printed is PyTorch time / convoke time: above 1 convoke is faster. With --dtype bf16 images and their gradients are bf16; so is PyTorch's
weight, as under autocast, while convoke's is f32, whose conversion is in its time.

Needs Python 3.9 with torch, and `cargo build --release`.
"""

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "-1",
    "MALLOC_TOP_PAD_": str(64 << 20),
}
PASSES = ["fwd", "bwd-data", "bwd-weights"]


def keep_memory():
    """Starts this program again with an allocator that keeps memory, unless it has: malloc reads its settings at the start."""
    if any(os.environ.get(name) != value for name, value in KEEP_MEMORY.items()):
        os.environ.update(KEEP_MEMORY)
        os.execv(sys.executable, [sys.executable, *sys.argv])


def main():
    keep_memory()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="+", type=Path, metavar="SUITE")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.15, help="time for each of PyTorch's measurements")
    parser.add_argument("--rounds", type=int, default=2, help="how often each is timed")
    parser.add_argument("--budget", type=float, default=1.5, help="seconds that convoke may take a pass")
    parser.add_argument("--passes", default=",".join(PASSES), help="with commas between them")
    parser.add_argument("--only", help="algorithms for convoke to choose from")
    parser.add_argument("--skip", help="algorithms that convoke must not use")
    parser.add_argument("--dtype", default="f32", choices=["f32", "bf16"], help="type of images and their gradients")
    parser.add_argument("--format", default="nhwc", choices=["nhwc", "nchw"], help="convoke's memory format")
    parser.add_argument("--convoke", default=Path(__file__).parents[2] / "target/release/convoke", type=Path)
    parser.add_argument("--json", type=Path, help="write every time here")
    args = parser.parse_args()

    import torch

    passes = args.passes.split(",")
    if unknown := set(passes) - set(PASSES):
        parser.error(f"--passes knows {', '.join(PASSES)}, not {', '.join(sorted(unknown))}")
    torch.set_num_threads(args.threads)
    rows = []
    for suite in args.suites:
        for line in suite.read_text().splitlines():
            problem = line.split("#")[0].strip()
            if not problem:
                continue
            chosen = choose(problem, args)
            theirs = dict.fromkeys(PASSES, math.inf)
            ours = dict.fromkeys(PASSES, math.inf)
            for _ in range(args.rounds):
                for name, seconds in time_pytorch(problem, args).items():
                    theirs[name] = min(theirs[name], seconds)
                for name in passes:
                    ours[name] = min(ours[name], time_convoke(problem, name, chosen[name], args))
            for name in passes:
                row = {"suite": suite.stem, "problem": problem, "pass": name, "algorithm": chosen[name]}
                row |= {"pytorch": theirs[name], "convoke": ours[name], "ratio": theirs[name] / ours[name]}
                rows.append(row)
                print(
                    f"{row['ratio']:6.2f}  {name:<12} {row['pytorch'] * 1e3:9.3f} ms  {row['convoke'] * 1e3:9.3f} ms  "
                    f"{row['algorithm']:<24} {problem}",
                    flush=True,
                )
    summarize(rows)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


def sizes(problem):
    """Sizes from benchdnn notation; omitted height or width follow the other one."""
    found = {key: int(value) for key, value in re.findall(r"([a-z]+)(\d+)", problem)}

    def pair(h, w, default):
        first = found.get(h, found.get(w, default))
        return first, found.get(w, first)

    return {
        "batch": found.get("mb", 2),
        "channels": (found["ic"], found["oc"]),
        "groups": found.get("g", 1),
        "input": pair("ih", "iw", 1),
        "kernel": pair("kh", "kw", 1),
        "stride": pair("sh", "sw", 1),
        "padding": pair("ph", "pw", 0),
        "dilation": tuple(d + 1 for d in pair("dh", "dw", 0)),
    }


def time_pytorch(problem, args):
    """The median seconds of each pass, in the better memory format."""
    import torch

    p = sizes(problem)
    (c, k), g = p["channels"], p["groups"]
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    best = dict.fromkeys(PASSES, math.inf)
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(p["batch"], c, *p["input"]).to(dtype, memory_format=layout)
        w = torch.randn(k, c // g, *p["kernel"]).to(dtype, memory_format=layout)
        options = (p["stride"], p["padding"], p["dilation"])

        def forward():
            return torch.nn.functional.conv2d(x, w, None, *options, g)

        with torch.no_grad():
            dy = torch.randn_like(forward())

        def backward(data, weights):
            return torch.ops.aten.convolution_backward(
                dy, x, w, None, *options, False, (0, 0), g, (data, weights, False)
            )

        calls = [forward, lambda: backward(True, False), lambda: backward(False, True)]
        for name, call in zip(PASSES, calls):
            best[name] = min(best[name], median_seconds(call, args.seconds))
    return best


def median_seconds(call, seconds):
    import torch

    with torch.no_grad():
        call()
        times, start = [], time.perf_counter()
        while len(times) < 5 or time.perf_counter() - start < seconds and len(times) < 200:
            before = time.perf_counter()
            call()
            times.append(time.perf_counter() - before)
    return statistics.median(times)


def choose(problem, args):
    """The algorithm that convoke chooses, for each pass."""
    flags = ["--budget", str(args.budget)]
    for name in args.passes.split(","):
        flags += ["--pass", name]
    for flag in ("only", "skip"):
        if getattr(args, flag):
            flags += [f"--{flag}", getattr(args, flag)]
    return {entry["pass"]: entry["algorithm"] for entry in bench(problem, flags, args)}


def time_convoke(problem, name, algorithm, args):
    """The median seconds of this algorithm when it runs alone, as PyTorch's does."""
    flags = ["--pass", name, "--only", algorithm, "--budget", str(2 * args.seconds)]
    [entry] = bench(problem, flags, args)
    return entry["seconds_median"]


def bench(problem, flags, args):
    """The chosen entries of `convoke bench`."""
    command = [args.convoke, "bench", problem, "--json", "-", "--threads", str(args.threads)]
    command += ["--dtype", args.dtype, "--format", args.format, *flags]
    return [entry for entry in run_convoke(command) if entry["chosen"]]


def run_convoke(command):
    """The JSON that convoke prints, run without malloc's settings."""
    return run_json(command, {name: value for name, value in os.environ.items() if name not in KEEP_MEMORY})


def run_json(command, environment):
    """The JSON that a command prints."""
    command = list(map(str, command))
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    return json.loads(done.stdout)


def kind(problem):
    """The kinds of problem that are worth telling apart."""
    p = sizes(problem)
    (c, k), kernel = p["channels"], p["kernel"]
    kinds = []
    if p["groups"] == c and c > 1:
        kinds.append("depthwise")
    elif p["groups"] == 1:
        if kernel == (1, 1):
            kinds.append("1x1")
        if kernel == (3, 3) and p["stride"] == p["dilation"] == (1, 1) and min(c, k) >= 64:
            kinds.append("3x3 stride 1, C and K >= 64")
        if min(kernel) >= 5 and c >= 32:
            kinds.append("5x5 and larger, C >= 32")
        if c <= 4:
            kinds.append("C <= 4")
    return kinds


def summarize(rows):
    groups = {}
    for row in rows:
        for name in ["all", *kind(row["problem"])]:
            groups.setdefault(name, {}).setdefault(row["pass"], []).append(row["ratio"])
    print("\nPyTorch time / convoke time: geometric mean, least, number of problems")
    for name, passes in groups.items():
        for which, ratios in passes.items():
            mean = statistics.geometric_mean(ratios)
            print(f"{name:<30} {which:<12} {mean:6.2f} {min(ratios):6.2f} {len(ratios):4}")


if __name__ == "__main__":
    main()
