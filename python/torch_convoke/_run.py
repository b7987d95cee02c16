"""Runs a subgraph of a model in convoke, as one function of PyTorch's autograd."""

from __future__ import annotations

import logging
from typing import Any, Sequence

import torch
from torch.autograd.function import once_differentiable
from torch.utils.dlpack import from_dlpack, to_dlpack

from . import _capture, _engine, _threads
from ._capture import Unsupported

log = logging.getLogger("torch_convoke")

#: How many sizes of the inputs a subgraph keeps what it has built for.
SIZES = 16


def usable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied if its elements are in neither of the two memory formats that convoke knows."""
    if tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)):
        return tensor
    return tensor.contiguous()


def capsule(tensor: torch.Tensor) -> Any:
    return to_dlpack(usable(tensor))


class Specialization:
    """A subgraph for one size of its inputs."""

    def __init__(self, subgraph: Subgraph, args: Sequence[Any], engine: _engine.Engine):
        nodes, sizes = subgraph.placeholders, {}
        for node, arg in zip(nodes, args):
            value = _capture.example(node)
            if isinstance(arg, torch.Tensor):
                pairs = zip(value.shape, arg.shape)
            else:
                pairs = [(value, arg)]
            for size, actual in pairs:
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                    sizes[size.node.expr] = int(actual)
        translator = _capture.Translator(subgraph.kinds, subgraph.names, sizes)
        for node in subgraph.body:
            translator.node(node)
        place = {node: index for index, node in enumerate(nodes)}
        self.input_places = [place[node] for node in translator.inputs]
        by_name = {subgraph.names[node]: place[node] for node in translator.state}
        dtype = subgraph.dtype
        self.dummies = {
            name: torch.zeros(channels, dtype=dtype) for name, channels in translator.to.dummies.items()
        }
        values = {name: args[index] for name, index in by_name.items()} | self.dummies
        formats = [_is_channels_last(_capture.example(node)) for node in subgraph.results]
        self.graph = _engine.Graph(
            engine,
            translator.definition(subgraph.results, dtype),
            _capture.DTYPES[dtype],
            {name: capsule(value.detach()) for name, value in values.items()},
            formats,
        )
        self.engine = engine
        #: For each tensor of the state, its place among the arguments, or a stand-in.
        self.state: list[int | torch.Tensor] = []
        for name, _ in self.graph.state:
            self.state.append(by_name[name] if name in by_name else self.dummies[name])
        self.trained = [trained for _, trained in self.graph.state]
        self.shapes = [tuple(args[index].shape) for index in self.input_places]
        #: What dropout multiplies by: shape and probability of 0.
        self.noises = [(value.shape, p) for value, p in translator.to.noises]

    def tensors(self, args: Sequence[Any]) -> list[torch.Tensor]:
        """Inputs and state, in the engine's order."""
        inputs = [args[place] for place in self.input_places]
        return inputs + [args[part] if isinstance(part, int) else part for part in self.state]

    def forward(self, tensors: Sequence[torch.Tensor], needs: list[bool]) -> tuple[list[torch.Tensor], Any]:
        """Outputs and the tape."""
        count = len(self.input_places)
        capsules = [capsule(tensor) for tensor in tensors]
        inputs = capsules[:count]
        # Drawn as PyTorch's dropout draws, so that the same seed drops the same elements.
        for shape, p in self.noises:
            noise = torch.empty(shape, dtype=tensors[0].dtype)
            inputs.append(capsule(noise.bernoulli_(1 - p).div_(1 - p) if p < 1 else noise.zero_()))
        needs = needs[:count] + [False] * len(self.noises) + needs[count:]
        outputs, statistics, tape = self.graph.forward(inputs, capsules[count:], needs)
        if statistics:
            old, new = [], []
            for place, values in statistics:
                if isinstance(self.state[place], int):
                    old.append(tensors[count + place])
                    new.append(from_dlpack(values))
            if old:
                with torch.no_grad():
                    torch._foreach_copy_(old, new)
        return [from_dlpack(output) for output in outputs], tape


def _is_channels_last(tensor: torch.Tensor) -> bool:
    """Whether PyTorch's result would be in channels-last, so that what reads it finds the strides that it expects."""
    return (
        tensor.dim() == 4
        and not tensor.is_contiguous()
        and tensor.is_contiguous(memory_format=torch.channels_last)
    )


class Run(torch.autograd.Function):
    """Forward and backward of a subgraph."""

    @staticmethod
    def forward(ctx: Any, specialization: Specialization, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        needs = list(ctx.needs_input_grad[1:])
        outputs, tape = specialization.forward(tensors, needs)
        ctx.tape, ctx.count, ctx.noises = tape, len(specialization.input_places), len(specialization.noises)
        ctx.set_materialize_grads(False)
        # Keeps what backward reads alive, and lets PyTorch check that nobody has changed it in between.
        count = len(specialization.input_places)
        trained = [True] * count + specialization.trained
        ctx.save_for_backward(*(tensor for tensor, read in zip(tensors, trained) if read))
        ctx.mark_non_differentiable(
            *(output for output, needed in zip(outputs, tape.needs) if not needed) if tape else outputs
        )
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.saved_tensors
        retain = torch._C._autograd._get_current_graph_task_keep_graph()
        capsules = [None if gradient is None else capsule(gradient.detach()) for gradient in gradients]
        found = ctx.tape.backward(capsules, retain)
        del found[ctx.count : ctx.count + ctx.noises]
        return None, *(None if gradient is None else from_dlpack(gradient) for gradient in found)


class Subgraph(torch.nn.Module):
    """Takes the place of a part of a captured graph. What cannot run in convoke after all runs in PyTorch."""

    def __init__(self, name: str, module: torch.fx.GraphModule, support: _capture.Support, threads: int | None):
        super().__init__()
        # Not as a submodule: its parameters are arguments.
        self.__dict__["module"] = module
        self.name = name
        self.dtype = support.dtype
        self.threads = threads
        nodes = list(module.graph.nodes)
        self.placeholders = [node for node in nodes if node.op == "placeholder"]
        self.body = [node for node in nodes if node.op.startswith("call_")]
        results = nodes[-1].args[0]
        self.single = isinstance(results, torch.fx.Node)
        self.results = [results] if self.single else list(results)
        by_name = {node.name: node for node in support.kinds}
        self.kinds, self.names = {}, {}
        for node in self.placeholders:
            outer = by_name.get(node.name)
            self.kinds[node] = support.kinds[outer] if outer is not None else "input"
            self.names[node] = support.names[outer] if outer is not None else node.name
        self.specializations: dict[Any, Specialization] = {}
        #: Why this runs in PyTorch, if it does.
        self.reason: str | None = None

    def forward(self, *args: Any) -> Any:
        if self.reason is not None:
            return self.module(*args)
        specialization = self._specialization(args)
        if specialization is None:
            return self.module(*args)
        tensors = specialization.tensors(args)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            outputs = Run.apply(specialization, *tensors)
        else:
            outputs = specialization.forward([tensor.detach() for tensor in tensors], [False] * len(tensors))[0]
        return outputs[0] if self.single else tuple(outputs)

    def _specialization(self, args: Sequence[Any]) -> Specialization | None:
        engine = _threads.engine(self.threads)
        key = (id(engine), *(
            arg if not isinstance(arg, torch.Tensor) else arg.shape
            for node, arg in zip(self.placeholders, args)
            if self.kinds[node] in ("input", "number")
        ))
        found = self.specializations.get(key)
        if found is not None:
            return found
        try:
            found = Specialization(self, args, engine)
        except (Unsupported, RuntimeError, ValueError) as error:
            self.reason = str(error)
            log.warning("%s stays in PyTorch: %s", self.name, error)
            return None
        while len(self.specializations) >= SIZES:
            self.specializations.pop(next(iter(self.specializations)), None)
        self.specializations[key] = found
        return found
