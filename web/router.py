"""Routes: a method and a path, and the coroutine that answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from .exchange import Answer, Events, Request
from .failures import HttpError
from .tenants import Access

Handler = Callable[[Request, Any], Awaitable[Answer | Events]]


class Route(msgspec.Struct, frozen=True):
    """An entry of the router.

    Args:
        body: type that the body is decoded to; None: there is none.
        access: "open": for everybody; "key": with a key, if there are keys; "admin": with an administrator's key.
        decoder: of a body in JSON; None: there is none, or the body is a form.
        error_form: makes the error object of the route's API from OpenAI's.
    """

    method: str
    path: str
    handler: Handler
    body: Any
    access: Access
    decoder: msgspec.json.Decoder[Any] | None
    error_form: Callable[[dict[str, Any]], dict[str, Any]]

    @property
    def takes_form(self) -> bool:
        return self.body is not None and self.decoder is None


class Router:
    def __init__(self) -> None:
        self.routes: list[Route] = []
        self._plain: dict[str, dict[str, Route]] = {}  # path → method → route
        self._rest: list[tuple[str, Route]] = []  # what stands before the last part, and the route
        self._open: dict[int, list[tuple[list[str], Route]]] = {}  # number of parts → routes with open parts

    def add(
        self,
        method: str,
        path: str,
        handler: Handler,
        body: Any = None,
        access: Access = "key",
        form: bool = False,
        error_form: Callable[[dict[str, Any]], dict[str, Any]] = lambda error: error,
    ) -> None:
        """``{name}`` in a path is one part of any text; ``{name:path}`` at its end is any number of parts. `form`: the
        body is of the type multipart/form-data."""
        decoder = None if body is None or form else msgspec.json.Decoder(body)
        route = Route(method, path, handler, body, access, decoder, error_form)
        self.routes.append(route)
        if path.endswith(":path}"):
            self._rest.append((path[: path.index("{")], route))
        elif "{" in path:
            parts = path.split("/")
            self._open.setdefault(len(parts), []).append((parts, route))
        else:
            self._plain.setdefault(path, {})[method] = route

    def find(self, method: str, path: str) -> tuple[Route, dict[str, str]]:
        """The route, and the open parts of the path.

        Raises:
            HttpError: 404 or 405.
        """
        given = "GET" if method == "HEAD" else method
        methods = self._plain.get(path)
        if methods is not None and given in methods:
            return methods[given], {}
        others = list(methods or ())
        parts = path.split("/")
        for pattern, route in self._open.get(len(parts), ()):
            if all(one == part or one[:1] == "{" for one, part in zip(pattern, parts, strict=True)):
                if route.method == given:
                    names = zip(pattern, parts, strict=True)
                    return route, {one[1:-1]: part for one, part in names if one[:1] == "{"}
                others.append(route.method)
        for prefix, route in self._rest:
            if path.startswith(prefix):
                if route.method == given:
                    return route, {route.path[len(prefix) + 1 : -len(":path}")]: path[len(prefix) :]}
                others.append(route.method)
        if others:
            allow = sorted({*others, "HEAD"} if "GET" in others else {*others})
            raise HttpError(405, f"{method} is not for {path}; it takes {', '.join(others)}", allow=allow)
        raise HttpError(404, f"there is no {path} here")
