"""Extra state that rides in a state dict's metadata, so that its keys are the plain module's own."""

from __future__ import annotations

from typing import Any

from torch import nn

_KEY = "gossip_state"


class MetadataState(nn.Module):
    """`get_extra_state` / `set_extra_state` as in `nn.Module`, but not under a key of the state dict.

    torch would put them under "_extra_state". A plain model refuses that key once "module." is stripped from the
    others, and a wrapper that expects it refuses DistributedDataParallel's checkpoints. The metadata travels with the
    dict through `torch.save` and `torch.load(weights_only=True)`; who loads a dict without it gets
    `set_extra_state(None)`.
    """

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):  # a plain dict of the caller has none: there the key stays
            destination._metadata[prefix[:-1]][_KEY] = destination.pop(prefix + "_extra_state")

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *args: Any, **kwargs: Any
    ) -> None:
        state_dict.setdefault(prefix + "_extra_state", local_metadata.get(_KEY))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)
