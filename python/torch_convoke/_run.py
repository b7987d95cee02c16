"""Runs a subgraph of a model in convoke, as one function of PyTorch's autograd."""

from __future__ import annotations

import logging
import math
from typing import Any, Iterable, Iterator, Sequence

import torch
from torch.autograd.function import once_differentiable
from torch.utils.dlpack import from_dlpack, to_dlpack

from . import _capture, _engine, _memory, _threads, _verdict
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


def _works_in_channels_last(
    subgraph: Subgraph, inputs: Sequence[torch.fx.Node], results_in_channels_last: Sequence[bool], sizes: dict[Any, int]
) -> bool:
    """Whether a subgraph runs in channels-last, which most kernels prefer, even if it has to convert inputs and results.

    It does where little is converted for what is computed between. Images of one channel are in both formats.
    """

    def elements(nodes: Iterable[torch.fx.Node]) -> int:
        shapes = [_capture.shape_of(example, sizes) for node in nodes if _is_images(example := _capture.example(node))]
        return sum(math.prod(shape) for shape in shapes)

    inputs = [node for node in inputs if not _capture.is_channels_last(_capture.example(node))]
    results = [node for node, already in zip(subgraph.results, results_in_channels_last) if not already]
    return 4 * (elements(inputs) + elements(results)) <= elements(subgraph.body)


def _is_images(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 4


class Specialization:
    """A subgraph for one size of its inputs."""

    def __init__(
        self, subgraph: Subgraph, engine: _engine.Engine, sizes: dict[Any, int], values: dict[str, torch.Tensor]
    ):
        """`sizes` has the values of the graph's symbols, `values` the parameters and statistics by name."""
        nodes = subgraph.placeholders
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
        values = {name: values[name] for name in by_name} | self.dummies
        # Batch norms whose results nobody reads still change their statistics: they run because their results are asked for.
        results = [*subgraph.results, *_capture.unread_norms(subgraph.body, subgraph.results, subgraph.kinds)]
        self.formats = [_capture.is_channels_last(_capture.example(node)) for node in results]
        self.definition = translator.definition(results, dtype)
        #: How many of the results somebody reads.
        self.read = len(subgraph.results)
        self.graph = _engine.Graph(
            engine,
            self.definition,
            _capture.DTYPES[dtype],
            {name: capsule(value.detach()) for name, value in values.items()},
            {
                "works_in_channels_last": _works_in_channels_last(subgraph, translator.inputs, self.formats, sizes),
                "outputs_in_channels_last": self.formats,
            },
        )
        self.engine, self.sizes = engine, sizes
        #: How many times it has run with gradients; the second time it is measured against PyTorch.
        self.trainings = 0
        #: Whether it was decided what its blocks keep.
        self.lightened = False
        self.verdict: _verdict.Verdict | None = None
        #: For each tensor of the state, its place among the arguments, or a stand-in.
        self.state: list[int | torch.Tensor] = []
        for name, _ in self.graph.state:
            self.state.append(by_name[name] if name in by_name else self.dummies[name])
        self.trained = [trained for _, trained in self.graph.state]
        inputs = [_capture.example(node) for node in translator.inputs]
        self.shapes = [_capture.shape_of(tensor, sizes) for tensor in inputs]
        described = [
            (list(shape), _capture.is_channels_last(tensor), tensor.requires_grad)
            for shape, tensor in zip(self.shapes, inputs)
        ] + [(list(value.shape), False, False) for value, _ in translator.to.noises]
        state = [(subgraph.names[node], _capture.example(node)) for node in translator.state]
        frozen = [name for name, tensor in state if not tensor.requires_grad]
        channels_last = [name for name, tensor in state if _capture.is_channels_last(tensor)]
        #: For plans of memory: the graph; for each input its shape, whether it is in channels-last, and whether it gets a gradient; the
        #: parameters that get none; those in channels-last.
        self.step = self.graph, described, frozen, channels_last
        #: What dropout multiplies by: shape and probability of 0.
        self.noises = [(value.shape, p) for value, p in translator.to.noises]
        self.noise_axes = translator.to.noise_axes
        #: The axes of each output in the order of memory, where that is neither of the engine's two formats.
        self.turned = [
            None if format or axes == sorted(axes) else axes
            for format, axes in zip(self.formats[: self.read], (_capture.axes_in_memory(_capture.example(node), sizes) for node in subgraph.results))
        ]

    def tensors(self, args: Sequence[Any]) -> list[torch.Tensor]:
        """Inputs and state, in the engine's order."""
        inputs = [args[place] for place in self.input_places]
        return inputs + [args[part] if isinstance(part, int) else part for part in self.state]

    def call(self, args: Sequence[Any]) -> Sequence[torch.Tensor]:
        """The outputs for the subgraph's arguments."""
        tensors = self.tensors(args)
        if self.read and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return Run.apply(self, *tensors)
        return self.forward([tensor.detach() for tensor in tensors], [False] * len(tensors))[0]

    def forward(self, tensors: Sequence[torch.Tensor], needs: list[bool]) -> tuple[list[torch.Tensor], Any]:
        """Outputs and the tape."""
        count = len(self.input_places)
        capsules = [capsule(tensor) for tensor in tensors]
        inputs = capsules[:count]
        # Drawn as PyTorch's dropout draws, so that the same seed drops the same elements.
        for (shape, p), axes in zip(self.noises, self.noise_axes):
            noise = torch.empty_permuted(shape, axes, dtype=tensors[0].dtype)
            inputs.append(capsule(noise.bernoulli_(1 - p).div_(1 - p) if p < 1 else noise.zero_()))
        needs = needs[:count] + [False] * len(self.noises) + needs[count:]
        with _threads.running:
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
        outputs = [from_dlpack(output) for output in outputs[: self.read]]
        # What reads the outputs in PyTorch may count on the strides of its own results.
        for place, axes in enumerate(self.turned):
            if axes is not None:
                outputs[place] = torch.empty_permuted(outputs[place].shape, axes, dtype=outputs[place].dtype).copy_(outputs[place])
        return outputs, tape


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
        capsules += [None] * (len(ctx.tape.needs) - len(capsules))
        with _threads.running:
            found = ctx.tape.backward(capsules, retain)
        del found[ctx.count : ctx.count + ctx.noises]
        return None, *(None if gradient is None else from_dlpack(gradient) for gradient in found)


class Subgraph(torch.nn.Module):
    """Takes the place of a part of a captured graph. What cannot run in convoke after all runs in PyTorch."""

    def __init__(self, name: str, module: torch.fx.GraphModule, support: _capture.Support, threads: int | None, owner: Any):
        super().__init__()
        #: Who has an engine of its own, if somebody has.
        self.owner = owner
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
        #: Whether it is measured against PyTorch, and whether it decides itself what its blocks keep.
        self.measures = self.lightens = True
        #: Why this runs in PyTorch, if it does.
        self.reason: str | None = None

    def forward(self, *args: Any) -> Any:
        if self.reason is not None:
            return self.module(*args)
        specialization = self._specialization(args)
        if specialization is None:
            return self.module(*args)
        if self.lightens:
            self._lighten(specialization)
        if specialization.verdict is None and self.measures and torch.is_grad_enabled():
            self._judge(specialization, args)
        if specialization.verdict is not None and not specialization.verdict.keeps:
            return self.module(*args)
        outputs = specialization.call(args)
        return outputs[0] if self.single else tuple(outputs)

    def _lighten(self, specialization: Specialization) -> None:
        """Without a budget, what is kept for backward is at most half of what PyTorch would keep."""
        if specialization.lightened or not torch.is_grad_enabled():
            return
        specialization.lightened = True
        try:
            most = _memory.saved_by_pytorch(self, specialization.sizes) // 2
            with _threads.running:
                _engine.lighten(specialization.engine, [specialization.step], most)
        except Exception as error:
            # Blocks then keep what is usually fastest.
            log.info("%s: it is not known what PyTorch would keep: %s", self.name, error)

    def _judge(self, specialization: Specialization, args: Sequence[Any]) -> None:
        """Finds out whether PyTorch is faster. Sizes that are met once, such as an epoch's last batch, are not worth it."""
        if not any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
            return
        specialization.trainings += 1
        if specialization.trainings == 2:
            specialization.verdict = _verdict.measure(self, specialization, args)
            if specialization.verdict is not None and not specialization.verdict.keeps:
                log.info("%s runs in PyTorch, which is faster: %s", self.name, specialization.verdict)

    def _specialization(self, args: Sequence[Any]) -> Specialization | None:
        engine = _threads.engine(self.threads, self.owner)
        key = (id(engine), *(arg.shape if isinstance(arg, torch.Tensor) else arg for arg in self._varying(args)))
        found = self.specializations.get(key)
        if found is None:
            sizes = _capture.sizes_of(self.placeholders, args)
            values = {self.names[node]: arg for node, arg in zip(self.placeholders, args)}
            found = self._build(key, engine, sizes, values)
        return found

    def _varying(self, args: Sequence[Any]) -> Iterator[Any]:
        """The arguments whose sizes or values may differ from call to call."""
        return (arg for node, arg in zip(self.placeholders, args) if self.kinds[node] in ("input", "number"))

    def prepare(self, engine: _engine.Engine, sizes: dict[Any, int], tensors: dict[str, Any]) -> Specialization | None:
        """What runs this for certain sizes, before it runs; None if it runs in PyTorch."""
        if self.reason is not None:
            return None
        examples = [_capture.example(node) for node in self.placeholders]
        key = (id(engine), *(
            _capture.shape_of(value, sizes) if isinstance(value, torch.Tensor) else _capture.concrete(value, sizes)
            for value in self._varying(examples)
        ))
        found = self.specializations.get(key)
        if found is None:
            values = {self.names[node]: tensors[node.name] for node in self.placeholders if node.name in tensors}
            found = self._build(key, engine, sizes, values)
        return found

    def _build(
        self, key: Any, engine: _engine.Engine, sizes: dict[Any, int], values: dict[str, Any]
    ) -> Specialization | None:
        try:
            found = Specialization(self, engine, sizes, values)
        except (Unsupported, RuntimeError, ValueError) as error:
            self.reason = str(error)
            log.warning("%s stays in PyTorch: %s", self.name, error)
            return None
        while len(self.specializations) >= SIZES:
            self.specializations.pop(next(iter(self.specializations)), None)
        self.specializations[key] = found
        return found
