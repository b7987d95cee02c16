#!/usr/bin/env python3
"""Writes the files of torch.save that convoke's tests read: crates/nn/tests/it/data/*.pt.

    python3 -m venv venv && venv/bin/pip install torch numpy
    venv/bin/python tools/make_torch_files.py

All hold the same weights, those of a small convolution, batch norm and linear layer, by a formula that the tests know too:
element I of the tensor at place T of the state dict is ((64 T + I) mod 97) / 8, which every floating-point type holds exactly.
They differ in how these are stored.
"""

import argparse
from collections import Counter, OrderedDict
from pathlib import Path

import torch

SIZE_LIMIT = 60_000  # bytes, all files together
ROOT = Path(__file__).resolve().parent.parent


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 2, 3)
        self.bn = torch.nn.BatchNorm2d(2)


class Model(torch.nn.Module):
    """The model of crates/nn/tests/it/checkpoints.rs."""

    def __init__(self, classes=4):
        super().__init__()
        self.block = Block()
        self.head = torch.nn.Linear(12, classes)


def numbers(place, shape, more=0):
    count = torch.Size(shape).numel()
    return ((torch.arange(count) + 64 * place + more) % 97).reshape(shape).float() / 8


def weights(classes=4, more=0):
    """The state dict of a model, with its metadata."""
    model = Model(classes)
    for place, (name, tensor) in enumerate(model.state_dict().items()):
        tensor.copy_(torch.tensor(7) if name.endswith("tracked") else numbers(place, tensor.shape, more))
    return model.state_dict()


def prefixed(state, prefix):
    return OrderedDict((prefix + name, tensor) for name, tensor in state.items())


def nested():
    """A checkpoint of a training run, with a moving average and an optimizer's state."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    average = prefixed(weights(more=50), "module.")
    average["n_averaged"] = torch.tensor(3)
    return {
        "epoch": 3,
        "best": 0.5,
        "steps": 1 << 70,
        "seen": {1, 2},
        "milestones": Counter([1, 1, 2]),
        "device": torch.device("cpu"),
        "type": torch.float32,
        "size": torch.Size([1, 2]),
        "model_ema": average,
        "optimizer": optimizer.state_dict(),
        "model": prefixed(weights(), "module."),
    }


def halves():
    types = [torch.float16, torch.bfloat16, torch.float64]
    return {
        name: tensor.to(types[place % 3]) if tensor.is_floating_point() else tensor
        for place, (name, tensor) in enumerate(weights().items())
    }


def views():
    """Tensors that share storages, start within them, or have elements in another order; parameters with attributes."""
    state = weights()
    small = [name for name, tensor in state.items() if tensor.shape == (2,)]
    together = torch.cat([state[name] for name in small])
    for place, name in enumerate(small):
        state[name] = together[2 * place : 2 * place + 2]
    state["head.weight"] = state["head.weight"].t().contiguous().t()
    every_second = torch.zeros(8)
    every_second[1::2] = state["head.bias"]
    state["head.bias"] = torch.nn.Parameter(every_second[1::2], requires_grad=False)
    state["block.conv.weight"] = torch.nn.Parameter(
        state["block.conv.weight"].to(memory_format=torch.channels_last)
    )
    state["block.conv.weight"].note = "a parameter with an attribute"
    state["block.bn.weight"].note = "a tensor with an attribute"
    return state


def compiled():
    """What torch.compile and data parallelism add to names, around a model that holds this one."""
    state = prefixed(weights(), "_orig_mod.module.backbone.")
    return OrderedDict((name.replace("block.", "block._orig_mod."), tensor) for name, tensor in state.items())


def script(path):
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), path)


def unchecked(path):
    torch.serialization.set_crc32_options(False)
    torch.save(weights(), path)
    torch.serialization.set_crc32_options(True)


FILES = {
    "plain": lambda path: torch.save(weights(), path),
    "nested": lambda path: torch.save(nested(), path),
    "halves": lambda path: torch.save(halves(), path),
    "views": lambda path: torch.save(views(), path),
    "compiled": lambda path: torch.save(compiled(), path),
    "protocol5": lambda path: torch.save(weights(), path, pickle_protocol=5),
    "classes": lambda path: torch.save(weights(classes=7), path),
    "uncounted": lambda path: torch.save({k: v for k, v in weights().items() if "tracked" not in k}, path),
    "unchecked": unchecked,
    "module": lambda path: torch.save(torch.nn.Linear(1, 1), path),
    "old": lambda path: torch.save(weights(), path, _use_new_zipfile_serialization=False),
    "script": script,
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "crates/nn/tests/it/data", help="folder (default: %(default)s)")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    total = 0
    for name, write in FILES.items():
        path = folder / f"{name}.pt"
        write(str(path))
        total += path.stat().st_size
        print(f"{name:12} {path.stat().st_size:6} bytes")
    print(f"{'total':12} {total:6} bytes  (limit {SIZE_LIMIT}), PyTorch {torch.__version__}")
    if total > SIZE_LIMIT:
        raise SystemExit("the files are too large to commit")


if __name__ == "__main__":
    main()
