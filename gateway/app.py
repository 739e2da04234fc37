"""The ASGI application: every path and the order of the middleware, on one screen."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from headrace.errors import ErrorInfo, RemoteError
from headrace.gateway.auth import Guarded
from headrace.gateway.chat import build_chat_call
from headrace.gateway.completions import build_completion_call
from headrace.gateway.endpoint import GenerationEndpoint
from headrace.gateway.errors import error_response
from headrace.gateway.exact_paths import ExactPaths
from headrace.gateway.health import Health, Metrics, Ready
from headrace.gateway.middleware import ErrorMiddleware, RequestIdMiddleware
from headrace.gateway.models_endpoint import ListModels, ShowModel
from headrace.gateway.openai_schema import (
    CHAT_DECODER,
    COMPLETION_DECODER,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from headrace.gateway.openapi import OpenApi
from headrace.gateway.openapi_schema import (
    ChatCompletion,
    DetokenizeAnswer,
    HealthAnswer,
    ModelList,
    ModelObject,
    ReadyAnswer,
    TextCompletion,
    TokenizeAnswer,
)
from headrace.gateway.operation import Operation
from headrace.gateway.state import GatewayState
from headrace.gateway.tokenization import Detokenize, Tokenize


def operations(state: GatewayState) -> list[Operation]:
    """Return everything the main port answers."""
    chat = GenerationEndpoint(state, "/v1/chat/completions", CHAT_DECODER, build_chat_call)
    completions = GenerationEndpoint(
        state, "/v1/completions", COMPLETION_DECODER, build_completion_call
    )
    return [
        Operation(
            "POST",
            "/v1/chat/completions",
            "key",
            chat,
            summary="Messages in, an answer out",
            body=ChatBody,
            answer=ChatCompletion,
            may_stream=True,
        ),
        Operation(
            "POST",
            "/v1/completions",
            "key",
            completions,
            summary="Raw prompts in, continuations out",
            body=CompletionBody,
            answer=TextCompletion,
            may_stream=True,
        ),
        *_small_operations(state),
    ]


def _small_operations(state: GatewayState) -> list[Operation]:
    return [
        Operation(
            "GET",
            "/v1/models",
            "key",
            ListModels(state),
            "Models that can be asked",
            answer=ModelList,
        ),
        Operation(
            "GET",
            "/v1/models/{model:path}",
            "key",
            ShowModel(state),
            "One model",
            answer=ModelObject,
        ),
        Operation(
            "POST",
            "/tokenize",
            "key",
            Tokenize(state),
            "Text to tokens",
            TokenizeBody,
            TokenizeAnswer,
        ),
        Operation(
            "POST",
            "/detokenize",
            "key",
            Detokenize(state),
            "Tokens to text",
            DetokenizeBody,
            DetokenizeAnswer,
        ),
        Operation("GET", "/health", "open", Health(), "Whether it lives", answer=HealthAnswer),
        Operation(
            "GET",
            "/ready",
            "open",
            Ready(state),
            "Whether it can serve",
            answer=ReadyAnswer,
            may_be_unready=True,
        ),
        Operation(
            "GET", "/metrics", "metrics", Metrics(state), "For Prometheus", media_type="text/plain"
        ),
    ]


def create_app(state: GatewayState, more: Sequence[Operation] = ()) -> ExactPaths:
    """Return the gateway as an ASGI application, with `more` operations on the same port.

    It owns nothing: the server starts and stops `state`.
    """
    openapi = OpenApi()
    document = Operation("GET", "/openapi.json", "open", openapi, "This document")
    table = [*operations(state), *more, document]
    openapi.describe(table, needs_key=state.authenticator.keys.is_required)
    return application(state, table)


def application(state: GatewayState, table: Sequence[Operation]) -> ExactPaths:
    """Return an application of these operations, each behind the check of who may use it."""
    sample_ratio = state.tracing.sample_ratio if state.tracing is not None else None
    guarded = [Guarded(each.endpoint, state.authenticator, each.access) for each in table]
    layers = [
        Middleware(RequestIdMiddleware, sample_ratio),
        *_cors(state),
        Middleware(ErrorMiddleware),
    ]
    exact = {
        (each.method, each.path): _behind(layers, endpoint)
        for each, endpoint in zip(table, guarded, strict=True)
        if "{" not in each.path
    }
    app = Starlette(
        routes=[
            Route(each.path, endpoint, methods=[each.method])
            for each, endpoint in zip(table, guarded, strict=True)
        ],
        middleware=layers,
        exception_handlers={HTTPException: _http_error},
    )
    app.router.redirect_slashes = False  # it would send clients to whatever their Host header says
    return ExactPaths(app, exact)


def _behind(layers: Sequence[Middleware], endpoint: ASGIApp) -> ASGIApp:
    """Return an endpoint with every layer of middleware before it, the first outermost."""
    for layer in reversed(layers):
        endpoint = layer.cls(endpoint, *layer.args, **layer.kwargs)
    return endpoint


def _cors(state: GatewayState) -> list[Middleware]:
    origins = state.config.gateway.cors_origins
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-api-key", "x-request-id"],
            expose_headers=["x-request-id", "retry-after"],
        )
    ]


async def _http_error(request: Request, error: Exception) -> Response:
    """Say in an error object what the routing says in plain text: no such path, no such method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    info = ErrorInfo(code=code, message=message, http_status=error.status_code)
    response = error_response(RemoteError(info))
    response.headers.update(error.headers or {})
    return response
