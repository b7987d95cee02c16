"""One engine for each number of threads in each process."""

from __future__ import annotations

import os
import threading

import torch

from . import _engine

_lock = threading.Lock()
_engines: dict[tuple[int, int], _engine.Engine] = {}


def thread_count(threads: int | None = None) -> int:
    """The threads to use: as many as PyTorch does (`torch.get_num_threads`), unless `threads` says, but no more than the processors that
    this process may use, its container's quota included."""
    wanted = torch.get_num_threads() if threads is None else threads
    return max(1, min(wanted, _engine.available_threads()))


def engine(threads: int | None = None) -> _engine.Engine:
    """The engine of this process for a number of threads, which is PyTorch's if it is not given."""
    count = thread_count(threads)
    found = _engines.get((os.getpid(), count))
    if found is not None:
        return found
    from . import tuning

    with _lock:
        key = (os.getpid(), count)
        if key not in _engines:
            _engines[key] = _engine.Engine(count, cache=tuning.path())
        return _engines[key]


def _after_fork() -> None:
    """In a forked process the lock may be held by a thread that does not exist there."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
