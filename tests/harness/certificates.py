"""Authority: certificates for one test, and the contexts of TLS of the workers that have them."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path
from typing import Any

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


class Authority:
    """A certificate authority with its files in a new folder, made by the program openssl."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        _openssl(folder, "req", "-x509", *_NEW_KEY, "-subj", "/CN=ca", "-keyout", "ca.key", "-out", "ca.pem")

    def contexts(self, name: str = "worker", *, host: str = "IP:127.0.0.1") -> dict[str, Any]:
        """The arguments `server_ssl` and `client_ssl` of a worker with a certificate for this host.

        Each end must show a certificate of this authority.
        """
        files = ("-keyout", f"{name}.key", "-out", f"{name}.csr")
        _openssl(self._folder, "req", *_NEW_KEY, "-subj", f"/CN={name}", *files)
        (self._folder / f"{name}.ext").write_text(f"subjectAltName={host}\n", encoding="utf-8")
        signer = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", f"{name}.ext")
        _openssl(self._folder, "x509", "-req", "-in", f"{name}.csr", *signer, "-out", f"{name}.pem")
        server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(self._folder / "ca.pem"))
        server.verify_mode = ssl.CERT_REQUIRED
        client = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=str(self._folder / "ca.pem"))
        for context in (server, client):
            context.load_cert_chain(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        return {"server_ssl": server, "client_ssl": client}


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=30)
