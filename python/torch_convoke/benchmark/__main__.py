"""The command line."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from . import PRECISIONS, Failure, Mistake, Result, Setting, Task, measure

DESCRIPTION = """\
Times whole training steps of a model: in eager PyTorch, with torch.compile, and with torch_convoke, on this machine.

MODEL is a function that returns a model, as FILE.py:FUNCTION or MODULE:FUNCTION, a model of torchvision by its name,
timm:NAME, or smp:NAME/ENCODER (segmentation_models_pytorch). A function may return a pair, the model and a tuple of its
inputs; else a step has noise as images, of as many channels as the first convolution has.
"""
EXAMPLES = """\
examples:
  python -m torch_convoke.benchmark model.py:make_model --batch 8 --size 224
  python -m torch_convoke.benchmark resnet18 --precision both
  python -m torch_convoke.benchmark timm:convnextv2_atto --threads 1 --json convnext.json

The first time takes a few minutes: torch.compile compiles, and torch_convoke measures which algorithms are fastest here.
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m torch_convoke.benchmark", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL", help="what to train")
    parser.add_argument("--batch", type=positive, metavar="N", help="images of a step (default: 8)")
    parser.add_argument("--size", type=edges, metavar="N|HxW", help="edges of the images in pixels (default: 224)")
    parser.add_argument("--threads", type=positive, metavar="N", help="threads of each setting (default: as many as PyTorch takes)")
    parser.add_argument("--precision", choices=[*PRECISIONS, "both"], default="f32", help="f32, bf16 for autocast to bfloat16, or both (default: f32)")
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="turns of each setting (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured")
    arguments = parser.parse_args()
    task = Task(arguments.model, arguments.batch, arguments.size, arguments.threads)
    precisions = PRECISIONS if arguments.precision == "both" else (arguments.precision,)
    progress = Progress()
    try:
        result = measure(task, precisions, rounds=arguments.rounds, progress=progress)
    except (Mistake, Failure) as error:
        progress.clear()
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, Mistake) else 1
    except KeyboardInterrupt:
        progress.clear()
        print("interrupted: nothing was written", file=sys.stderr)
        return 130
    progress.clear()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result.as_json()) + "\n")
    print(table(result))
    print()
    for precision in precisions:
        print(sentence(result, precision))
    return 0


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def edges(text: str) -> tuple[int, ...]:
    found = tuple(positive(part) for part in text.lower().split("x"))
    if len(found) > 2:
        raise argparse.ArgumentTypeError(f"{text} is not an edge or HEIGHTxWIDTH")
    return found


class Progress:
    """One line on standard error that changes; in a log, a line for each thing that takes long."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()
        self._start = time.monotonic()

    def __call__(self, text: str) -> None:
        if self._shown:
            print(f"\r\033[K{time.monotonic() - self._start:4.0f} s  {text}", end="", file=sys.stderr, flush=True)
        elif not text.startswith("round"):
            print(text, file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def table(result: Result) -> str:
    """A line for each setting."""
    inputs = ", ".join(" x ".join(map(str, shape)) for shape in result.model["inputs"])
    lines = [
        f"{result.task.model}, {result.model['parameters'] / 1e6:.1f} million parameters, inputs of {inputs}",
        f"{result.machine}, {result.threads} thread{'s' if result.threads > 1 else ''}",
        "",
        f"{'':24} {'step':>10} {'of best':>8} {'memory':>9} {'first step':>11} {'ready after':>12}",
    ]
    best = result.best_peer()
    for name, found in result.settings.items():
        label = str(Setting.of(name))
        if "error" in found:
            lines.append(f"{label:24} {found['error']}")
            continue
        lines.append(
            f"{label:24} {milliseconds(result.seconds(name)):>10} {result.ratio(name, best):8.2f} {gigabytes(found['bytes']):>9} "
            f"{milliseconds(found['first']):>11} {found['ready']:10.1f} s"
        )
    return "\n".join(lines)


def sentence(result: Result, precision: str) -> str:
    """What torch_convoke gives this model here."""
    peer, ours = result.best_peer(precision), Setting("convoke", precision).name
    ratio = result.ratio(ours, peer)
    memory = result.settings[ours]["bytes"] / result.settings[peer]["bytes"]
    times = f"{milliseconds(result.seconds(ours))} a step instead of {milliseconds(result.seconds(peer))} in {Setting.of(peer)}"
    if ratio < 0.95:
        first = f"torch_convoke makes training {1 / ratio:.2f} times as fast here: {times}"
    elif ratio <= 1.05:
        first = f"torch_convoke trains as fast as PyTorch here: {times}"
    else:
        first = f"torch_convoke does not pay here: {times}. Please report this model, it should not be so. It uses"
    text = f"{first}{', with' if ratio <= 1.05 else ''} {memory:.2f} of the memory."
    # "20 of 20 convolutions, 99 % of the time, 0.61 of PyTorch's step" is the first line of a report.
    report = (result.settings[ours].get("report") or "").partition(",")[0]
    return text + (f" {report} run in convoke." if report.endswith("convolutions") else "")


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.{0 if seconds >= 0.1 else 1}f} ms"


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.exit(code)
