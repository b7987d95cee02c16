#!/usr/bin/env python3
"""Train torchvision's resnet18 on a folder of photographs in PyTorch and in convoke, with the same recipe, and compare accuracies.

    python tools/peers/photographs.py DIR [--weights FILE.pth] [--epochs 5] [--size 64] [--seeds 1,2,3] [--json FILE]

DIR holds train/CLASS/IMAGE and val/CLASS/IMAGE. The recipe is convoke's default: AdamW with a learning rate that rises to --lr and
falls again (one-cycle), no weight decay on biases and batch norms, batches of 32, random parts with changed colours, mirrored. With
--weights both start from that file, with a new last layer whose learning rate is ten times as high, and batch norms frozen.

A seed gives starting values, order and augmentation, each side by its own generator: runs of the same seed do not do the same steps,
so the means over the seeds are what can be compared. PyTorch may train on a GPU (--device cuda); convoke trains on the CPU.

Needs Python 3.9 with torch and torchvision, and `cargo build --release`.
"""

import argparse
import json
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from convolutions import run_convoke

BATCH = 32


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--weights", type=Path, help="fine-tune from this state_dict instead of training from nothing")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--size", type=int, default=64, help="height and width of the images for the model")
    parser.add_argument("--lr", type=float, help="the highest learning rate: 0.003, with --weights 0.001")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--threads", type=int, default=2, help="of each run")
    parser.add_argument("--together", type=int, default=1, help="convoke's runs at a time")
    parser.add_argument("--device", default="cpu", help="what PyTorch trains on")
    parser.add_argument("--only", choices=["pytorch", "convoke"])
    parser.add_argument("--save", type=Path, help="keep PyTorch's trained state_dict of the first seed here")
    parser.add_argument("--convoke", default=Path(__file__).parents[2] / "target/release/convoke", type=Path)
    parser.add_argument("--json", type=Path, help="write every accuracy here")
    args = parser.parse_args()
    args.lr = args.lr or (0.001 if args.weights else 0.003)

    sides = {"pytorch": train_pytorch, "convoke": train_convoke}
    found = {}
    # PyTorch's runs share this process and its random generator, so they follow each other.
    with ThreadPoolExecutor(args.together) as pool:
        for side, train in sides.items():
            if args.only in (None, side):
                seeds = [int(seed) for seed in args.seeds.split(",")]
                runs = pool.map if side == "convoke" else map
                found[side] = list(runs(lambda seed: train(seed, args), seeds))
                mean, spread = statistics.mean(found[side]), statistics.stdev(found[side]) if len(seeds) > 1 else 0
                shown = ", ".join(f"{accuracy:.2%}" for accuracy in found[side])
                print(f"{side}: {shown}; mean {mean:.2%}, standard deviation {100 * spread:.2f} points", flush=True)
    if len(found) == 2:
        difference = statistics.mean(found["convoke"]) - statistics.mean(found["pytorch"])
        print(f"convoke - PyTorch: {100 * difference:+.2f} points")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


def train_convoke(seed, args):
    """Accuracy on the validation images after the last epoch, 0 to 1."""
    with tempfile.TemporaryDirectory() as output:
        command = [args.convoke, "train", "--data", "folder", "--data-dir", args.dir, "--model", "resnet18", "--json", "-"]
        command += ["--image-size", args.size, "--batch-size", BATCH, "--epochs", args.epochs, "--lr", args.lr]
        command += ["--seed", seed, "--threads", args.threads, "--output", Path(output) / "run"]
        if args.weights:
            command += ["--weights", args.weights, "--freeze-bn", "--head-lr", 10 * args.lr]
        [result] = run_convoke(command)["runs"]
        return result["validation"][-1]["accuracy"]


def train_pytorch(seed, args):
    """As train_convoke."""
    import torch
    from torchvision import datasets, models, transforms

    torch.set_num_threads(args.threads)
    torch.manual_seed(seed)
    normalize = [transforms.ToTensor(), transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    varied = transforms.Compose([
        transforms.RandomResizedCrop(args.size),
        transforms.RandomHorizontalFlip(),
        transforms.ColorJitter(0.4, 0.4, 0.4),
        *normalize,
    ])
    plain = transforms.Compose([transforms.Resize(round(args.size * 8 / 7)), transforms.CenterCrop(args.size), *normalize])
    options = {"num_workers": 2 * args.threads if args.device != "cpu" else 0}
    train = datasets.ImageFolder(args.dir / "train", varied)
    train = torch.utils.data.DataLoader(train, BATCH, shuffle=True, persistent_workers=options["num_workers"] > 0, **options)
    val = torch.utils.data.DataLoader(datasets.ImageFolder(args.dir / "val", plain), 256, **options)

    model = models.resnet18(num_classes=len(train.dataset.classes))
    if args.weights:
        state = torch.load(args.weights, weights_only=True)
        model.load_state_dict({name: value for name, value in state.items() if not name.startswith("fc.")}, strict=False)
    model = model.to(args.device, memory_format=torch.channels_last)
    head = set(model.fc.parameters())
    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    if args.weights:
        for norm in norms:
            norm.requires_grad_(False)
    groups = [
        {"params": [parameter], "max_lr": args.lr * (10 if args.weights and parameter in head else 1),
         "weight_decay": 0.01 if parameter.dim() > 1 else 0.0}
        for parameter in model.parameters() if parameter.requires_grad
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, foreach=True)
    steps = args.epochs * len(train)
    rates = [group["max_lr"] for group in groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=steps, cycle_momentum=False)
    loss = torch.nn.CrossEntropyLoss()
    for _ in range(args.epochs):
        model.train()
        if args.weights:
            for norm in norms:
                norm.eval()
        for images, labels in train:
            images = images.to(args.device, memory_format=torch.channels_last, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            loss(model(images), labels.to(args.device)).backward()
            optimizer.step()
            schedule.step()
    if args.save and seed == int(args.seeds.split(",")[0]):
        torch.save({name: value.cpu() for name, value in model.state_dict().items()}, args.save)
    model.eval()
    with torch.no_grad():
        right = sum(
            (model(images.to(args.device)).argmax(1).cpu() == labels).sum().item() for images, labels in val
        )
    return right / len(val.dataset)


if __name__ == "__main__":
    main()
