"""MuonAdamW: Muon for the matrices of a model and AdamW for all else, as one optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from .base import StepOptimizer, check_numbers

SCALES = ("match_rms_adamw", "original")
"""The values of `adjust_lr_fn`."""


class MuonAdamW(StepOptimizer):
    """Muon steps the hidden matrices of a model, and AdamW its embeddings, its heads and all tensors of other than two
    dimensions, such as the kernels of convolutions.

    One object has the state of both, so `state_dict`, learning-rate schedulers and GradScaler work as with any other
    optimizer, and a wrapper sees one step. `param_groups[k]["param_names"]` lists the parameters of each group.

    With the default `adjust_lr_fn="match_rms_adamw"` torch scales the steps of Muon to the size of the steps of AdamW,
    so one learning rate serves both.

    Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024,
    https://kellerjordan.github.io/posts/muon; the scale: Liu et al., "Muon is Scalable for LLM Training", 2025, arXiv
    2502.16982.

    Args:
        model: the model, wrapped or not; parameters without gradients are left out.
        lr: the learning rate.
        muon_lr: the learning rate of Muon; None: `lr`.
        weight_decay: the weight decay, decoupled, of all tensors of two dimensions or more: matrices, embeddings, and
            the kernels of convolutions, also of `nn.Conv1d`. Biases, norms and other vectors have none.
        momentum: of Muon.
        betas: of AdamW.
        adamw: names or patterns of matrices for AdamW, beside embeddings: "head.weight", "*.gate.*". None: the weight
            of the last `nn.Linear`, the head of most models.
        adjust_lr_fn: see `torch.optim.Muon`; "original" is the scale of Jordan et al. and needs a `muon_lr`.

    Raises:
        RuntimeError: torch is older than 2.9.
        ValueError: the model has no matrices for Muon, a name in `adamw` is a name of no matrix, a setting is out of
            range, or parameters are in the place of the model; (add_param_group) the group does not say which of the
            two steps it.

    Example:
        >>> model = GossipDataParallel(model, algorithm=MuLoCo())
        >>> optimizer = MuonAdamW(model, lr=3e-3, weight_decay=0.1)
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        *,
        muon_lr: float | None = None,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        adamw: Sequence[str] | None = None,
        adjust_lr_fn: str = "match_rms_adamw",
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise RuntimeError(
                f"MuonAdamW: got torch {torch.__version__}, expected 2.9 or later, which has torch.optim.Muon; "
                "`pip install -U torch`, or train by torch.optim.AdamW"
            )
        _check(model, adamw, lr=lr, muon_lr=lr if muon_lr is None else muon_lr, weight_decay=weight_decay)
        if not (0 <= momentum < 1 and all(0 <= beta < 1 for beta in betas)):
            raise ValueError(f"MuonAdamW: got momentum={momentum!r} and betas={betas!r}, expected numbers from 0 to 1")
        if adjust_lr_fn not in SCALES or (adjust_lr_fn == "original" and muon_lr is None):
            raise ValueError(
                f"MuonAdamW: got adjust_lr_fn={adjust_lr_fn!r} and muon_lr={muon_lr!r}, expected one of "
                f"{', '.join(map(repr, SCALES))}, and a muon_lr with 'original', such as muon_lr=0.02"
            )
        muon, others = split_parameters(model, adamw)
        is_matrix = [(name, p) for name, p in others if p.ndim >= 2]
        rest = [(name, p) for name, p in others if p.ndim < 2]
        groups: list[dict[str, Any]] = [
            {"params": muon, "kind": "Muon", "lr": lr if muon_lr is None else muon_lr, "momentum": momentum},
            {"params": is_matrix, "kind": "AdamW", "betas": betas},
            {"params": rest, "kind": "AdamW", "betas": betas, "weight_decay": 0.0},
        ]
        groups[0]["adjust_lr_fn"] = adjust_lr_fn
        self._parts: list[Optimizer] = []
        super().__init__([group for group in groups if group["params"]], {"lr": lr, "weight_decay": weight_decay})
        self._make_parts()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer`; with kind="Muon" or kind="AdamW", and names of the parameters.

        Missing settings are taken from the first group of this kind.

        Example:
            >>> optimizer.add_param_group({"params": [("gate.weight", model.gate.weight)], "kind": "Muon"})
        """
        if (kind := param_group.get("kind")) not in ("Muon", "AdamW"):
            raise ValueError(
                f"MuonAdamW: got a group of parameters with kind={kind!r}, expected 'Muon', for hidden matrices, or "
                "'AdamW'; add matrices and other tensors as two groups"
            )
        alike = next((group for group in self.param_groups if group["kind"] == kind), {})
        settings = {name: value for name, value in alike.items() if name not in ("params", "param_names")}
        super().add_param_group({**(settings if self._parts else {}), **param_group})
        if self._parts:  # else the constructor adds its groups
            self._make_parts()

    def _make_parts(self) -> None:
        """Make the two optimizers over the groups and the state of this one."""
        self._parts = []
        for kind in (torch.optim.Muon, AdamW):
            if groups := [group for group in self.param_groups if group["kind"] == kind.__name__]:
                part = kind([{**group, "params": list(group["params"])} for group in groups])
                for own, made in zip(groups, part.param_groups, strict=True):  # with all settings of its kind
                    own.update({name: value for name, value in made.items() if name not in own})
                part.param_groups, part.state = groups, self.state
                self._parts.append(part)

    def update(self) -> None:
        """See `StepOptimizer`."""
        for part in self._parts:
            # The step without the hooks of optimizers: both parts are one step of this optimizer.
            inspect.unwrap(type(part).step, stop=lambda step: not hasattr(step, "hooked"))(part)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._make_parts()


def _check(model: object, adamw: object, **rates: float) -> None:
    """Raise ValueError where arguments are of another kind, or out of range."""
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"MuonAdamW: got a {type(model).__name__}, expected the model, whose names and layers tell the matrices "
            "of Muon; pass model in place of model.parameters()"
        )
    if isinstance(adamw, str):
        raise ValueError(f"MuonAdamW: got adamw={adamw!r}, expected a list of names or patterns, such as [{adamw!r}]")
    check_numbers("MuonAdamW", **rates)


def split_parameters(
    model: nn.Module, adamw: Sequence[str] | None = None
) -> tuple[list[tuple[str, nn.Parameter]], list[tuple[str, nn.Parameter]]]:
    """Return the trained parameters of a model for Muon, and those for AdamW, with their names.

    Args:
        model: the model, wrapped or not.
        adamw: see `MuonAdamW`.

    Raises:
        ValueError: see `MuonAdamW`.
    """
    modules = list(model.modules())
    left_out = {id(each.weight) for each in modules if isinstance(each, nn.Embedding | nn.EmbeddingBag)}
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [(name, p) for name, p in named if p.ndim == 2]
    if adamw is None:
        left_out |= {id(each.weight) for each in [each for each in modules if isinstance(each, nn.Linear)][-1:]}
    for pattern in adamw or ():
        matching = {
            id(p) for name, p in matrices if fnmatchcase(name, pattern) or fnmatchcase(name, f"module.{pattern}")
        }
        if not matching:
            raise ValueError(
                f"got adamw={list(adamw or ())!r}, but {pattern!r} matches no matrix, expected names or patterns of "
                f"some of {[name for name, _ in matrices]}; correct the name, or leave it out"
            )
        left_out |= matching
    muon = [(name, p) for name, p in matrices if id(p) not in left_out]
    if not matrices:
        raise ValueError(
            f"got a {type(model).__name__} without trained parameters of two dimensions, expected hidden matrices for "
            "Muon; train by torch.optim.AdamW"
        )
    if not muon:
        raise ValueError(
            f"got a {type(model).__name__} whose matrices are all embeddings or heads, expected hidden matrices for "
            f"Muon; pass adamw=() if the last nn.Linear is no head, or train by torch.optim.AdamW"
        )
    taken = {id(p) for _, p in muon}
    return muon, [(name, p) for name, p in named if id(p) not in taken]
