"""DpwaPyTorchAdapter: a `PairwiseAverager` by the arguments of dpwa."""

from __future__ import annotations

from os import PathLike
from typing import Any

from torch import nn

from ..averager import PairwiseAverager
from ..config import PairwiseConfig


class DpwaPyTorchAdapter(PairwiseAverager):
    """`PairwiseAverager(net, PairwiseConfig.from_yaml(name, config_file))`.

    Args:
        net: the module; its trained tensors become views of one flat vector, which keeps their values.
        name: the name of this worker in the file.
        config_file: the YAML file of dpwa.
        options: `init_from_peers` and `gossip_buffers` of `PairwiseAverager`.

    Raises:
        ImportError, OSError, ValueError: see `PairwiseConfig.from_yaml` and `PairwiseAverager`.
    """

    def __init__(self, net: nn.Module, name: str, config_file: str | PathLike[str], **options: Any) -> None:
        super().__init__(net, PairwiseConfig.from_yaml(name, config_file), **options)

    def update(self, loss: float | None = None) -> bool:
        """`update_send(loss)`, then `update_wait(loss)`: nothing runs under the fetch.

        Args:
            loss: the loss of the last batch; None = as last told.

        Returns:
            Whether the module was changed.
        """
        self.update_send(loss)
        return self.update_wait(loss)
