"""Bodies of the type multipart/form-data."""

from __future__ import annotations

import logging
from functools import partial
from typing import TypeVar

import msgspec

from ..ipc.errors import NotSupportedError
from .failures import HttpError

T = TypeVar("T")

MAX_PARTS = 100  # of a form, because a boundary takes much more time than other bytes


def read_form(content_type: str, body: bytes | bytearray, kind: type[T]) -> T:
    """The struct whose fields are those of a form. A file is bytes. Fields whose names end with ``[]`` are the entries
    of a list; of several others of one name the last one counts.

    Args:
        content_type: the header, which has the boundary.

    Raises:
        HttpError: the body is no such form.
        msgspec.ValidationError: a field is missing, or has a wrong value.
        NotSupportedError: the package that reads forms is not installed.
    """
    try:
        from python_multipart import FormParser
        from python_multipart.exceptions import FormParserError
        from python_multipart.multipart import Field, File, parse_options_header
    except ImportError as error:
        raise NotSupportedError(f'{error.name} is not installed: pip install "mainspring[serve]"') from None
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # it warns of each wrong form
    media_type, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if media_type != b"multipart/form-data" or not boundary:
        raise HttpError(400, "the body must be multipart/form-data, with its boundary in Content-Type")
    if body.count(b"--" + boundary) > MAX_PARTS + 1:
        raise HttpError(400, f"the form has more than {MAX_PARTS} parts")
    parts: list[Field | File] = []
    ends: list[bool] = []
    fields: dict[str, list[bytes | str]] = {}
    in_memory = {"MAX_MEMORY_FILE_SIZE": len(body) + 1}
    try:
        add, end = parts.append, partial(ends.append, True)
        FormParser("multipart/form-data", add, add, end, boundary=boundary, config=in_memory).write(bytes(body))
        if not ends:
            raise FormParserError("its last boundary is missing")
        for part in parts:
            values = fields.setdefault((part.field_name or b"").decode(), [])
            if isinstance(part, File):
                part.file_object.seek(0)
                values.append(part.file_object.read())
            else:
                values.append((part.value or b"").decode())
    except (FormParserError, UnicodeDecodeError) as error:
        raise HttpError(400, f"the body is no form that can be read: {error}") from None
    given = {name.removesuffix("[]"): some if name.endswith("[]") else some[-1] for name, some in fields.items()}
    return msgspec.convert(given, kind, strict=False)
