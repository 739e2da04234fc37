"""How another server can fail us; apart, so that a gateway without one loads no HTTP client."""

from __future__ import annotations

from headrace.errors import RequestError


class UpstreamFailed(RequestError):
    """The other server could not be reached, or broke off."""

    code = "upstream_failed"
    http_status = 502


class UpstreamTimeout(UpstreamFailed):
    """The other server kept silent for too long."""

    code = "upstream_timeout"
    http_status = 504
