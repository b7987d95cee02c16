"""Regions of `torch.utils.checkpoint` in captured graphs: their operations run in convoke as well, and are computed again in backward."""

from __future__ import annotations

from typing import Any, Callable, Sequence

import torch
import torch.utils.checkpoint

_REGIONS = [getattr(torch.ops.higher_order, name, None) for name in ("tag_activation_checkpoint",)]


class Region(torch.nn.Module):
    """A region, as a function of its inputs: parameters and buffers belong to the function, as in the user's model.

    As inputs, they would be saved for backward, and buffers that the region changes would be an error there.
    """

    def __init__(self, run: Callable[..., Any], inputs: Sequence[int], options: dict[str, Any]):
        super().__init__()
        self.run, self.inputs, self.options = run, inputs, options

    def forward(self, *args: Any) -> Any:
        def region(*inputs: Any) -> Any:
            own = list(args)
            for place, value in zip(self.inputs, inputs):
                own[place] = value
            return self.run(*own)

        inputs = [args[place] for place in self.inputs]
        # The last batch norm's counter must move in backward too, also where nothing after it is needed.
        with torch.utils.checkpoint.set_checkpoint_early_stop(False):
            return torch.utils.checkpoint.checkpoint(region, *inputs, **self.options)


def replace(fused: torch.fx.GraphModule, backend: Any, captured: Any, support: Any) -> int:
    """Replaces the regions of a graph by modules that run in convoke what they can. Gives how many there are."""
    from ._capture import is_of_model

    count = 0
    for node in list(fused.graph.nodes):
        if node.op != "call_function" or node.target not in _REGIONS:
            continue
        body = getattr(fused, node.args[0].target)
        args = node.args[1:]
        for placeholder, arg in zip(body.graph.find_nodes(op="placeholder"), args):
            if isinstance(arg, torch.fx.Node):
                placeholder.meta = {**placeholder.meta, **{key: arg.meta[key] for key in ("grapharg", "example_value") if key in arg.meta}}
        inputs = [place for place, arg in enumerate(args) if not (isinstance(arg, torch.fx.Node) and is_of_model(arg))]
        # What runs again in backward must run where it ran before, and a plan within a budget is made for a whole step, in which nothing is computed twice.
        run = body.forward if captured.budget is not None else backend.compiled(body, captured, measures=False)
        name = f"checkpoint_{count}"
        fused.add_module(name, Region(run, inputs, {"use_reentrant": False, **node.kwargs}))
        with fused.graph.inserting_before(node):
            call = fused.graph.call_module(name, args)
        call.meta = dict(node.meta)
        node.replace_all_uses_with(call)
        fused.graph.erase_node(node)
        count += 1
    return count
