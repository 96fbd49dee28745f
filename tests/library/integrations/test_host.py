"""What the hosts share."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize("host", ["accelerate", "lightning", "transformers"])
def test_a_missing_package_is_named_with_its_extra(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"gossip_modules.integrations.{host}"
    for loaded in list(sys.modules):
        if loaded.startswith(("gossip_modules.integrations.", f"{host}.")):
            monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, host, None)
    with pytest.raises(ImportError, match=rf"needs the package {host} .*in a clone: pip install '\.\[{host}\]'"):
        importlib.import_module(name)
