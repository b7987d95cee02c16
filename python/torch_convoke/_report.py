"""The text of `report`."""

from __future__ import annotations

from typing import Any

import torch

from . import _capture, _engine, _memory
from ._writes import operation_name

#: Parts of the names of functions that are convolutions.
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
_CONVOLUTION_MODULES = torch.nn.modules.conv._ConvNd


def describe_model(model: torch.nn.Module, optimized: Any) -> list[str]:
    """What of an optimized model runs where, and why: first one line that sums up."""
    backend = optimized.backend
    lines: list[str] = []
    if optimized.inner and not backend.captured:
        for name, network in optimized.inner:
            first, *others = describe_model(network, network._compiled_call_impl)
            lines += [f"{name}: {first}", *others]
        return lines
    modules = sum(isinstance(module, _CONVOLUTION_MODULES) for module in model.modules())
    if optimized.failures:
        lines.append(f"TorchDynamo could not capture the model {len(optimized.failures)} times: {optimized.failures[-1]}.")
    if not backend.captured:
        first = f"0 of {modules} convolutions: "
        if optimized.failures:
            first += "the model runs in PyTorch."
        elif not optimized.calls:
            first += "the model has not run yet. It is captured when it is called"
            first += "." if optimized.pace.wait <= 0 else f", after {optimized.pace.wait:.1f} s in PyTorch."
        elif not optimized.pace.has_begun:
            first += (
                f"the model runs in PyTorch for its first {optimized.pace.wait:.1f} s, and is captured then. With the environment variable "
                "CONVOKE_CAPTURE_AFTER=0, or by torch_convoke.tuning.tune(model, inputs), it is captured at once."
            )
        else:
            first += "TorchDynamo gave nothing to run, such as for a model whose forward it may not trace."
        return [first, *lines]
    if optimized.postponed:
        lines.append(
            f"{optimized.postponed} of {optimized.calls} calls ran in PyTorch, as inputs, modes, hooks or frozen parameters were others, and "
            "capturing them had to wait until the model had trained for as long as it had been captured."
        )
    if optimized.bypassed:
        lines.append(
            f"{optimized.bypassed} of {optimized.calls} calls ran in PyTorch: TorchDynamo does not capture them any more, after "
            f"{len(backend.captured)} captures for other inputs, modes, hooks or frozen parameters."
        )
    elif len(backend.captured) > 8:
        lines.append(f"The model was captured {len(backend.captured)} times, for other inputs, modes, hooks or frozen parameters.")
    for captured in backend.captured:
        lines.extend(describe(captured))
    return [summary(backend), *lines]


def summary(backend: Any) -> str:
    """One line on what the last call ran: convolutions, share of the time, and the time beside PyTorch's."""
    newest = max(captured.last_call for captured in backend.captured)
    last = [captured for captured in backend.captured if captured.last_call == newest]
    here = there = 0
    ours = theirs = 0.0
    for captured in last:
        there += sum(_is_convolution(node) for node in captured.left)
        for subgraph in captured.subgraphs:
            count = sum(_is_convolution(node) for node in subgraph.body)
            verdicts = subgraph.verdicts()
            runs_here = subgraph.reason is None and all(verdict.keeps for verdict in verdicts)
            here, there = (here + count, there) if runs_here else (here, there + count)
            ours += sum(verdict.convoke if verdict.keeps else verdict.pytorch for verdict in verdicts)
            theirs += sum(verdict.pytorch for verdict in verdicts)
    text = f"{here} of {here + there} convolutions"
    seconds = sum(captured.seconds for captured in last)
    if seconds > 0:
        text += f", {100 * sum(captured.inside for captured in last) / seconds:.0f} % of the time"
    return text + (f", {ours / theirs:.2f} of PyTorch's step" if theirs > 0 else ", not yet measured against PyTorch")


def _is_convolution(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and operation_name(node) in _CONVOLUTIONS


def describe(captured: Any) -> list[str]:
    """What of a captured graph runs where, and why."""
    if captured.reason is not None:
        return [f"A graph of {len(captured.nodes)} operations runs in PyTorch: {captured.reason}."]
    lines = []
    for subgraph in captured.subgraphs:
        lines.extend(_subgraph(subgraph))
    groups: dict[tuple[str, str], list[str]] = {}
    for node, reason in captured.left.items():
        key = (operation_name(node), reason)
        groups.setdefault(key, []).append(_capture.path_of(node))
    for (operation, reason), paths in groups.items():
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        lines.append(f"PyTorch runs {operation} of {paths[0]}{more}: {reason}.")
    if captured.budget is not None and captured.budget.plan is not None:
        lines.append(f"With the memory budget, {captured.budget.plan}.")
    return lines or ["A graph without operations."]


def _subgraph(subgraph: Any) -> list[str]:
    lines = []
    if subgraph.reason is not None:
        return [f"PyTorch runs a subgraph of {len(subgraph.body)} operations: {subgraph.reason}."]
    if not subgraph.specializations:
        return [f"convoke will run a subgraph of {len(subgraph.body)} operations; it has not run yet."]
    for specialization in list(subgraph.specializations.values()):
        shapes = ", ".join(" x ".join(map(str, shape)) for shape in specialization.shapes)
        where = "convoke"
        why = ""
        verdict = specialization.verdict
        if verdict is not None:
            why = f"; {verdict}"
            where = "convoke" if verdict.keeps else "PyTorch"
        taken = [*specialization.shapes, *(shape for shape, _, _ in specialization.noises)]
        steps, alone = specialization.graph.describe([(list(shape), kind) for shape, kind in zip(taken, specialization.types)])
        fused = sum("+" in operation for _, operation, _, _ in steps)
        lines.append(
            f"{where} runs {len(subgraph.body)} operations on {shapes} as {len(steps)} steps, {fused} of them fused{why}."
        )
        for name, reason in alone:
            lines.append(f"  {name} runs alone: {reason}.")
        after, peak = _engine.step_memory(specialization.engine, [specialization.step])
        theirs = _memory.saved_by_pytorch(subgraph, specialization.sizes)
        lines.append(
            f"  For backward it keeps {_memory.megabytes(after)}, PyTorch would keep {_memory.megabytes(theirs)}; at the peak of a "
            f"step it uses {_memory.megabytes(peak)}, gradients included."
        )
    return lines

