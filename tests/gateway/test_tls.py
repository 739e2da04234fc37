"""HTTPS with a certificate made here, and what a wrong one is told."""

from __future__ import annotations

import functools
import pathlib
import shutil
import ssl
import subprocess
from collections.abc import Iterator

import httpx
import pytest
from gateway_server import Served

from headrace.config import TlsConfig
from headrace.errors import ConfigError
from headrace.gateway.http_protocol import HttpProtocol
from headrace.gateway.tls import tls_options

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
SUBJECT = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """A certificate, its key, another key, and the first key with a password."""
    folder = tmp_path_factory.mktemp("tls")
    names = ("certificate", "key", "other", "locked", "nonsense")
    paths = {name: folder / f"{name}.pem" for name in names}
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *SUBJECT]
    for certificate, key in (("other", "other"), ("certificate", "key")):
        out = ["-out", str(paths[certificate]), "-keyout", str(paths[key])]
        subprocess.run([*make, *out], check=True, capture_output=True)
    lock = ["openssl", "rsa", "-aes256", "-passout", "pass:secret", "-in", str(paths["key"])]
    subprocess.run([*lock, "-out", str(paths["locked"])], check=True, capture_output=True)
    paths["nonsense"].write_text("no PEM")
    return paths


@pytest.fixture(scope="module")
def served(files: dict[str, pathlib.Path]) -> Iterator[Served]:
    config = TlsConfig(certificate=str(files["certificate"]), key=str(files["key"]))
    http = functools.partial(HttpProtocol, stall_timeout=5.0)
    served = Served(ws="none", http=http, **tls_options(config))
    yield served
    served.close()


def test_a_request_over_https(served: Served, files: dict[str, pathlib.Path]) -> None:
    trusted = ssl.create_default_context(cafile=str(files["certificate"]))
    url = f"https://localhost:{served.port}"
    with httpx.Client(verify=trusted, timeout=20) as client:
        assert client.get(f"{url}/health").status_code == 200
        body = {"prompt": "a", "max_tokens": 3, "stream": True}
        answer = client.post(f"{url}/v1/completions", json=body)
    assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")


def test_a_client_that_does_not_know_the_certificate_leaves(served: Served) -> None:
    with pytest.raises(httpx.ConnectError, match="certificate"):
        httpx.get(f"https://localhost:{served.port}/health", timeout=20)


def test_plain_http_gets_nothing(served: Served) -> None:
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://localhost:{served.port}/health", timeout=20)


@pytest.mark.parametrize(
    ("certificate", "key", "said"),
    [
        ("missing", "key", "No such file"),
        ("nonsense", "key", ""),
        ("certificate", "other", ""),
        ("certificate", "locked", ""),
        ("certificate", "nonsense", ""),
    ],
)
def test_files_that_cannot_be_used_stop_the_start(
    files: dict[str, pathlib.Path], certificate: str, key: str, said: str
) -> None:
    paths = {**files, "missing": files["key"].with_name("missing.pem")}
    with pytest.raises(ConfigError) as raised:
        tls_options(TlsConfig(certificate=str(paths[certificate]), key=str(paths[key])))
    for part in ("gateway.tls", str(paths[certificate]), str(paths[key]), said):
        assert part in str(raised.value)


def test_a_key_without_a_certificate_stops_the_start() -> None:
    with pytest.raises(ConfigError, match=r"gateway\.tls\.key"):
        tls_options(TlsConfig(key="key.pem"))


def test_without_a_certificate_there_is_no_tls() -> None:
    assert tls_options(TlsConfig()) == {}
