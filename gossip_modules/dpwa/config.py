"""PairwiseConfig: the options of a worker of pairwise averaging, from the constructor or from dpwa's YAML file."""

from __future__ import annotations

import math
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from os import PathLike
from pathlib import Path
from typing import Any

from ..flat.nonfinite import check_policy
from ..old_names import takes_old_arguments
from ..wrappers.arguments import as_timeout
from .interpolation import (
    ClockInterpolation,
    ConstantInterpolation,
    DivergenceThreshold,
    Interpolation,
    LossInterpolation,
)

DEFAULT_MAX_DISTANCE = 1e6
DEFAULT_TIMEOUT = timedelta(seconds=2.5)
DEFAULT_AVERAGE_TIMEOUT = timedelta(seconds=10)
DEFAULT_INTERPOLATION = ConstantInterpolation(0.5)
_METHODS: Mapping[str, type[Interpolation]] = {
    "constant": ConstantInterpolation,
    "clock": ClockInterpolation,
    "loss": LossInterpolation,
}
_CONTEXTS = (
    ("server_ssl", ssl.PROTOCOL_TLS_CLIENT, "CLIENT_AUTH"),
    ("client_ssl", ssl.PROTOCOL_TLS_SERVER, "SERVER_AUTH"),
)
_DEFAULTS: Mapping[str, Any] = {  # of the keys of a file
    "nodes": None,
    "fetch_probability": 1.0,
    "timeout_ms": 2500.0,
    "interpolation": "constant",
    "divergence_threshold": 0.0,
    **dict.fromkeys(_METHODS),
}
_PEERS_EXAMPLE = "{'w0': 'tcp://10.0.0.1:45000', 'w1': 'tcp://10.0.0.2:45000'}"
_EXAMPLE = "a list like [{nodes: [{name: w0, host: 10.0.0.1, port: 45000}, ...]}, {interpolation: constant}, ...]"


@dataclass(frozen=True)
class PairwiseConfig:
    """The options of a worker: its name, its peers, and the rule for merging their models.

    Args:
        name: the name of this worker.
        peers: the address "tcp://host:port" of every worker by name. This worker binds the address under its own name.
        interpolation: how far a merge goes towards a peer.
        divergence_threshold: merges become smaller below this loss: see `DivergenceThreshold`; 0 = none.
        fetch_probability: the probability of asking a peer in a round.
        timeout: the time limit of one round, for all peers together; a number means seconds.
        seed: the seed of the choice of peers. The name is part of it, so workers with one seed make different choices.
        on_nonfinite: the reaction to infinities or NaN in the own model at the end of a fetch: "raise" an error;
            "spread": merge it anyway. A peer's model with infinities or NaN is always refused.
        max_distance: the largest root mean square distance of a peer's model from the own one, in units of the own root
            mean square, or of 1 if that is smaller; models further away are refused. Training never comes near
            the default.
        average_timeout: the timeout of averages over all ranks; None = `timeout` if you give one, else 10 s, as workers
            do not come to an average at the same time.
        server_ssl: the TLS context for serving the model, with the worker's certificate; its `verify_mode` says whether
            peers must show one too. None = in the clear: everybody with access to the address can read the model.
        client_ssl: the TLS context for fetching models. It decides about valid certificates; the certificate of a peer
            must be for the host in its address. Give both contexts or none, on all workers alike.

    Raises:
        ValueError: an argument out of range, or no own entry.
    """

    name: str
    peers: Mapping[str, str]
    interpolation: Interpolation = DEFAULT_INTERPOLATION
    divergence_threshold: float = 0.0
    fetch_probability: float = 1.0
    timeout: timedelta = DEFAULT_TIMEOUT
    seed: int = 0
    on_nonfinite: str = "raise"
    max_distance: float = DEFAULT_MAX_DISTANCE
    average_timeout: timedelta | None = None
    server_ssl: ssl.SSLContext | None = None
    client_ssl: ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.peers, Mapping):
            raise ValueError(
                f"got peers={self.peers!r}, expected a dict of the address of every worker by name, this one included; "
                f"pass one like {_PEERS_EXAMPLE}"
            )
        if self.name not in self.peers:
            raise ValueError(
                f"got name={self.name!r} and peers {sorted(self.peers)}, expected an entry of this worker's own among "
                "them; its address is where to bind, like 'tcp://0.0.0.0:45000'"
            )
        for peer, address in self.peers.items():
            check_address(address, peer=peer, is_own=peer == self.name)
        if not isinstance(self.interpolation, Interpolation):
            raise ValueError(
                f"got interpolation={self.interpolation!r}, expected an Interpolation; pass "
                "ConstantInterpolation(0.5), ClockInterpolation() or LossInterpolation()"
            )
        self._check_tls()
        for name in ("divergence_threshold", "fetch_probability", "max_distance"):
            if not _is_number(getattr(self, name)):
                default = getattr(type(self), name)
                raise ValueError(f"got {name}={getattr(self, name)!r}, expected a number; the default is {default}")
        if not 0.0 <= self.fetch_probability <= 1.0:
            raise ValueError(f"got fetch_probability={self.fetch_probability}, expected a probability in [0, 1]")
        if not self.max_distance > 0:
            raise ValueError(
                f"got max_distance={self.max_distance}, expected a positive number; math.inf refuses no finite model"
            )
        check_policy(self.on_nonfinite)
        for name in ("timeout", "average_timeout"):
            if (seconds := getattr(self, name)) is not None:
                object.__setattr__(self, name, as_timeout(seconds, name=name))
        _ = self.rule  # raises for a threshold out of range

    def _check_tls(self) -> None:
        for name, other, purpose in _CONTEXTS:
            context = getattr(self, name)
            if context is not None and (not isinstance(context, ssl.SSLContext) or context.protocol is other):
                raise ValueError(
                    f"got {name}={context!r}, expected a context for that side of TLS; make it with "
                    f"ssl.create_default_context(ssl.Purpose.{purpose})"
                )
        if (self.server_ssl is None) != (self.client_ssl is None):
            raise ValueError(
                f"got server_ssl={self.server_ssl} and client_ssl={self.client_ssl}, expected both or none, as every "
                "worker serves and fetches; pass two ssl.SSLContext"
            )

    @property
    def others(self) -> dict[str, str]:
        """Addresses of all workers but this one."""
        return {peer: address for peer, address in self.peers.items() if peer != self.name}

    @property
    def time_to_average(self) -> timedelta:
        """The time limit of an average over all ranks."""
        default = DEFAULT_AVERAGE_TIMEOUT if self.timeout == DEFAULT_TIMEOUT else self.timeout
        return self.average_timeout or default

    @property
    def rule(self) -> Interpolation:
        """The interpolation with the divergence threshold, if there is one."""
        if self.divergence_threshold == 0:
            return self.interpolation
        return DivergenceThreshold(self.interpolation, self.divergence_threshold)

    @classmethod
    def from_yaml(cls, name: str, path: str | PathLike[str], **options: Any) -> PairwiseConfig:
        """The configuration of worker `name` in a file of dpwa.

        The file is a list of mappings with one key each, in any order: `nodes` (a list of name, host and port), and
        optionally `fetch_probability` (default 1), `timeout_ms` (2500), `interpolation` (constant, clock or loss),
        `divergence_threshold` (0) and the arguments of the interpolation under its name, like `constant: {value: 0.5}`
        or, where it has none, `clock: 0`.

        Args:
            name: the name of the worker.
            path: the file.
            options: further arguments of `PairwiseConfig`: `seed`, `on_nonfinite`, `max_distance`, `average_timeout`,
                `server_ssl`, `client_ssl`.

        Raises:
            ImportError: PyYAML is missing.
            OSError: the file cannot be read.
            ValueError: any mistake in the file; names it.
        """
        try:
            return cls(name, **_arguments(_read(Path(path))), **options)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


PairwiseConfig.__init__ = takes_old_arguments()(PairwiseConfig.__init__)  # type: ignore[method-assign]


def check_address(address: str, *, peer: str, is_own: bool = False) -> None:
    """Raise ValueError unless this is "tcp://host:port"; only an address to bind may leave host or port open (*, 0)."""
    host, _, port = address.removeprefix("tcp://").rpartition(":") if isinstance(address, str) else ("", "", "")
    is_port = port == "*" or (port.isascii() and port.isdigit() and int(port) < 1 << 16)
    is_blank = any(character.isspace() for character in host)
    if not host or is_blank or not address.startswith("tcp://") or not is_port:
        raise ValueError(f"got address {address!r} of {peer!r}, expected 'tcp://host:port' like 'tcp://10.0.0.1:45000'")
    if not is_own and (host == "*" or port.strip("0") in ("", "*")):
        raise ValueError(
            f"got address {address!r} of {peer!r}, expected the host and port where that worker is reached; "
            "only the own address may leave one open"
        )


def _read(path: Path) -> dict[str, Any]:
    """The entries of the file as one mapping."""
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ImportError(
            "reading dpwa's configuration needs PyYAML; in a clone: pip install '.[pairwise]', or pass the arguments "
            "to the constructor"
        ) from error
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"got a file that is no YAML, expected {_EXAMPLE}: {error}") from error
    if not isinstance(content, list) or not all(isinstance(entry, dict) and len(entry) == 1 for entry in content):
        raise ValueError(f"got a {type(content).__name__}, expected {_EXAMPLE}, one key per entry")
    entries: dict[str, Any] = {}
    for entry in content:
        ((key, value),) = entry.items()
        if key not in _DEFAULTS or key in entries:
            what = "twice" if key in entries else "which is unknown"
            raise ValueError(f"got the key {key!r} {what}, expected each of {list(_DEFAULTS)} once at most")
        entries[key] = value
    return {**_DEFAULTS, **entries}


def _arguments(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `PairwiseConfig` in a file."""
    for key in ("fetch_probability", "timeout_ms", "divergence_threshold"):
        if not _is_number(entries[key]) or not math.isfinite(entries[key]):
            raise ValueError(f"got {key}: {entries[key]!r}, expected a finite number")
    return {
        "peers": _addresses(entries["nodes"]),
        "interpolation": _interpolation(entries["interpolation"], entries),
        "divergence_threshold": float(entries["divergence_threshold"]),
        "fetch_probability": float(entries["fetch_probability"]),
        "timeout": entries["timeout_ms"] / 1000,
    }


def _addresses(nodes: Any) -> dict[str, str]:
    if not isinstance(nodes, list) or not nodes:
        raise ValueError(f"got nodes: {nodes!r}, expected a list of workers like {{name: w0, host: 10.0.0.1, port: 1}}")
    addresses: dict[str, str] = {}
    for node in nodes:
        if not isinstance(node, dict) or set(node) != {"name", "host", "port"}:
            raise ValueError(f"got the node {node!r}, expected the keys name, host and port")
        name, host, port = str(node["name"]), node["host"], node["port"]
        if not isinstance(host, str) or isinstance(port, bool) or not isinstance(port, int):
            raise ValueError(f"got host {host!r} and port {port!r} of {name!r}, expected a string and a whole number")
        if name in addresses:
            raise ValueError(f"got two nodes named {name!r}, expected a name for each")
        addresses[name] = f"tcp://{host}:{port}"
    return addresses


def _interpolation(method: Any, entries: Mapping[str, Any]) -> Interpolation:
    if method not in list(_METHODS):
        raise ValueError(f"got interpolation: {method!r}, expected one of {list(_METHODS)}")
    arguments = entries[method] or {}
    if method == "constant" and isinstance(arguments, dict) and set(arguments) <= {"value"}:
        return ConstantInterpolation(**{key: float(value) for key, value in arguments.items()})
    if arguments:
        expected = "{value: 0.5}" if method == "constant" else "0, as it has no arguments"
        raise ValueError(f"got {method}: {arguments!r}, expected {expected}")
    return _METHODS[method]()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
