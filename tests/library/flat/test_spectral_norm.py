"""u and v of `spectral_norm` become those of the weight that is there now."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, spectral_norm

from gossip_modules.flat.kept_buffers import refresh_spectral_norms, singular_vectors


class Double(nn.Module):
    """A parametrization in front of another one."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def doubled() -> nn.Module:
    layer = nn.Linear(8, 16)
    parametrize.register_parametrization(layer, "weight", Double())
    return parametrizations.spectral_norm(layer)


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "hook": lambda: spectral_norm(nn.Linear(8, 16)),
    "parametrization": lambda: parametrizations.spectral_norm(nn.Linear(8, 16)),
    "after another one": doubled,
    "transposed": lambda: parametrizations.spectral_norm(nn.ConvTranspose2d(3, 4, 2)),
    "bfloat16": lambda: parametrizations.spectral_norm(nn.Linear(8, 16)).bfloat16(),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_norm_is_1_in_eval_mode_after_the_weight_was_replaced(make: Callable[[], nn.Module]) -> None:
    module = make().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    refresh_spectral_norms(nn.Sequential(module))
    assert not module.training
    weight: Tensor = module.weight  # type: ignore[assignment]
    rows = weight.detach().double().transpose(0, int(weight.dim() == 4)).flatten(1)
    tolerance = 1e-2 if weight.dtype is torch.bfloat16 else 1e-4
    assert abs(torch.linalg.matrix_norm(rows, 2).item() - 1) < tolerance
    u, v = (x.double() for x in singular_vectors(module))
    assert torch.equal(torch.linalg.vector_norm(u).round(), torch.ones((), dtype=torch.float64))
    torch.testing.assert_close(u @ rows @ v, torch.ones((), dtype=torch.float64), rtol=0, atol=tolerance)


def test_a_weight_of_one_dimension_and_a_broken_one_end() -> None:
    vector = nn.Module()
    vector.register_parameter("weight", nn.Parameter(torch.ones(3)))
    parametrizations.spectral_norm(vector)
    broken = parametrizations.spectral_norm(nn.Linear(2, 2))
    nn.init.constant_(broken.get_parameter("parametrizations.weight.original"), float("nan"))
    refresh_spectral_norms(nn.Sequential(vector, broken))
    assert len(singular_vectors(vector)) == 0
