"""Finds out whether PyTorch would run a subgraph faster, by letting both run the user's own steps in turn, and remembers the answer.

A step is run by one of them, so that nothing is computed twice and nothing is changed by measuring.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from . import _engine, tuning

#: Convoke must take this many times as long as PyTorch before a subgraph is left to PyTorch: times vary by as much.
MARGIN = 1.05
#: If convoke takes at most this share of PyTorch's time, it is not measured again.
CLEAR = 0.8
#: Turns of each, at least and at most: the least are enough if each of convoke's took less time than each of PyTorch's, or far more. The first
#: turn of each is not counted: it fills caches and gets memory.
LEAST, MOST = 2, 6
#: After so many steps what was close, or went against convoke, is measured again; each time after four times as many.
AGAIN = 200

CONVOKE, PYTORCH = "convoke", "pytorch"


class Verdict:
    """Seconds of a forward and backward of a subgraph, in convoke and in PyTorch."""

    def __init__(self, convoke: float, pytorch: float):
        self.convoke, self.pytorch = convoke, pytorch

    @property
    def keeps(self) -> bool:
        """Whether convoke runs it."""
        return self.convoke <= self.pytorch * MARGIN

    @property
    def is_clear(self) -> bool:
        """Whether convoke is faster by far, so that nobody needs to look again."""
        return self.convoke <= self.pytorch * CLEAR

    def __str__(self) -> str:
        return f"forward and backward take {1e3 * self.convoke:.1f} ms in convoke and {1e3 * self.pytorch:.1f} ms in PyTorch"


class Turns:
    """Who runs the next step of a subgraph, until it is known who is faster."""

    def __init__(self, known: Verdict | None = None):
        self.verdict = known
        #: Whether the verdict is new, and should be remembered.
        self.is_new = False
        self._seconds: dict[str, list[float]] = {CONVOKE: [], PYTORCH: []}
        self._given = {CONVOKE: 0, PYTORCH: 0}
        self._steps, self._again = 0, AGAIN
        # What went against convoke once may have been another program's doing.
        if known is not None and not known.keeps:
            self._again = 0

    @property
    def is_measuring(self) -> bool:
        """Whether it is not known yet who is faster; without backward, as where nobody turns gradients off to evaluate, it never is."""
        return self.verdict is None and sum(self._given.values()) < 8 * MOST

    def next(self) -> str:
        """Who runs the next step."""
        if self.verdict is not None:
            self._steps += 1
            if self.verdict.is_clear or self._steps <= self._again:
                return CONVOKE if self.verdict.keeps else PYTORCH
            self._start_again()
        if not self.is_measuring:
            return CONVOKE
        # In blocks of two: the first step after a change finds other data in the caches than the second one.
        side = CONVOKE if (self._given[CONVOKE] + self._given[PYTORCH]) // 2 % 2 == 0 else PYTORCH
        self._given[side] += 1
        return side

    def _start_again(self) -> None:
        self._again = 4 * max(self._again, AGAIN)
        self._steps, self.verdict = 0, None
        self._seconds = {CONVOKE: [], PYTORCH: []}
        self._given = {CONVOKE: 0, PYTORCH: 0}

    def add(self, side: str, seconds: float) -> None:
        """Takes the time of a forward and backward."""
        if self.verdict is not None:
            return
        self._seconds[side].append(seconds)
        ours, theirs = self._seconds[CONVOKE][1:], self._seconds[PYTORCH][1:]
        least = min(len(ours), len(theirs))
        if least < LEAST:
            return
        # Against convoke more is needed: what is left to PyTorch takes PyTorch's memory, too.
        is_known = max(ours) <= min(theirs) or max(theirs) <= CLEAR * min(ours)
        if is_known or least >= MOST:
            # The fastest is what the code takes, the rest is what else the machine did; the median guards against a single lucky one.
            value = lambda times: (min(times) + statistics.median(times)) / 2
            self.verdict, self.is_new = Verdict(value(ours), value(theirs)), True


def _key(specialization: Any, trains: bool) -> str:
    """What a verdict depends on, as a name of a file."""
    parts = [
        specialization.definition,
        [list(shape) for shape in specialization.shapes],
        specialization.types,
        specialization.formats,
        trains,
        specialization.engine.threads,
        specialization.engine.isa,
        torch.__version__,
        _engine.version(),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _file(specialization: Any, trains: bool) -> Path | None:
    folder = tuning.path()
    # With another ending than tuning results, which the program `convoke` lists and prunes.
    return Path(folder) / "torch" / f"{_key(specialization, trains)}.verdict" if folder else None


def known(specialization: Any, trains: bool) -> Verdict | None:
    """What was measured before."""
    file = _file(specialization, trains)
    try:
        if file is None or file.stat().st_size > 1000:
            return None
        entry = json.loads(file.read_text())
        found = Verdict(float(entry["convoke"]), float(entry["pytorch"]))
        return found if 0 < found.convoke < math.inf and 0 < found.pytorch < math.inf else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remember(specialization: Any, trains: bool, verdict: Verdict) -> None:
    """Keeps a verdict for other processes."""
    file = _file(specialization, trains)
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


def free_bytes() -> int:
    """Memory that is free, with what the system can take back."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 1 << 62
