"""Random programs give what they give in eager PyTorch: results, gradients, statistics, counters, what they write to. What convoke cannot
follow stays in PyTorch, with a reason."""

from __future__ import annotations

import copy

import pytest
import torch

import torch_convoke
from conftest import check, check_state, compiled, convolutions, images, loss_of, recorded
from random_programs import Program, program

#: Programs that are recorded as TorchDynamo would capture them, and programs that TorchDynamo captures.
RECORDED, CAPTURED = 1000, 40


def outcome(model, run, seed):
    """What a program gives and changes: results, gradients of the inputs or why there are none, the inputs afterwards."""
    torch.manual_seed(seed)
    inputs = [images(2, 6, seed=seed, channels=4), images(2, 6, seed=seed + 1, channels=6)]
    leaves = [tensor.clone().requires_grad_(seed % 3 > 0) for tensor in inputs]
    given = [leaf * 1 if leaf.requires_grad else leaf for leaf in leaves]
    # A tensor that is returned and written to gives no sensible loss, in PyTorch neither.
    results = run(*given)
    error = None
    try:
        loss_of([result * 1 for result in results if result.requires_grad]).backward() if any(r.requires_grad for r in results) else None
    except RuntimeError as caught:
        assert "modified by an inplace operation" in str(caught), caught
        error = caught
    return results, [leaf.grad for leaf in leaves], [tensor.detach() for tensor in given], error


def compare(expected_model, wanted, model, found):
    for one, other in zip(found[0], wanted[0], strict=True):
        check(one, other, 1e-9, nan=True)
        assert one.requires_grad == other.requires_grad
    for one, other in zip(found[2], wanted[2], strict=True):
        check(one, other, 1e-9, "an input afterwards", nan=True)
    for (name, one), other in zip(model.named_buffers(), expected_model.buffers(), strict=True):
        check(one, other, 1e-9, name, nan=True)
    if wanted[3] is not None or found[3] is not None:
        # PyTorch needs what was overwritten; convoke may have kept something else.
        assert found[3] is None or wanted[3] is not None, found[3]
        return
    check_state(model, expected_model, 1e-8)
    for one, other in zip(found[1], wanted[1], strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            check(one, other, 1e-8, "gradient of an input")


@pytest.mark.usefixtures("one_thread")
def test_recorded_programs():
    failures, ran, convs = [], 0, 0
    for seed in range(RECORDED):
        source = program(seed)
        expected, model = Program(source), Program(source)
        try:
            torch.manual_seed(seed)
            wanted = outcome(expected, expected, seed)
        except RuntimeError:
            # PyTorch refuses some writes, such as to expanded tensors.
            continue
        ran += 1
        shadow = copy.deepcopy(model)
        names = [name for name, _ in shadow.named_parameters()] + [name for name, _ in shadow.named_buffers()]

        def whole(tensors, x, y):
            return torch.func.functional_call(shadow, tensors, (x, y))

        try:
            torch.manual_seed(seed)
            tensors = dict(shadow.named_parameters()) | dict(shadow.named_buffers())
            x, y = images(2, 6, seed=seed, channels=4), images(2, 6, seed=seed + 1, channels=6)
            needs = seed % 3 > 0
            x, y = (x.requires_grad_() * 1, y.requires_grad_() * 1) if needs else (x, y)
            graph, inputs = recorded(shadow, (x, y), {}) if not tensors else recorded(lambda tensors, x, y: whole(tensors, x, y), (tensors, x, y), {})
            run, captured = compiled(graph)
            own = dict(model.named_parameters()) | dict(model.named_buffers())
            places = {id(tensor): name for name, tensor in tensors.items()}
            order = [places.get(id(tensor)) or ("x" if tensor is x else "y") for tensor in inputs]
            convs += sum(node.name.startswith("conv2d") for graph in captured for subgraph in graph.subgraphs for node in subgraph.body)
            found = outcome(model, lambda x, y: run(*(own[name] if name in own else {"x": x, "y": y}[name] for name in order)), seed)
            compare(expected, wanted, model, found)
        except Exception as error:
            failures.append(f"seed {seed}: {type(error).__name__}: {str(error)[:300]}\n{source}")
            if len(failures) > 5:
                break
    assert not failures, "\n".join(failures)
    assert ran > 0.8 * RECORDED and convs > RECORDED / 2, (ran, convs)


@pytest.mark.usefixtures("one_thread")
def test_captured_programs():
    failures, here, there = [], 0, 0
    for seed in range(CAPTURED):
        source = program(10_000 + seed, modes=True)
        expected, model = Program(source), torch_convoke.optimize(Program(source))
        try:
            torch._dynamo.reset()
            for call in range(3):
                try:
                    wanted = outcome(expected, expected, seed + call)
                except RuntimeError:
                    break
                compare(expected, wanted, model, outcome(model, model, seed + call))
            else:
                torch_convoke.report(model)
                count = convolutions(model)
                here, there = here + count[0], there + count[1]
        except Exception as error:
            failures.append(f"seed {seed}: {type(error).__name__}: {str(error)[:300]}\n{source}")
            if len(failures) > 5:
                break
    assert not failures, "\n".join(failures)
    # The rest is what nobody reads, and what writes through views touch.
    assert here > 0.6 * there > 0, (here, there)
