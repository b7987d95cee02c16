"""`python -m torch_convoke.benchmark`, and the page of the table: what is measured, what is said of it, and mistakes."""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torch_convoke.benchmark import Failure, Mistake, Result, Setting, Task, Worker, measure
from torch_convoke.benchmark.__main__ import edges, sentence, table

MODELS = """
import torch
from torch import nn

print("models may print")


def make_model():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(2, 2, 1)

    def forward(self, image, scale):
        return {"image": self.layer(image) * scale, "loss": self.layer.bias.square().sum()}


def with_inputs():
    return Two(), (torch.randn(2, 2, 8, 8), 2.0)


def broken():
    raise ValueError("my own mistake")


def infinite():
    model = make_model()
    with torch.no_grad():
        model[0].weight.fill_(float("inf"))
    return model


def of_width(width):
    return nn.Linear(width, width)


def number():
    return 3


def untrained():
    return nn.Conv2d(1, 1, 1).requires_grad_(False)
"""


@pytest.fixture
def models(tmp_path):
    file = tmp_path / "models.py"
    file.write_text(MODELS)
    return file


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "torch_convoke.benchmark", *map(str, arguments)],
        # Without a compiler: what torch.compile does is not what is tested.
        env=dict(os.environ, CXX="/nonexistent", CONVOKE_CACHE=environment.pop("cache"), **environment),
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_model_of_a_file(models, tmp_path):
    file = tmp_path / "result.json"
    done = run(f"{models}:make_model", "--batch", 2, "--size", "12x16", "--rounds", 2, "--threads", 1, "--json", file, cache=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    result = Result.from_json(json.loads(file.read_text()))
    assert result.model == {"parameters": 63, "inputs": [[2, 1, 12, 16]]} and result.threads == 1
    assert set(result.settings) == {"eager", "compiled", "convoke"}
    for name in ("eager", "convoke"):
        found = result.settings[name]
        assert len(found["seconds"]) == 2 and all(0 < one < 60 for one in found["seconds"])
        assert 0 < found["idle"] < found["bytes"] and found["first"] <= found["ready"]
    assert "error" in result.settings["compiled"] and "torch.compile cannot train the model" in done.stdout
    assert "convolutions" in result.settings["convoke"]["report"]
    assert done.stdout.splitlines()[-1].endswith("1 of 1 convolutions run in convoke.")
    assert "models may print" not in done.stdout


def answers_of(task, engine):
    with Worker(task, Setting(engine, "f32"), 1, "contiguous") as worker:
        return worker.answer(), worker.round(1)


def test_a_model_with_inputs_of_its_own(models):
    first, then = answers_of(Task(f"{models}:with_inputs"), "eager")
    assert first["model"] == {"parameters": 6, "inputs": [[2, 2, 8, 8]]} and len(then["seconds"]) == 1


@pytest.mark.parametrize(
    "model, others, message",
    [
        ("resnet19", {}, "torchvision has no model 'resnet19'.*resnet18"),
        ("{models}:make_modle", {}, "no function 'make_modle'.*is it make_model"),
        ("{models}:number", {}, "returned int: it should return a torch.nn.Module"),
        ("{models}:of_width", {}, "wants width"),
        ("{models}:with_inputs", {"batch": 2}, "leave out --batch and --size"),
        ("{models}:infinite", {}, "the loss is not finite"),
        ("{models}:untrained", {}, "no tensor with a gradient|no parameters"),
        ("nothing.py:make", {}, "no file 'nothing.py'"),
        ("no_such_package:make", {}, "no_such_package is not installed"),
        ("smp:NoNet", {}, "segmentation"),
    ],
)
def test_mistakes(models, model, others, message):
    with pytest.raises(Mistake, match=message):
        answers_of(Task(model.replace("{models}", str(models)), **others), "eager")


def test_errors_of_the_users_code_are_shown(models):
    with pytest.raises(Failure, match="ValueError: my own mistake"):
        measure(Task(f"{models}:broken"))


def test_mistakes_end_the_program_with_a_line(models, tmp_path):
    done = run(f"{models}:number", cache=str(tmp_path))
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("error: ") and "Traceback" not in done.stderr
    done = run("resnet18", "--size", "0", cache=str(tmp_path))
    assert done.returncode == 2 and "--size" in done.stderr


def test_edges():
    assert edges("64") == (64,) and edges("32x48") == (32, 48)
    with pytest.raises(Exception, match="HEIGHTxWIDTH"):
        edges("1x2x3")


def made_up(ours, precision=""):
    def setting(seconds, taken):
        return {"seconds": [seconds, seconds * 1.1, seconds], "bytes": taken, "idle": 1 << 20, "first": 1.0, "ready": 2.0}

    settings = {
        f"eager{precision}": setting(0.2, 800 << 20),
        f"compiled{precision}": {"error": "no compiler"},
        f"convoke{precision}": setting(ours, 400 << 20) | {"report": "1 of 2 convolutions, 90 % of the time"},
    }
    return Result(Task("resnet18", 8, (64,), 2), "A processor", 2, {"parameters": 1, "inputs": [[8, 3, 64, 64]]}, settings)


def test_what_is_said():
    assert "2.00 times as fast here: 100 ms a step instead of 200 ms in eager PyTorch, with 0.50 of the memory" in sentence(made_up(0.1), "f32")
    assert "memory. 1 of 2 convolutions run in convoke." in sentence(made_up(0.1), "f32")
    assert "as fast as PyTorch here" in sentence(made_up(0.2), "f32")
    assert "does not pay here" in sentence(made_up(0.3), "f32")
    assert "eager PyTorch in bf16" in sentence(made_up(0.1, "-bf16"), "bf16")
    assert "no compiler" in table(made_up(0.1))


TABLE = Path(__file__).resolve().parents[1] / "benchmarks" / "table.py"


@pytest.fixture
def page():
    spec = importlib.util.spec_from_file_location("table_of_training", TABLE)
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    return page


def test_a_precision_is_added_to_what_is_there(page, tmp_path, monkeypatch):
    file = tmp_path / "table.json"
    asked = []

    def measured(task, precisions, rounds):
        asked.append((task.model, precisions))
        result = made_up(0.1)
        result.settings = {}
        for precision in precisions:
            result.settings |= made_up(0.1, "" if precision == "f32" else f"-{precision}").settings
        return result

    monkeypatch.setattr(page.benchmark, "measure", measured)
    options = {"file": file, "networks": ["resnet18"], "threads": 2, "rounds": 3}
    for precision in ["f32", "f32", "both", "both"]:
        page.run_all(argparse.Namespace(**options, precision=precision))
    # What is known is not measured again.
    assert asked == [("resnet18", ("f32",)), ("resnet18", ("bf16",))]
    settings = json.loads(file.read_text())["results"]["resnet18"]["settings"]
    assert set(settings) == {f"{engine}{precision}" for engine in ("eager", "compiled", "convoke") for precision in ("", "-bf16")}


def test_the_page(page, tmp_path):
    assert len({name for _, name, _ in page.NETWORKS}) == len(page.NETWORKS) >= 24
    results = {"resnet18": made_up(0.1).as_json(), "resnet50": made_up(0.25).as_json()}
    source = tmp_path / "table.json"
    source.write_text(json.dumps({"machine": "A <processor>", "threads": 2, "date": "2026-01-01", "results": results}))
    outputs = [tmp_path / "docs" / name for name in ("table.md", "table.svg", "table.html")]
    done = subprocess.run(
        [sys.executable, TABLE, "page", source, "--markdown", outputs[0], "--svg", outputs[1], "--html", outputs[2]],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    # The mean of 0.5 and 1.25, and of memory 399 / 799.
    assert "2 networks take 0.79 of the time and 0.50 of the memory" in done.stdout and "resnet50 took longer" in done.stdout
    markdown, svg, html = (output.read_text() for output in outputs)
    assert "| resnet18 | 8 | 64 | eager | 200 ms | 100 ms | 0.50 |" in markdown
    assert "A &lt;processor&gt;" in svg and "A &lt;processor&gt;" in html
