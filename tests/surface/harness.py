"""Rows of the public surface, their tests, and a check that each test fails without the row's member.

A row is `OWNER.NAME`: a member of a class, a field of parameters, arguments or outputs, a metric (`metrics.NAME`) or a
name of the package (`mainspring.NAME`). A test is a function of a `Place`: engines of one mode. It runs twice: with the
member it must pass, and with the member removed it must fail.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import dataclasses
import functools
import inspect
import json
import re
import signal
import textwrap
import time
import urllib.request
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import pytest

import mainspring
from daemons import Daemon
from mainspring import AsyncLLMEngine, EngineArgs, LLMEngine, SamplingParams
from mainspring.engine import llm
from mainspring.engine.observe import metrics
from mainspring.engine.request import outputs
from mainspring.engine.text.tokenizer import Tokenizer
from mainspring.ipc import structured

IN, OWN, CONNECTED = MODES = ("in-process", "own process", "connected")
NOT_INSIDE = ((OWN, CONNECTED), "its core is always in another process")
PATIENCE_S = 120  # seconds; a guard against hanging
SHARED = 3  # number of engines kept open besides the plain one
BASE = {"num_gpu_blocks_override": 300}

Test = Callable[["Place"], Any]


class Row(NamedTuple):
    """One row and its test. `of` is the member that is removed; the name may add a comment after a space."""

    name: str
    test: Test
    modes: tuple[str, ...] = MODES
    why: str = ""  # the test supports only these modes
    says: str = ""  # for the page, if there is no docstring

    @property
    def of(self) -> str:
        return self.name.split()[0].rstrip(",")


class Result(NamedTuple):
    """The result of a row in one mode: `passed`, or the problem."""

    row: str
    mode: str
    wrong: str = ""
    seconds: float = 0.0


ROWS: dict[str, Row] = {}
NEXT: dict[str, Row] = {}  # accepted by signature; the test sees that the error names the feature


def row(
    *names: str, modes: tuple[str, ...] = (), why: str = "", says: str = "", into: dict[str, Row] = ROWS
) -> Callable[[Test], Test]:
    """Register a test for one or several rows; each member is removed separately."""

    def register(test: Test) -> Test:
        for name in names:
            assert name not in into, f"{name} has two tests"
            by_owner = {"AsyncLLMEngine": NOT_INSIDE, "LLM": NOT_INSIDE}.get(name.split(".")[0], (MODES, ""))
            into[name] = Row(name, test, modes or by_owner[0], why or by_owner[1], says)
        return test

    return register


def comes(feature: str, modes: tuple[str, ...] = MODES) -> Callable[[Test], Test]:
    """Register a row that raises `NotSupportedError` until its feature exists. The error must name `feature`."""

    def register(test: Test) -> Test:
        def refused(at: Place) -> None:
            with pytest.raises(mainspring.NotSupportedError, match=feature.split()[-1]):
                test(at)

        row(feature, modes=modes, into=NEXT)(refused)
        return test

    return register


# ---------------------------------------------------------------------- what there is

ENGINES: dict[str, type] = {"LLMEngine": LLMEngine, "AsyncLLMEngine": AsyncLLMEngine, "LLM": mainspring.LLM}
_DUNDER = ("__init__", "__call__", "__enter__", "__exit__", "__aenter__", "__aexit__")
_PARAMETERS = ("SamplingParams", "PoolingParams", "BeamSearchParams", "LoRARequest", "PromptAdapterRequest")


def owners() -> dict[str, type]:
    """All classes whose members are rows, by name."""
    found = dict(ENGINES)
    for name in (*_PARAMETERS, "EngineArgs", "AsyncEngineArgs"):
        if (kind := getattr(mainspring, name, None)) is not None:
            found[name] = kind
    found["Tokenizer"] = Tokenizer
    found["StructuredOutputsParams"] = structured.StructuredOutputsParams
    for kind in (*vars(outputs).values(), mainspring.BeamSearchOutput, mainspring.BeamSearchSequence):
        if _is_output(kind) and not kind.__name__.startswith("_"):
            found[kind.__name__] = kind
    return found


def _is_output(kind: Any) -> bool:
    """Whether a class is of what users get."""
    modules = outputs.__name__, mainspring.BeamSearchOutput.__module__
    return isinstance(kind, type) and kind.__module__ in modules


def existing() -> dict[str, Any]:
    """All existing rows, found by inspection: name → the member, or None if only an instance has it."""
    found: dict[str, Any] = {}
    for owner, kind in owners().items():
        inherited = members(EngineArgs) if owner == "AsyncEngineArgs" else {}
        found |= {f"{owner}.{name}": one for name, one in members(kind).items() if name not in inherited}
    found |= {f"metrics.{name}": None for name in metrics.HELP}
    found |= {f"mainspring.{name}": None for name in mainspring.__all__ if name != "__version__"}
    return found


def members(kind: type) -> dict[str, Any]:
    """Public fields, methods and properties of a class, and the attributes that its methods set on an instance."""
    found: dict[str, Any] = dict.fromkeys(instance_attributes(kind))
    if dataclasses.is_dataclass(kind):
        found |= dict.fromkeys(field.name for field in dataclasses.fields(kind))
    for name in dir(kind):
        if name in found or (name.startswith("_") and (name not in _DUNDER or dataclasses.is_dataclass(kind))):
            continue
        one = inspect.getattr_static(kind, name)
        if name.startswith("_") and not inspect.isfunction(one):
            continue
        found[name] = one
    return found


@functools.lru_cache
def instance_attributes(kind: type) -> list[str]:
    """Public attributes that are assigned to `self` anywhere in the class."""
    found = []
    for one in kind.__mro__:
        if not one.__module__.startswith("mainspring.engine.") or dataclasses.is_dataclass(one):
            continue
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(one)))):
            if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store) or node.attr.startswith("_"):
                continue
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                found.append(node.attr)
    return found


# ---------------------------------------------------------------------- taking a member away


@contextlib.contextmanager
def without(name: str, at: Place) -> Iterator[None]:
    """A context in which the member returns None, the field has its default, or the metric does not exist."""
    owner, _, member = name.partition(".")
    if owner == "metrics":
        with mock.patch.object(metrics.StatLoggerManager, "metrics", _without_metric(member)):
            at.hidden = member
            yield
            at.hidden = None
    elif owner == "mainspring":
        getattr(mainspring, member)
        with mock.patch.object(mainspring, member, None):
            yield
    else:
        kind = owners()[owner]
        fields = {field.name: field for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else {}
        if fields and member not in fields and member in inspect.get_annotations(kind):  # only an argument
            with mock.patch.object(kind, "__init__", _init_ignoring(kind, member)):
                yield
        elif member not in fields:
            with mock.patch.object(kind, member, nothing(kind, member), create=True):
                yield
        elif _is_output(kind):
            at.blank = (kind, member)
            yield
            at.blank = None
        elif issubclass(kind, EngineArgs):
            at.default = member
            with mock.patch.object(kind, "__init__", _init_without(kind, member)):
                yield
            at.default = None
        else:
            with mock.patch.object(kind, "__init__", _init_without(kind, member)):
                yield


def nothing(kind: type, member: str) -> Any:
    """A replacement: for a method, one of the same kind that returns None or no outputs; for an attribute, None."""
    one = inspect.getattr_static(kind, member, None)
    if isinstance(one, (classmethod, staticmethod)):
        return staticmethod(lambda *_, **__: None)
    if inspect.iscoroutinefunction(one):

        async def waited(*_: Any, **__: Any) -> None:
            return None

        return waited
    if inspect.isasyncgenfunction(one) or re.search("Stream|AsyncIterator", str(getattr(one, "__annotations__", ""))):

        async def stream(*_: Any, **__: Any) -> Any:
            for _ in ():
                yield

        return stream
    if inspect.isfunction(one):
        return lambda *_, **__: None
    return property(lambda _: None, lambda _, __: None)


def _init_without(kind: Any, member: str) -> Callable[..., None]:
    original = kind.__init__
    (field,) = (field for field in dataclasses.fields(kind) if field.name == member)
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    else:
        default = 1 if field.default is dataclasses.MISSING else field.default  # if required: the smallest

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        changed = [] if default is None and isinstance(getattr(self, member), list) else default
        object.__setattr__(self, member, changed)  # some are frozen

    return init


def _init_ignoring(kind: Any, member: str) -> Callable[..., None]:
    original = kind.__init__
    return lambda self, *args, **kwargs: original(self, *args, **{k: v for k, v in kwargs.items() if k != member})


def _without_metric(name: str) -> Callable[[Any], list[Any]]:
    original = metrics.StatLoggerManager.metrics
    return lambda self: [one for one in original(self) if one.name != metrics.PREFIX + name]


def _blanked(value: Any, kind: type, member: str) -> None:
    """Set the attribute to None in every object of the class inside an output."""
    if isinstance(value, (list, tuple)):
        for one in value:
            _blanked(one, kind, member)
    elif isinstance(value, dict):
        _blanked(list(value.values()), kind, member)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _blanked(getattr(value, field.name), kind, member)
        if isinstance(value, kind):
            setattr(value, member, None)


# ---------------------------------------------------------------------- engines of one mode


class Place:
    """Engines of one mode for the tests, shared by tests with the same arguments."""

    def __init__(self, mode: str, folder: Path) -> None:
        self.mode, self.folder = mode, folder
        self.default: str | None = None  # the argument that is left at its default
        self.hidden: str | None = None  # the metric that is removed
        self.blank: tuple[type, str] | None = None  # the attribute of outputs that is None
        self.loop = asyncio.new_event_loop()
        self._engines: OrderedDict[str, Any] = OrderedDict()
        self._daemons: dict[str, Daemon] = {}
        self._fresh: list[Any] = []
        self._files: dict[str, Any] = {}
        self._numbers = iter(range(10**9))

    @property
    def inside(self) -> bool:
        return self.mode == IN

    def once(self, name: str, make: Callable[[Path], Any]) -> Any:
        """Files for a test, created in a separate folder at the first use."""
        if name not in self._files:
            (folder := self.folder / name).mkdir()
            self._files[name] = make(folder)
        return self._files[name]

    def _arguments(self, args: dict[str, Any]) -> dict[str, Any]:
        given = {**BASE, **{name: value for name, value in args.items() if name != self.default}}
        return {name: value for name, value in given.items() if value is not None}

    def daemon(self, **args: Any) -> Daemon:
        """A running daemon with these engine arguments."""
        flags = [_flag(name, value) for name, value in self._arguments(args).items()]
        key = " ".join(flags)
        if key not in self._daemons:
            number = len(list(self.folder.glob("d*")))
            (folder := self.folder / f"d{number}").mkdir()
            daemon = Daemon(folder, *flags)
            self._daemons[key] = daemon
            daemon.ready_line()
        return self._daemons[key]

    def address(self, **args: Any) -> str:
        """The address of a daemon, with admin rights."""
        return self.daemon(**args).address + ".admin"

    def fresh(self, kind: Any = LLMEngine, /, **args: Any) -> Any:
        """An engine of this mode for a single test, which may break it."""
        if self.mode == CONNECTED:
            made = kind(connect=self.address(**args)) if kind is llm.LLM else kind.connect(self.address(**args))
        elif kind is llm.LLM:
            made = kind(**self._arguments(args))
        elif kind is AsyncLLMEngine:
            made = kind.from_engine_args(EngineArgs(**self._arguments(args)))
        else:
            made = kind.from_engine_args(EngineArgs(**self._arguments(args)), enable_multiprocessing=not self.inside)
        self._fresh.append(made)
        return made

    def shared(self, kind: Any, /, **args: Any) -> Any:
        key = f"{kind.__name__} {sorted(self._arguments(args).items())}"
        if key not in self._engines:
            made = self.fresh(kind, **args)
            self._fresh.remove(made)
            self._engines[key] = made
            extra = [one for one in self._engines if one not in self._plain()]
            for old in extra[:-SHARED]:
                _shut(self._engines.pop(old))
        self._engines.move_to_end(key)
        return self._engines[key]

    def _plain(self) -> set[str]:
        return {f"{kind.__name__} {sorted(BASE.items())}" for kind in ENGINES.values()}

    def engine(self, **args: Any) -> LLMEngine:
        return self.shared(LLMEngine, **args)

    def aengine(self, **args: Any) -> AsyncLLMEngine:
        return self.shared(AsyncLLMEngine, **args)

    def llm(self, **args: Any) -> Any:
        return self.shared(llm.LLM, **args)

    # ------------------------------------------------------------------ requests

    def id(self) -> str:
        return f"r{next(self._numbers)}"

    def stream(self, prompt: Any = "Once upon a time", /, engine: Any = None, **sampling: Any) -> list[Any]:
        """All outputs of one request, greedy by default."""
        engine = engine or self.engine()
        given = {"temperature": 0.0, "max_tokens": 8, **sampling}
        name = engine.add_request(self.id(), prompt, SamplingParams(**given))
        return self.outputs(engine, name)

    def outputs(self, engine: LLMEngine, *names: str) -> list[Any]:
        """Step until all requests have ended; → the outputs of the named requests, or of all."""
        found: list[Any] = []
        while engine.has_unfinished_requests():
            found += [one for one in engine.step() if not names or one.request_id in names]
        return self.seen(found)

    def seen(self, found: Any) -> Any:
        if self.blank is not None:
            _blanked(found, *self.blank)
        return found

    def run(self, prompt: Any = "Once upon a time", /, engine: Any = None, **sampling: Any) -> Any:
        """The last output of one request."""
        return self.stream(prompt, engine, **sampling)[-1]

    def text(self, prompt: Any = "Once upon a time", /, engine: Any = None, **sampling: Any) -> str:
        return self.run(prompt, engine, **sampling).outputs[0].text

    def ids(self, prompt: Any = "Once upon a time", /, engine: Any = None, **sampling: Any) -> list[int]:
        return list(self.run(prompt, engine, **sampling).outputs[0].token_ids)

    def metric(self, name: str, engine: Any = None, **labels: str) -> Any:
        """A metric's value, or the number of a histogram's observations."""
        found = [
            one
            for one in (engine or self.engine()).get_metrics()
            if one.name == metrics.PREFIX + name and labels.items() <= one.labels.items()
        ]
        assert len(found) == 1, f"{name}: {found}"
        return getattr(found[0], "value", None) if hasattr(found[0], "value") else found[0].count

    def scrape(self, port: int) -> dict[str, float]:
        """The metrics served for Prometheus, without labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as page:
            lines = [line.decode().rsplit(" ", 1) for line in page if not line.startswith(b"#")]
        found = {re.sub(r"^mainspring:|\{.*", "", name): float(value) for name, value in lines}
        return {name: value for name, value in found.items() if self.hidden is None or self.hidden not in name}

    # ------------------------------------------------------------------ afterwards

    def settle(self) -> None:
        """Reset the shared engines after a test."""
        for engine in self._fresh:
            _shut(engine)
        self._fresh = []
        for key, engine in list(self._engines.items()):
            try:
                self._settle(getattr(engine, "llm_engine", engine))
            except Exception:
                _shut(self._engines.pop(key))

    def _settle(self, engine: Any) -> None:
        left = list(engine.output_processor._requests)
        if isinstance(engine, AsyncLLMEngine):
            self.loop.run_until_complete(asyncio.wait_for(_settle_async(engine, left), PATIENCE_S))
            return
        for method in RESTORES:
            with contextlib.suppress(mainspring.MainspringError):
                engine.engine_core.call(method)
        engine.abort_request(left)
        while engine.has_unfinished_requests():
            engine.step()

    def close(self) -> None:
        """Stop all engines and daemons, also after an interrupt."""
        try:
            for engine in (*self._fresh, *self._engines.values()):
                _shut(engine)
            self.loop.run_until_complete(asyncio.sleep(0.05))
        finally:
            for daemon in self._daemons.values():
                daemon.end()


RESTORES = ("wake_up", "resume_generation")


async def _settle_async(engine: AsyncLLMEngine, left: list[str]) -> None:
    for method in RESTORES:
        with contextlib.suppress(mainspring.MainspringError):
            await engine.engine_core.call(method)
    await engine.abort(left)


def _shut(engine: Any) -> None:
    with contextlib.suppress(Exception):
        engine.shutdown()


def _flag(name: str, value: Any) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    if isinstance(value, dict):
        return f"--{flag}={json.dumps(value)}"
    return f"--{flag}={','.join(map(str, value)) if isinstance(value, list) else value}"


# ---------------------------------------------------------------------- running


def _alarm(_: int, __: FrameType | None) -> None:
    raise TimeoutError(f"not done after {PATIENCE_S} s")


def attempt(test: Test, at: Place) -> BaseException | None:
    """Run a test; → the exception it raised."""
    signal.signal(signal.SIGALRM, _alarm)
    signal.alarm(PATIENCE_S)
    try:
        if inspect.iscoroutinefunction(test):
            at.loop.run_until_complete(test(at))
        else:
            test(at)
    except (Exception, SystemExit, pytest.fail.Exception) as error:
        return error
    finally:
        signal.alarm(0)
    return None


def check(one: Row, at: Place, take_away: bool = True) -> Result:
    """Check a row in one mode: its test passes, and fails without the member."""
    began = time.monotonic()
    error = attempt(one.test, at)
    at.settle()
    wrong = "" if error is None else f"{type(error).__name__}: {_where(error)} {error}"
    if error is None and take_away:
        with without(one.of, at):
            error = attempt(one.test, at)
        at.default = at.hidden = at.blank = None
        at.settle()
        wrong = "" if error is not None else "the test still passes with the member taken away"
    return Result(one.name, at.mode, wrong[:400], round(time.monotonic() - began, 2))


def _where(error: BaseException) -> str:
    frames = []
    trace = error.__traceback__
    while trace is not None:
        if "/surface/" in trace.tb_frame.f_code.co_filename and "harness" not in trace.tb_frame.f_code.co_filename:
            frames.append(f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}")
        trace = trace.tb_next
    return frames[-1] if frames else ""
