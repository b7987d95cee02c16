"""Times training steps of one of convoke's models in PyTorch: prints seconds and memory as JSON. Run by steps.py.

    python tools/peers/pytorch_steps.py MODEL BATCH HOW THREADS WARM_UP STEPS

HOW is default, channels-last, kept, compiled, compiled-SHARE (with this share as the activation memory budget), checkpointed, or bf16 or
bf16-compiled: forward under autocast to bf16, as PyTorch's documentation says.
"""

import json
import resource
import statistics
import sys
import time

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from models import MODELS, parts


def main():
    name, batch, how, threads, warm_up, steps = sys.argv[1:]
    torch.set_num_threads(int(threads))
    torch.manual_seed(1)
    make, shape, classes, pixels, optimizer = MODELS[name]
    model = make().train()
    layout = torch.contiguous_format if how == "default" else torch.channels_last
    model = model.to(memory_format=layout)
    optimizer = optimizer(model.parameters())
    images = torch.randn(int(batch), *shape).to(memory_format=layout)
    labels = torch.randint(classes, (int(batch), *(shape[1:] if pixels else ())))
    forward = model
    how, bf16 = how.removeprefix("bf16-"), how.startswith("bf16")
    if how.startswith("compiled"):
        if share := how.partition("-")[2]:
            torch._functorch.config.activation_memory_budget = float(share)
        forward = torch.compile(model)
    if how == "checkpointed":
        for part in parts(model):
            # The method that it had, called again in backward.
            part.forward = lambda x, own=part.forward: checkpoint(own, x, use_reentrant=False)
    seconds = []
    for _ in range(int(warm_up) + int(steps)):
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = F.nll_loss(forward(images), labels)
        loss.backward()
        optimizer.step()
        loss.item()
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": statistics.median(seconds[int(warm_up) :]), "first": seconds[0], "bytes": peak}))


if __name__ == "__main__":
    main()
