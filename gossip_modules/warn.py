"""The line that a warning names: the first one outside of torch and of this library."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

_NOT_OF_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def levels_to_user() -> int:
    """The `stacklevel` of the caller's warning that names the first line outside of torch and of this library."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_OF_USERS):
        frame, level = frame.f_back, level + 1
    return level
