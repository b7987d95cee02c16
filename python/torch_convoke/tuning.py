"""Where tuning results are kept, which the program `convoke` shares."""
from __future__ import annotations
import os
from . import _engine


def path():
    """The folder of tuning results."""
    return os.environ.get("CONVOKE_CACHE") or _engine.cache_path()
