"""Deprecated name of `gossip_modules.matcha`: `python -m gossip_modules.matching` still runs its command."""

import warnings

from .matcha import *  # noqa: F403 (the names that this module had)
from .matcha import __all__ as __all__
from .matcha.__main__ import main

warnings.warn(
    "gossip_modules.matching is deprecated; use gossip_modules.matcha, also as python -m gossip_modules.matcha",
    DeprecationWarning,
    stacklevel=1 if __name__ == "__main__" else 2,
)

if __name__ == "__main__":
    main()
