"""Writes docs/configuration.md from `mainspring.ipc.config`, where each field is defined (`make docs`).

`--check` writes nothing and fails if the page is not what would be written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from mainspring.ipc.config import SECTIONS, FieldInfo, fields_of

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
HEAD = """# Configuration

Every argument of `EngineArgs`, of `LLM(model, …)` and of the command line: the flag of `max_model_len` is
`--max-model-len`. Fields marked *read only* are filled in by the core; read them from the engine's configuration.

Generated from `ipc/config.py` by `make docs`; do not edit.
"""


def type_text(kind: Any) -> str:
    """A field's type as a reader would say it."""
    if get_origin(kind) is Literal:
        return ", ".join(f"`{option}`" for option in get_args(kind))
    if get_origin(kind) is dict:
        return "`dict`"
    if type(None) in get_args(kind):
        return " or ".join("none" if option is NoneType else type_text(option) for option in get_args(kind))
    return f"`{kind.__name__}`"


def default_text(value: Any) -> str:
    return "none" if value is None else f"`{value}`"


def row(field: FieldInfo) -> str:
    doc = f"*Read only.* {field.doc}" if field.set_by_core else field.doc
    return f"| `{field.name}` | {type_text(field.type)} | {default_text(field.default)} | {doc} |"


def page() -> str:
    parts = [HEAD]
    for name, kind in SECTIONS.items():
        given = f" Given as `{name}`, a dict of these." if kind.nested else ""
        parts += [f"## {kind.__name__}", "", (kind.__doc__ or "").strip() + given, ""]
        rows = map(row, fields_of(kind, name))
        parts += ["| field | type | default | meaning |", "| --- | --- | --- | --- |", *rows, ""]
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page())
    elif not PAGE.exists() or PAGE.read_text() != page():
        print(f"{PAGE.name} is out of date; run `make docs`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
