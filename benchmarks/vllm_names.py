"""Compares names of vLLM's source with ours (`moves_over.py --names`). The source is parsed, not imported.

It looks at the fields of `EngineArgs` and `AsyncEngineArgs` with their defaults, at `vllm.__all__`, and at the public
members and parameters of `LLM`, `LLMEngine`, `AsyncLLM`, `SamplingParams` and `PoolingParams` with their base classes.
A name is known if we have it, if it is accepted, or if the error for it gives a reason.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mainspring
from mainspring.compat import forms
from mainspring.compat.missing import ARGUMENTS, MISSING
from mainspring.compat.vllm.names import PLACES, refusal
from mainspring.engine.args import all_names
from mainspring.ipc.errors import MainspringError

OURS: dict[str, Any] = {
    name: getattr(mainspring, name) for name in ("LLM", "LLMEngine", "AsyncLLM", "SamplingParams", "PoolingParams")
}
_REQUEST = {*forms._KEYWORDS, *forms._OLDER_KEYWORDS, forms._RANK}
# method whose parameters are not all in its signature → the others
_MORE = {
    "LLM.__init__": {*all_names()},
    "LLMEngine.add_request": _REQUEST,
    "AsyncLLM.add_request": _REQUEST,
    "AsyncLLM.generate": _REQUEST,
    "AsyncLLM.__init__": {*forms._ENGINE_KEYWORDS, *forms._PARTS},
    "LLMEngine.__init__": {*forms._ENGINE_KEYWORDS, *forms._PARTS},
}
_LITERALS = (ast.Constant, ast.List, ast.Dict, ast.UnaryOp)


class Source:
    """The classes of an unpacked source distribution."""

    def __init__(self, folder: Path) -> None:
        self.trees = {path: ast.parse(path.read_text()) for path in _files(folder / "vllm")}
        self.classes: dict[str, list[ast.ClassDef]] = {}
        for tree in self.trees.values():
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    self.classes.setdefault(node.name, []).append(node)
        self.exported: list[str] = next(
            ast.literal_eval(node.value)
            for node in self.trees[folder / "vllm" / "__init__.py"].body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        )

    def body(self, name: str) -> Iterator[ast.stmt]:
        """The statements of a class, and of its base classes that are in this source."""
        for node in self.classes[name]:
            for base in node.bases:
                if (known := ast.unparse(base)) in self.classes and known.endswith("Mixin"):
                    yield from self.body(known)
            yield from node.body

    def fields(self, name: str) -> dict[str, ast.expr | None]:
        """Annotated fields → default."""
        return {
            node.target.id: node.value
            for node in self.body(name)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }

    def default(self, value: ast.expr | None) -> ast.expr | None:
        """The literal default behind ``Config.field``, ``get_field(Config, "field")`` and ``Field(default=...)``."""
        if isinstance(value, ast.Attribute) and (owner := ast.unparse(value.value)) in self.classes:
            return self.default(self.fields(owner).get(value.attr))
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "get_field":
            owner, field = ast.unparse(value.args[0]), ast.literal_eval(value.args[1])
            return self.default(self.fields(owner).get(field))
        if isinstance(value, ast.Call) and ast.unparse(value.func) in ("Field", "field"):
            return next((self.default(word.value) for word in value.keywords if word.arg == "default"), None)
        return value if isinstance(value, _LITERALS) else None


def _files(folder: Path) -> list[Path]:
    parts = ("config", "engine", "v1/engine", "entrypoints")
    return [*folder.glob("*.py"), *(path for part in parts for path in (folder / part).rglob("*.py"))]


def engine_fields(source: Source) -> Iterator[tuple[str, str]]:
    """→ field, and what is wrong with it, or ""."""
    ours, names = mainspring.AsyncEngineArgs, all_names()
    for owner in ("EngineArgs", "AsyncEngineArgs"):
        for name, value in source.fields(owner).items():
            known = name in names or name in ours.__dataclass_fields__
            wrong = "" if known else "unknown"
            default = source.default(value)
            if known and default is not None and name != "model":
                try:
                    ours(**{name: ast.literal_eval(default)}).create_engine_config()
                except MainspringError as error:
                    wrong = f"its default: {error}"
            yield f"{owner}.{name}", wrong


def exported(source: Source) -> Iterator[tuple[str, str]]:
    for name in source.exported:
        yield f"vllm.{name}", "" if name in PLACES[""] or ": " in refusal(name) else "unknown"


def members(source: Source) -> Iterator[tuple[str, str]]:
    for owner, ours in OURS.items():
        for name in source.fields(owner):
            if not name.startswith("_"):
                yield f"{owner}.{name}", "" if _has(owner, name) else "unknown"
        for node in source.body(owner):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            name = node.name
            if name.startswith("_") and name != "__init__":
                continue
            dotted = f"{owner}.{name}"
            known = name == "__init__" or _has(owner, name)
            yield dotted, "" if known else "unknown"
            if not known or name in MISSING.get(owner, {}) or isinstance(getattr(ours, name, None), property):
                continue
            if any("property" in ast.unparse(one) or ".setter" in ast.unparse(one) for one in node.decorator_list):
                continue
            parameters = inspect.signature(getattr(ours, name)).parameters if name != "from_optional" else {}
            fields = ours.__dataclass_fields__.keys() | ours._accepted.keys() if name == "from_optional" else set()
            have = {*parameters, *ARGUMENTS.get(dotted, {}), *_MORE.get(dotted, ()), *fields}
            for one in (*node.args.args, *node.args.kwonlyargs):
                if one.arg not in ("self", "cls"):
                    yield f"{dotted}({one.arg})", "" if one.arg in have else "unknown"


def _has(owner: str, name: str) -> bool:
    ours = OURS[owner]
    return (
        name in getattr(ours, "_accepted", {})
        or name in MISSING.get(owner, {})
        or inspect.getattr_static(ours, name, None) is not None
        or any(name in getattr(base, "__annotations__", {}) for base in ours.__mro__)
        or any(re.search(rf"self\.{name}\b[^=\n]*= ", inspect.getsource(base)) for base in ours.__mro__[:-1])
    )


def compare(folder: Path) -> int:
    """Print the names that are unknown, and how many there are; the number of unknown ones."""
    source = Source(folder)
    total = 0
    for title, found in (("fields", engine_fields), ("names", exported), ("members and parameters", members)):
        results = dict(found(source))
        wrong = {name: why for name, why in results.items() if why}
        total += len(wrong)
        print(*(f"{name}: {why}" for name, why in wrong.items()), sep="\n", end="\n" if wrong else "")
        print(f"{folder.name}: {len(results)} {title}, {len(wrong)} unknown")
    return total
