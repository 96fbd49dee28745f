"""The comparison of bits: it covers the registry, training repeats its bits, and a difference is an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bit_equal, bit_equal_side
from gossip_modules.methods import METHODS


def test_each_method_of_the_registry_is_trained_or_left_out_with_a_reason() -> None:
    assert {*bit_equal_side.METHODS, *(name for name in bit_equal_side.LEFT_OUT if "," not in name)} == set(METHODS)
    assert all(bit_equal_side.LEFT_OUT.values())


def test_training_repeats_its_bits_and_variants_have_bits_of_their_own() -> None:
    names = ["sgp", "diloco, delay", "sgp, membership"]
    first, second = (
        {case: value for part, found in bit_equal_side.run_all(names) for case, value in zip(part, found, strict=True)}
        for _ in range(2)
    )
    assert first == second
    assert len(set(first.values())) == len(names)


def test_a_case_with_an_error_has_its_text_in_place_of_a_digest(capsys: pytest.CaptureFixture[str]) -> None:
    def run(names: object) -> list[str]:
        raise ValueError("no such case\nmore")

    assert bit_equal_side.failed(run, "sgp") == "ValueError: no such case"
    assert "more" in capsys.readouterr().err


def test_differences_are_named_and_cases_of_one_side_are_left_out(tmp_path: Path) -> None:
    assert bit_equal.differences({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "0"}) == ["b: got 0, expected 2"]


def test_the_command_compares_with_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bit_equal, "digests", lambda tree, cases: dict.fromkeys(cases, "bits"))
    path = tmp_path / "before.json"
    monkeypatch.setattr("sys.argv", ["bit_equal", "--quick", "--methods", "sgp", "--digest", str(path)])
    bit_equal.main()
    monkeypatch.setattr("sys.argv", ["bit_equal", "--against", str(path)])
    with pytest.raises(SystemExit, match="0"):
        bit_equal.main()
    path.write_text(json.dumps({"sgp": "other bits"}))
    with pytest.raises(SystemExit, match="1"):
        bit_equal.main()


def test_unknown_methods_are_refused_with_the_reasons_of_those_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bit_equal", "--methods", "adpsgd"])
    with pytest.raises(SystemExit, match=r"got methods \['adpsgd'\], expected some of .*sgp.* depend on time"):
        bit_equal.main()
