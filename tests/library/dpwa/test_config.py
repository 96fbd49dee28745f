"""What a worker is told: dpwa's YAML means what it meant, and every mistake is named."""

from __future__ import annotations

import ssl
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from gossip_modules.dpwa.config import PairwiseConfig
from gossip_modules.dpwa.interpolation import (
    ClockInterpolation,
    ConstantInterpolation,
    DivergenceThreshold,
    Interpolation,
    LossInterpolation,
)
from gossip_modules.dpwa.wrapper import PairwiseDataParallel

# samples/config.yaml of dpwa, in its form.
SAMPLE = """
- nodes:
  - {name: w1, host: 127.0.0.1, port: 45000}
  - {name: w2, host: localhost, port: 45001}
- fetch_probability: 1
- timeout_ms: 2500
- interpolation: loss
- divergence_threshold: 0.2
- constant: {value: 0.5}
- clock: 0
- loss: 0
"""
CLIENT_CONTEXT = ssl.create_default_context()
NODES = "- nodes: [{name: w1, host: h, port: 1}, {name: w2, host: h, port: 2}]\n"


def read(folder: Path, text: str) -> PairwiseConfig:
    """The configuration of w1 in a file with this text."""
    path = folder / "dpwa.yaml"
    path.write_text(text, encoding="utf-8")
    return PairwiseConfig.from_yaml("w1", path)


def test_sample_of_dpwa(tmp_path: Path) -> None:
    assert read(tmp_path, SAMPLE) == PairwiseConfig(
        name="w1",
        peers={"w1": "tcp://127.0.0.1:45000", "w2": "tcp://localhost:45001"},
        interpolation=LossInterpolation(),
        divergence_threshold=0.2,
        fetch_probability=1.0,
        timeout=timedelta(milliseconds=2500),
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ConstantInterpolation(0.5)),
        ("- interpolation: clock\n- clock: 0", ClockInterpolation()),
        ("- constant: {value: 1}\n- interpolation: constant", ConstantInterpolation(1.0)),
        ("- loss:\n- interpolation: loss", LossInterpolation()),
    ],
)
def test_optional_keys_have_defaults(tmp_path: Path, text: str, expected: Interpolation) -> None:
    config = read(tmp_path, NODES + text)
    assert config.rule == expected
    assert config.others == {"w2": "tcp://h:2"}
    assert config.timeout == timedelta(seconds=2.5)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("nodes: []", r"dpwa\.yaml: got a dict, expected a list like"),
        ("- {nodes: [], timeout_ms: 1}", "expected a list like .* one key per entry"),
        ("[: {", "got a file that is no YAML"),
        ("!!python/object/apply:os.system ['true']", "got a file that is no YAML"),
        ("- interpolation: clock", "got nodes: None, expected a list of workers"),
        (NODES + "- timeout: 3", "got the key 'timeout' which is unknown, expected each of"),
        (NODES + NODES, "got the key 'nodes' twice"),
        ("- nodes: [{name: w1, host: h}]", "got the node .* expected the keys name, host and port"),
        ("- nodes: [{name: w1, host: h, port: '1'}]", "got host 'h' and port '1' of 'w1'"),
        ("- nodes: [{name: w1, host: h, port: 70000}]", "got address 'tcp://h:70000' of 'w1', expected 'tcp://host"),
        ("- nodes: [{name: a, host: h, port: 1}, {name: a, host: h, port: 2}]", "got two nodes named 'a'"),
        ("- nodes: [{name: a, host: h, port: 1}]", "got name='w1' and peers .*'a'.*, expected an entry of this worker"),
        (
            NODES + "- interpolation: linear",
            "got interpolation: 'linear', expected one of .*'constant', 'clock', 'loss'",
        ),
        (NODES + "- constant: {value: 2}", r"got value=2.0, expected a factor in \[0, 1\]"),
        (NODES + "- constant: {factor: 1}", "got constant: .*expected {value: 0.5}"),
        (NODES + "- interpolation: clock\n- clock: 1", "got clock: 1, expected 0, as it has no arguments"),
        (NODES + "- timeout_ms: soon", "got timeout_ms: 'soon', expected a finite number"),
        (NODES + "- timeout_ms: .inf", "got timeout_ms: inf, expected a finite number"),
        (NODES + "- timeout_ms: 0", "got timeout=0.0, expected more than zero seconds"),
        (NODES + "- fetch_probability: 1.5", r"got fetch_probability=1.5, expected a probability in \[0, 1\]"),
        (NODES + "- divergence_threshold: -1", "got threshold=-1.0, expected a positive number"),
    ],
)
def test_every_mistake_is_named(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        read(tmp_path, text)


def test_threshold_wraps_the_interpolation() -> None:
    config = PairwiseConfig("a", {"a": "tcp://h:1"}, ClockInterpolation(), divergence_threshold=0.5)
    assert config.rule == DivergenceThreshold(ClockInterpolation(), 0.5)


@pytest.mark.parametrize("peers", [["tcp://h:1"], ("w0", "w1"), "tcp://h:1", None, [("w0", "tcp://h:1")]])
def test_peers_are_a_dict(peers: Any) -> None:
    message = r"got peers=.*, expected a dict of the address of every worker by name.*\{'w0': 'tcp://10.0.0.1:45000', "
    for make in (PairwiseConfig, lambda name, peers: PairwiseDataParallel(nn.Linear(1, 1), name=name, peers=peers)):
        with pytest.raises(ValueError, match=message):
            make("w0", peers)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"interpolation": 0.5},
            r"got interpolation=0.5, expected an Interpolation; pass ConstantInterpolation\(0.5\)",
        ),
        ({"interpolation": LossInterpolation}, r"got interpolation=<class .*or LossInterpolation\(\)"),
        ({"server_ssl": "cert.pem"}, r"got server_ssl='cert.pem', expected a context.*\(ssl.Purpose.CLIENT_AUTH\)"),
        (
            {"server_ssl": CLIENT_CONTEXT, "client_ssl": CLIENT_CONTEXT},
            r"got server_ssl=<ssl.SSLContext .*, expected a context for that side of TLS; .*Purpose.CLIENT_AUTH",
        ),
        ({"client_ssl": CLIENT_CONTEXT}, r"got server_ssl=None and client_ssl=<ssl.*, expected both or none, as every"),
        ({"fetch_probability": "1"}, r"got fetch_probability='1', expected a number; the default is 1.0"),
        ({"divergence_threshold": None}, r"got divergence_threshold=None, expected a number; the default is 0.0"),
        ({"max_distance": True}, r"got max_distance=True, expected a number"),
        ({"timeout": "30"}, r"got timeout='30', expected more than zero seconds"),
        ({"average_timeout": -1}, r"got average_timeout=-1, expected more than zero seconds"),
    ],
)
def test_arguments_of_other_types_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PairwiseConfig("a", {"a": "tcp://h:1"}, **options)


def test_a_timeout_may_be_a_number_of_seconds() -> None:
    config = PairwiseConfig("a", {"a": "tcp://h:1"}, timeout=30, average_timeout=0.5)  # type: ignore[arg-type]
    assert config.timeout == timedelta(seconds=30)
    assert config.time_to_average == timedelta(seconds=0.5)


@pytest.mark.parametrize("address", ["h:1", "tcp://h", "tcp://:1", "udp://h:1", "tcp://h:x", "tcp://h:-1", 5, ""])
def test_addresses_are_checked(address: Any) -> None:
    with pytest.raises(ValueError, match="of 'a', expected 'tcp://host:port'"):
        PairwiseConfig("a", {"a": address})


@pytest.mark.parametrize("address", ["tcp://*:1", "tcp://h:*", "tcp://h:0"])
def test_only_the_own_address_is_open(address: str) -> None:
    PairwiseConfig("a", {"a": address, "b": "tcp://h:1"})
    with pytest.raises(ValueError, match=r"got address .* of 'b', expected the host and port where that worker is"):
        PairwiseConfig("a", {"a": "tcp://h:1", "b": address})


def test_without_yaml_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)  # as if it were not installed
    with pytest.raises(ImportError, match=r"needs PyYAML; in a clone: pip install '\.\[pairwise\]'"):
        read(tmp_path, SAMPLE)
