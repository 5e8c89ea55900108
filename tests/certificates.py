"""Certificates for tests of TLS."""

from __future__ import annotations

import subprocess
from pathlib import Path


def self_signed(directory: Path) -> tuple[Path, Path]:
    """A certificate for this machine, and its private key."""
    certificate, private = directory / "cert.pem", directory / "key.pem"
    make = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost")
    make = (*make, "-addext", "basicConstraints=critical,CA:FALSE")  # rustls takes no authority for a server
    names = ("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(private), "-out", str(certificate))
    subprocess.run([*make, *names], check=True, capture_output=True)
    return certificate, private
