"""The ASGI application: every path and the order of the middleware, on one screen."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.errors import ErrorInfo, RemoteError
from headrace.gateway.chat import build_chat_call
from headrace.gateway.completions import build_completion_call
from headrace.gateway.endpoint import GenerationEndpoint
from headrace.gateway.errors import error_response
from headrace.gateway.health import Health, Metrics, Ready
from headrace.gateway.middleware import ErrorMiddleware, RequestIdMiddleware
from headrace.gateway.models_endpoint import ListModels, ShowModel
from headrace.gateway.openai_schema import CHAT_DECODER, COMPLETION_DECODER
from headrace.gateway.state import GatewayState
from headrace.gateway.tokenization import Detokenize, Tokenize


def create_app(state: GatewayState) -> Starlette:
    """Return the gateway as an ASGI application. It owns nothing: the server starts and stops `state`."""
    chat = GenerationEndpoint(state, "/v1/chat/completions", CHAT_DECODER, build_chat_call)
    completions = GenerationEndpoint(
        state, "/v1/completions", COMPLETION_DECODER, build_completion_call
    )
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/models", ListModels(state), methods=["GET"]),
            Route("/v1/models/{model:path}", ShowModel(state), methods=["GET"]),
            Route("/tokenize", Tokenize(state), methods=["POST"]),
            Route("/detokenize", Detokenize(state), methods=["POST"]),
            Route("/health", Health(), methods=["GET"]),
            Route("/ready", Ready(state), methods=["GET"]),
            Route("/metrics", Metrics(state), methods=["GET"]),
        ],
        middleware=[Middleware(RequestIdMiddleware), Middleware(ErrorMiddleware)],
        exception_handlers={HTTPException: _http_error},
    )
    app.router.redirect_slashes = False  # it would send clients to whatever their Host header says
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    """Say in an error object what the routing says in plain text: no such path, no such method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    info = ErrorInfo(code=code, message=message, http_status=error.status_code)
    response = error_response(RemoteError(info))
    response.headers.update(error.headers or {})
    return response
