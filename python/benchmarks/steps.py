"""Times whole training steps of one model in PyTorch and with torch_convoke, in turn, in one process.

    python benchmarks/steps.py MODEL [--batch N] [--size N] [--rounds N] [--compiled] [--autocast] [--threads N] [--json FILE]

MODEL is one of torchvision's, or mnist-cnn, resnet20, segnet (a U-Net) as tools/peers has them. PyTorch runs at its best: in channels-last,
with an allocator that keeps memory. Printed are medians of seconds, the ratio convoke / PyTorch (below 1 convoke is faster) with the
smallest and largest of the rounds, and bytes. "first" is the first step, capture and measuring included.
"""

import argparse
import copy
import json
import os
import resource
import statistics
import sys
import time
from pathlib import Path

KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1", "MALLOC_TOP_PAD_": str(64 << 20)}
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools" / "peers"))


def keep_memory():
    """Starts this program again with an allocator that keeps memory: malloc reads its settings at the start."""
    if any(os.environ.get(name) != value for name, value in KEEP_MEMORY.items()):
        os.environ.update(KEEP_MEMORY)
        os.execv(sys.executable, [sys.executable, *sys.argv])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="steps of a round")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--compiled", action="store_true", help="also time torch.compile")
    parser.add_argument("--autocast", action="store_true", help="forward and loss under autocast to bfloat16")
    parser.add_argument("--contiguous", action="store_true", help="models and inputs in PyTorch's default format")
    parser.add_argument("--json")
    args = parser.parse_args()
    keep_memory()
    import torch
    from torch.nn import functional as F

    import torch_convoke
    from torch_convoke import _threads

    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    from models import MODELS

    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, fused=True)
    shape, classes, pixels, loss_of = (3, args.size, args.size), 1000, False, F.cross_entropy
    if args.model in MODELS:
        make, shape, classes, pixels, optimizer = MODELS[args.model]
        loss_of = F.nll_loss
    else:
        import torchvision

        make = getattr(torchvision.models, args.model)
    layout = torch.contiguous_format if args.contiguous else torch.channels_last
    eager = make().train().to(memory_format=layout)
    models = {"eager": eager, "convoke": torch_convoke.optimize(copy.deepcopy(eager))}
    if args.compiled:
        models["compiled"] = torch.compile(copy.deepcopy(eager))
    batch = args.batch or {"mnist-cnn": 1024, "resnet20": 128, "segnet": 8}.get(args.model, 8)
    images = torch.randn(batch, *shape).to(memory_format=layout)
    labels = torch.randint(classes, (batch, *(shape[1:] if pixels else ())))
    optimizers = {name: optimizer(model.parameters()) for name, model in models.items()}

    def step(name):
        start = time.perf_counter()
        optimizers[name].zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.autocast):
            loss = loss_of(models[name](images), labels)
        loss.backward()
        optimizers[name].step()
        loss.item()
        return time.perf_counter() - start

    first = {name: step(name) for name in models}
    for name in models:
        step(name)
    seconds = {name: [] for name in models}
    for _ in range(args.rounds):
        for name in models:
            # OpenMP's threads spin for a while after PyTorch's last operation.
            time.sleep(0.05)
            step(name)
            seconds[name].append(statistics.median(step(name) for _ in range(args.steps)))
    engine = _threads.engine()
    result = {"model": args.model, "batch": batch, "threads": torch.get_num_threads(), "isa": engine.isa}
    for name in models:
        result[name] = statistics.median(seconds[name])
        result[f"{name}_first"] = first[name]
    ratios = [ours / theirs for ours, theirs in zip(seconds["convoke"], seconds["eager"])]
    result["ratio"], result["least"], result["most"] = statistics.median(ratios), min(ratios), max(ratios)
    if args.compiled:
        pairs = zip(seconds["convoke"], seconds["eager"], seconds["compiled"])
        result["ratio_to_best"] = statistics.median(ours / min(a, b) for ours, a, b in pairs)
    result["peak_bytes"] = engine.memory()[1]
    print(json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in result.items()}))
    if args.json:
        Path(args.json).write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
