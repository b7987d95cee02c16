"""Trains torchvision's ResNet-18 on the CPU, in PyTorch and in convoke, and compares: losses, seconds of a step, bytes.

    python python/examples/classification.py                    # images drawn by this script
    python python/examples/classification.py path/to/photos     # a folder with a folder of images for each class

The cells (# %%) run one by one in editors that know notebooks.
"""

# %% The model, as you have it.
import copy
import sys
import time

import torch
import torchvision
from torch.nn import functional as F
from torchvision.transforms import v2

import torch_convoke

BATCH, SIZE, STEPS = 16, 128, 20
torch.manual_seed(0)

# %% The data: a folder of photographs, or images of bars that lie, stand, or lean.
if len(sys.argv) > 1 and "ipykernel" not in sys.modules:
    transforms = v2.Compose(
        [
            v2.ToImage(),
            v2.RandomResizedCrop(SIZE, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ]
    )
    dataset = torchvision.datasets.ImageFolder(sys.argv[1], transforms)
    classes = len(dataset.classes)
else:
    classes = 4
    places = torch.stack(torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij"))
    directions = torch.tensor([[1, 0], [0, 1], [1, 1], [1, -1]])

    def bars(label):
        distance = (places * directions[label][:, None, None]).sum(0) - torch.randint(SIZE, ())
        return torch.randn(3, SIZE, SIZE) + 3 * (distance.abs() < 4)

    labels = torch.randint(classes, (BATCH * STEPS,))
    dataset = [(bars(label), label.item()) for label in labels]

# %% Two copies of the model. The one line is `optimize`.
eager = torchvision.models.resnet18(num_classes=classes).to(memory_format=torch.channels_last)
model = torch_convoke.optimize(copy.deepcopy(eager))


# %% The loop stays what it was.
def train(model):
    loader = torch.utils.data.DataLoader(dataset, BATCH, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses, seconds = [], []
    for step, (images, labels) in zip(range(STEPS), loader):
        images = images.to(memory_format=torch.channels_last)
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
        if step % 5 == 4 or step == 0:
            print(f"  step {step + 1:2}: loss {loss.item():.4f}, {seconds[-1]:.2f} s", flush=True)
    return losses, sorted(seconds)[len(seconds) // 2]


print("PyTorch, channels-last:")
expected, theirs = train(eager)
print("convoke; the first step captures the model, and times convolutions that this machine has not met:")
losses, ours = train(model)

# %% What came out.
print(f"a step takes {1e3 * theirs:.0f} ms in PyTorch, {1e3 * ours:.0f} ms in convoke ({ours / theirs:.2f})")
print(f"losses of the first step: {expected[0]:.6f} and {losses[0]:.6f}; of the last: {expected[-1]:.4f} and {losses[-1]:.4f}")
print(torch_convoke.report(model))

# %% The same file as before: the names in the state dict did not change.
eager.load_state_dict(model.state_dict())
