"""GET /openapi.json: the routes and their bodies, from the router."""

from __future__ import annotations

from typing import Any

import msgspec

from .. import __version__
from .exchange import Answer, Request, json_of
from .router import Route, Router

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {name: {"type": ["string", "null"]} for name in ("message", "type", "param", "code")},
        }
    },
}
_MESSAGES_ERROR = {  # Anthropic's. What fails before the route is known to be one of its API has the other form.
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {name: {"type": "string"} for name in ("type", "message")},
        },
    },
}


class OpenApi:
    def __init__(self, router: Router) -> None:
        self._router = router
        self._encoded: bytes | None = None

    async def handle(self, request: Request, body: None) -> Answer:
        if self._encoded is None:
            self._encoded = json_of(document(self._router))
        return Answer(self._encoded)


def document(router: Router) -> dict[str, Any]:
    """The document in OpenAPI's form. Answers that are no errors are described in docs/serving.md only."""
    typed = [route.body for route in router.routes if route.body is not None]
    schemas, components = msgspec.json.schema_components(typed, ref_template="#/components/schemas/{name}")
    by_body = dict(zip(map(id, typed), schemas, strict=True))
    paths: dict[str, Any] = {}
    for route in router.routes:
        paths.setdefault(route.path.replace(":path}", "}"), {})[route.method.lower()] = _operation(route, by_body)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Mainspring", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": _ERROR, "MessagesError": _MESSAGES_ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, by_body: dict[int, Any]) -> dict[str, Any]:
    kinds = ["Error", "MessagesError"] if route.path.startswith("/v1/messages") else ["Error"]
    error = {"schema": {"anyOf": [{"$ref": f"#/components/schemas/{kind}"} for kind in kinds]}}
    failed = {"description": "An error.", "content": {"application/json": error}}
    made: dict[str, Any] = {"responses": {"200": {"description": "The result."}, "default": failed}}
    if route.access != "open":
        made["security"] = [{"key": []}]
    names = [part[1:-1].removesuffix(":path") for part in route.path.split("/") if part[:1] == "{"]
    if names:
        made["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if route.body is not None:
        schema = by_body.get(id(route.body), {"type": "object"})
        media_type = "multipart/form-data" if route.takes_form else "application/json"
        made["requestBody"] = {"required": True, "content": {media_type: {"schema": schema}}}
    return made
