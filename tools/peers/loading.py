#!/usr/bin/env python3
"""Time loading of photographs alone, in PyTorch's DataLoader with Pillow and in convoke, in turn, and print the ratio.

    python tools/peers/loading.py DIR [--workers 2] [--size 224] [--rounds 3]

DIR holds a folder of photographs for each class. Both cut out a random part, resize it with antialiasing, mirror half of them and
normalise; batches have 32 images. Each round passes once over the images in each; a figure is the median of the rounds. A ratio
above 1 means that convoke is faster.

Needs Python 3.9 with torch and torchvision, and `cargo build --release --example loading_times`.
"""

import argparse
import statistics
import subprocess
import time
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "target" / "release" / "examples" / "loading_times"


def time_torch(options):
    import torch
    from torchvision import datasets, transforms

    torch.set_num_threads(1)
    transform = transforms.Compose([
        transforms.RandomResizedCrop(options.size),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ])
    data = datasets.ImageFolder(options.dir, transform)
    loader = torch.utils.data.DataLoader(
        data, batch_size=32, num_workers=options.workers, persistent_workers=options.workers > 0
    )
    # Workers start with the first pass.
    next(iter(loader))
    start = time.perf_counter()
    images = sum(len(labels) for _, labels in loader)
    return images / (time.perf_counter() - start)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rates = {"torch": [], "convoke": []}
    for _ in range(options.rounds):
        arguments = [options.dir, str(options.workers), str(options.size)]
        rates["convoke"].append(float(subprocess.run([PROGRAM, *arguments], check=True, capture_output=True).stdout))
        rates["torch"].append(time_torch(options))
    torch, convoke = (statistics.median(rates[name]) for name in ("torch", "convoke"))
    print(f"images a second with {options.workers} workers: PyTorch {torch:.0f}, convoke {convoke:.0f}, ratio {convoke / torch:.2f}")


if __name__ == "__main__":
    main()
