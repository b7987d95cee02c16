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
from torch._dynamo.utils import counters as _counters
from torch.utils import _pytree

from . import _threads
from ._backend import Backend, Options
from ._memory import parse_size
from ._report import describe_model

log = logging.getLogger("torch_convoke")

#: Seconds for which a model runs in PyTorch before it is captured, and more of them for each module, as capturing takes longer then: a run
#: that ends sooner would not get them back.
CAPTURE_AFTER, CAPTURE_AFTER_EACH = 1.0, 0.01
#: After so many captures that failed, a model runs in PyTorch.
MOST_FAILURES = 3
#: How many times TorchDynamo captures the same code: for kinds of inputs, modes, what is frozen. PyTorch's 8 are few for training.
MOST_CAPTURES = 32


def capture_after(model: torch.nn.Module) -> float:
    """For how many seconds a model runs in PyTorch first: the environment variable CONVOKE_CAPTURE_AFTER may say others."""
    named = os.environ.get("CONVOKE_CAPTURE_AFTER")
    try:
        usual = CAPTURE_AFTER + CAPTURE_AFTER_EACH * sum(1 for _ in model.modules())
        return usual if named is None else float(named)
    except ValueError:
        raise ValueError(f"the environment variable CONVOKE_CAPTURE_AFTER must be a number of seconds, not {named!r}") from None


class CapturePace:
    """When a model is captured: first after some time in PyTorch, and then, for other kinds of inputs, modes, hooks or what is frozen, once
    it has trained for as long as it has been captured. So changes in each step make no step longer than twice its time on average."""

    def __init__(self, wait: float):
        self.wait = wait
        self._first: float | None = None
        #: Seconds that captures took.
        self.spent = 0.0
        self._allowed = False

    @property
    def has_begun(self) -> bool:
        """Whether the model is captured by now, so that it is only a question of when for others."""
        return self.wait <= 0 or self.spent > 0

    def allows(self) -> bool:
        """Whether a call may be captured now. What runs again in backward runs where it ran before."""
        if self.wait <= 0:
            return True
        now = time.monotonic()
        if self._first is None:
            self._first = now
        if torch._C._current_graph_task_id() == -1:
            trained = now - self._first - self.spent
            self._allowed = trained >= max(self.wait, self.spent)
        return self._allowed

    def spend(self, seconds: float) -> None:
        """What a call took that was captured."""
        self.spent += seconds


class Shapes:
    """Which sizes of a model's inputs change between calls: the first capture then allows for them, instead of a second one."""

    def __init__(self) -> None:
        self._seen: list[torch.Size] = []
        self._changing: set[tuple[int, int]] = set()

    def watch(self, args: Any, kwargs: Any) -> None:
        """Looks at the inputs of a call."""
        shapes = [leaf.shape for leaf in _tensors(args, kwargs)]
        if [len(shape) for shape in shapes] != [len(shape) for shape in self._seen]:
            self._seen, self._changing = shapes, set()
        for place, (before, now) in enumerate(zip(self._seen, shapes)):
            self._changing.update((place, axis) for axis, size in enumerate(now) if size != before[axis])

    def mark(self, args: Any, kwargs: Any) -> None:
        """Tells TorchDynamo which sizes of a call's inputs change."""
        tensors = _tensors(args, kwargs)
        for place, axis in self._changing:
            if place < len(tensors) and axis < tensors[place].dim():
                torch._dynamo.maybe_mark_dynamic(tensors[place], axis)


def _tensors(args: Any, kwargs: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]


class Optimized:
    """What runs the calls of an optimized model, in the place where `model.compile()` puts what it compiles."""

    def __init__(self, model: torch.nn.Module, options: Options, precision: str = "f32"):
        self.precision = precision
        self.backend = Backend(options)
        self._model = model
        #: A budget holds from the first call on.
        self.pace = CapturePace(0.0 if options.memory_budget is not None else capture_after(model))
        self._shapes: Shapes | None = Shapes()
        #: How many calls there were, how many of them ran in PyTorch although the model is captured, and how many because capturing them
        #: had to wait.
        self.calls = self.bypassed = self.postponed = 0
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
        #: Runs what is captured, and captures nothing.
        self._known = torch._dynamo.run(call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.precision == "f32":
            return self._call(args, kwargs)
        with torch.autocast("cpu", torch.bfloat16):
            return self._call(args, kwargs)

    def _call(self, args: Any, kwargs: Any) -> Any:
        model = self._model
        # Others that trace or transform the model get its operations.
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or torch.jit.is_tracing():
            return model._call_impl(*args, **kwargs)
        self.calls += 1
        allowed = self.pace.allows()
        if not (allowed or self.pace.has_begun) or len(self.failures) >= MOST_FAILURES:
            if self._shapes is not None:
                self._shapes.watch(args, kwargs)
            return model._call_impl(*args, **kwargs)
        before, self.backend.call = self.backend.runs, self.calls
        if not allowed:
            result = self._known(*args, **kwargs)
            self.postponed += self.backend.runs == before
            return result
        if self._shapes is not None:
            self._shapes.mark(args, kwargs)
            self._shapes = None
        frames, start = _counters["frames"]["total"], time.monotonic()
        try:
            result = self._compiled(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            failure = error
        else:
            self.bypassed += self.backend.runs == before
            return result
        finally:
            if _counters["frames"]["total"] != frames:
                self.pace.spend(time.monotonic() - start)
        # The user's mistake is PyTorch's to explain; anything else must not stop a training.
        result = model._call_impl(*args, **kwargs)
        failure = getattr(failure, "inner_exception", failure)
        text = next((line for line in str(failure).split("\n") if line.strip()), "")
        self.failures.append(f"{type(failure).__name__}: {text}")
        log.warning("%s runs in PyTorch, as TorchDynamo cannot capture it: %s", type(model).__name__, self.failures[-1])
        return result


def optimize(
    model: torch.nn.Module,
    *,
    memory_budget: int | str | None = None,
    precision: str = "f32",
    threads: int | None = None,
    verbose: bool = False,
) -> torch.nn.Module:
    """Makes calls of `model` run in convoke where it can, and gives the same model.

    Parameters, buffers, names, hooks, `state_dict`, `repr`, copies and pickles stay as they are; optimizers made before or after this
    work. Only calls of this instance change: `model(x)`, not `model.forward(x)`. A copy or a pickle of the model is not optimized.

    Calls of the first second run in PyTorch, or of more where a model has hundreds of modules. Then the model is captured, which takes about
    as long, and again for a new kind of input once it has trained for as long as it has been captured. Algorithms are chosen by estimate
    first, and measured between later steps, in at most as much time as the training takes. The environment variable CONVOKE_CAPTURE_AFTER
    names other seconds; with 0, or with a memory budget, each call is captured that must be.

    Args:
        model: Any module. What convoke does not have stays in PyTorch, between what it has: see `report`.
        memory_budget: The most memory of a training step, such as "2GB" or a number of bytes.
        precision: "f32", or "bf16": calls then run as under ``torch.autocast("cpu", torch.bfloat16)``, so that results are bfloat16.
            Parameters and their gradients stay float32. It halves the memory of activations, and time where the processor multiplies
            bfloat16.
        threads: How many threads convoke uses; by default as many as PyTorch (`torch.get_num_threads()`).
        verbose: Whether to print what runs where when the model is captured.

    Raises:
        TypeError: If `model` is no module.
        ValueError: If `precision` is neither "f32" nor "bf16".
        RuntimeError: If the model is already compiled by `model.compile()`.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"optimize takes a torch.nn.Module, not {type(model).__name__}")
    if precision not in ("f32", "bf16"):
        raise ValueError(f"precision must be 'f32' or 'bf16', not {precision!r}")
    _threads.check(threads)
    budget = None if memory_budget is None else parse_size(memory_budget)
    revert(model)
    if model._compiled_call_impl is not None:
        raise RuntimeError("the model is already compiled: optimize a model that is not, or use backend='convoke'")
    options = Options(budget, threads, verbose)
    optimized = Optimized(model, options, precision)
    if callable(getattr(model, "training_step", None)):
        for name, child in model.named_children():
            if child._compiled_call_impl is None and next(child.parameters(), None) is not None:
                child._compiled_call_impl = Optimized(child, options, precision)
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
