"""Trains the PyTorch model you have faster and in less memory, on CPUs."""

try:
    import torch as _torch
except ImportError as error:
    raise ImportError(
        "torch_convoke needs PyTorch, which is not installed: pip install torch (for CPUs only: "
        "pip install torch --index-url https://download.pytorch.org/whl/cpu)"
    ) from error

if _torch.distributed.is_available():
    # Functions of this module hold the process group of the moment at which they are imported. TorchDynamo imports them in the first step,
    # and a group that is held is not taken down by `destroy_process_group`: its threads then abort processes that end.
    import torch.distributed.nn as _  # noqa: F401

from . import nn, ops, tuning
from ._backend import backend
from ._engine import version as _version
from ._optimize import optimize, report, revert

__all__ = ["backend", "nn", "ops", "optimize", "report", "revert", "tuning"]
__version__ = _version()
