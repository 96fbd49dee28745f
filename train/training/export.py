"""The averaged model as a safetensors file that plain PyTorch loads, without this library.

model = train.models.MODELS["cnn"](1, 10)        # or the architecture from anywhere else
model.load_state_dict(safetensors.torch.load_file("averaged_model.safetensors"))
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from train.job.files import write_atomically


def export_model(module: nn.Module, path: Path, *, metadata: Mapping[str, str]) -> None:
    """Write the state of `module` to `path`, atomically.

    Args:
        module: the bare model; inside `with wrapper.averaged():` it is the average.
        path: file to write.
        metadata: what a reader should know, such as the name of the architecture.
    """
    # Parameters are views of one flat storage, which the format refuses: it gets a contiguous copy of each.
    tensors = {
        name: tensor.detach().to("cpu").clone(memory_format=torch.contiguous_format)
        for name, tensor in module.state_dict().items()
    }
    write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata=dict(metadata)))
