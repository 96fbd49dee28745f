"""Which tensors travel: by kind of buffer, by name, and by what DistributedDataParallel is told to leave alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.utils.prune as prune
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, spectral_norm

from gossip_modules.extend import FlatBuffer, Selection


class Statistics(nn.Module):
    """A normalisation of its own, with a counter that is a float."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        for name in ("running_mean", "running_var", "moving_variance", "image_running_std"):
            self.register_buffer(name, torch.ones(2))
        self.register_buffer("count", torch.ones(()))
        self.register_buffer("running_max", torch.ones(2))
        self.register_buffer("running_mean_of_batch", torch.ones(2), persistent=False)


class Contrast(nn.Module):
    """A queue of rows with norm 1, as in MoCo, and its pointer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 2)
        self.register_buffer("queue", nn.functional.normalize(torch.ones(4, 2), dim=1))
        self.register_buffer("queue_ptr", torch.zeros(1))


def pruned() -> nn.Module:
    layer = nn.Linear(3, 3)
    prune.l1_unstructured(layer, "weight", amount=0.5)
    return layer


KINDS: dict[str, tuple[Callable[[], nn.Module], list[str], list[str]]] = {
    "BatchNorm": (lambda: nn.BatchNorm1d(2), ["running_mean", "running_var"], ["num_batches_tracked"]),
    "InstanceNorm": (
        lambda: nn.InstanceNorm1d(2, affine=True, track_running_stats=True),
        *(["running_mean", "running_var"], ["num_batches_tracked"]),
    ),
    "a normalisation that torch does not know": (
        *(Statistics, ["running_mean", "running_var", "moving_variance", "image_running_std"]),
        ["count", "running_max"],
    ),
    "spectral_norm, the hook": (lambda: spectral_norm(nn.Linear(3, 2)), [], ["weight_u", "weight_v"]),
    "spectral_norm, the parametrization": (
        *(lambda: parametrizations.spectral_norm(nn.Linear(3, 2)), []),
        ["parametrizations.weight.0._u", "parametrizations.weight.0._v"],
    ),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(3, 3)), [], ["parametrizations.weight.0.base"]),
    "prune": (pruned, [], ["weight_mask"]),
    "a queue": (Contrast, [], ["queue", "queue_ptr"]),
}


@pytest.mark.parametrize(("make", "averaged", "copied"), KINDS.values(), ids=KINDS)
def test_the_kind_of_a_buffer_determines_its_rule(
    make: Callable[[], nn.Module], averaged: list[str], copied: list[str]
) -> None:
    module, selection = make(), Selection()
    assert list(selection.averaged(module)) == averaged
    assert list(selection.copied(module)) == copied
    parameters = [name for name, _ in module.named_parameters()]
    assert sorted(FlatBuffer(module).vector.layout.names) == sorted([*parameters, *averaged])
    no_buffers = Selection(gossip_buffers=False)
    assert no_buffers.averaged(module) == no_buffers.copied(module) == {}
    assert sorted(FlatBuffer(module, include_buffers=False).vector.layout.names) == sorted(parameters)


def test_buffers_can_be_named_in_place_of_running_statistics() -> None:
    module = Statistics()
    selection = Selection(gossip_buffers=["running_m*", "count"])
    assert list(selection.averaged(module)) == ["running_mean", "count", "running_max", "running_mean_of_batch"]
    assert list(selection.copied(module)) == ["running_var", "moving_variance", "image_running_std"]


class Tree(nn.Module):
    """Layers in layers, with a weight that has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.head = nn.Linear(2, 2)
        self.tied = nn.Linear(2, 2, bias=False)
        self.tied.weight = self.body[0].weight  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("ignore", "left"),
    [
        (["head.bias"], ["body.0.bias", "body.0.weight", "body.1.bias", "body.1.weight", "head.weight"]),
        (("*.bias",), ["body.0.weight", "body.1.weight", "head.weight"]),
        ({"body.*"}, ["head.bias", "head.weight"]),
        (["tied.weight", "head.*"], ["body.0.bias", "body.1.bias", "body.1.weight"]),
    ],
)
def test_names_and_patterns_are_left_out(ignore: Any, left: list[str]) -> None:
    buffer = FlatBuffer(Tree(), selection=Selection(ignore=ignore, gossip_buffers=False))
    assert sorted(buffer.vector.layout.names) == left


def test_ignored_buffers_are_neither_averaged_nor_copied() -> None:
    module, selection = Tree(), Selection(ignore=["*.running_var", "*.num_batches_tracked"])
    assert list(selection.averaged(module)) == ["body.1.running_mean"]
    assert selection.copied(module) == selection.kept(module) == {}
    assert list(selection.others(module, [])) == [
        *("body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias", "head.weight", "head.bias"),
        "body.1.running_mean",
    ]


def test_tensors_that_data_parallel_ignores_are_left_alone() -> None:
    module = Tree()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        module, [".head.bias", "tied.weight", "gone", "body.1.running_var"]
    )
    selection = Selection(ignore=["head.weight"])
    ignored = ["body.0.weight", "body.1.running_var", "head.bias", "head.weight", "tied.weight"]
    assert sorted(selection.ignored(module)) == ignored
    assert sorted(FlatBuffer(module, selection=selection).vector.layout.names) == [
        *("body.0.bias", "body.1.bias", "body.1.running_mean", "body.1.weight")
    ]


def test_a_module_whose_ignored_parameters_alone_are_trained_is_not_trained() -> None:
    module = Tree()
    buffer = FlatBuffer(module, selection=Selection(ignore=["head.*"]))
    for part in (module.body, module.tied):
        part.requires_grad_(False)
    assert not buffer.is_complete()
    assert not buffer.is_trained()
    buffer.keep()
    module.head.requires_grad_(False)  # of no concern
    assert buffer.is_complete()


def test_a_child_is_known_by_its_name_and_not_by_its_place() -> None:
    module = nn.Sequential()
    module.add_module("first", nn.Linear(2, 2))
    module.add_module("second", nn.Linear(2, 2))
    buffer = FlatBuffer(module)
    module._modules["first"] = module._modules.pop("first")  # such as by an export that takes a layer out for a while
    assert buffer.is_complete()
    module._modules["third"] = module._modules.pop("first")
    assert not buffer.is_complete()


def test_a_layer_that_comes_later_is_ignored_by_the_same_patterns() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    buffer = FlatBuffer(module, selection=Selection(ignore=["*.bias"]))
    module.append(nn.Linear(2, 1))
    buffer.attach()
    assert sorted(buffer.vector.layout.names) == ["0.weight", "1.weight"]


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "a name": ({"ignore": "head.bias"}, r"got ignore='head.bias', expected a sequence of names"),
    "a number": ({"ignore": [1]}, r"got ignore=\[1\], expected a sequence"),
    "None": ({"gossip_buffers": None}, r"got gossip_buffers=None, expected True or False, or a sequence of names"),
    "a misspelt name": ({"ignore": ["haed.bias"]}, r"'haed.bias', which matches no parameter or buffer of a Tree.*"
                        r"did you mean 'head.bias'"),
    "a submodule": ({"ignore": ["head"]}, r"'head', which matches no parameter.*did you mean 'head.\*'\?"),
    "the end of a name": ({"ignore": ["running_mean"]}, r"did you mean 'body.1.running_mean' or "),
    "a name in the wrapper": ({"ignore": ["module.head.bias"]}, r"without a wrapper.*did you mean 'head.bias' or "),
    "a pattern of nothing": ({"ignore": ["*.bias", "layer.*"]}, r"'layer.\*', which matches no"),
    "an integer buffer": ({"gossip_buffers": ["*.num_batches_tracked"]}, r"matches no floating-point buffer of a Tree"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "message"), MISTAKES.values(), ids=MISTAKES)
def test_entries_that_match_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FlatBuffer(Tree(), selection=Selection(**options))
