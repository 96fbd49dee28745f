"""SavedModels: models in a run, for workers that join, for a new start of the whole run, and for readers outside."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..membership.background_log import log
from ..transport.state_tree import decode, encode
from .medium import Medium
from .sealed import pack, unpack

_NUMBERED = re.compile(r"(?:round/)?([^/]+)/(\d{10})(/\w+)?")
KEPT_ROUNDS = 16  # whose messages stay, at least, for workers that are late
_MAX_BYTES = 1 << 40


@dataclass(frozen=True)
class SavedModel:
    """A model in a run.

    Attributes:
        round: the number of rounds before it.
        model: the state dict of the module: the average of the workers if `is_average`, else of one worker.
        is_average: whether all workers agree on this model.
        step: the next training step of a worker that begins with it.
        state: the rest of the state for a worker that joins.
    """

    round: int
    model: Mapping[str, Tensor]
    is_average: bool
    step: int
    state: Mapping[str, Any]


class SavedModels:
    """The models of a run, each in an object of its own: model/<round>.

    Args:
        medium: has the objects.
    """

    def __init__(self, medium: Medium) -> None:
        self.medium = medium

    def numbers(self, *, deadline: float | None = None) -> list[int]:
        """The numbers of all models, ascending; here and below, see `Medium` for the deadline."""
        found = [path.rsplit("/", 1)[1] for path in self.medium.list("model/", deadline=deadline)]
        return sorted(map(int, filter(str.isdigit, found)))

    def newest(self, *, deadline: float | None = None) -> int | None:
        """The number of the newest model; None: the run has no model."""
        return max(self.numbers(deadline=deadline), default=None)

    def load(self, *, after: int = -1) -> SavedModel | None:
        """Read the newest model that opens; None: the run has no model with a number above `after`."""
        for number in reversed(self.numbers()):
            if number <= after:
                break
            if (saved := self.read(number)) is not None:
                return saved
            log.warning(
                "%s: the model of round %d is damaged or gone; the one before it is used", self.medium.address, number
            )
        return None

    def pack(self, saved: SavedModel) -> bytes:
        """Return the object of a model, a copy.

        Raises:
            TypeError: the state has a value that is neither plain nor a tensor.
        """
        tree, tensors = encode({**vars(saved), "model": dict(saved.model)})
        return pack({"tree": tree}, tensors)

    def create(self, number: int, data: bytes) -> bool:
        """Write the object of `pack` as the model after so many rounds; False: there is one with this number."""
        return self.medium.create(f"model/{number:010d}", data)

    def read(self, number: int) -> SavedModel | None:
        """Read the model after so many rounds; None: it is damaged or gone."""
        data = self.medium.get(f"model/{number:010d}", max_bytes=_MAX_BYTES)
        if data is None:
            return None
        header, tensors = unpack(data, max_bytes=_MAX_BYTES)
        return SavedModel(**decode(header["tree"], tensors))

    def prune(self, last: Mapping[str, int]) -> None:
        """Delete the models and the messages of rounds long before the last ones; the closes stay.

        Args:
            last: the numbers of the last rounds by stream, as this worker knows them: anybody may have written objects
                with larger numbers. Models have the name "model".
        """
        found = [_NUMBERED.fullmatch(path) for folder in ("model", "round") for path in self.medium.list(folder)]
        old = [each for each in found if each and int(each[2]) < last.get(each[1], 0) - KEPT_ROUNDS]
        self.medium.delete([each[0] for each in old if each[3] != "/close"])
