"""Tuning results: kept, shipped, shared between ranks, and measured ahead without a trace in the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_convoke
from torch_convoke import _engine, _pace, _threads, ops, tuning
from torch_convoke.nn import FusedConvBN2d


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of results of this test's own, and no engine yet. Choices are measured however little time they took."""
    monkeypatch.setenv("CONVOKE_CACHE", str(tmp_path / "results"))
    monkeypatch.setattr(_pace, "SECONDS", 0.0)
    new_process(monkeypatch)
    return tmp_path / "results"


def new_process(monkeypatch):
    """Forgets what a process knows."""
    monkeypatch.setattr(_threads, "_engines", {})
    monkeypatch.setattr(tuning, "_adopted", [])


def convolve(batch=2, channels=4, calls=3):
    """Runs a convolution until what it needs is measured, which is when it has run twice."""
    x = torch.randn(batch, channels, 8, 8, requires_grad=True)
    for _ in range(calls):
        ops.conv2d(x, torch.randn(8, channels, 3, 3, requires_grad=True), padding=1).sum().backward()


def files(folder):
    return sorted(folder.glob("*/*.json"))


def with_other_choices(file):
    """Changes an export so that in each result another algorithm won."""
    export = json.loads(file.read_text())
    for entry in export["entries"]:
        record = entry["record"]
        timed = [candidate for candidate in record["candidates"] if candidate.get("times")]
        loser = [candidate for candidate in timed if candidate["algorithm"] != record["chosen"]][-1]
        loser["times"] |= {"score": 1e-9, "min": 1e-9, "median": 1e-9}
        record["chosen"] = loser["algorithm"]
    file.write_text(json.dumps(export))
    return {entry["record"]["key"]["pass"]: entry["record"]["chosen"] for entry in export["entries"]}


def test_the_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("CONVOKE_CACHE", str(tmp_path))
    assert tuning.path() == tmp_path
    monkeypatch.setenv("CONVOKE_CACHE", "")
    own = _engine.cache_path()
    assert tuning.path() == (None if own is None else Path(own))


def test_results_are_kept_and_used(folder, monkeypatch):
    assert tuning.choices() == []
    convolve()
    made = tuning.choices()
    assert [choice.pass_ for choice in made] == ["bwd-data", "bwd-weights", "fwd"]
    for choice in made:
        assert (choice.problem, choice.format, choice.dtype) == ("mb2ic4ih8iw8oc8oh8ow8kh3kw3sh1sw1ph1pw1", "nchw", "f32")
        assert choice.threads == _threads.thread_count()
    assert len(files(folder)) == 3
    times = [file.stat().st_mtime_ns for file in files(folder)]
    new_process(monkeypatch)
    convolve()
    assert tuning.choices() == made and times == [file.stat().st_mtime_ns for file in files(folder)]


def test_export_and_load(folder, monkeypatch, tmp_path):
    convolve()
    made, file = tuning.choices(), tmp_path / "tuning.json"
    assert tuning.export(file) == 3
    assert tuning.load(file) == (0, 3)
    monkeypatch.setenv("CONVOKE_CACHE", str(tmp_path / "other"))
    new_process(monkeypatch)
    assert tuning.load(str(file)) == tuning.Loaded(added=3, present=0)
    convolve()
    assert tuning.choices() == made


def test_what_is_loaded_is_chosen(folder, monkeypatch, tmp_path):
    """Also by engines that have chosen, and where the folder has another result."""
    convolve()
    file = tmp_path / "tuning.json"
    tuning.export(file)
    wanted = with_other_choices(file)
    assert tuning.load(file) == (0, 3)
    assert {choice.pass_: choice.algorithm for choice in tuning.choices()} == wanted
    convolve()
    assert {choice.pass_: choice.algorithm for choice in tuning.choices()} == wanted
    # An engine that is made later takes it over too.
    _threads._engines.clear()
    convolve()
    assert {choice.pass_: choice.algorithm for choice in tuning.choices()} == wanted


def test_results_of_other_machines_are_kept_but_not_chosen(folder, tmp_path):
    convolve()
    made, file = tuning.choices(), tmp_path / "tuning.json"
    tuning.export(file)
    with_other_choices(file)
    file.write_text(file.read_text().replace(_engine.tuning_scope(), "convoke-0.1_some-other-cpu_avx2"))
    assert tuning.load(file) == (3, 0)
    assert tuning.choices() == made and len(files(folder)) == 6
    assert tuning.export(file) == 6


def test_errors_name_the_remedy(folder, monkeypatch, tmp_path):
    file = tmp_path / "tuning.json"
    assert tuning.export(file) == 0
    with pytest.raises(FileNotFoundError, match="nowhere.json"):
        tuning.load(tmp_path / "nowhere.json")
    for text in ("", "{}", "[1]", '{"convoke_tuning": 2, "entries": []}', "\0"):
        file.write_text(text)
        with pytest.raises(ValueError, match="tuning.json.*torch_convoke.tuning.export and `convoke cache export` write such files"):
            tuning.load(file)
    assert not files(folder)
    with pytest.raises(OSError, match="missing"):
        tuning.export(tmp_path / "missing" / "tuning.json")
    monkeypatch.setenv("CONVOKE_CACHE", "")
    monkeypatch.setattr(_engine, "cache_path", lambda: None)
    assert tuning.path() is None
    for function in (tuning.export, tuning.load):
        with pytest.raises(RuntimeError, match="set the environment variable CONVOKE_CACHE to a folder"):
            function(file)
    with pytest.raises(PermissionError, match="may write to, for the folder by the environment variable CONVOKE_CACHE"):
        with tuning._remedies():
            raise PermissionError("refused")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.5)
        self.block = FusedConvBN2d(8, 8, 3, affine=True, track_running_stats=True, activation="relu")
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = F.relu(self.bn(self.conv(x)))
        return self.head(self.drop(self.block(x).mean((2, 3))))


def state_of(model):
    return [part.detach().clone() for part in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize("training", [True, False])
def test_tune_leaves_no_trace(folder, training, capsys):
    model = torch_convoke.optimize(Net().train(training))
    x = torch.randn(4, 3, 12, 12)
    model.conv.weight.grad = torch.ones_like(model.conv.weight)
    ran = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(ran.append)
    gradient, state, generator = model.conv.weight.grad, state_of(model), torch.get_rng_state()
    count = tuning.tune(model, x)
    assert count > 0 and count == len(tuning.choices())
    assert model.conv.weight.grad is gradient and torch.equal(gradient, torch.ones_like(gradient))
    assert model.bn.weight.grad is None and not ran and model.training == training
    assert torch.equal(generator, torch.get_rng_state()) and x.grad is None and not x.requires_grad
    for one, other in zip(state_of(model), state):
        assert torch.equal(one, other)
    passes = {choice.pass_ for choice in tuning.choices()}
    assert passes == ({"fwd", "bwd-data", "bwd-weights"} if training else {"fwd"})
    # Every choice is measured, and a step has none left to make.
    assert len(files(folder)) == count
    made = tuning.choices()
    assert tuning.tune(model, x) == 0
    with torch.set_grad_enabled(training):
        output = model(x)
    if training:
        output.sum().backward()
    assert tuning.choices() == made


def test_tune_restores_after_an_error(folder):
    model, x = torch_convoke.optimize(Net()), torch.randn(4, 5, 12, 12)
    state, generator = state_of(model), torch.get_rng_state()
    with pytest.raises(Exception, match="5"):
        tuning.tune(model, x)
    for one, other in zip(state_of(model), state):
        assert torch.equal(one, other)
    assert torch.equal(generator, torch.get_rng_state())


def test_tune_measures_what_was_estimated(folder, monkeypatch):
    """As where an engine has spent its time for measuring."""
    engine = _engine.Engine(_threads.thread_count(), cache=str(folder), budget=0.0)
    monkeypatch.setitem(_threads._engines, (os.getpid(), _threads.thread_count()), engine)
    layer = FusedConvBN2d(3, 8, 3)
    layer(torch.randn(4, 3, 12, 12)).sum().backward()
    assert not files(folder)
    assert tuning.tune(layer, torch.randn(4, 3, 12, 12)) == 2
    assert len(files(folder)) == 2


def test_what_was_estimated_is_measured_later(folder, monkeypatch):
    engine = _engine.Engine(_threads.thread_count(), cache=str(folder), budget=0.0, budget_each=0.05)
    monkeypatch.setitem(_threads._engines, (os.getpid(), _threads.thread_count()), engine)
    monkeypatch.setattr(_pace.Pace, "measure", lambda *_: None)
    assert (engine.pending, engine.measure_next(0, 0.0)) == (0, (False, 0))
    convolve()
    convolve(calls=1, channels=5)
    assert engine.pending == 6 and not files(folder)
    assert engine.measure_next(4, 0.0) == (False, 6)
    assert [engine.measure_next(2, 0.0) for _ in range(4)] == [(True, 5), (True, 4), (True, 3), (False, 3)]
    assert len(files(folder)) == 3 and all("ic4" in file.name for file in files(folder))
    assert [engine.measure_next(1, 0.0) for _ in range(4)] == [(True, 2), (True, 1), (True, 0), (False, 0)]
    made = tuning.choices()
    convolve()
    assert engine.pending == 0 and tuning.choices() == made and len(files(folder)) == 6
    with pytest.raises(OverflowError):
        engine.measure_next(-1, 0.0)


def test_what_took_little_time_is_not_measured(folder, monkeypatch):
    monkeypatch.setattr(_pace, "SECONDS", 10.0)
    convolve(calls=10)
    assert _threads.engine(None, None).pending == 3 and not files(folder)
    # Who tunes wants all of it.
    tuning.tune(FusedConvBN2d(3, 8, 3), torch.randn(4, 3, 12, 12))
    assert files(folder)


def test_measuring_takes_a_small_share_of_a_long_training(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(_pace.time, "monotonic", lambda: now[0])
    pace = _pace.Pace()
    for trained, spent, allowed in [(0, 0, 1), (30, 0, 31), (30, 31, 0), (100, 61, 4), (1000, 61, 49), (1000, 111, -1)]:
        pace.spent = float(spent)
        now[0] = trained + pace.spent
        assert pace.allowed == allowed, (trained, spent)


def test_tune_says_how_far_it_is(folder, capsys, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(tuning, "_step", lambda *_: release.wait(1.3))
    tuning.tune(FusedConvBN2d(3, 8, 3), torch.randn(1))
    assert "torch_convoke: measuring algorithms, 0 chosen, 1 s" in capsys.readouterr().err
    release.set()
    tuning.tune(FusedConvBN2d(3, 8, 3), torch.randn(1))
    assert capsys.readouterr().err == ""
    release.clear()
    tuning.tune(FusedConvBN2d(3, 8, 3), torch.randn(1), progress=False)
    assert capsys.readouterr().err == ""


def test_tune_refuses(folder):
    with pytest.raises(ValueError, match=r"call torch_convoke.optimize\(model\) first"):
        tuning.tune(nn.Conv2d(3, 4, 3), torch.randn(1, 3, 5, 5))
    with pytest.raises(TypeError, match=r"tune\(model, images\)"):
        tuning.tune(FusedConvBN2d(3, 4, 3))
    with pytest.raises(RuntimeError, match="init_process_group first"):
        tuning.broadcast()


RANK = """
import os, sys
import torch, torch.distributed as dist
from torch_convoke import ops, tuning
from torch_convoke.nn import FusedConvBN2d
torch.set_num_threads(1)
threads = lambda: len(os.listdir("/proc/self/task"))
before = threads()
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=int(sys.argv[3]))
rank = dist.get_rank()
layer, x = FusedConvBN2d(3, 8, 3), torch.randn(4, 3, 12, 12)
if rank != 0 and sys.argv[4] != "none":
    tuning.load(sys.argv[4])  # other choices
if rank == 0:
    tuning.tune(layer, x)
tuning.broadcast()
layer(x).sum().backward()
mine = tuning.choices()
everyone = [None] * dist.get_world_size()
dist.all_gather_object(everyone, mine)
assert len(mine) == 2 and all(other == everyone[0] for other in everyone), everyone
print("agreed", [choice.algorithm for choice in mine])
dist.destroy_process_group()
assert threads() == before, "something holds the process group"
sys.stdout.flush()
os._exit(0)  # See `RANKS` in test_semantics.py.
"""


def test_ranks_agree(folder, tmp_path):
    torch.set_num_threads(1)
    try:
        tuning.tune(FusedConvBN2d(3, 8, 3), torch.randn(4, 3, 12, 12))
    finally:
        torch.set_num_threads(_engine.available_threads())
    file = tmp_path / "other.json"
    tuning.export(file)
    with_other_choices(file)
    ranks = []
    for rank in range(2):
        arguments = [sys.executable, "-c", RANK, str(tmp_path / "store"), str(rank), "2", str(file)]
        environment = os.environ | {"CONVOKE_CACHE": str(tmp_path / f"rank{rank}")}
        ranks.append(subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    for rank in ranks:
        output, _ = rank.communicate(timeout=120)
        assert rank.returncode == 0 and "agreed" in output, output
    assert len(files(tmp_path / "rank1")) == 2
