"""Subgraphs run in convoke and in PyTorch by turns until it is known who is faster, and what was measured is remembered."""

import json

import pytest
import torch

import torch_convoke
from conftest import Small, captures, check_training, images
from torch_convoke import _run, _verdict, tuning
from torch_convoke._verdict import AGAIN, CONVOKE, MOST, PYTORCH, Turns, Verdict

BATCHES = [images(seed=seed) for seed in range(20)]


def specialization(model):
    (found,) = captures(model)[0].subgraphs[0].specializations.values()
    return found


def sides(turns, count, seconds):
    """Who runs the next steps, which take so many seconds."""
    found = []
    for _ in range(count):
        found.append(turns.next())
        turns.add(found[-1], seconds[found[-1]])
    return found


def test_turns_end_soon_where_the_difference_is_clear():
    turns = Turns()
    assert sides(turns, 8, {CONVOKE: 1.0, PYTORCH: 2.0})[:8] == [CONVOKE, CONVOKE, PYTORCH, PYTORCH, CONVOKE, CONVOKE, PYTORCH, CONVOKE]
    assert (turns.verdict.convoke, turns.verdict.pytorch) == (1.0, 2.0) and turns.verdict.is_clear
    # Nobody looks again.
    assert set(sides(turns, 10 * AGAIN, {CONVOKE: 9.0, PYTORCH: 1.0})) == {CONVOKE}


def test_turns_go_on_while_it_is_close():
    turns = Turns()
    ran = sides(turns, 4 * (MOST + 1), {CONVOKE: 1.0, PYTORCH: 0.98})
    assert ran.count(PYTORCH) == MOST + 1 or ran.count(PYTORCH) == MOST + 2
    assert turns.verdict.keeps and not turns.verdict.is_clear


def test_convoke_runs_soon_what_it_ran_faster_each_time():
    turns = Turns()
    ran = sides(turns, AGAIN, {CONVOKE: 1.0, PYTORCH: 1.02})
    assert ran.count(PYTORCH) == 3 and turns.verdict.keeps and not turns.verdict.is_clear
    # As it was close, it is measured again later, and another answer counts.
    sides(turns, 40, {CONVOKE: 1.0, PYTORCH: 0.5})
    assert not turns.verdict.keeps


def test_one_noisy_moment_decides_nothing():
    turns = Turns()
    for step in range(4 * MOST):
        side = turns.next()
        turns.add(side, {CONVOKE: 45.0 if step in (4, 5) else 1.0, PYTORCH: 1.5}[side])
    assert turns.verdict.keeps


def test_what_went_against_convoke_is_measured_again():
    turns = Turns()
    sides(turns, 8, {CONVOKE: 2.0, PYTORCH: 1.0})
    assert not turns.verdict.keeps
    again = sides(turns, AGAIN + 20, {CONVOKE: 1.0, PYTORCH: 2.0})
    assert set(again[: AGAIN - 10]) == {PYTORCH} and turns.verdict.keeps
    # So is what another process found lost.
    turns = Turns(Verdict(2.0, 1.0))
    assert turns.next() == CONVOKE and turns.is_measuring
    for known in (Verdict(0.95, 1.0), Verdict(0.5, 1.0)):
        turns = Turns(known)
        assert turns.next() == CONVOKE and not turns.is_measuring


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("faster", [CONVOKE, PYTORCH])
def test_the_faster_one_runs(faster, measured, monkeypatch):
    calls = []
    call = _run.Specialization.forward
    monkeypatch.setattr(_run.Specialization, "forward", lambda self, *args: calls.append(1) or call(self, *args))
    add = Turns.add
    monkeypatch.setattr(Turns, "add", lambda self, side, seconds: add(self, side, 1.0 if side == faster else 2.0))

    def test():
        calls.clear()
        model = check_training(Small(dropout=0.3).double(), BATCHES)
        assert specialization(model).verdict.keeps == (faster == CONVOKE)
        # Two steps before the turns, and the turns.
        assert 20 - 6 <= len(calls) <= 20 if faster == CONVOKE else len(calls) <= 8
        text = torch_convoke.report(model)
        first = "2 of 2 convolutions" if faster == CONVOKE else "0 of 2 convolutions"
        assert text.startswith(first) and f", {'0.50' if faster == CONVOKE else '1.00'} of PyTorch's step\n" in text

    measured(test)


@pytest.mark.usefixtures("one_thread")
def test_what_was_measured_is_remembered(monkeypatch, tmp_path, measured):
    add = Turns.add
    monkeypatch.setattr(Turns, "add", lambda self, side, seconds: add(self, side, 1.0 if side == CONVOKE else 2.0))
    folder = tuning.path()
    model = check_training(Small(dropout=0.3).double(), BATCHES)
    found = specialization(model)
    (file,) = [file for file in (tmp_path / folder).glob("torch/*") if file.stem == _verdict._key(found, True)]
    assert file.suffix == ".verdict" and json.loads(file.read_text()) == {"convoke": 1.0, "pytorch": 2.0}
    assert _verdict.known(found, True).convoke == 1.0 and _verdict.known(found, False) is None
    for damaged in ("{", '{"convoke": 1}', "[]", "x" * 2000, '{"convoke": "a", "pytorch": 1}', '{"convoke": NaN, "pytorch": 1}', '{"convoke": -1, "pytorch": 1}'):
        file.write_text(damaged)
        assert _verdict.known(found, True) is None, damaged


@pytest.mark.usefixtures("one_thread")
def test_steps_without_gradients_are_measured_apart(measured):
    def test():
        model = torch_convoke.optimize(Small().eval())
        x = images(dtype=torch.float32)
        with torch.no_grad():
            results = [model(x) for _ in range(40)]
        assert all(torch.allclose(result, results[0], atol=1e-5) for result in results)
        assert specialization(model).verdict is not None

    measured(test)


@pytest.mark.usefixtures("one_thread")
def test_steps_without_backward_end_the_turns(measured):
    model = torch_convoke.optimize(Small().eval())
    for _ in range(70):
        model(images(dtype=torch.float32))
    assert specialization(model).verdict is None and not specialization(model).turns(True).is_measuring


@pytest.mark.usefixtures("one_thread")
def test_a_second_backward_is_pytorch_s_error_on_each_turn(measured):
    model = torch_convoke.optimize(Small())
    for seed in range(8):
        loss = model(images(dtype=torch.float32, seed=seed)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward()


def test_margins():
    assert Verdict(1.0, 1.0).keeps and Verdict(1.04, 1.0).keeps
    assert not Verdict(1.2, 1.0).keeps


@pytest.mark.usefixtures("one_thread")
def test_too_little_memory_to_measure(monkeypatch, measured):
    monkeypatch.setattr(_verdict, "free_bytes", lambda: 1000)
    model = check_training(Small().double(), BATCHES)
    assert specialization(model).verdict is None
