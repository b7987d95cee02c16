"""Runs a subgraph of a model in convoke, as one function of PyTorch's autograd."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
import weakref
from typing import Any, Iterable, Iterator, NamedTuple, Sequence

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from . import _capture, _engine, _memory, _operators, _pace, _threads, _verdict
from ._capture import Unsupported
from ._partition import Part, effects_of
from ._writes import storages, writes_into

log = logging.getLogger("torch_convoke")

#: How many sizes of the inputs a subgraph keeps what it has built for.
SIZES = 16
#: After so many calls, what PyTorch needed for the steps before has been freed.
SETTLED = 3


def usable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied if its elements are in neither of the two memory formats that convoke knows."""
    return tensor if tensor.is_contiguous() or _capture.is_channels_last(tensor) else tensor.contiguous()


def capsule(tensor: torch.Tensor) -> Any:
    return to_dlpack(usable(tensor))


def _works_in_channels_last(
    subgraph: Subgraph, inputs: Sequence[torch.fx.Node], results_in_channels_last: Sequence[bool], sizes: dict[Any, int]
) -> bool:
    """Whether a subgraph runs in channels-last, which most kernels prefer, even if it has to convert inputs and results.

    It does where little is converted for what is computed between. Images of one channel are in both formats. Volumes
    always do: what has windows converts them otherwise.
    """
    if any(_computes_volumes(node) for node in subgraph.body):
        return True

    def elements(nodes: Iterable[torch.fx.Node]) -> int:
        shapes = [_capture.shape_of(example, sizes) for node in nodes if _is_images(example := _capture.example(node))]
        return sum(math.prod(shape) for shape in shapes)

    inputs = [node for node in inputs if _is_images(value := _capture.example(node)) and not _capture.is_channels_last(value)]
    results = [node for node, already in zip(subgraph.results, results_in_channels_last) if not already]
    return 4 * (elements(inputs) + elements(results)) <= elements(subgraph.body)


def _computes_volumes(node: torch.fx.Node) -> bool:
    value, (op, _) = _capture.example(node), _operators.find(node)
    return isinstance(value, torch.Tensor) and value.dim() == 5 and op is not None and op.computes


def _is_images(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() in _capture.CHANNELS_LAST


class Input(NamedTuple):
    """An input of a graph whose memory is planned."""

    shape: tuple[int, ...]
    #: The name of its type.
    dtype: str
    channels_last: bool
    #: Whether it gets a gradient.
    gradient: bool


class Step(NamedTuple):
    """A graph as a part of a step whose memory is planned."""

    graph: _engine.Graph
    inputs: list[Input]
    #: The names of the parameters that get no gradient.
    frozen: list[str]
    #: The names of the parameters in channels-last.
    channels_last: list[str]


class Specialization:
    """A subgraph for one size of its inputs."""

    def __init__(
        self, subgraph: Subgraph, engine: _engine.Engine, sizes: dict[Any, int], values: dict[str, torch.Tensor]
    ):
        """`sizes` has the values of the graph's symbols, `values` the parameters and statistics by name."""
        self.subgraph = subgraph
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
            {name: capsule(self._wide(value)) for name, value in values.items()},
            {
                "works_in_channels_last": _works_in_channels_last(subgraph, translator.inputs, self.formats, sizes),
                "outputs_in_channels_last": self.formats,
            },
        )
        self.engine, self.sizes = engine, sizes
        #: How many times it was called.
        self.calls = 0
        #: Whether it was decided what its blocks keep.
        self.lightened = False
        self._turns: dict[bool, _verdict.Turns] = {}
        #: Whether there is memory to let PyTorch run it, once that is known.
        self.room: bool | None = None
        #: For each tensor of the state, its place among the arguments, or a stand-in.
        self.state: list[int | torch.Tensor] = []
        for name, _ in self.graph.state:
            self.state.append(by_name[name] if name in by_name else self.dummies[name])
        self.trained = [trained for _, trained in self.graph.state]
        # A number that may differ from call to call is a tensor of its own.
        inputs = [_capture.example(node) for node in translator.inputs]
        inputs = [value if isinstance(value, torch.Tensor) else torch.zeros((), dtype=dtype) for value in inputs]
        self.shapes = [_capture.shape_of(tensor, sizes) for tensor in inputs]
        #: The names of the types of what the graph takes.
        self.types = [_capture.NAMES[kind] for kind in translator.types_taken(dtype)]
        described = [
            Input(shape, _capture.NAMES[tensor.dtype], _capture.is_channels_last(tensor), tensor.requires_grad)
            for shape, tensor in zip(self.shapes, inputs)
        ] + [Input(tuple(value.shape), _capture.NAMES[kind or dtype], False, False) for value, _, kind in translator.to.noises]
        state = [(subgraph.names[node], _capture.example(node)) for node in translator.state]
        frozen = [name for name, tensor in state if not tensor.requires_grad]
        channels_last = [name for name, tensor in state if _capture.is_channels_last(tensor)]
        #: For plans of memory.
        self.step = Step(self.graph, described, frozen, channels_last)
        #: What dropout multiplies by: shape, probability of 0, and type.
        self.noises = [(value.shape, p, kind or dtype) for value, p, kind in translator.to.noises]
        self.noise_axes = translator.to.noise_axes
        #: The axes of each output in the order of memory, where that is neither of the engine's two formats.
        self.turned = [
            None if format or axes == sorted(axes) else axes
            for format, axes in zip(self.formats[: self.read], (_capture.axes_in_memory(_capture.example(node), sizes) for node in subgraph.results))
        ]

    def turns(self, trains: bool) -> _verdict.Turns:
        """Who runs the next step; steps with gradients and without are measured apart."""
        if trains not in self._turns:
            self._turns[trains] = _verdict.Turns(_verdict.known(self, trains))
        return self._turns[trains]

    @property
    def verdict(self) -> _verdict.Verdict | None:
        """What is known about steps; with gradients if there were such."""
        found = [turns.verdict for _, turns in sorted(self._turns.items(), reverse=True) if turns.verdict is not None]
        return found[0] if found else None

    def tensors(self, args: Sequence[Any]) -> list[torch.Tensor]:
        """Inputs and state, in the engine's order."""
        inputs = [args[place] for place in self.input_places]
        inputs = [value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=self.subgraph.dtype) for value in inputs]
        return inputs + [args[part] if isinstance(part, int) else part for part in self.state]

    def forward(self, args: Sequence[Any], needs: Sequence[bool]) -> tuple[list[torch.Tensor], Any]:
        """Outputs and the tape for the subgraph's arguments, of which some need gradients."""
        tensors = self.tensors(args)
        count = len(self.input_places)
        inputs = [capsule(tensor.detach()) for tensor in tensors[:count]]
        state = [capsule(self._wide(tensor)) for tensor in tensors[count:]]
        # Drawn as PyTorch's dropout draws, so that the same seed drops the same elements.
        for (shape, p, dtype), axes in zip(self.noises, self.noise_axes):
            noise = torch.empty_permuted(shape, axes, dtype=dtype)
            inputs.append(capsule(noise.bernoulli_(1 - p).div_(1 - p) if p < 1 else noise.zero_()))
        needed = [needs[place] for place in self.input_places] + [False] * len(self.noises)
        needed += [isinstance(part, int) and needs[part] for part in self.state]
        with _threads.running:
            outputs, statistics, tape = self.graph.forward(inputs, state, needed)
        if statistics:
            old, new = [], []
            for place, values in statistics:
                if isinstance(self.state[place], int):
                    # As by PyTorch's batch norm, the change does not count as one that others' backward must know of.
                    old.append(tensors[count + place].data)
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

    def backward(self, tape: Any, gradients: Sequence[torch.Tensor | None], retain: bool) -> list[torch.Tensor | None]:
        """The gradients of the subgraph's arguments for those of its outputs."""
        capsules = [None if gradient is None else capsule(gradient.detach()) for gradient in gradients]
        capsules += [None] * (len(tape.needs) - len(capsules))
        with _threads.running:
            found = tape.backward(capsules, retain)
        count = len(self.input_places)
        del found[count : count + len(self.noises)]
        result: list[torch.Tensor | None] = [None] * len(self.subgraph.placeholders)
        for place, gradient in zip([*self.input_places, *self.state], found):
            if gradient is not None:
                result[place] = from_dlpack(gradient).to(_capture.example(self.subgraph.placeholders[place]).dtype)
        return result

    def _wide(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the state in the type that convoke computes in: parameters of bfloat16 are copied."""
        return tensor.detach().to(self.subgraph.dtype)


class Timer:
    """Takes the time of a forward and the backward of the same step."""

    def __init__(self, turns: _verdict.Turns, side: str):
        self.turns, self.side = turns, side
        self._seconds = 0.0
        self._start = time.perf_counter()

    def stop(self, last: bool) -> None:
        self._seconds += time.perf_counter() - self._start
        if last:
            self.turns.add(self.side, self._seconds)

    def go_on(self) -> None:
        self._start = time.perf_counter()


class _Tape(bytearray):
    """What a forward keeps for its backward, as memory of a tensor.

    That tensor is saved as any other that backward reads. So whoever drops saved tensors, as `torch.utils.checkpoint` does, drops this,
    and whoever computes them again computes this again.
    """

    _numbers = itertools.count()
    _all: weakref.WeakValueDictionary[int, _Tape] = weakref.WeakValueDictionary()

    def __init__(self, tape: Any):
        number = next(_Tape._numbers)
        super().__init__(number.to_bytes(8, "little"))
        self.tape = tape
        _Tape._all[number] = self

    def tensor(self) -> torch.Tensor:
        return torch.frombuffer(self, dtype=torch.uint8)

    @staticmethod
    def of(tensor: torch.Tensor) -> Any:
        """The tape that a tensor holds; None if this is a copy of such a tensor."""
        found = _Tape._all.get(int.from_bytes(bytes(tensor.tolist()), "little"))
        return None if found is None else found.tape


class _Function(torch.autograd.Function):
    """A subgraph as one function of PyTorch's autograd. Where its gradients are differentiated, PyTorch computes them."""

    @staticmethod
    def save(ctx: Any, subgraph: Subgraph, args: Sequence[Any], first: torch.Tensor | None, rng: torch.Tensor | None) -> None:
        """Keeps what backward needs to run again what forward ran on `args`; `first` is saved before these."""
        ctx.subgraph, ctx.rng = subgraph, rng
        ctx.set_materialize_grads(False)
        # Keeps what backward reads alive, and lets PyTorch check that nobody has changed it in between.
        ctx.saved_places = [place for place, arg in enumerate(args) if isinstance(arg, torch.Tensor) and place in subgraph.saved]
        ctx.others = [None if place in ctx.saved_places else arg for place, arg in enumerate(args)]
        ctx.save_for_backward(first, *(args[place] for place in ctx.saved_places))

    @staticmethod
    def again(ctx: Any, saved: Sequence[torch.Tensor], needs: Sequence[bool], gradients: Sequence[torch.Tensor | None]) -> list[Any]:
        """The gradients of the arguments, computed by PyTorch; they can be differentiated themselves if gradients are recorded now."""
        args = list(ctx.others)
        for place, tensor in zip(ctx.saved_places, saved):
            args[place] = tensor
        for place, arg in enumerate(args):
            # Statistics have changed already.
            if isinstance(arg, torch.Tensor) and place not in ctx.saved_places:
                args[place] = arg.detach().clone()
        records = torch.is_grad_enabled()
        wanted = [place for place, needed in enumerate(needs) if needed]
        with torch.enable_grad(), torch.random.fork_rng(devices=[], enabled=ctx.rng is not None):
            if ctx.rng is not None:
                torch.set_rng_state(ctx.rng)
            if not records:
                args = [arg.detach().requires_grad_(needs[place]) if isinstance(arg, torch.Tensor) else arg for place, arg in enumerate(args)]
            outputs = ctx.subgraph.in_pytorch(args)
        pairs = [(output, gradient) for output, gradient in zip(outputs, gradients) if gradient is not None and output.requires_grad]
        found: list[torch.Tensor | None] = [None] * len(args)
        if pairs:
            results = torch.autograd.grad(
                [output for output, _ in pairs],
                [args[place] for place in wanted],
                [gradient for _, gradient in pairs],
                create_graph=records,
                allow_unused=True,
            )
            for place, gradient in zip(wanted, results):
                found[place] = gradient
        return found


class InConvoke(_Function):
    """Forward and backward of a subgraph in convoke."""

    @staticmethod
    def forward(ctx: Any, specialization: Specialization, timer: Timer | None, *args: Any) -> tuple[torch.Tensor, ...]:
        rng = torch.get_rng_state() if specialization.noises else None
        outputs, tape = specialization.forward(args, ctx.needs_input_grad[2:])
        ctx.specialization, ctx.timer = specialization, timer
        _Function.save(ctx, specialization.subgraph, args, _Tape(tape).tensor(), rng)
        ctx.mark_non_differentiable(
            *(output for output, needed in zip(outputs, tape.needs) if not needed) if tape else outputs
        )
        if timer is not None:
            timer.stop(last=False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        first, *saved = ctx.saved_tensors
        timer, ctx.timer = ctx.timer, None
        tape = None if torch.is_grad_enabled() else _Tape.of(first)
        if tape is None:
            return None, None, *_Function.again(ctx, saved, ctx.needs_input_grad[2:], gradients)
        if timer is not None:
            timer.go_on()
        retain = torch._C._autograd._get_current_graph_task_keep_graph()
        found = ctx.specialization.backward(tape, gradients, retain)
        if timer is not None:
            timer.stop(last=True)
        return None, None, *found


class InPyTorch(_Function):
    """Forward and backward of a subgraph in PyTorch, which are timed."""

    @staticmethod
    def forward(ctx: Any, subgraph: Subgraph, timer: Timer, *args: Any) -> tuple[torch.Tensor, ...]:
        needs = ctx.needs_input_grad[2:]
        rng = torch.get_rng_state() if subgraph.draws else None
        own = [arg.detach().requires_grad_(needed) if isinstance(arg, torch.Tensor) else arg for arg, needed in zip(args, needs)]
        with torch.enable_grad():
            outputs = subgraph.in_pytorch(own)
        ctx.leaves, ctx.outputs, ctx.timer = own, outputs, timer
        _Function.save(ctx, subgraph, args, None, rng)
        given = tuple(output.detach() for output in outputs)
        ctx.mark_non_differentiable(*(one for one, output in zip(given, outputs) if not output.requires_grad))
        timer.stop(last=False)
        return given

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        needs = ctx.needs_input_grad[2:]
        timer, ctx.timer = ctx.timer, None
        if torch.is_grad_enabled():
            return None, None, *_Function.again(ctx, ctx.saved_tensors[1:], needs, gradients)
        if ctx.outputs is None:
            # Raises PyTorch's error of a second backward.
            ctx.saved_tensors
        if timer is not None:
            timer.go_on()
        retain = torch._C._autograd._get_current_graph_task_keep_graph()
        wanted = [place for place, needed in enumerate(needs) if needed]
        pairs = [(output, gradient) for output, gradient in zip(ctx.outputs, gradients) if gradient is not None and output.requires_grad]
        found: list[torch.Tensor | None] = [None] * len(needs)
        if pairs:
            results = torch.autograd.grad(
                [output for output, _ in pairs],
                [ctx.leaves[place] for place in wanted],
                [gradient for _, gradient in pairs],
                retain_graph=retain,
                allow_unused=True,
            )
            for place, gradient in zip(wanted, results):
                found[place] = gradient
        if not retain:
            ctx.outputs = ctx.leaves = None
        if timer is not None:
            timer.stop(last=True)
        return None, None, *found


class Symbols(threading.local):
    """The sizes of a captured graph's inputs that differ from call to call, in the call that runs now."""

    def __init__(self) -> None:
        self.sizes: dict[Any, int] = {}


class Subgraph(torch.nn.Module):
    """Takes the place of a part of a captured graph. What cannot run in convoke after all runs in PyTorch."""

    #: Whether it runs in convoke and in PyTorch by turns, to see who is faster.
    measures_by_default = True

    def __init__(self, part: Part, support: _capture.Support, threads: int | None, owner: Any, symbols: Symbols):
        super().__init__()
        self.symbols = symbols
        #: Who has an engine of its own, if somebody has.
        self.owner = owner
        # Not as a submodule: its parameters are arguments.
        self.__dict__["module"] = part.module
        self.name = part.name
        self.dtype = support.dtype
        #: The type that autocast computes in where it stands; None where it is off.
        self.autocast = support.autocast[part.nodes[0]]
        self.threads = threads
        nodes = list(part.module.graph.nodes)
        self.placeholders = [node for node in nodes if node.op == "placeholder"]
        sizes = {node.name for node in part.sizes}
        self.body = [node for node in nodes if node.op.startswith("call_") and node.name not in sizes]
        results = nodes[-1].args[0]
        self.single = isinstance(results, torch.fx.Node)
        self.results = [results] if self.single else list(results)
        outer = dict(zip(self.placeholders, part.taken))
        self.kinds = {node: support.kinds.get(outer[node], "input") for node in self.placeholders}
        self.names = {node: support.names[outer[node]] for node in self.placeholders}
        places = {node: place for place, node in enumerate(self.placeholders)}
        read = {node for norm in self.body if _capture.is_frozen_norm(norm) for node in norm.all_input_nodes}
        #: The arguments that backward reads, by place: all tensors but statistics that forward changes.
        self.saved = {place for node, place in places.items() if self.kinds[node] in ("input", "parameter") or node in read}
        #: The arguments that PyTorch's operations write to, by place.
        memory = {storage for node in self.body if (target := writes_into(node)) is not None for storage in storages(target)}
        self.written = {place for node, place in places.items() if storages(node) & memory}
        read, left = set(), list(self.results)
        while left:
            node = left.pop()
            if node not in read:
                read.add(node)
                left.extend(node.all_input_nodes)
        #: The arguments that no result depends on, by place: they get no gradient. Batch norms that nobody reads still read theirs.
        self.unread = {place for node, place in places.items() if node not in read}
        #: Whether it draws random numbers.
        self.draws = any("random numbers" in effects_of(node, self.kinds) for node in self.body)
        self.specializations: dict[Any, Specialization] = {}
        #: Whether it is measured against PyTorch, and whether it decides itself what its blocks keep.
        self.measures, self.lightens = self.measures_by_default, True
        #: Why this runs in PyTorch, if it does.
        self.reason: str | None = None
        #: How many calls there were before it was known who is faster.
        self.measuring_calls = 0
        #: Seconds of all forwards in convoke.
        self.seconds = 0.0

    def forward(self, *args: Any) -> Any:
        if self.unread:
            own = enumerate(args)
            args = tuple(arg.detach() if place in self.unread and isinstance(arg, torch.Tensor) else arg for place, arg in own)
        if self.reason is not None:
            return self.module(*args)
        specialization = self._specialization(args)
        if specialization is None:
            return self.module(*args)
        trains = torch.is_grad_enabled() and any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
        if self.lightens and trains:
            self._lighten(specialization)
        side, timer = self._turn(specialization, trains)
        if side == _verdict.PYTORCH and timer is None:
            return self.module(*args)
        if side == _verdict.CONVOKE:
            outputs = self._in_convoke(specialization, timer, args, trains)
        elif trains:
            outputs = InPyTorch.apply(self, timer, *args)
        else:
            outputs = self.in_pytorch(args)
        if timer is not None and not trains:
            timer.stop(last=True)
        return outputs[0] if self.single else tuple(outputs)

    def _in_convoke(self, specialization: Specialization, timer: Timer | None, args: Sequence[Any], trains: bool) -> Sequence[torch.Tensor]:
        start = time.perf_counter()
        if trains and specialization.read:
            outputs = InConvoke.apply(specialization, timer, *args)
        else:
            outputs = specialization.forward(args, [False] * len(args))[0]
        self.seconds += time.perf_counter() - start
        return outputs

    def in_pytorch(self, args: Sequence[Any]) -> Sequence[torch.Tensor]:
        """The outputs of PyTorch's operations, which write to none of the arguments but statistics."""
        own = [arg.clone() if place in self.written else arg for place, arg in enumerate(args)]
        outputs = self.module(*own)
        return [outputs] if self.single else outputs

    def _turn(self, specialization: Specialization, trains: bool) -> tuple[str, Timer | None]:
        """Who runs this call, and what takes its time."""
        specialization.calls += 1
        if specialization.calls == SETTLED:
            _memory.give_back()
        # With hooks on saved tensors, as in checkpointing, it may run again, and must do so where it ran before.
        if not self.measures or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            return _verdict.CONVOKE, None
        turns = specialization.turns(trains)
        self.measuring_calls += turns.is_measuring
        # Sizes that are met once, such as an epoch's last batch, are not worth it, and algorithms are chosen before.
        if turns.is_measuring and (specialization.calls < 3 or not _pace.of(specialization.engine).is_settled()):
            return _verdict.CONVOKE, None
        if turns.is_measuring and self._has_no_room(specialization):
            return _verdict.CONVOKE, None
        if turns.is_new:
            turns.is_new = False
            _verdict.remember(specialization, trains, turns.verdict)
            _memory.give_back()
            log.info("%s: %s", self.name, turns.verdict)
        side = turns.next()
        return side, Timer(turns, side) if turns.is_measuring else None

    def _has_no_room(self, specialization: Specialization) -> bool:
        """Whether there may be too little memory for what PyTorch keeps of a subgraph for backward, and needs in it."""
        if specialization.room is None:
            needed = 2 * _capture.bytes_of_results(self.body, specialization.sizes)
            specialization.room = needed <= _verdict.free_bytes() // 2
        return not specialization.room

    def verdicts(self) -> list[_verdict.Verdict]:
        """What is known about each size."""
        return [found.verdict for found in self.specializations.values() if found.verdict is not None]

    def _lighten(self, specialization: Specialization) -> None:
        """Without a budget, what is kept for backward is at most half of what PyTorch would keep."""
        # Sizes that are met once, as where images differ in size, are not worth it.
        if specialization.lightened or (len(self.specializations) > 1 and specialization.calls < 2):
            return
        specialization.lightened = True
        try:
            most = _memory.saved_by_pytorch(self, specialization.sizes) // 2
            with _threads.running:
                _engine.lighten(specialization.engine, [specialization.step], most)
        except Exception as error:
            # Blocks then keep what is usually fastest.
            log.info("%s: it is not known what PyTorch would keep: %s", self.name, error)

    def _specialization(self, args: Sequence[Any]) -> Specialization | None:
        engine = _threads.engine(self.threads, self.owner)
        key = (id(engine), *(arg.shape if isinstance(arg, torch.Tensor) else arg for arg in self._varying(args)))
        sizes = self.symbols.sizes
        if sizes:
            key += tuple(sizes.values())
        found = self.specializations.get(key)
        if found is None:
            sizes = sizes | _capture.sizes_of(self.placeholders, args)
            values = {self.names[node]: arg for node, arg in zip(self.placeholders, args)}
            found = self._build(key, engine, sizes, values)
        return found

    def _varying(self, args: Sequence[Any]) -> Iterator[Any]:
        """The arguments whose sizes or values may differ from call to call."""
        taken = (arg for node, arg in zip(self.placeholders, args) if self.kinds[node] in ("input", "number"))
        return (arg for arg in taken if not isinstance(arg, (float, torch.SymFloat)))

    def prepare(self, engine: _engine.Engine, sizes: dict[Any, int], tensors: dict[str, Any]) -> Specialization | None:
        """What runs this for certain sizes, before it runs; None if it runs in PyTorch."""
        if self.reason is not None:
            return None
        examples = [_capture.example(node) for node in self.placeholders]
        key = (id(engine), *(
            _capture.shape_of(value, sizes) if isinstance(value, torch.Tensor) else _capture.concrete(value, sizes)
            for value in self._varying(examples)
        ))
        if sizes:
            key += tuple(sizes.values())
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
