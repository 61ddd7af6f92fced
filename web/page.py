"""GET /: a page to talk to the model and to see how the server is. It has no data of its own, and needs no key."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from .exchange import Answer, Header, Request


class Page:
    def __init__(self) -> None:
        self._body = files(__package__).joinpath("page.html").read_bytes()
        self._headers: list[Header] = [
            (b"content-type", b"text/html; charset=utf-8"),
            (b"content-security-policy", _policy(self._body)),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
            (b"cache-control", b"no-cache"),
        ]

    async def show(self, request: Request, body: None) -> Answer:
        return Answer(self._body, headers=self._headers)


def _policy(body: bytes) -> bytes:
    """Only the page's own script and style run, and they reach only this server."""
    sources = []
    for tag in (b"script", b"style"):
        found = re.search(rb"<%b>(.*?)</%b>" % (tag, tag), body, re.DOTALL)
        assert found is not None
        digest = base64.b64encode(hashlib.sha256(found[1]).digest())
        sources.append(b"%b-src 'sha256-%b'" % (tag, digest))
    rest = b"connect-src 'self'; img-src data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    return b"default-src 'none'; " + b"; ".join(sources) + b"; " + rest
