#!/usr/bin/env python3
"""Time whole training steps of PyTorch and convoke, model by model, by turns.

    python tools/peers/steps.py [MODEL[:BATCH]...] [--threads 2] [--rounds 3] [--steps 6] [--json FILE] [--markdown]

MODEL is mnist-cnn, resnet20, resnet50 or segnet (default: all, at batch 2048, 128, 16, 16). Each contender is a process of its
own: it does some steps on noise that it holds in memory, of which the median counts, and the median of its rounds. PyTorch runs

    default         as it is after installation, contiguous
    channels-last   model and images in channels-last memory
    kept            channels-last, and malloc told to keep memory, since fresh memory costs page faults
    compiled        the last, through torch.compile (with --compile)

and convoke runs its separate layers, its fused blocks, and these within --budget bytes (mnist-cnn: 650MB). Convoke's time includes
making batches from bytes; PyTorch's images are ready. Ratios are convoke's time / PyTorch's best, and / its default: below 1
convoke is faster. "memory" is the most that the process had resident.

Needs Python 3.9 with torch, and `cargo build --release`. The first run measures convoke's convolutions, which later ones remember.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

from convolutions import KEEP_MEMORY, run_convoke, run_json

BATCHES = {"mnist-cnn": 2048, "resnet20": 128, "resnet50": 16, "segnet": 16}
BUDGETS = {"mnist-cnn": "650MB"}
WARM_UP = 2


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(BATCHES), metavar="MODEL[:BATCH]")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each contender, by turns")
    parser.add_argument("--steps", type=int, default=6, help="steps that count, of each process")
    parser.add_argument("--compile", action="store_true", help="also time torch.compile, which needs a C++ compiler")
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=PROGRAM",
        help="also time mnist-cnn in this program, called with BATCH WARM_UP STEPS, such as those of tools/peers/candle and burn; once, with 2 steps",
    )
    parser.add_argument("--budget", help="--memory-budget of convoke's planned run")
    parser.add_argument("--convoke", default=Path(__file__).parents[2] / "target/release/convoke", type=Path)
    parser.add_argument("--json", type=Path, help="write every time here")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    args = parser.parse_args()
    results = []
    for argument in args.models:
        model, _, batch = argument.partition(":")
        if model not in BATCHES:
            sys.exit(f"{model} is not one of {', '.join(BATCHES)}")
        results.append(compare(model, int(batch or BATCHES[model]), args))
        print(table(results[-1], args.markdown), flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


def compare(model, batch, args):
    """The median seconds and the memory of each contender."""
    theirs = ["default", "channels-last", "kept"] + (["compiled"] if args.compile else [])
    contenders = {f"PyTorch, {how}": lambda how=how: pytorch(model, batch, how, args) for how in theirs}
    budget = args.budget or BUDGETS.get(model)
    ours = {"separate": ["--conv-bn", "separate"], "fused": []} | (
        {f"fused, {budget}": ["--memory-budget", budget]} if budget else {}
    )
    contenders |= {f"convoke, {how}": lambda flags=flags: convoke(model, batch, flags, args) for how, flags in ours.items()}
    runs = {name: [] for name in contenders}
    for done in range(args.rounds):
        for name, measure in contenders.items():
            print(f"{model}: round {done + 1} of {args.rounds}, {name}          ", end="\r", file=sys.stderr, flush=True)
            runs[name].append(measure())
    for peer in args.peer if model == "mnist-cnn" else []:
        name, _, program = peer.partition("=")
        environment = dict(os.environ, RAYON_NUM_THREADS=str(args.threads), **KEEP_MEMORY)
        runs[name] = [run_json([program, batch, 1, 2], environment)]
    rows = {
        name: {
            "seconds": statistics.median(run["seconds"] for run in found),
            "all_seconds": [run["seconds"] for run in found],
            "bytes": max(run["bytes"] for run in found),
        }
        for name, found in runs.items()
    }
    return {"model": model, "batch": batch, "threads": args.threads, "machine": machine(), "contenders": rows}


def pytorch(model, batch, how, args):
    environment = dict(os.environ, **(KEEP_MEMORY if how in ("kept", "compiled") else {}))
    worker = Path(__file__).with_name("pytorch_steps.py")
    command = [sys.executable, worker, model, batch, how, args.threads, WARM_UP, args.steps]
    return run_json(command, environment)


def convoke(model, batch, flags, args):
    optimizer = "adadelta" if model == "mnist-cnn" else "sgd"
    command = [args.convoke, "train", "--model", model, "--data", "random", "--batch-size", batch, "--json", "-"]
    command += ["--optimizer", optimizer, "--threads", args.threads, "--steps", WARM_UP + args.steps, "--continue-on-nan"]
    [result] = run_convoke(command + flags)["runs"]
    return {"seconds": result["step_seconds_median"], "bytes": result["process_peak_bytes"]}


def table(result, markdown):
    rows = result["contenders"]
    best = min(row["seconds"] for name, row in rows.items() if name.startswith("PyTorch"))
    default = rows["PyTorch, default"]["seconds"]
    title = f"{result['model']}, batch {result['batch']}, {result['threads']} threads; {result['machine']}"
    header = ["", "step", "/ best PyTorch", "/ default PyTorch", "memory"]
    cells = [
        [name, f"{row['seconds'] * 1e3:.0f} ms", f"{row['seconds'] / best:.2f}", f"{row['seconds'] / default:.2f}"]
        + [f"{row['bytes'] / 1e9:.2f} GB"]
        for name, row in rows.items()
    ]
    if markdown:
        lines = ["| " + " | ".join(cells) + " |" for cells in [header, ["---"] + ["---:"] * 4, *cells]]
        return f"{title}\n\n" + "\n".join(lines) + "\n"
    widths = [max(len(row[column]) for row in [header, *cells]) for column in range(len(header))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in [header, *cells]]
    return f"\n{title}\n" + "\n".join(lines)


def machine():
    """The processor's name, where Linux tells it, and the date."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {time.strftime('%Y-%m-%d')}"


if __name__ == "__main__":
    main()
