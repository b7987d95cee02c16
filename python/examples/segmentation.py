"""Trains a U-Net on the CPU within a memory budget: each pixel of an image belongs to a disc or to the background.

    python python/examples/segmentation.py [BUDGET]      # such as 600MB

The cells (# %%) run one by one in editors that know notebooks.
"""

# %%
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

import torch_convoke

BATCH, SIZE, STEPS = 8, 128, 40
BUDGET = sys.argv[1] if len(sys.argv) > 1 and "ipykernel" not in sys.modules else None
torch.manual_seed(0)


# %% A U-Net with batch norm, written as usual.
def double(inputs, outputs):
    layers = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    def __init__(self, classes, widths=(16, 32, 64, 128)):
        super().__init__()
        self.down = nn.ModuleList(double(before, after) for before, after in zip((3, *widths), widths))
        pairs = list(zip(widths[:0:-1], widths[-2::-1]))
        self.up = nn.ModuleList(nn.ConvTranspose2d(deep, shallow, 2, 2) for deep, shallow in pairs)
        self.join = nn.ModuleList(double(2 * shallow, shallow) for _, shallow in pairs)
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x):
        skipped = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            skipped.append(x)
        skipped.pop()
        for up, join in zip(self.up, self.join):
            x = join(torch.cat([skipped.pop(), up(x)], 1))
        return self.head(x)


model = UNet(classes=2).to(memory_format=torch.channels_last)

# %% The one line. With a budget, a planner chooses what is kept for backward and what is computed again.
torch_convoke.optimize(model, memory_budget=BUDGET)


# %% Images of discs in noise, and their masks.
def discs():
    places = torch.stack(torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")).float()
    centres = torch.rand(BATCH, 2, 1, 1) * SIZE
    radii = 8 + 24 * torch.rand(BATCH, 1, 1)
    masks = ((places - centres).square().sum(1).sqrt() < radii).long()
    images = torch.randn(BATCH, 3, SIZE, SIZE) + masks[:, None]
    return images.to(memory_format=torch.channels_last), masks


# %%
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(STEPS):
    images, masks = discs()
    start = time.perf_counter()
    loss = F.cross_entropy(model(images), masks)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9 or step == 0:
        print(f"step {step + 1:2}: loss {loss.item():.4f}, {time.perf_counter() - start:.2f} s", flush=True)

# %% Evaluation is captured for itself. The mean intersection over union of the two classes:
model.eval()
with torch.no_grad():
    images, masks = discs()
    found = model(images).argmax(1)
shares = [((found == label) & (masks == label)).sum() / ((found == label) | (masks == label)).sum() for label in range(2)]
print(f"mean IoU {torch.stack(shares).mean():.3f}")
print(torch_convoke.report(model))
