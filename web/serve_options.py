"""The options of `mainspring serve`, and those of its engine."""

from __future__ import annotations

import ipaddress
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from ..engine.args import EngineArgs, check_least, check_port
from ..engine.text.chat_template import check_template
from ..engine.text.response_formats import reasoning_format, tool_format
from ..ipc.config import EngineConfig, Section, fields_of
from ..ipc.errors import InvalidArgumentError, shown
from ..serve import daemon_options

if TYPE_CHECKING:
    import argparse


class ServeOptions(Section, frozen=True, kw_only=True):
    """Where the server listens, who may come in, and which core it asks."""

    host: Annotated[str, "Address to listen at. Other than loopback it needs api_key_file, or insecure."] = "127.0.0.1"
    port: Annotated[int, "Port to listen at; 0: any free one."] = 8000
    connect: Annotated[str | None, "Address of a daemon whose core is asked; none: a core of its own is started."] = (
        None
    )
    key: Annotated[str | None, "For connect at tcp: file of your secret key."] = None
    server_key: Annotated[str | None, "For connect at tcp: the daemon's public key, or its file."] = None
    workers: Annotated[int, "Processes that answer requests. They share the port."] = 1
    api_key_file: Annotated[
        str | None, "File with a line for each tenant: KEY NAME [weight=NUMBER] [admin]; none: no keys are asked for."
    ] = None
    insecure: Annotated[bool, "Listen at an address other than loopback without keys."] = False
    tls_cert: Annotated[str | None, "File of the certificates, for https."] = None
    tls_key: Annotated[str | None, "File of the certificate's secret key."] = None
    cors_origins: Annotated[list[str] | None, "Web pages of these origins may ask; none: no others than ours."] = None
    lora_modules: Annotated[
        list[str] | None, "LoRA adapters, each NAME=FOLDER, or JSON as in vLLM; requests name one as their model."
    ] = None
    model_aliases: Annotated[
        list[str] | None, "Further names of the model; `--served-model-name A B C` gives these, too."
    ] = None
    tool_parser: Annotated[str, "Form of the model's tool calls, or none; auto: as its chat template shows."] = "auto"
    reasoning_parser: Annotated[str, "Form of the model's reasoning, or none; auto: as its template shows."] = "auto"
    chat_template: Annotated[
        str | None, "Chat template in place of the model's own: a file, or the text of the template."
    ] = None
    default_chat_template_kwargs: Annotated[
        dict[str, Any] | None, "Variables for the chat template; those in a request's chat_template_kwargs win."
    ] = None
    trust_request_chat_template: Annotated[
        bool, "Render a chat_template that a request brings, though its loops may stop a worker."
    ] = False
    max_body_bytes: Annotated[
        int | None,
        "Longest body of a request; by default 32 MiB if the model takes media, else 4 MiB and 16 bytes for each "
        "token of its context, because all streams of a worker wait while a body is decoded.",
    ] = None
    body_timeout: Annotated[float, "Seconds that a client has to go on with its request while it sends it."] = 30.0
    restart_wait: Annotated[
        float, "Seconds that new requests wait for a core that restarts, before they are refused."
    ] = 30.0
    drain_timeout: Annotated[float, "Seconds that requests have to finish after SIGTERM or Ctrl-C."] = 30.0
    access_log: Annotated[bool, "Write a line of JSON for each request."] = True
    log_format: Annotated[Literal["text", "json"], "Other log lines as text or JSON."] = "text"


OPTIONS = {info.name: info for info in fields_of(ServeOptions, "serve")}
# Names of the same options in `vllm serve`. The help does not show them; docs/migrating.md does.
VLLM_NAMES = {
    "tool_call_parser": "tool_parser",
    "ssl_certfile": "tls_cert",
    "ssl_keyfile": "tls_key",
    "allowed_origins": "cors_origins",
    "api_server_count": "workers",
}
VLLM_IGNORED = (  # because the server always does what they ask for
    "enable_auto_tool_choice",
    "enable_prompt_tokens_details",
    "enable_server_load_tracking",
    "disable_log_requests",
)
_VLLM_TYPES: dict[str, Any] = {"allowed_origins": json.loads, "api_server_count": int}
_OF_FRONTENDS = ("served_model_name", "tokenizer", "tokenizer_mode", "otlp_traces_endpoint")  # may go with connect


def add_cli_args(command: argparse.ArgumentParser) -> None:
    """A flag for each option, the engine's included; and for those of `vllm serve` that mean the same."""
    import argparse

    daemon_options.add_cli_args(command, OPTIONS)
    text = "names of the model; answers have the first (default: that of --model)"
    command.add_argument("--served-model-name", nargs="+", default=argparse.SUPPRESS, metavar="NAME", help=text)
    command.add_argument("model_tag", nargs="?", metavar="MODEL", help="the same as --model MODEL")
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for name, ours in VLLM_NAMES.items():
        command.add_argument(f"--{name.replace('_', '-')}", dest=ours, type=_VLLM_TYPES.get(name, str), **hidden)
    command.add_argument("--disable-uvicorn-access-log", dest="access_log", action="store_false", **hidden)
    for name in VLLM_IGNORED:
        command.add_argument(f"--{name.replace('_', '-')}", action="store_true", **hidden)


def from_cli_args(args: argparse.Namespace) -> tuple[ServeOptions, EngineConfig | dict[str, Any]]:
    """Options, and the configuration of the own core; with `connect` the options of the frontends.

    Raises:
        MainspringError: as `EngineArgs.create_engine_config`; or options contradict each other.
    """
    own, engine = daemon_options.given_options(args, OPTIONS)
    if isinstance(names := engine.get("served_model_name"), list) and names:
        engine["served_model_name"] = names[0]
        own["model_aliases"] = [*names[1:], *own.get("model_aliases", ())]
    tag = args.model_tag
    if tag is not None and engine.setdefault("model", tag) != tag:
        raise InvalidArgumentError(f"the model is {tag} and {engine['model']}; give one")
    options = checked(ServeOptions(**own))
    check_port("port", options.port)
    check_least("workers", options.workers, 1)
    for name in ("max_body_bytes", "body_timeout", "restart_wait", "drain_timeout"):
        if (given := getattr(options, name)) is not None:
            check_least(name, given, 0)
    if (options.tls_cert is None) != (options.tls_key is None):
        raise InvalidArgumentError("tls_cert and tls_key go together: give both")
    if not (is_loopback(options.host) or options.api_key_file or options.insecure):
        raise InvalidArgumentError(
            f"host is {options.host}, where others could come in: give --api-key-file, or write --insecure"
        )
    if options.connect is None:
        for name in ("key", "server_key"):
            if getattr(options, name):
                raise InvalidArgumentError(f"{name} is for connect; give the daemon's address")
        return options, EngineArgs(**{**daemon_options.DEFAULTS, **engine}).create_engine_config()
    for name in engine:
        if name not in _OF_FRONTENDS:
            raise InvalidArgumentError(f"{name} is given with connect, but the daemon's core has its own")
    return options, engine


def checked(options: ServeOptions) -> ServeOptions:
    """The options with the text of the chat template in place of its file.

    Raises:
        InvalidArgumentError: there is no such format of calls or reasoning, or the template can't be read.
    """
    tool_format(options.tool_parser, None)
    reasoning_format(options.reasoning_parser, None)
    if (given := options.chat_template) is None:
        return options
    try:
        text = Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if "{" not in given:
            raise InvalidArgumentError(f"chat_template is {shown(given)}, which can't be read: {error}") from None
        text = given
    check_template(text)
    return msgspec.structs.replace(options, chat_template=text)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
