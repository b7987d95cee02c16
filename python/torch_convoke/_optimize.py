"""`optimize`, `revert` and `report`."""

from __future__ import annotations

import inspect
import logging
import os
import time
import weakref
from typing import Any

import torch
from torch._C._dynamo.eval_frame import reset_code

from . import _threads
from ._backend import Backend, Options
from ._memory import parse_size
from ._report import describe_model

log = logging.getLogger("torch_convoke")

#: Seconds for which a model runs in PyTorch before it is captured: a run that ends sooner would not get them back.
CAPTURE_AFTER = 1.0
#: After so many captures that failed, a model runs in PyTorch.
MOST_FAILURES = 3
#: How many times TorchDynamo captures the same code: for kinds of inputs, modes, what is frozen. PyTorch's 8 are few for training.
MOST_CAPTURES = 32


def capture_after() -> float:
    """CAPTURE_AFTER, or what the environment variable CONVOKE_CAPTURE_AFTER says in seconds."""
    named = os.environ.get("CONVOKE_CAPTURE_AFTER")
    try:
        return CAPTURE_AFTER if named is None else float(named)
    except ValueError:
        raise ValueError(f"the environment variable CONVOKE_CAPTURE_AFTER must be a number of seconds, not {named!r}") from None


class Optimized:
    """What runs the calls of an optimized model, in the place where `model.compile()` puts what it compiles."""

    def __init__(self, model: torch.nn.Module, options: Options):
        self.backend = Backend(options)
        self._model = model
        #: Whether calls run captured graphs by now. A budget holds from the first call on.
        self.wait = 0.0 if options.memory_budget is not None else capture_after()
        self.captures = self.wait <= 0
        self._first: float | None = None
        #: How many calls there were, and how many of them ran in PyTorch although the model is captured.
        self.calls = self.bypassed = 0
        #: The networks of a model that a trainer does not call itself, such as a LightningModule, by name: they are optimized too.
        self.inner: list[tuple[str, torch.nn.Module]] = []
        #: What TorchDynamo said when it could not capture.
        self.failures: list[str] = []

        def call(*args: Any, **kwargs: Any) -> Any:
            return model._call_impl(*args, **kwargs)

        # TorchDynamo keeps what it compiles with the code of a function: with its own code, a model shares no limits with others.
        call.__code__ = call.__code__.replace(co_name=f"call_{type(model).__name__}")
        self.forget = weakref.finalize(model, reset_code, call.__code__)
        self.forget.atexit = False
        reference = weakref.ref(self.backend)

        def compile_graph(module: torch.fx.GraphModule, example_inputs: Any) -> Any:
            # TorchDynamo keeps every backend that it has seen; this one must go with its model.
            backend = reference()
            return module.forward if backend is None else backend(module, example_inputs)

        known = inspect.signature(torch.compile).parameters
        limits = {"recompile_limit": MOST_CAPTURES} if "recompile_limit" in known else {}
        self._compiled = torch.compile(call, backend=compile_graph, **limits)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model
        # Others that trace or transform the model get its operations.
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or torch.jit.is_tracing():
            return model._call_impl(*args, **kwargs)
        self.calls += 1
        if not self.captures:
            self._wait()
        if not self.captures or len(self.failures) >= MOST_FAILURES:
            return model._call_impl(*args, **kwargs)
        before, self.backend.call = self.backend.runs, self.calls
        try:
            result = self._compiled(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            failure = error
        else:
            self.bypassed += self.backend.runs == before
            return result
        # The user's mistake is PyTorch's to explain; anything else must not stop a training.
        result = model._call_impl(*args, **kwargs)
        failure = getattr(failure, "inner_exception", failure)
        text = next((line for line in str(failure).split("\n") if line.strip()), "")
        self.failures.append(f"{type(failure).__name__}: {text}")
        log.warning("%s runs in PyTorch, as TorchDynamo cannot capture it: %s", type(model).__name__, self.failures[-1])
        return result

    def _wait(self) -> None:
        """Decides whether it is time to capture. What runs again in backward runs where it ran before."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
        elif now - self._first >= self.wait and torch._C._current_graph_task_id() == -1:
            self.captures = True


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

    Calls of the first second run in PyTorch. Then the model is captured (about a second), and again for a new kind of input. Algorithms
    are chosen by estimate first, and measured between later steps, in at most as much time as the training takes. The environment variable
    CONVOKE_CAPTURE_AFTER names other seconds than 1; with 0, or with a memory budget, the first call is captured.

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
    _threads.check(threads)
    budget = None if memory_budget is None else parse_size(memory_budget)
    revert(model)
    if model._compiled_call_impl is not None:
        raise RuntimeError("the model is already compiled: optimize a model that is not, or use backend='convoke'")
    options = Options(budget, threads, verbose)
    optimized = Optimized(model, options)
    if callable(getattr(model, "training_step", None)):
        for name, child in model.named_children():
            if child._compiled_call_impl is None and next(child.parameters(), None) is not None:
                child._compiled_call_impl = Optimized(child, options)
                optimized.inner.append((name, child))
    model._compiled_call_impl = optimized
    return model


def revert(model: torch.nn.Module) -> torch.nn.Module:
    """Undoes `optimize`; does nothing to a model that is not optimized."""
    found = model._compiled_call_impl
    if isinstance(found, Optimized):
        model._compiled_call_impl = None
        found.forget()
        for _, inner in found.inner:
            revert(inner)
    return model


def report(model: torch.nn.Module) -> str:
    """What of an optimized model runs where and why, the bytes that it keeps, and what a memory budget led to.

    The first line sums up: "72 of 72 convolutions, 98 % of the time, 0.61 of PyTorch's step".

    Raises:
        ValueError: If the model is not optimized.
    """
    return "\n".join(describe_model(model, optimized_of(model)))


def optimized_of(model: torch.nn.Module) -> Optimized:
    """What runs the calls of an optimized model."""
    found = model._compiled_call_impl
    if not isinstance(found, Optimized):
        raise ValueError("the model is not optimized: call torch_convoke.optimize(model) first")
    return found


def backend_of(model: torch.nn.Module) -> Backend:
    """What an optimized model runs in."""
    return optimized_of(model).backend
