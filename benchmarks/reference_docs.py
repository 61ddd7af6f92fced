"""Writes docs/configuration.md from `mainspring.ipc.config`, and docs/vllm_arguments.md from the tables in
`mainspring.compat` (`make docs`).

`--check` writes nothing and fails if a page is not what would be written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from mainspring.compat.engine_fields import DEFAULT_ONLY, MAPPED, RENAMED, VALUES, WITHOUT_EFFECT, is_flag
from mainspring.compat.missing import ARGUMENTS, MEMBERS
from mainspring.ipc.config import SECTIONS, FieldInfo, fields_of
from mainspring.ipc.errors import Accepted
from mainspring.ipc.params import SamplingParams
from mainspring.ipc.pooling_params import PoolingParams

DOCS = Path(__file__).resolve().parent.parent / "docs"
HEAD = """# Configuration

Every argument of `EngineArgs`, of `LLM(model, …)` and of the command line: the flag of `max_model_len` is
`--max-model-len`. Fields marked *read only* are filled in by the core; read them from the engine's configuration.

Generated from `ipc/config.py` by `make docs`; do not edit.
"""
VLLM_HEAD = """# vLLM's arguments

What the fields of vLLM's `EngineArgs`, 0.11 to 0.33, and the arguments and members of its classes are here, where they
differ from ours. Fields that are not on this page are those of the [configuration](configuration.md), or unknown.
On the command line they are flags: `--enable-sleep-mode`.

Generated from `compat/engine_fields.py`, `compat/missing.py` and `ipc/` by `make docs`; do not edit.
"""


def type_text(kind: Any) -> str:
    """A field's type in readable form."""
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


def entry_text(entry: str) -> str:
    """`name`, or `name=value` of a table in compat/."""
    name, _, values = entry.partition("=")
    if not values or is_flag(name):
        return f"`{name}`"
    return f"`{name}` ({' or '.join(f'`{value}`' for value in values.split('|'))})"


def grouped(head: str, rows: dict[str, str]) -> list[str]:
    cells = (f"| {text} | {', '.join(map(entry_text, names.split()))} |" for text, names in rows.items())
    return [f"| {head} | names |", "| --- | --- |", *cells, ""]


def accepted_rows(owner: str, accepted: Accepted) -> list[str]:
    rows = []
    for name, entry in accepted.items():
        if isinstance(entry, str):
            text = f"an older name of `{entry}`"
        elif "anything" in entry[0] or {True, False} <= {value for value in entry[0] if not isinstance(value, dict)}:
            text = "no effect"
        else:
            text = f"accepted at its default; not supported: {entry[1]}"
        rows.append(f"| `{owner}` | `{name}` | {text} |")
    return rows


def vllm_page() -> str:
    works = {**{name: f"another name of `{ours}`" for name, ours in RENAMED.items()}, **MAPPED}
    values = (
        f"| `{name}` | {', '.join(f'`{theirs}`: `{ours}`' for theirs, ours in table.items())} |"
        for name, table in VALUES.items()
    )
    owners = {"SamplingParams": SamplingParams._accepted, "PoolingParams": PoolingParams._accepted, **ARGUMENTS}
    parts = [
        VLLM_HEAD,
        "## Fields of EngineArgs that work under another name",
        "",
        *("| field | here |", "| --- | --- |", *(f"| `{name}` | {text} |" for name, text in works.items()), ""),
        "## Values of vLLM's that mean one of ours",
        "",
        *("| field | value: ours |", "| --- | --- |", *values, ""),
        "## Fields of EngineArgs without effect",
        "",
        *grouped("because", WITHOUT_EFFECT),
        "## Fields of EngineArgs that must keep their default",
        "",
        "Any other value than that in parentheses, none, false or an empty one raises `NotSupportedError`.",
        "",
        *grouped("does not exist here", DEFAULT_ONLY),
        "## Arguments of classes and methods",
        "",
        *("| of | argument | here |", "| --- | --- | --- |"),
        *(row for owner, accepted in owners.items() for row in accepted_rows(owner, accepted)),
        "",
        "## Members that do not exist here",
        "",
        *grouped("instead, or why", MEMBERS),
    ]
    return "\n".join(parts)


PAGES = {"configuration.md": page, "vllm_arguments.md": vllm_page}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check, stale = parser.parse_args().check, []
    for name, make in PAGES.items():
        path = DOCS / name
        if not check:
            path.write_text(make())
        elif not path.exists() or path.read_text() != make():
            stale.append(name)
    if stale:
        print(f"{', '.join(stale)}: out of date; run `make docs`")
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
