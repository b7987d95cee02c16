#!/usr/bin/env python3
"""Train convoke's models in PyTorch and in convoke, with the same settings, and compare test accuracies.

    python tools/peers/accuracy.py MNIST_DIR CIFAR10_DIR [--models mnist-cnn,resnet20] [--seeds 1,2,3] [--threads 2] [--json FILE]

mnist-cnn trains on MNIST with Adadelta (learning rate 1, times 0.7 after each epoch), resnet20 on as many batches of CIFAR-10 as
are there, with SGD (0.1, times 0.3 after each epoch, momentum 0.9, weight decay 1e-4), cropped and mirrored at random. Batches
have 128 images. A seed gives starting values, order, dropout and augmentation, each side by its own generator: runs of the same
seed do not do the same steps, so the means over the seeds are what can be compared. convoke trains its fused blocks, whose
convolutions it has measured.

Needs Python 3.9 with torch and numpy, and `cargo build --release`.
"""

import argparse
import gzip
import json
import statistics
from pathlib import Path

from cifar10 import RECORD, read
from convolutions import keep_memory, run_convoke
from models import MODELS

BATCH = 128
# Epochs, learning rate, its factor after each epoch, and what else convoke is told.
SETTINGS = {
    "mnist-cnn": (2, 1.0, 0.7, ["--data", "mnist", "--optimizer", "adadelta"]),
    "resnet20": (3, 0.1, 0.3, ["--data", "cifar10", "--optimizer", "sgd", "--momentum", "0.9", "--weight-decay", "1e-4"]),
}


def main():
    keep_memory()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mnist", type=Path, help="folder with the four IDX files, packed or not")
    parser.add_argument("cifar10", type=Path, help="folder with the .bin files, or with cifar-10-binary.tar.gz")
    parser.add_argument("--models", default=",".join(SETTINGS))
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--epochs", type=int, help="instead of each model's own number")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--convoke", default=Path(__file__).parents[2] / "target/release/convoke", type=Path)
    parser.add_argument("--json", type=Path, help="write every accuracy here")
    args = parser.parse_args()

    import torch

    torch.set_num_threads(args.threads)
    found = []
    for name in args.models.split(","):
        folder, read = {"mnist-cnn": (args.mnist, read_mnist), "resnet20": (args.cifar10, read_cifar10)}[name]
        data = read(folder)
        rows = []
        for seed in map(int, args.seeds.split(",")):
            row = {"model": name, "seed": seed}
            row["pytorch"] = train_pytorch(name, data, seed, args)
            row["convoke"] = train_convoke(name, folder, seed, args)
            rows.append(row)
            print(f"{name}, seed {seed}: PyTorch {row['pytorch']:.2%}, convoke {row['convoke']:.2%}", flush=True)
        means = [statistics.mean(row[side] for row in rows) for side in ("pytorch", "convoke")]
        print(f"{name}, mean: PyTorch {means[0]:.2%}, convoke {means[1]:.2%}, {100 * (means[1] - means[0]):+.2f} points")
        found += rows
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


def settings(name, args):
    epochs, *rest = SETTINGS[name]
    return args.epochs or epochs, *rest


def train_convoke(name, folder, seed, args):
    """Test accuracy, 0 to 1."""
    epochs, rate, gamma, flags = settings(name, args)
    command = [args.convoke, "train", "--model", name, "--data-dir", folder, "--batch-size", BATCH, "--json", "-", *flags]
    command += ["--epochs", epochs, "--lr", rate, "--lr-gamma", gamma, "--seed", seed, "--threads", args.threads]
    [result] = run_convoke(command)["runs"]
    return result["test_accuracy"]


def train_pytorch(name, data, seed, args):
    """Test accuracy, 0 to 1."""
    import torch

    epochs, rate, gamma, _ = settings(name, args)
    (images, labels), (test_images, test_labels) = data
    torch.manual_seed(seed)
    model = MODELS[name][0]().to(memory_format=torch.channels_last)
    if name == "mnist-cnn":
        optimizer = torch.optim.Adadelta(model.parameters(), lr=rate)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma)
    for _ in range(epochs):
        model.train()
        for batch in torch.randperm(len(images)).split(BATCH):
            x = images[batch]
            if name == "resnet20":
                x = augment(x)
            optimizer.zero_grad(set_to_none=True)
            x = x.contiguous(memory_format=torch.channels_last)
            torch.nn.functional.nll_loss(model(x), labels[batch]).backward()
            optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        parts = zip(test_images.split(1000), test_labels.split(1000))
        right = sum((model(x).argmax(1) == y).sum().item() for x, y in parts)
    return right / len(test_images)


def augment(x):
    """Random parts of images that 4 pixels of zeros surround, half of them mirrored."""
    import torch

    n, _, height, width = x.shape
    padded = torch.nn.functional.pad(x, (4, 4, 4, 4))
    rows = torch.randint(9, (n, 1)) + torch.arange(height)
    columns = torch.randint(9, (n, 1)) + torch.arange(width)
    mirrored = torch.rand(n) < 0.5
    columns[mirrored] = columns[mirrored].flip(1)
    images = torch.arange(n)[:, None, None]
    return padded[images, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def read_mnist(folder):
    """Training and test images and labels, as convoke normalizes them."""
    return [
        (
            normalized(idx(folder, f"{part}-images-idx3-ubyte", 16).reshape(-1, 1, 28, 28), [0.1307], [0.3081]),
            as_labels(idx(folder, f"{part}-labels-idx1-ubyte", 8)),
        )
        for part in ("train", "t10k")
    ]


def idx(folder, name, header):
    import numpy

    path = folder / name
    content = path.read_bytes() if path.exists() else gzip.decompress((folder / f"{name}.gz").read_bytes())
    return numpy.frombuffer(content, numpy.uint8, offset=header)


def read_cifar10(folder):
    """As read_mnist."""
    import numpy

    mean, std = [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]
    parts = []
    for prefix in ("data_batch", "test_batch"):
        rows = numpy.frombuffer(read(folder, prefix), numpy.uint8).reshape(-1, RECORD)
        parts.append((normalized(rows[:, 1:].reshape(-1, 3, 32, 32), mean, std), as_labels(rows[:, 0])))
    return parts


def normalized(images, mean, std):
    import torch

    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
    return (torch.from_numpy(images.copy()).float() / 255 - mean) / std


def as_labels(labels):
    import torch

    return torch.from_numpy(labels.copy()).long()


if __name__ == "__main__":
    main()
