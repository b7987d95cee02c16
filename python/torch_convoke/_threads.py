"""One engine for each number of threads in each process."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import torch

from . import _engine

#: The longest that an engine times algorithms at first sight, which is not at all (see `_pace`), and for one choice.
SECONDS, SECONDS_EACH = 0.0, 0.3

_lock = threading.Lock()
_engines: dict[tuple[int, int], _engine.Engine] = {}
_owned: weakref.WeakKeyDictionary[Any, dict[tuple[int, int], _engine.Engine]] = weakref.WeakKeyDictionary()


@functools.cache
def _available() -> int:
    """Finding this out reads files, and the answer stays."""
    return _engine.available_threads()


#: The OpenMP runtimes that builds of PyTorch come with: GNU's, LLVM's and Intel's.
_OPENMP = ("libgomp", "libomp", "libiomp5")


def _use_openmp() -> bool:
    """Lets PyTorch's OpenMP threads help convoke's, as they would spin on the processors that it needs. Gives whether they will."""
    folder = Path(torch.__file__).parent / "lib"
    try:
        # The path by which it is loaded, as another would load it twice.
        mapped = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
        loaded = sorted((Path(name) for name in mapped), key=lambda path: path.parent != folder)
    except OSError:
        loaded = sorted(folder.glob("lib*"))
    return any(_engine.use_openmp(path) for path in loaded if path.name.startswith(_OPENMP))


#: Whether PyTorch's OpenMP threads help.
HELPED = _use_openmp()


def check(threads: int | None) -> None:
    """Raises ValueError for a number of threads that makes no sense."""
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be 1 or more, not {threads}")


def thread_count(threads: int | None = None) -> int:
    """The threads to use: as many as PyTorch does (`torch.get_num_threads`), unless `threads` says, but no more than the processors that
    this process may use, its container's quota included."""
    wanted = torch.get_num_threads() if threads is None else threads
    return max(1, min(wanted, _available()))


def engine(threads: int | None = None, owner: Any = None) -> _engine.Engine:
    """The engine of this process for a number of threads, which is PyTorch's if it is not given.

    An `owner` gets an engine of its own, which lasts as long as the owner: a memory budget counts that engine's bytes alone.
    """
    key = (os.getpid(), thread_count(threads))
    engines = _engines if owner is None else _owned.setdefault(owner, {})
    found = engines.get(key)
    if found is not None:
        return found
    from . import tuning

    with _lock:
        if key not in engines:
            made = _engine.Engine(key[1], cache=tuning.path(), budget=SECONDS, budget_each=SECONDS_EACH)
            tuning.share(made)
            engines[key] = made
        return engines[key]


def engines() -> list[_engine.Engine]:
    """All engines of this process."""
    tables = [_engines, *_owned.values()]
    return [engine for table in tables for (process, _), engine in list(table.items()) if process == os.getpid()]


class Running:
    """Holds while kernels run: a fork in another thread waits for their end, as it would copy locks that they hold."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._running = 0
        self._forking = False

    def __enter__(self) -> None:
        with self._changed:
            # A fork that is about to happen goes first, but it waits for nobody for long.
            self._changed.wait_for(lambda: not self._forking, timeout=FORK_SECONDS)
            self._running += 1

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._running -= 1
            self._changed.notify_all()

    def before_fork(self) -> None:
        with self._changed:
            self._forking = True
            self._changed.wait_for(lambda: self._running == 0, timeout=FORK_SECONDS)

    def after_fork(self) -> None:
        with self._changed:
            self._forking = False
            self._changed.notify_all()


#: The longest that a fork waits for kernels, which may be those of the forking thread itself.
FORK_SECONDS = 10.0
running = Running()


def _in_child() -> None:
    """Locks may be held by threads that do not exist in the forked process."""
    global _lock, running
    _lock = threading.Lock()
    running = Running()


os.register_at_fork(
    before=lambda: running.before_fork(),
    after_in_parent=lambda: running.after_fork(),
    after_in_child=_in_child,
)
