"""The line of the user's program that a warning is about."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import torch

_TORCH = str(Path(torch.__file__).parent)
_OURS = (_TORCH, str(Path(__file__).parents[2]))


def levels_to_user() -> int:
    """The `stacklevel` of the caller's warning that names the first line outside of torch and of this library."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame, level = frame.f_back, level + 1
    return level


def is_torch(frame: FrameType) -> bool:
    """Whether the frame is of a function of torch."""
    return frame.f_code.co_filename.startswith(_TORCH)
