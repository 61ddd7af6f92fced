"""The options of a daemon, and those of its engine, from flags and from a TOML file with the same names."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ..engine.args import FIELDS, EngineArgs, add_flags, all_names, check_least, check_port, typed
from ..ipc.config import EngineConfig, FieldInfo, Section, fields_of
from ..ipc.errors import InvalidArgumentError, unknown_argument

if TYPE_CHECKING:
    import argparse

# Defaults of a daemon. They are far above what is good for latency, and bound the memory that a mistake can take.
DEFAULTS = {"max_requests_in_flight": 65_536, "max_requests_per_frontend": 16_384, "max_logprobs": 20}


class DaemonOptions(Section, frozen=True, kw_only=True):
    """Where a daemon listens, who may come in, and how it ends."""

    listen: Annotated[
        str | None, "Where to listen: ipc://PATH or tcp://HOST:PORT; none: core.sock in your runtime folder."
    ] = None
    admin_listen: Annotated[
        str | None,
        "Where connections may change the engine for everyone; none: PATH.admin beside ipc://PATH, admin.sock "
        "beside core.sock, and over tcp the keys listed with `admin`.",
    ] = None
    key: Annotated[str | None, "File of the daemon's secret key, for tcp."] = None
    allowed_keys: Annotated[
        str | None, "File that lists the public keys let in; none: allowed_keys in ~/.config/mainspring."
    ] = None
    insecure: Annotated[bool, "Listen at tcp without keys: whoever reaches the port is let in."] = False
    http_host: Annotated[str, "Address for http_port and metrics_port."] = "127.0.0.1"
    http_port: Annotated[int | None, "Port for GET /healthz and /readyz; none: not served."] = None
    log_format: Annotated[Literal["text", "json"], "Log lines as text or JSON."] = "text"
    drain_timeout: Annotated[
        float, "Seconds that requests have to finish after SIGTERM or Ctrl-C; a second one ends them at once."
    ] = 30.0


OPTIONS = {info.name: info for info in fields_of(DaemonOptions, "daemon")}
Options = Mapping[str, FieldInfo]


def add_cli_args(command: argparse.ArgumentParser, options: Options = OPTIONS) -> None:
    """A flag for each option, the engine's included; see `add_flags`."""
    command.add_argument("--config", metavar="FILE", help="TOML file of the names here, with underscores; flags win")
    add_flags(command, {**options, **FIELDS}.values())


def from_cli_args(args: argparse.Namespace) -> tuple[DaemonOptions, EngineConfig]:
    """Options and configuration, by flags, else by the file named in `config`, else by default.

    Raises:
        MainspringError: as `EngineArgs.create_engine_config`; or the file can't be read or holds what is unknown.
    """
    options, engine = given_options(args, OPTIONS)
    found = DaemonOptions(**options)
    check_least("drain_timeout", found.drain_timeout, 0)
    check_port("http_port", found.http_port)
    return found, EngineArgs(**{**DEFAULTS, **engine}).create_engine_config()


def given_options(args: argparse.Namespace, options: Options) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of these, and those of the engine, that are given by flags or in the file named in `config`.

    Raises:
        InvalidArgumentError: the file can't be read or holds what is unknown, or a value has the wrong type.
    """
    names = all_names()
    flags = {name: getattr(args, name) for name in (*options, *names) if hasattr(args, name)}
    given = {**(_read(args.config, {**options, **FIELDS}) if args.config else {}), **flags}
    own = {name: typed(field, given[name]) for name, field in options.items() if name in given}
    return own, {name: value for name, value in given.items() if name in names and name not in own}


def _read(path: str, options: Options) -> dict[str, Any]:
    """The entries of all tables in one, each checked to be known, and where it belongs."""
    try:
        found = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise InvalidArgumentError(f"config is {path}, which can't be read: {error.strerror}") from None
    except ValueError as error:  # also what is no UTF-8
        raise InvalidArgumentError(f"config is {path}, which is not TOML: {error}") from None
    sections = {field.section for field in options.values()}
    for section in sections & found.keys():
        table = found.pop(section)
        known = [name for name, field in options.items() if field.section == section]
        if not isinstance(table, dict):
            raise InvalidArgumentError(f"{path}: {section} is {table!r}; it must be a table, [{section}]")
        for name, value in table.items():
            if name not in known:
                raise unknown_argument(f"[{section}] in {path}", name, known)
            if name in found:
                raise InvalidArgumentError(f"{path} sets {name} twice")
            found[name] = value
    for name in found:
        if name not in options:
            raise unknown_argument(path, name, [*options, *sections])
    return found
