"""Measures whether PyTorch would run a subgraph faster, and remembers the answer."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Sequence

import torch

from . import _capture, _engine, tuning

#: Convoke must take this many times as long as PyTorch before a subgraph is left to PyTorch: times vary by as much.
MARGIN = 1.05
#: If convoke takes at most this share of PyTorch's time in the first round, there is no second one.
CLEAR = 0.85
ROUNDS = 3


class Verdict:
    """Seconds of a forward and backward of a subgraph, in convoke and in PyTorch."""

    def __init__(self, convoke: float, pytorch: float):
        self.convoke, self.pytorch = convoke, pytorch

    @property
    def keeps(self) -> bool:
        """Whether convoke runs it."""
        return self.convoke <= self.pytorch * MARGIN

    def __str__(self) -> str:
        return f"forward and backward take {1e3 * self.convoke:.1f} ms in convoke and {1e3 * self.pytorch:.1f} ms in PyTorch"


def _key(specialization: Any) -> str:
    """What a verdict depends on, as a name of a file."""
    parts = [
        specialization.definition,
        [list(shape) for shape in specialization.shapes],
        specialization.formats,
        specialization.engine.threads,
        specialization.engine.isa,
        torch.__version__,
        _engine.version(),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _file(specialization: Any) -> Path | None:
    folder = tuning.path()
    # With another ending than tuning results, which the program `convoke` lists and prunes.
    return Path(folder) / "torch" / f"{_key(specialization)}.verdict" if folder else None


def known(specialization: Any) -> Verdict | None:
    """What was measured before."""
    file = _file(specialization)
    try:
        if file is None or file.stat().st_size > 1000:
            return None
        entry = json.loads(file.read_text())
        return Verdict(float(entry["convoke"]), float(entry["pytorch"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remember(specialization: Any, verdict: Verdict) -> None:
    file = _file(specialization)
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, suffix=".tmp")
        with os.fdopen(handle, "w") as out:
            json.dump({"convoke": verdict.convoke, "pytorch": verdict.pytorch}, out)
        os.replace(name, file)
    except OSError:
        # A verdict that cannot be kept is measured again next time.
        pass


def _free_bytes() -> int:
    """Memory that is free, with what the system can take back."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 1 << 62


def measure(subgraph: Any, specialization: Any, args: Sequence[Any]) -> Verdict | None:
    """Runs a subgraph on the tensors of a step in both, without changing any; None if there is not enough memory for that."""
    found = known(specialization)
    if found is not None:
        return found
    # About what PyTorch keeps of a subgraph for backward, and needs in it.
    if 2 * _capture.bytes_of_results(subgraph.body, specialization.sizes) > _free_bytes() // 2:
        return None

    def own(arg: Any, kind: str) -> Any:
        if not isinstance(arg, torch.Tensor):
            return arg
        # Statistics change, parameters get no gradient: the tensors of the user stay as they are.
        return arg.detach().clone() if kind == "statistic" else arg.detach().requires_grad_(arg.requires_grad)

    kinds = [subgraph.kinds[node] for node in subgraph.placeholders]
    args = [own(arg, kind) for arg, kind in zip(args, kinds)]
    leaves = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.requires_grad]

    def seconds(run: Callable[[], Any]) -> float:
        start = time.perf_counter()
        outputs = run()
        outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
        outputs = [output for output in outputs if output.requires_grad]
        torch.autograd.grad(outputs, leaves, [torch.ones_like(output) for output in outputs], allow_unused=True)
        return time.perf_counter() - start

    state = torch.get_rng_state()
    ours = lambda: seconds(lambda: specialization.call(args))
    theirs = lambda: seconds(lambda: subgraph.module(*args))
    with torch.enable_grad():
        try:
            ours(), theirs()
            verdict = Verdict(float("inf"), float("inf"))
            for _ in range(ROUNDS):
                verdict = Verdict(min(verdict.convoke, ours()), min(verdict.pytorch, theirs()))
                if verdict.convoke <= CLEAR * verdict.pytorch:
                    break
        finally:
            torch.set_rng_state(state)
    _remember(specialization, verdict)
    return verdict
