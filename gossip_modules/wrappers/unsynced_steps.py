"""Steps without a round: an optimizer that steps after forwards in eval mode, which start no gossip round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class UnsyncedSteps:
    """Notices that a model is trained in eval mode, where each rank would train alone without a word.

    A forward in eval mode is an evaluation, even where autograd records it (adversarial examples, saliency maps). It
    is training where gradients of parameters are computed after it and parameters have changed by the next forward.
    In a forward of train mode the wrapper calls `forget()`, where `is_watching`.

    Attributes:
        is_watching: whether a forward in eval mode was the last one, so that there is something to forget.
    """

    def __init__(self) -> None:
        self._has_told = False
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        return {"_has_told": self._has_told}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self._has_told = state["_has_told"]

    def _forget(self) -> None:
        self.is_watching = False
        self._versions: list[int] = []
        self._has_gradients = False
        self._handle: torch.utils.hooks.RemovableHandle | None = None

    def forget(self) -> None:
        """What came before is no more of interest: a forward trains, or a checkpoint is about to be loaded."""
        if self._handle is not None:
            self._handle.remove()
        self._forget()

    def check(self, parameters: Sequence[Tensor], *, name: str) -> None:
        """A forward in eval mode that autograd records.

        Args:
            parameters: what the wrapper gossips.
            name: of the wrapper's class.

        Raises:
            RuntimeError: since the last such forward, without a round in between, gradients were computed and
                parameters were stepped. Once for each wrapper.
        """
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        versions = [parameter._version for parameter in trained]
        is_step = self._has_gradients and self.is_watching and versions != self._versions
        self.forget()
        if self._has_told or not trained:
            return
        if is_step:
            self._has_told = True
            raise RuntimeError(
                f"got an optimizer step after a forward in eval mode, which starts no gossip round: expected training "
                f"forwards in train mode; call model.train() before the training loop, or, to train in eval mode (with "
                f"frozen BatchNorm statistics, say), wrap with {name}(..., gossip_in_eval_mode=True)"
            )
        self.is_watching, self._versions = True, versions

        def note(*_: object) -> None:
            self._has_gradients = True

        self._handle = torch.autograd.graph.register_multi_grad_hook(trained, note, mode="any")
