"""`optimize`, `revert` and `report`."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch._C._dynamo.eval_frame import reset_code

from ._backend import Backend, Options
from ._memory import parse_size
from ._report import describe

#: For each optimized model its backend, and what makes TorchDynamo forget what was compiled for it.
_optimized: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Backend, weakref.finalize]] = weakref.WeakKeyDictionary()


def optimize(
    model: torch.nn.Module,
    *,
    memory_budget: int | str | None = None,
    threads: int | None = None,
    verbose: bool = False,
) -> torch.nn.Module:
    """Makes calls of `model` run in convoke where it can, and gives the same model.

    Parameters, buffers, names, hooks, `state_dict`, `repr`, copies and pickles stay as they are; optimizers made before or after this
    work. Only calls of this instance change: `model(x)`, not `model.forward(x)`. A copy or a pickle of the model is not optimized.
    The first call for a new kind of input captures the model (some seconds) and measures convolutions that this machine has not met.

    Args:
        model: Any module. What convoke does not have stays in PyTorch, between what it has: see `report`.
        memory_budget: The most memory of a training step, such as "2GB" or a number of bytes.
        threads: How many threads convoke uses; by default as many as PyTorch (`torch.get_num_threads()`).
        verbose: Whether to print what runs where when the model is captured.

    Raises:
        TypeError: If `model` is no module.
        RuntimeError: If the model is already compiled by `model.compile()`.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"optimize takes a torch.nn.Module, not {type(model).__name__}")
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be 1 or more, not {threads}")
    budget = None if memory_budget is None else parse_size(memory_budget)
    if model in _optimized:
        revert(model)
    if model._compiled_call_impl is not None:
        raise RuntimeError("the model is already compiled: optimize a model that is not, or use backend='convoke'")
    backend = Backend(Options(budget, threads, verbose))

    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)

    # TorchDynamo keeps what it compiles with the code of a function: with its own code, a model shares no limits with others.
    call.__code__ = call.__code__.replace(co_name=f"call_{type(model).__name__}")
    forget = weakref.finalize(model, reset_code, call.__code__)
    forget.atexit = False
    reference = weakref.ref(backend)

    def compile_graph(module: torch.fx.GraphModule, example_inputs: Any) -> Any:
        # TorchDynamo keeps every backend that it has seen; this one must go with its model.
        backend = reference()
        return module.forward if backend is None else backend(module, example_inputs)

    model._compiled_call_impl = torch.compile(call, backend=compile_graph)
    _optimized[model] = backend, forget
    return model


def revert(model: torch.nn.Module) -> torch.nn.Module:
    """Undoes `optimize`; does nothing to a model that is not optimized."""
    found = _optimized.pop(model, None)
    if found is not None:
        model._compiled_call_impl = None
        _, forget = found
        forget()
    return model


def report(model: torch.nn.Module) -> str:
    """What of an optimized model runs where and why, the bytes that it keeps, and what a memory budget led to.

    Raises:
        ValueError: If the model is not optimized.
    """
    backend = backend_of(model)
    if not backend.captured:
        return "The model has not run yet: it is captured when it is called."
    lines = []
    for captured in backend.captured:
        lines.extend(describe(captured))
    return "\n".join(lines)


def backend_of(model: torch.nn.Module) -> Backend:
    """What an optimized model runs in."""
    if model not in _optimized:
        raise ValueError("the model is not optimized: call torch_convoke.optimize(model) first")
    return _optimized[model][0]
