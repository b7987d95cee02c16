#!/usr/bin/env python3
"""Train airbench94's network on CIFAR-10 by its recipe, in PyTorch on processors and in single precision.

    python tools/peers/airbench94.py --data DIR [--epochs 9.9] [--compile]
    python tools/peers/airbench94.py --random 8192 --epochs 1

Network and recipe are Keller Jordan's, "94% on CIFAR-10 in 3.29 seconds on a single GPU", 2024, arXiv:2404.00498. convoke's example
airbench94 is the same in Rust, with the same command line:

    cargo run --release --example airbench94 -- --data DIR

One line an epoch: the seconds of its training, the mean loss of its images, the accuracy on the test images. The last line has the
accuracy with test-time augmentation, and the seconds of everything but the preparation and the tests between epochs. Each program has
its own random numbers, so the same seed gives other runs.

Images and weights are channels-last. PyTorch is a tenth to a third faster where malloc keeps memory:

    MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=-1 MALLOC_TOP_PAD_=67108864 python tools/peers/airbench94.py ...

Needs Python 3.9 with torch, and a C++ compiler for --compile.
"""

import argparse
import math
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import cifar10

MEAN, STD = (torch.tensor(numbers).view(1, 3, 1, 1) for numbers in ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)))
WIDTHS = 64, 256, 256
# The filters that whiten patches of 3 x 2 x 2 numbers, and their negatives.
WHITENED = 2 * 3 * 2 * 2
WHITENING_IMAGES, WHITENING_EPS = 5000, 5e-4
SCALE = 1 / 9
MOMENTUM, LEARNING_RATE, WEIGHT_DECAY = 0.85, 11.5, 0.0153
# The learning rate of the batch norms' biases as a multiple of the others'.
BIAS_FACTOR = 64
LABEL_SMOOTHING = 0.2
WHITENING_BIAS_EPOCHS = 3
FIRST_RATE, LAST_RATE, RISE = 0.2, 0.07, 0.23
LOOKAHEAD_EVERY = 5
MOST_MOVED = 2
JUDGED_AT_ONCE = 2000


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=Path, metavar="DIR", help="a folder with cifar-10-binary.tar.gz, cifar-10-batches-bin, or the .bin files")
    source.add_argument("--random", type=int, metavar="N", help="number of images of noise to train on instead, to time an epoch; nothing is tested")
    source.add_argument("--golden", action="store_true", help="print the losses that convoke's test of its example compares with")
    parser.add_argument("--epochs", type=float, default=9.9, metavar="X", help="how many epochs; the last one may be a part (default: 9.9)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="initial values, order and views of the images (default: 0)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), metavar="N", help="threads (default: all processors)")
    parser.add_argument("--batch", type=int, default=1024, metavar="N", help="images in a step (default: 1024)")
    parser.add_argument("--compile", action="store_true", help="run the network through torch.compile")
    args = parser.parse_args()
    if not 0 < args.epochs <= 1e6:
        parser.error("--epochs: expected a number above 0, such as 9.9")
    if args.batch < 2 or args.threads < 1 or (args.random is not None and args.random < 1):
        parser.error("--batch must be 2 or more, --threads and --random 1 or more")
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    if args.golden:
        return golden()
    train, test = load(args)
    steps_per_epoch = len(train) // args.batch
    if steps_per_epoch == 0:
        sys.exit(f"error: a batch of {args.batch} is more than the {len(train)} training images")
    run(args, train, test, math.ceil(steps_per_epoch * args.epochs))


def run(args, train, test, steps):
    start = time.perf_counter()
    network = Network()
    network.train_whitening_bias(True)
    forward = torch.compile(network) if args.compile else network
    warm_up(network, forward, train, args.batch)
    print(f"prepared in {time.perf_counter() - start:.1f} s", flush=True)

    start = time.perf_counter()
    network.initialize()
    network.whiten(train.normalised(torch.arange(min(WHITENING_IMAGES, len(train)))))
    training = Training(network, forward, steps)
    mirrored = torch.rand(len(train)) < 0.5
    total = time.perf_counter() - start
    for epoch in range(math.ceil(args.epochs)):
        start = time.perf_counter()
        network.train_whitening_bias(epoch < WHITENING_BIAS_EPOCHS)
        losses = []
        order = torch.randperm(len(train))
        for chosen in order.split(args.batch)[: len(train) // args.batch]:
            images = moved(train.normalised(chosen))
            images = mirror(images, mirrored[chosen] ^ (epoch % 2 == 1))
            losses.append(training.step(images, train.labels[chosen]))
            if not math.isfinite(losses[-1]):
                sys.exit(f"error: the loss of step {len(losses)} of epoch {epoch + 1} is {losses[-1]}")
            if training.is_done():
                break
        seconds = time.perf_counter() - start
        total += seconds
        line = f"epoch {epoch + 1}: {seconds:.2f} s, loss {sum(losses) / len(losses):.4f}"
        print(line + (f", accuracy {100 * accuracy(network, forward, test, plain):.2f} %" if len(test) else ""), flush=True)
    if len(test):
        start = time.perf_counter()
        share = accuracy(network, forward, test, augmented)
        total += time.perf_counter() - start
        print(f"accuracy {100 * share:.2f} % with test-time augmentation; ", end="")
    print(f"{total:.2f} s in total")


class Images:
    """Images of bytes, N x 3 x 32 x 32, with their classes."""

    def __init__(self, pixels, labels):
        self.pixels, self.labels = pixels.contiguous(memory_format=torch.channels_last), labels

    def __len__(self):
        return len(self.labels)

    def normalised(self, chosen):
        return ((self.pixels[chosen].float() / 255 - MEAN) / STD).contiguous(memory_format=torch.channels_last)


def load(args):
    """The images to train and to test with."""
    if args.random is not None:
        pixels = torch.randint(256, (args.random, 3, 32, 32), dtype=torch.uint8)
        none = Images(torch.empty(0, 3, 32, 32, dtype=torch.uint8), torch.empty(0, dtype=torch.int64))
        return Images(pixels, torch.randint(10, (args.random,))), none
    unpacked = args.data / "cifar-10-batches-bin"
    folder = unpacked if unpacked.is_dir() and not (args.data / "cifar-10-binary.tar.gz").exists() else args.data
    parts = []
    for prefix in ("data_batch", "test_batch"):
        try:
            records = cifar10.read(folder, prefix)
        except OSError as error:
            sys.exit(f"error: CIFAR-10 in {args.data}: {error}")
        if not records or len(records) % cifar10.RECORD:
            sys.exit(f"error: {prefix} in {args.data}: {len(records)} bytes are no whole number of images")
        records = torch.frombuffer(bytearray(records), dtype=torch.uint8).view(-1, cifar10.RECORD)
        parts.append(Images(records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].long()))
    return parts


def moved(images):
    """Each image moved at random by up to two pixels each way. Beyond its edges it goes on as its mirror image."""
    padded = F.pad(images, (MOST_MOVED,) * 4, "reflect")
    shifts = torch.randint(2 * MOST_MOVED + 1, (len(images), 2))
    result = torch.empty_like(images)
    for down in range(2 * MOST_MOVED + 1):
        for right in range(2 * MOST_MOVED + 1):
            chosen = (shifts == torch.tensor([down, right])).all(1)
            result[chosen] = padded[chosen, :, down : down + 32, right : right + 32]
    return result


def mirror(images, chosen):
    return torch.where(chosen.view(-1, 1, 1, 1), images.flip(-1), images).contiguous(memory_format=torch.channels_last)


class Group(nn.Module):
    """A convolution, max pool, batch norm and GELU, then a convolution, batch norm and GELU."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, outputs, 3, padding=1, bias=False) for channels in (inputs, outputs))
        self.norm1, self.norm2 = (nn.BatchNorm2d(outputs, eps=1e-12, momentum=1 - 0.6) for _ in range(2))
        self.norm1.weight.requires_grad = self.norm2.weight.requires_grad = False

    def forward(self, x):
        x = F.gelu(self.norm1(F.max_pool2d(self.conv1(x), 2)))
        return F.gelu(self.norm2(self.conv2(x)))


class Network(nn.Module):
    """N x 3 x 32 x 32 to logits, N x 10."""

    def __init__(self):
        super().__init__()
        self.whitening = nn.Conv2d(3, WHITENED, 2)
        self.groups = nn.ModuleList(Group(inputs, outputs) for inputs, outputs in zip((WHITENED, *WIDTHS), WIDTHS))
        self.classify = nn.Linear(WIDTHS[-1], 10, bias=False)
        self.whitening.weight.requires_grad = False
        self.to(memory_format=torch.channels_last)
        self.initialize()

    def forward(self, x):
        x = F.gelu(self.whitening(x))
        for group in self.groups:
            x = group(x)
        return self.classify(F.max_pool2d(x, 3).flatten(1)) * SCALE

    @torch.no_grad()
    def initialize(self):
        """PyTorch's initial values, but filters that pass one channel of the input each, as far as there are channels."""
        for module in self.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        self.whitening.bias.zero_()
        for group in self.groups:
            for conv in (group.conv1, group.conv2):
                nn.init.dirac_(conv.weight[: conv.in_channels])

    @torch.no_grad()
    def whiten(self, images):
        """Makes the first layer whiten the patches of these images: its filters are the eigenvectors of the patches' second moments,
        divided by the root of their eigenvalues, and the negatives of these."""
        patches = images.unfold(2, 2, 1).unfold(3, 2, 1).permute(0, 2, 3, 1, 4, 5).reshape(-1, WHITENED // 2)
        values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
        filters = (vectors / (values + WHITENING_EPS).sqrt()).T.flip(0).view(-1, 3, 2, 2)
        self.whitening.weight.copy_(torch.cat([filters, -filters]))

    def train_whitening_bias(self, trained):
        self.whitening.bias.requires_grad = trained

    def norm_biases(self):
        return [module.bias for module in self.modules() if isinstance(module, nn.BatchNorm2d)]


class Training:
    """Nesterov momentum with two learning rates, a triangular schedule, Lookahead."""

    def __init__(self, network, forward, steps):
        self.network, self.forward, self.done, self.steps = network, forward, 0, steps
        biases = network.norm_biases()
        others = [p for p in network.parameters() if p.requires_grad and not any(p is bias for bias in biases)]
        # Nesterov's momentum lengthens the steps of a constant gradient by the factor in parentheses; 1024 is the batch of the rates above.
        self.scale = 1024 * (1 + 1 / (1 - MOMENTUM))
        groups = [dict(params=params, factor=factor) for params, factor in ((biases, BIAS_FACTOR), (others, 1))]
        self.optimizer = torch.optim.SGD(groups, lr=LEARNING_RATE / self.scale, momentum=MOMENTUM, nesterov=True)
        self.slow = {name: value.clone() for name, value in self.fast()}

    def fast(self):
        """Weights and running statistics."""
        return [(name, value) for name, value in self.network.state_dict().items() if value.is_floating_point()]

    def is_done(self):
        return self.done >= self.steps

    def step(self, images, labels):
        """One step on a batch. Returns the mean of the images' losses before it."""
        loss = F.cross_entropy(self.forward(images), labels, label_smoothing=LABEL_SMOOTHING, reduction="sum")
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        highest = LEARNING_RATE / self.scale
        for group in self.optimizer.param_groups:
            group["lr"] = highest * group["factor"] * rate(self.done, self.steps)
            group["weight_decay"] = WEIGHT_DECAY * len(labels) / self.scale / highest / group["factor"]
        self.optimizer.step()
        self.done += 1
        if self.done % LOOKAHEAD_EVERY == 0:
            self.look_ahead(0.95**5 * (self.done / self.steps) ** 3)
        if self.done == self.steps:
            self.look_ahead(1.0)
        return loss.item() / len(labels)

    @torch.no_grad()
    def look_ahead(self, decay):
        """The slow copies go towards the weights, which then become the copies."""
        for name, fast in self.fast():
            self.slow[name].lerp_(fast, 1 - decay)
            fast.copy_(self.slow[name])


def rate(step, steps):
    """The learning rate of a step, from 0, as a share of the highest: it rises in a line, then falls in a line."""
    rise = int(steps * RISE)
    if step < rise:
        share = step / rise
        return FIRST_RATE * (1 - share) + share
    share = (step - rise) / (steps - rise)
    return (1 - share) + LAST_RATE * share


def warm_up(network, forward, images, batch):
    """A step for which the network is compiled and memory is taken."""
    Training(network, forward, 1).step(images.normalised(torch.arange(batch)), images.labels[:batch])


def plain(forward, images):
    return forward(images)


def augmented(forward, images):
    """The mean logits of an image and its mirror image; and of both moved by a pixel up and to the left and down and to the right."""

    def both(images):
        return (forward(images) + forward(images.flip(-1).contiguous(memory_format=torch.channels_last))) / 2

    padded = F.pad(images, (1,) * 4, "reflect")
    corners = [padded[:, :, at : at + 32, at : at + 32].contiguous(memory_format=torch.channels_last) for at in (0, 2)]
    return both(images) / 2 + sum(both(corner) for corner in corners) / 4


def accuracy(network, forward, images, logits):
    network.eval()
    right = 0
    with torch.no_grad():
        for chosen in torch.arange(len(images)).split(JUDGED_AT_ONCE):
            answers = logits(forward, images.normalised(chosen)).argmax(1)
            right += (answers == images.labels[chosen]).sum().item()
    network.train()
    return right / len(images)


def golden():
    """The losses of a few steps from numbers of a formula: `crates/convoke/tests/airbench94.rs` has them."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from make_golden import formula_fill

    network = Network()
    network.train_whitening_bias(True)
    weights = [network.whitening.weight, network.whitening.bias]
    for group in network.groups:
        weights += [group.conv1.weight, group.norm1.bias, group.conv2.weight, group.norm2.bias]
    weights.append(network.classify.weight)
    with torch.no_grad():
        for tag, weight in enumerate(weights):
            bound = 1 / math.sqrt(weight[0].numel()) if weight.dim() > 1 else 0.1
            weight.copy_(torch.as_tensor(formula_fill(tag, weight.numel(), bound)).reshape(weight.shape))
    count, steps = 16, 6
    images = torch.as_tensor(formula_fill(100, count * 3 * 32 * 32, 2.0)).reshape(count, 3, 32, 32)
    labels = torch.arange(count) * 7 % 10
    training = Training(network, network, steps)
    losses = []
    for step in range(steps):
        network.train_whitening_bias(step < 3)
        losses.append(training.step(images.contiguous(memory_format=torch.channels_last), labels))
    network.eval()
    with torch.no_grad():
        losses.append(F.cross_entropy(network(images), labels).item())
    print(losses)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
