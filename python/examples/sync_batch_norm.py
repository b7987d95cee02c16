"""Trains a small network on several processes of one machine's CPU, with batch norm over the batches of all of them.

Each process sees 4 images a step: too few for statistics of their own. PyTorch's SyncBatchNorm refuses tensors on the
CPU.

    torchrun --nproc-per-node 2 python/examples/sync_batch_norm.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torch_convoke.nn import convert_sync_batchnorm

IMAGES, STEPS = 4, 200


def images(generator):
    """Noise with a bright bar, which lies (class 0) or stands (class 1)."""
    x = torch.randn(IMAGES, 1, 16, 16, generator=generator)
    target = torch.randint(2, (IMAGES,), generator=generator)
    place = torch.randint(16, (IMAGES,), generator=generator)
    for image, stands, at in zip(x, target, place):
        (image.transpose(1, 2) if stands else image)[0, at] += 2
    return x, target


def main():
    # torchrun tells each process its rank.
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)  # the same parameters on all ranks
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 2),
    )
    # The one line. The layers keep their parameters, buffers and names; only their class changes.
    model = convert_sync_batchnorm(model)
    model = DistributedDataParallel(model)  # averages the gradients over the ranks
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    generator = torch.Generator().manual_seed(1 + rank)  # each rank has images of its own
    losses = torch.zeros(())
    for step in range(1, STEPS + 1):
        x, target = images(generator)
        loss = nn.functional.cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        losses += loss.detach()
        if step % 40 == 0:
            dist.all_reduce(losses)
            if rank == 0:
                mean = losses.item() / (40 * world)
                print(f"step {step:3}, {world} ranks of {IMAGES} images: loss {mean:.3f}", flush=True)
            losses.zero_()

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
