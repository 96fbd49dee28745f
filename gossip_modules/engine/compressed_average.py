"""CompressedAverage: the mean over all ranks of what their compressed messages mean."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..compression.compressor import Compressor
from ..transport.base import Transport


class CompressedAverage:
    """mean <- 1/n sum_j q_j, where q_j is what the message of rank j means: every rank gets all messages.

    All ranks add them up in the order of the ranks, so that they have the same mean, to the bit. A rank sends its
    message n - 1 times, where an all-reduce of the vector sends it almost twice: that is less where messages are less
    than 2 / n of the vector. Keeps nothing.

    Args:
        transport: over the ranks.
        compressor: made the messages.
    """

    def __init__(self, transport: Transport, compressor: Compressor) -> None:
        self.transport, self.compressor = transport, compressor

    def average(self, messages: Sequence[Tensor], means: Sequence[Tensor], *, what: str) -> None:
        """Each mean <- that of the ranks' messages; blocking.

        Args:
            messages: of this rank, see `Anchor.messages`; not changed.
            means: float32 or float64, as long as what was compressed; written.
            what: names it in errors.

        Raises:
            TimeoutError, ConnectionError: naming who did not come.
        """
        n = self.transport.world_size
        for message, mean in zip(messages, means, strict=True):
            if not message.numel():  # of a shard without parameters
                continue
            gathered = message.new_empty(n * message.numel())
            self.transport.all_gather(gathered, message, what=what)
            num_bytes = self.compressor.num_bytes(mean.numel(), mean.dtype)
            mean.zero_()
            for theirs in gathered.view(n, -1):
                self.compressor.add_decompressed(theirs[:num_bytes], mean)
            mean.div_(n)
