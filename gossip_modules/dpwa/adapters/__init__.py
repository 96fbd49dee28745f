"""The adapter of dpwa, in the package where dpwa has it."""

from .pytorch import DpwaPyTorchAdapter as DpwaPyTorchAdapter
