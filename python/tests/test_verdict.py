"""Subgraphs that measure slower than in PyTorch run there, and what was measured is remembered."""

import pytest
import torch

import torch_convoke
from conftest import MEASURE, Small, captures, check_training, images
from torch_convoke import _run, _verdict, tuning

BATCHES = [images(seed=seed) for seed in range(5)]


def specialization(model):
    (found,) = captures(model)[0].subgraphs[0].specializations.values()
    return found


@pytest.mark.usefixtures("one_thread")
def test_what_is_slower_runs_in_pytorch(monkeypatch):
    calls = []
    call = _run.Specialization.call
    monkeypatch.setattr(_run.Specialization, "call", lambda self, args: calls.append(1) or call(self, args))
    monkeypatch.setattr(_verdict, "measure", lambda *_: _verdict.Verdict(2.0, 1.0))
    model = check_training(Small().double(), BATCHES)
    # The first training step ran in convoke, and the second one was measured.
    assert len(calls) == 1
    assert "PyTorch runs" in torch_convoke.report(model)
    assert "forward and backward take 2000.0 ms in convoke and 1000.0 ms in PyTorch" in torch_convoke.report(model)


@pytest.mark.usefixtures("one_thread")
def test_measuring_changes_nothing_and_is_remembered(monkeypatch, tmp_path):
    monkeypatch.setattr(_verdict, "measure", MEASURE)
    monkeypatch.setattr(tuning, "path", lambda: str(tmp_path))
    model = check_training(Small(dropout=0.3).double(), BATCHES)
    first = specialization(model).verdict
    assert first.convoke > 0 and first.pytorch > 0
    (file,) = tmp_path.glob("torch/*")
    assert file.suffix == ".verdict"

    model = check_training(Small(dropout=0.3).double(), BATCHES)
    again = specialization(model).verdict
    assert (again.convoke, again.pytorch) == (first.convoke, first.pytorch)

    for damaged in ("{", '{"convoke": 1}', "[]", "x" * 2000):
        file.write_text(damaged)
        assert _verdict.known(specialization(model)) is None
    model = check_training(Small(dropout=0.3).double(), BATCHES)
    assert _verdict.known(specialization(model)).convoke == specialization(model).verdict.convoke


def test_margins():
    assert _verdict.Verdict(1.0, 1.0).keeps and _verdict.Verdict(1.04, 1.0).keeps
    assert not _verdict.Verdict(1.2, 1.0).keeps


def test_too_little_memory_to_measure(monkeypatch):
    monkeypatch.setattr(_verdict, "measure", MEASURE)
    monkeypatch.setattr(_verdict, "_free_bytes", lambda: 1000)
    model = check_training(Small().double(), BATCHES[:3])
    assert specialization(model).verdict is None and torch.is_grad_enabled()
