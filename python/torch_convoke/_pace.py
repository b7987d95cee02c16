"""How much time measuring may take: never more than training has taken, beyond a small allowance, and in the long run a small share.

Algorithms are chosen by estimate first, and measured between later steps, those first that took the most time so far. So a run of seconds
loses seconds at most, and a long one has measured everything after a minute. Where sizes never cease to change, there is always
something to measure: then the share counts, and that a choice must have taken some time before it is worth it.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from typing import Any, Iterator

from . import _engine, _threads

#: Seconds that may be spent however short the training is.
ALLOWANCE = 1.0
#: After so many seconds, measuring may take this share of the training.
FIRST, SHARE = 60.0, 0.05
#: How often a choice must have been used before it is measured, and what it must have taken in seconds: what is met once is not worth
#: it, and measuring takes some 50 milliseconds at least.
USES, SECONDS = 2, 0.01


class Pace:
    """What an engine has spent on measuring, and what is left to measure."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self.spent = 0.0
        #: What somebody allows who decides when measuring begins and ends.
        self._decided: float | None = None
        self._left = True

    @property
    def allowed(self) -> float:
        """Seconds that may be spent now."""
        if self._decided is not None:
            return self._decided
        trained = time.monotonic() - self._start - self.spent
        return min(ALLOWANCE + trained, FIRST + SHARE * trained) - self.spent

    @contextlib.contextmanager
    def spending(self) -> Iterator[None]:
        """What runs inside counts as spent."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.spent += time.monotonic() - start

    @contextlib.contextmanager
    def decided(self, allowed: float) -> Iterator[None]:
        """Inside, so many seconds are allowed, however long the training is."""
        before, self._decided = self._decided, allowed
        try:
            yield
        finally:
            self._decided = before

    def measure(self, engine: _engine.Engine) -> None:
        """Measures choices that were made by estimate, as long as there is time for it."""
        while self.allowed > 0:
            with self.spending(), _threads.running:
                # Who decides how long it may take wants all of it.
                seconds = SECONDS if self._decided is None else 0.0
                measured, pending = engine.measure_next(USES, seconds)
            self._left = measured and pending > 0
            if not measured:
                break

    def is_settled(self) -> bool:
        """Whether all choices worth it are measured."""
        return not self._left


_paces: weakref.WeakKeyDictionary[_engine.Engine, Pace] = weakref.WeakKeyDictionary()


def of(engine: _engine.Engine) -> Pace:
    """The pace of an engine."""
    found = _paces.get(engine)
    if found is None:
        found = _paces[engine] = Pace()
    return found
