#!/usr/bin/env python3
"""Time whole training steps of convoke and its peers, model by model, by turns.

    python tools/peers/steps.py [MODEL[:BATCH]...] [--threads 2] [--rounds 3] [--steps 6] [--json FILE] [--markdown]

MODEL is mnist-cnn, resnet20, resnet50 or segnet (default: all, at batch 2048, 128, 16, 16). Each contender is a process of its
own: it does some steps on noise that it holds in memory, of which the median counts, and the median of its rounds. PyTorch runs

    default         as it is after installation, contiguous
    channels-last   model and images in channels-last memory
    kept            channels-last, and malloc told to keep memory, since fresh memory costs page faults
    kept-large      the last, in pages of 2 MB where the system gives them (GLIBC_TUNABLES=glibc.malloc.hugetlb=1), as convoke's are
    compiled        kept, through torch.compile; compiled-large in such pages
    compiled-0.5    compiled, with torch._functorch.config.activation_memory_budget = 0.5; likewise 0.2
    checkpointed    kept, with torch.utils.checkpoint around each block
    bf16            kept, forward under autocast to bf16; bf16-compiled: through torch.compile, too

and convoke its separate layers, its fused blocks, these in bf16, and within --budget bytes (mnist-cnn: 650MB). JAX runs once a model, with
--peer other programs. Convoke's time includes making batches from bytes; the images of the others are ready. Ratios are a
contender's time / that of the best peer in f32, and of the best of all peers: below 1 is faster. "first" is the first step of the
first process, with compilation; for convoke with nothing measured before. "memory" is the most that the process had resident.

Needs Python 3.9 with torch, jax (or --skip jax) and a C++ compiler for torch.compile, and `cargo build --release`.
"""

import argparse
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

from convolutions import KEEP_MEMORY, run_convoke, run_json

BATCHES = {"mnist-cnn": 2048, "resnet20": 128, "resnet50": 16, "segnet": 16}
BUDGETS = {"mnist-cnn": "650MB"}
LARGE = "-large"
PYTORCH = ["default", "channels-last", "kept", "kept-large", "compiled", "compiled-large", "compiled-0.5", "compiled-0.2", "checkpointed", "bf16", "bf16-compiled"]
WARM_UP = 2


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(BATCHES), metavar="MODEL[:BATCH]")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each contender, by turns")
    parser.add_argument("--steps", type=int, default=6, help="steps that count, of each process")
    parser.add_argument("--skip", default="", help="contenders to leave out, as in the table, with commas: compiled-0.2,jax")
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
    skipped = args.skip.split(",")
    contenders = {
        f"PyTorch, {how}": lambda how=how: pytorch(model, batch, how, args) for how in PYTORCH if how not in skipped
    }
    budget = args.budget or BUDGETS.get(model)
    ours = {"separate": ["--conv-bn", "separate"], "fused": [], "fused, bf16": ["--precision", "bf16"]}
    ours |= {f"fused, {budget}": ["--memory-budget", budget]} if budget else {}
    contenders |= {
        f"convoke, {how}": lambda flags=flags: convoke(model, batch, flags, args)
        for how, flags in ours.items()
        if how not in skipped
    }
    runs = {name: [] for name in contenders}
    show = lambda text: print(f"{model}: {text}          ", end="\r", file=sys.stderr, flush=True)
    show("first run of convoke")
    with tempfile.TemporaryDirectory() as cache:
        first = convoke(model, batch, ["--tuning-cache", cache], args, steps=1)["seconds"]
    for done in range(args.rounds):
        for name, measure in contenders.items():
            show(f"round {done + 1} of {args.rounds}, {name}")
            runs[name].append(measure())
    # Others are far from the best, so that once says enough.
    once = {} if "jax" in skipped else {"JAX": lambda: jax(model, batch, args)}
    for peer in args.peer if model == "mnist-cnn" else []:
        name, _, program = peer.partition("=")
        environment = dict(os.environ, RAYON_NUM_THREADS=str(args.threads), **KEEP_MEMORY)
        once[name] = lambda program=program, environment=environment: run_json([program, batch, 1, 2], environment)
    for name, measure in once.items():
        show(name)
        runs[name] = [measure()]
    rows = {
        name: {
            "seconds": statistics.median(run["seconds"] for run in found),
            "all_seconds": [run["seconds"] for run in found],
            "first": first if name == "convoke, fused" else None if name.startswith("convoke") else found[0].get("first"),
            "bytes": max(run["bytes"] for run in found),
        }
        for name, found in runs.items()
    }
    return {"model": model, "batch": batch, "threads": args.threads, "machine": machine(), "contenders": rows}


def pytorch(model, batch, how, args):
    environment = dict(os.environ, **({} if how in ("default", "channels-last") else KEEP_MEMORY))
    if how.endswith(LARGE):
        environment["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    # What another run has compiled would make the first step look short.
    with tempfile.TemporaryDirectory() as cache:
        environment["TORCHINDUCTOR_CACHE_DIR"] = cache
        worker = Path(__file__).with_name("pytorch_steps.py")
        command = [sys.executable, worker, model, batch, how.removesuffix(LARGE), args.threads, WARM_UP, args.steps]
        return run_json(command, environment)


def jax(model, batch, args):
    worker = Path(__file__).with_name("jax_steps.py")
    return run_json([sys.executable, worker, model, batch, args.threads, 1, 3], dict(os.environ, **KEEP_MEMORY))


def convoke(model, batch, flags, args, steps=None):
    optimizer = "adadelta" if model == "mnist-cnn" else "sgd"
    command = [args.convoke, "train", "--model", model, "--data", "random", "--batch-size", batch, "--json", "-"]
    command += ["--optimizer", optimizer, "--threads", args.threads, "--continue-on-nan"]
    command += ["--steps", steps or WARM_UP + args.steps]
    [result] = run_convoke(command + flags)["runs"]
    return {"seconds": result["step_seconds_median"], "bytes": result["process_peak_bytes"]}


def table(result, markdown):
    rows = result["contenders"]
    peers = {name: row["seconds"] for name, row in rows.items() if not name.startswith("convoke")}
    # NaN if all are skipped.
    best = min(peers.values(), default=math.nan)
    best_f32 = min((seconds for name, seconds in peers.items() if "bf16" not in name), default=math.nan)
    title = f"{result['model']}, batch {result['batch']}, {result['threads']} threads; {result['machine']}"
    header = ["", "step", "/ best f32", "/ best peer", "first step", "memory"]
    cells = [
        [name, f"{row['seconds'] * 1e3:.0f} ms", f"{row['seconds'] / best_f32:.2f}", f"{row['seconds'] / best:.2f}"]
        + [f"{row['first']:.1f} s" if row["first"] else "", f"{row['bytes'] / 1e9:.2f} GB"]
        for name, row in rows.items()
    ]
    if markdown:
        lines = ["| " + " | ".join(cells) + " |" for cells in [header, ["---"] + ["---:"] * 5, *cells]]
        return f"{title}\n\n" + "\n".join(lines) + "\n"
    widths = [max(len(row[column]) for row in [header, *cells]) for column in range(len(header))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in [header, *cells]]
    return f"\n{title}\n" + "\n".join(lines)


def machine():
    """The processor's name and vector instructions, where Linux tells them, and the date."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    known = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "AVX512-BF16", "amx_bf16": "AMX-BF16"}
    vectors = [known[flag] for flag in known if flag in flags]
    if "avx512f" in flags:
        vectors.remove("AVX2")
    return ", ".join([names[0] if names else platform.processor(), *(vectors or [platform.machine()]), time.strftime("%Y-%m-%d")])


if __name__ == "__main__":
    main()
