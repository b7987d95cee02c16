"""The text of `report`."""

from __future__ import annotations

from typing import Any

from . import _capture, _engine, _memory


def describe(captured: Any) -> list[str]:
    """What of a captured graph runs where, and why."""
    if captured.reason is not None:
        return [f"A graph of {_count(captured)} operations runs in PyTorch: {captured.reason}."]
    lines = []
    for subgraph in captured.subgraphs:
        lines.extend(_subgraph(subgraph))
    groups: dict[tuple[str, str], list[str]] = {}
    for node, reason in captured.left.items():
        key = (_capture.operation_name(node), reason)
        groups.setdefault(key, []).append(_capture.path_of(node))
    for (operation, reason), paths in groups.items():
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        lines.append(f"PyTorch runs {operation} of {paths[0]}{more}: {reason}.")
    if captured.budget is not None and captured.budget.plan is not None:
        lines.append(f"With the memory budget, {captured.budget.plan}.")
    return lines or ["A graph without operations."]


def _count(captured: Any) -> int:
    return sum(node.op.startswith("call_") for node in captured.placeholders[0].graph.nodes) if captured.placeholders else 0


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
        if specialization.verdict is not None:
            why = f"; {specialization.verdict}"
            where = "convoke" if specialization.verdict.keeps else "PyTorch"
        taken = [*specialization.shapes, *(shape for shape, _ in specialization.noises)]
        steps, alone = specialization.graph.describe([list(shape) for shape in taken])
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

