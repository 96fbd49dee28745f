"""Selection: the tensors of a module that are averaged, the buffers taken from rank 0, and the local tensors."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn

from .tables import buffers_of, is_persistent

_STATISTIC = re.compile(r"(^|_)(running|moving)_(mean|var|variance|std)$")


class MixedBuffers(nn.Module):
    """A module inside a wrapped one, whose floating-point buffers are all mixed: see [Note: kinds of buffers].

    Attributes:
        has_wrapper: whether a module with this one in it was wrapped.
        noise_source: the number of the replica whose gradients this process computes, such as its rank; 0 on all ranks
            where gradients are averaged.
    """

    has_wrapper = False
    noise_source = 0

    def check_training(self) -> None:
        """Raise ValueError if its buffers have no use in the training that is about to begin."""


def mixed_buffers(module: nn.Module) -> list[MixedBuffers]:
    """Return the `MixedBuffers` in a module."""
    return [part for part in module.modules() if isinstance(part, MixedBuffers)]


def set_noise_source(module: nn.Module, number: int) -> None:
    """Tell the `MixedBuffers` in a module whose gradients this process computes; see `MixedBuffers.noise_source`."""
    for part in mixed_buffers(module):
        part.noise_source = number


@dataclass(frozen=True)
class Selection:
    """The averaged buffers and the local tensors of a module.

    [Note: kinds of buffers] A mean over ranks is useful for running statistics. It is useless for singular vectors,
    masks, queues and counters. So each kind of buffer has its own rule:

    | buffers                                                   | in a round | in an average of all ranks    |
    |-----------------------------------------------------------|------------|-------------------------------|
    | running statistics: `running_` or `moving_` and `mean`,   | averaged   | averaged                      |
    | `var`, `variance` or `std`, of any module                 |            |                               |
    | named by `gossip_buffers=[...]`                           | averaged   | averaged                      |
    | of `MixedBuffers`, such as `MixedMomentum`                | averaged   | averaged                      |
    | u and v of `spectral_norm`, hook and parametrization      | local      | u, v of the averaged weight   |
    | other persistent ones: masks of `prune`, queues, memory   | local      | the values of rank 0, whole   |
    | banks, counters, codebooks, constants                     |            |                               |
    | not persistent, ignored, and all if `gossip_buffers=False`| local      | local                         |

    Args:
        gossip_buffers: True: running statistics are averaged. False: no buffer is averaged. A sequence of names, or of
            patterns as in `fnmatch`: the floating-point buffers with these names are averaged, in place of the running
            statistics.
        ignore: names, or patterns, of the parameters and buffers to leave local. The names in the module's
            `_ddp_params_and_buffers_to_ignore` stay local too, as with `DistributedDataParallel`.

    Raises:
        ValueError: an argument of another kind.
    """

    gossip_buffers: bool | Sequence[str] = True
    ignore: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.gossip_buffers, bool):
            expected = "True or False, or a sequence of names of buffers, such as ['quantizer.*']"
            object.__setattr__(self, "gossip_buffers", _names("gossip_buffers", self.gossip_buffers, expected))
        expected = "a sequence of names or patterns of parameters and buffers, such as ['head.bias', 'adapter.*']"
        object.__setattr__(self, "ignore", _names("ignore", self.ignore, expected))

    def check(self, module: nn.Module) -> None:
        """Check the entries against the module that is wrapped, and note that its `MixedBuffers` have a wrapper.

        Raises:
            ValueError: an entry matches no tensor of the module, with the nearest names; or a buffer of `MixedBuffers`
                would stay local.
        """
        floats = [name for name, buffer in _buffers(module) if buffer.is_floating_point()]
        _check_found("ignore", self.ignore, [name for name, _ in _tensors(module)], "parameter or buffer", module)
        if not isinstance(self.gossip_buffers, bool):
            _check_found("gossip_buffers", self.gossip_buffers, floats, "floating-point buffer", module)
        averaged = self.averaged(module)
        for owner, attribute, name, _ in _owned(module):
            if isinstance(owner, MixedBuffers) and name not in averaged:
                pattern = f"{name.removesuffix(attribute)}*"
                raise ValueError(
                    f"got gossip_buffers={self.gossip_buffers!r} and ignore={list(self.ignore)} with a "
                    f"{type(owner).__name__}, whose buffer {name!r} they leave local, expected all of them mixed; take "
                    f"its names out of ignore, and leave gossip_buffers out or add {pattern!r} to its list"
                )
        for part in mixed_buffers(module):
            part.has_wrapper = True

    def ignored(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the parameters and buffers to leave local, by all their names in `module`."""
        # DistributedDataParallel looks up parameters of the module itself with a point in front of their names.
        listed = {name.removeprefix(".") for name in getattr(module, "_ddp_params_and_buffers_to_ignore", ())}
        if not (listed or self.ignore):
            return {}
        named = list(_tensors(module))
        found = {id(x) for name, x in named if name in listed or _matches(name, self.ignore)}
        return {name: x for name, x in named if id(x) in found}

    def ignored_ids(self, module: nn.Module) -> frozenset[int]:
        """Return the ids of the tensors of `ignored(module)`."""
        return frozenset(map(id, self.ignored(module).values()))

    @contextlib.contextmanager
    def ignored_by_ddp(self, module: nn.Module) -> Iterator[None]:
        """Inside, a DistributedDataParallel made of the module leaves out the ignored tensors, and `MixedBuffers`.

        Averaged gradients make the buffers of `MixedBuffers` equal on all ranks, so no forward has to send them.

        `DistributedDataParallel._set_params_and_buffers_to_ignore_for_model` would mark the module and its tensors for
        good; after this context the module is as before.
        """
        name = "_ddp_params_and_buffers_to_ignore"
        before = vars(module).get(name)
        mixed = (name for owner, _, name, _ in _owned(module) if isinstance(owner, MixedBuffers))
        ignored = [*self.ignored(module), *mixed]
        # DistributedDataParallel looks up parameters of the module itself with a point in front of their names.
        setattr(module, name, [*ignored, *(f".{key}" for key in ignored)])
        try:
            yield
        finally:
            if before is None:
                delattr(module, name)
            else:
                setattr(module, name, before)

    def averages(self, owner: nn.Module, attribute: str, name: str) -> bool:
        """Whether a buffer is averaged, unless `ignore` names it; see [Note: kinds of buffers].

        Args:
            owner: the submodule with the buffer.
            attribute: the name of the buffer in `owner`.
            name: its full name in the wrapped module.
        """
        buffer = buffers_of(owner)[attribute]
        if buffer is None or not buffer.is_floating_point():
            return False
        if not isinstance(self.gossip_buffers, bool):
            return _matches(name, self.gossip_buffers)
        if not self.gossip_buffers:
            return False
        is_statistic = is_persistent(owner, attribute) and _STATISTIC.search(attribute) is not None
        return is_statistic or isinstance(owner, MixedBuffers)

    def averaged(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the averaged buffers of `module`, by name."""
        ignored = self.ignored_ids(module)
        return {
            name: buffer
            for owner, attribute, name, buffer in _owned(module)
            if id(buffer) not in ignored and self.averages(owner, attribute, name)
        }

    def kept(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the persistent buffers of `module` that are neither averaged nor ignored, by name."""
        left = self.ignored_ids(module) | frozenset(map(id, self.averaged(module).values()))
        return {
            name: buffer
            for owner, attribute, name, buffer in _owned(module)
            if id(buffer) not in left and is_persistent(owner, attribute)
        }

    def copied(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the buffers of `kept(module)` that an average of all ranks takes from rank 0."""
        return {} if self.gossip_buffers is False else self.kept(module)

    def others(self, module: nn.Module, exchanged: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the other tensors, such as frozen parameters and counters, each once, by name.

        Args:
            module: the wrapped module; its ignored tensors are left out.
            exchanged: the averaged tensors; these are left out too.
        """
        left = {id(x) for x in exchanged} | self.ignored_ids(module)
        others: dict[int, tuple[str, Tensor]] = {}
        for name, x in (*module.named_parameters(), *module.named_buffers()):
            if id(x) not in left:
                others.setdefault(id(x), (name, x))
        return dict(others.values())


def _owned(module: nn.Module) -> Iterator[tuple[nn.Module, str, str, Tensor]]:
    """Every buffer once: its owner, its attribute there, and its name in the module."""
    seen: set[int] = set()
    for prefix, owner in module.named_modules():
        for attribute, buffer in buffers_of(owner).items():
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                yield owner, attribute, f"{prefix}.{attribute}" if prefix else attribute, buffer


def _buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_buffers(remove_duplicate=False)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor under every name: tied tensors have several."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from _buffers(module)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)


def _names(argument: str, value: object, expected: str) -> tuple[str, ...]:
    """The entries, once each, in order.

    Raises:
        ValueError: it is no sequence of names.
    """
    is_sequence = isinstance(value, Sequence | set | frozenset) and not isinstance(value, str | bytes)
    if not is_sequence or not all(isinstance(entry, str) for entry in value):  # type: ignore[attr-defined]
        raise ValueError(f"got {argument}={value!r}, expected {expected}")
    return tuple(sorted(set(value)))  # type: ignore[call-overload]


def _check_found(argument: str, entries: Sequence[str], names: Sequence[str], what: str, module: nn.Module) -> None:
    for entry in entries:
        if any(_matches(name, [entry]) for name in names):
            continue
        inside = f"{entry}.*"
        near = [inside] if any(fnmatchcase(name, inside) for name in names) else _nearest(entry, names)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"it has no {what}"
        raise ValueError(
            f"got {argument} with {entry!r}, which matches no {what} of a {type(module).__name__}, expected names as "
            f"in named_parameters() and named_buffers() of the module without a wrapper, or patterns of them; {hint}"
        )


def _nearest(entry: str, names: Sequence[str]) -> list[str]:
    """Up to three names, the nearest first."""
    by_end = [name for name in names if name and (name.endswith(f".{entry}") or entry.endswith(f".{name}"))]
    return list(dict.fromkeys([*by_end, *difflib.get_close_matches(entry, names, n=3, cutoff=0.0)]))[:3]
