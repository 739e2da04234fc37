"""The certificate of an HTTPS gateway, checked before anything is bound or started."""

from __future__ import annotations

import ssl
from typing import Any

from headrace.config.schema import TlsConfig
from headrace.errors import ConfigError


def tls_options(config: TlsConfig) -> dict[str, Any]:
    """Return uvicorn's options for TLS; empty without a certificate. ConfigError where it cannot be used."""
    if not config.certificate:
        if config.key:
            raise ConfigError("gateway.tls.key: there is no gateway.tls.certificate it belongs to")
        return {}
    key = config.key or config.certificate
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            config.certificate, key, password=_no_password
        )
    except OSError as error:
        problem = error.strerror or getattr(error, "reason", None) or str(error)
        raise ConfigError(
            f"gateway.tls: the certificate {config.certificate} with the key {key} cannot be used: "
            f"{problem}. Both are PEM files, and the key has no password"
        ) from error
    return {"ssl_certfile": config.certificate, "ssl_keyfile": key}


def _no_password() -> str:
    raise OSError("the key is encrypted")
