"""Checks of the arguments of `Membership`; each error says got, expected and remedy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral

import torch.distributed as dist

from ..checks import is_number


def check_numbers(min_workers: int, max_workers: int, interval: float, min_deadline: float) -> None:
    """Raise ValueError for numbers of workers, or seconds between heartbeats, out of range."""
    if not is_whole(min_workers) or min_workers < 1:
        raise ValueError(f"got min_workers={min_workers!r}, expected a whole number of at least 1")
    if not is_whole(max_workers) or (max_workers and max_workers < min_workers):
        raise ValueError(
            f"got max_workers={max_workers!r} and min_workers={min_workers}, expected a whole number that is no "
            "smaller, or 0 for any number"
        )
    if not (is_number(interval) and is_number(min_deadline) and 0 < 2 * interval <= min_deadline < math.inf):
        raise ValueError(
            f"got interval={interval!r} and min_deadline={min_deadline!r}, expected seconds, the second at least "
            "twice the first"
        )


def check_places(store: object, name: object, host: object, on_partition: object) -> None:
    """Raise ValueError for a store, a name or a host of the wrong type, and for an unknown `on_partition`."""
    if not isinstance(store, (str, dist.Store)):
        raise ValueError(
            f"got store={store!r}, expected 'host:port', like 'node0:29400', 'file:path', the address of a mailbox, "
            "like 's3://bucket/run' or 'file:///folder/run', or a torch.distributed.Store"
        )
    if not isinstance(name, str):
        raise ValueError(f"got name={name!r}, expected a string, the same on all workers of the job")
    if host is not None and not isinstance(host, str):
        raise ValueError(f"got host={host!r}, expected the name or the address of this machine, or None")
    if on_partition not in ("majority", "both"):
        raise ValueError(f"got on_partition={on_partition!r}, expected 'majority' or 'both'")


def as_description(description: object) -> dict[str, str]:
    """A description as text, as workers compare it; None: nothing."""
    if description is None:
        return {}
    if not isinstance(description, Mapping):
        raise ValueError(f"got description={description!r}, expected a dict, like {{'data': 'version 3'}}")
    return {str(key): str(value) for key, value in description.items()}


def check_num_steps(num_steps: object) -> None:
    """Raise ValueError for anything but a number."""
    if not is_number(num_steps) or num_steps != num_steps:
        raise ValueError(f"got steps({num_steps!r}), expected a number: the training steps after which this loop ends")


def check_callback(callback: object) -> None:
    """Raise TypeError if `callback` is not callable."""
    if not callable(callback):
        raise TypeError(f"got on_change({callback!r}), expected a function of one argument, a `Change`")


def check_tracked(objects: Mapping[str, object]) -> None:
    """Raise TypeError for objects without a state dict."""
    for name, value in objects.items():
        if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
            raise TypeError(
                f"got {name} of type {type(value).__name__}, expected an object with state_dict() and "
                "load_state_dict(), like an optimizer"
            )


def is_whole(value: object) -> bool:
    """Whether it is a whole number."""
    return isinstance(value, Integral) and not isinstance(value, bool)
