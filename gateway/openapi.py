"""GET /openapi.json: the OpenAPI 3.1 document of what a port answers, made from its table of operations.

The schemas of the bodies are those that decode them, with the bounds that are checked later.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from headrace import __version__
from headrace.gateway.errors import JSONBytes
from headrace.gateway.openapi_schema import BOUNDS, ENUMS, REQUIRED, ErrorBody
from headrace.gateway.operation import Operation

_REFS = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(\w+)(?::path)?\}")
_EVENT = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
"""One server-sent event: a chunk or an error as JSON, and `[DONE]` at the end."""
_STREAM = {"text/event-stream": {"schema": _EVENT}}
_ANY_OBJECT = {"application/json": {"schema": {"type": "object"}}}
_REQUEST_ID = {
    "name": "X-Request-Id",
    "in": "header",
    "required": False,
    "description": "1 to 128 printable characters are sent back and logged; others count as none.",
    "schema": {"type": "string"},
}
_STATUSES = {
    "open": ("405",),
    "key": ("400", "401", "403", "404", "405", "408", "431", "500", "502", "503", "504"),
    "body": ("413", "415", "429"),
}
_MEANINGS = {
    "400": "The request is wrong; `param` names the field.",
    "401": "No API key, or one that nobody has.",
    "403": "The key does not reach this.",
    "404": "There is no such model, replica or path.",
    "405": "The path has no such method.",
    "408": "The request was not complete in time.",
    "409": "What was asked for cannot be done as things are.",
    "413": "The body is too large.",
    "415": "The body is compressed.",
    "429": "The caller's own limit; `Retry-After` says when to come again.",
    "431": "The head is too large.",
    "500": "The server failed.",
    "502": "The server behind the replica failed.",
    "503": "Overloaded, starting or stopping; `Retry-After` says when to come again.",
    "504": "The server behind the replica kept silent.",
}


class OpenApi:
    """Answers with the document of the port it is on; itself a line of that port's table."""

    def __init__(self) -> None:
        self._document: dict[str, Any] = {}

    def describe(self, table: Iterable[Operation], *, needs_key: bool) -> None:
        """Make the document, before the first request."""
        self._document = openapi_document(table, needs_key=needs_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await JSONBytes(self._document)(scope, receive, send)


def openapi_document(table: Iterable[Operation], *, needs_key: bool) -> dict[str, Any]:
    """Return the document. `needs_key`: API keys are configured, so that `key` asks for one."""
    operations = list(table)
    types = {each.body for each in operations} | {each.answer for each in operations}
    _, schemas = msgspec.json.schema_components(
        [ErrorBody, *sorted((t for t in types if t), key=lambda t: t.__name__)], ref_template=_REFS
    )
    for name, schema in schemas.items():
        _sharpen(name, schema)
    paths: dict[str, dict[str, Any]] = {}
    for each in operations:
        path = _PARAMETER.sub(r"{\1}", each.path)
        paths.setdefault(path, {})[each.method.lower()] = _operation(each, needs_key)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Headrace",
            "version": __version__,
            "description": "Serves large language models by OpenAI's API.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(each: Operation, needs_key: bool) -> dict[str, Any]:
    asks = each.access in ("admin", "admin_port") or (each.access != "open" and needs_key)
    answers = ["405"] if each.access == "open" else [*_STATUSES["key"]]
    if each.access.startswith("admin"):
        answers += ["409"]
    if each.method == "POST":
        answers += _STATUSES["body"]
    result: dict[str, Any] = {
        "operationId": each.operation_id,
        "summary": each.summary,
        "parameters": [_REQUEST_ID, *_parameters(each.path)],
        "security": [{"bearer": []}, {"x_api_key": []}] if asks else [],
        "responses": {
            str(each.status): {"description": "The answer.", "content": _content(each)},
            **{status: _error(status) for status in sorted(answers)},
        },
    }
    if each.may_be_unready:
        result["responses"]["503"] = {"description": _MEANINGS["503"], "content": _content(each)}
    if each.body is not None:
        schema = {"$ref": _REFS.format(name=each.body.__name__)}
        result["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    return result


def _parameters(path: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _PARAMETER.findall(path)
    ]


def _content(each: Operation) -> dict[str, Any]:
    if each.media_type != "application/json":
        return {each.media_type: {"schema": {"type": "string"}}}
    content: dict[str, Any] = _ANY_OBJECT
    if each.answer is not None:
        schema = {"$ref": _REFS.format(name=each.answer.__name__)}
        content = {"application/json": {"schema": schema}}
    return {**content, **_STREAM} if each.may_stream else content


def _error(status: str) -> dict[str, Any]:
    schema = {"$ref": _REFS.format(name="ErrorBody")}
    return {
        "description": _MEANINGS[status],
        "content": {"application/json": {"schema": schema}},
    }


def _sharpen(name: str, schema: dict[str, Any]) -> None:
    """Add what a struct's types do not say."""
    properties = schema.get("properties", {})
    for field, keywords in BOUNDS.get(name, {}).items():
        _alternatives(properties[field], keywords)
    for field, values in ENUMS.get(name, {}).items():
        _alternatives(properties[field], {"enum": [*values]})
    needed = REQUIRED.get(name, ())
    for field in needed:
        kinds = [each for each in properties[field].get("anyOf", ()) if each != {"type": "null"}]
        if kinds:
            del properties[field]["anyOf"]
            properties[field].update(kinds[0] if len(kinds) == 1 else {"anyOf": kinds})
        properties[field].pop("default", None)
    if needed:
        schema["required"] = [*needed]


def _alternatives(schema: dict[str, Any], keywords: Mapping[str, Any]) -> None:
    """Put keywords on every kind of value that is not null."""
    kinds = [each for each in schema.get("anyOf", [schema]) if each.get("type") != "null"]
    for kind in kinds:
        kind.update(keywords)
