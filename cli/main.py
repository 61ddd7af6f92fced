"""``mainspring generate | chat | demo | bench | batch | serve | daemon | rank | status | top | keys | kernels |
version``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

from .. import __version__
from ..demo import VISION_MODEL_PATH
from ..engine.args import EngineArgs, add_flags, add_vllm_flags, all_names, dashed, nearest_flag
from ..ipc import keys, logs
from ..ipc.config import MODALITIES, fields_of
from ..ipc.errors import (
    AddressInUseError,
    EngineDeadError,
    InvalidArgumentError,
    InvalidRequestError,
    MainspringError,
    UnknownArgumentError,
)
from ..ipc.params import SamplingParams
from ..serve import daemon_options
from ..tools import bench
from ..web import serve_options


class ExitCode(IntEnum):
    """How a command ended."""

    OK = 0  # a daemon: it was stopped
    FAILED = 1  # a daemon: it did not start
    USAGE = 2  # called wrongly
    DEAD = 3  # the core is gone for good; a daemon: it died too often
    ADDRESS = 4  # an address is in use, or can't be listened at
    INTERRUPTED = 130


_SAMPLING: dict[str, dict[str, Any]] = {
    "temperature": {"type": float, "help": "0: greedy (default: the generation config's, else 1)"},
    "top_p": {"type": float, "help": "keep the likeliest tokens that make up this probability"},
    "top_k": {"type": int, "help": "keep so many of the likeliest tokens"},
    "min_p": {"type": float, "help": "keep tokens of at least this share of the likeliest one's probability"},
    "max_tokens": {"type": int, "help": "most tokens of an answer (default: 512)"},
    "min_tokens": {"type": int, "help": "fewest tokens of an answer"},
    "seed": {"type": int, "help": "makes sampling repeatable; also the seed of --load-format dummy"},
    "stop": {"action": "append", "metavar": "TEXT", "help": "end before this text; may be given several times"},
    "ignore_eos": {"action": "store_true", "help": "go on to --max-tokens"},
}
_OF_BATCHES = ("tool_parser", "reasoning_parser", "chat_template", "default_chat_template_kwargs")  # of `serve`'s


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its `ExitCode`, or for `status` its own."""
    given = dashed(sys.argv[1:] if arguments is None else arguments)
    args, unknown = _parser(given).parse_known_args(given)
    if unknown:
        near = nearest_flag(args.parser, unknown[0])
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}{f'; did you mean {near}?' if near else ''}")
    if args.debug:
        os.environ["MAINSPRING_LOG_LEVEL"] = "DEBUG"  # the core's too
    os.environ.setdefault("MAINSPRING_LOG_LEVEL", args.usual_log_level)
    run: Callable[[argparse.Namespace], int | None] = args.run
    try:
        if run not in (_daemon, _serve):  # which learn their log format later
            logs.set_up(args.command)
        return run(args) or ExitCode.OK
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # whoever read our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FAILED
    except Exception as error:
        if args.debug:
            raise
        ours = isinstance(error, MainspringError)
        text = str(error) if ours else f"{type(error).__name__}: {error} (--debug shows where)"
        print(f"mainspring: error: {' '.join(text.split())}", file=sys.stderr)
        return _exit_code(error)


def _exit_code(error: Exception) -> ExitCode:
    if isinstance(error, (InvalidArgumentError, UnknownArgumentError)) and not isinstance(error, InvalidRequestError):
        return ExitCode.USAGE
    if isinstance(error, EngineDeadError):
        return ExitCode.DEAD
    return ExitCode.ADDRESS if isinstance(error, AddressInUseError) else ExitCode.FAILED


def _parser(given: Sequence[str] = ()) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mainspring",
        description="An LLM inference engine.",
        epilog="mainspring COMMAND --help explains each; docs/daemon.md says how to run a daemon",
    )
    parser.add_argument("--version", action="version", version=f"mainspring {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")

    generate = _command(commands, "generate", _generate, "complete one prompt, streaming, or several")
    generate.add_argument("prompts", nargs="*", metavar="PROMPT", help="one is streamed, several are a batch")
    generate.add_argument("--explain-model", action="store_true", help="say what was fused and why the rest was not")
    for modality in MODALITIES:
        text = "before each prompt, which then goes through the chat template; may be given several times"
        generate.add_argument(f"--{modality}", action="append", metavar="FILE_OR_URL", help=text)
    chat = _command(commands, "chat", _chat, "talk to the model")
    chat.add_argument("--system", help="a system message to begin with")
    demo = _command(commands, "demo", _demo, "what the engine does, with the embedded model")
    benches = _command(commands, "bench", None, "how fast the engine is: bench throughput, bench latency, bench serve")
    measured = benches.add_subparsers(required=True, metavar="BENCHMARK", dest="benchmark")
    benchmarks = [_command(measured, name, _bench, kind.__doc__ or "") for name, kind in bench.COMMANDS.items()]
    batch = _command(commands, "batch", _batch, "answer the requests of a file in OpenAI's batch format")
    batch.add_argument("source", metavar="IN.jsonl", type=Path, help="the requests")
    batch.add_argument("target", metavar="OUT.jsonl", type=Path, help="the answers; the same command goes on with them")
    batch.add_argument("--max-concurrent", type=int, default=256, metavar="N", help="requests at once (default: 256)")
    add_flags(batch, map(serve_options.OPTIONS.__getitem__, _OF_BATCHES))
    daemon = _command(commands, "daemon", _daemon, "keep a core running that any number of frontends share", "INFO")
    daemon_options.add_cli_args(daemon)
    serve = _command(commands, "serve", _serve, "serve OpenAI's API over HTTP", "INFO")
    serve_options.add_cli_args(serve)
    rank = _command(commands, "rank", _rank, "offer this machine's GPUs to a core on another machine", "INFO")
    rank.add_argument(
        "--join", metavar="ADDRESS", required=True, help="tcp://MASTER_ADDR:MASTER_PORT, as the core has them"
    )
    default = f"default: {keys.DEFAULT_KEY} in ~/.config/mainspring"
    rank.add_argument("--key-file", metavar="FILE", help=f"the key that all machines of the engine share ({default})")
    rank.add_argument("--ranks", type=int, metavar="N", help="how many (default: one for each GPU, else 1)")
    for command in (generate, chat, demo, batch, *benchmarks):
        EngineArgs.add_cli_args(command)
    for command in (generate, chat, demo, batch, daemon, serve, *benchmarks):
        add_vllm_flags(command, given)
        takes = {"generate": " PROMPT ...", "batch": " IN.jsonl OUT.jsonl", "serve": " [MODEL]"}.get(
            command.prog.split()[-1], ""
        )
        command.usage = f"%(prog)s [OPTION ...]{takes}"  # all options are some thirty lines, before each error, too
    for command in (generate, chat, batch, *benchmarks):
        command.add_argument("--connect", metavar="ADDRESS", help="use the daemon there, and start no core")
        _add_keys(command)
    for command in (generate, chat):
        _add_sampling(command)
    for kind, command in zip(bench.COMMANDS.values(), benchmarks, strict=True):
        add_flags(command, fields_of(kind, "benchmark"))

    status = _command(commands, "status", _status, "how a daemon is")
    status.epilog = "exit status: 0 ready, 1 starting or stopping, 2 unreachable"
    status.add_argument("--json", action="store_true", help="as one JSON object")
    top = _command(commands, "top", _top, "how a daemon is, live; q leaves")
    scale = _command(commands, "scale", _scale, "let a daemon have more cores or fewer; no stream ends")
    scale.add_argument("count", type=int, metavar="N", help="cores, each with a copy of the model")
    for command in (status, top, scale):
        command.add_argument(
            "address", nargs="?", metavar="ADDRESS", help="default: where a daemon without --listen listens"
        )
        _add_keys(command)

    _add_key_commands(_command(commands, "keys", None, "keys for daemons that listen at tcp"))
    kernels = _command(commands, "kernels", _kernels, "CUDA kernels ahead of time: kernels build, kernels list")
    kernels.add_argument("arguments", nargs=argparse.REMAINDER, metavar="build | list [OPTION ...]")
    _command(commands, "version", lambda args: print(__version__), "print the version")
    return parser


def _command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int | None] | None,
    text: str,
    log_level: str = "WARNING",
) -> argparse.ArgumentParser:
    # "resolve": the sampling flag --seed stands for the engine's, too
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text, conflict_handler="resolve", allow_abbrev=False
    )
    command.add_argument("--debug", action="store_true", help="log everything, and show tracebacks")
    command.set_defaults(run=run, usual_log_level=log_level, parser=command)
    return command


def _add_keys(command: argparse.ArgumentParser) -> None:
    default = f"default: {keys.DEFAULT_KEY} in ~/.config/mainspring"
    command.add_argument("--key", metavar="FILE", help=f"for tcp: your secret key ({default})")
    command.add_argument("--server-key", metavar="FILE_OR_KEY", help="for tcp: the daemon's public key")


def _add_key_commands(command: argparse.ArgumentParser) -> None:
    commands = command.add_subparsers(required=True, metavar="COMMAND")
    new = _command(
        commands, "new", _new_key, "make a pair: NAME.key, to be kept secret, and NAME.pub, to be given away"
    )
    name = Path(keys.DEFAULT_KEY).stem
    new.add_argument("name", nargs="?", metavar="NAME", default=name, help=f"default: {name}, which --key stands for")
    new.add_argument("--output", metavar="DIR", type=Path, help="default: ~/.config/mainspring")
    allow = _command(commands, "allow", _allow_key, "let the owner of a public key connect")
    allow.add_argument("public", metavar="KEY_OR_FILE", help="the public key, or its file")
    allow.add_argument("--name", help="how the owner is called (default: what the file says)")
    allow.add_argument("--weight", type=float, default=1.0, help="most weight its frontends may ask for (default: 1)")
    allow.add_argument("--admin", action="store_true", help="may change the engine for everyone")
    listed = _command(commands, "list", _list_keys, "who may connect")
    for one in (allow, listed):
        default = "allowed_keys in ~/.config/mainspring"
        one.add_argument("--allowed-keys", metavar="FILE", type=Path, help=f"default: {default}")


def _add_sampling(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("sampling")
    for name, how in _SAMPLING.items():
        shown = {"metavar": how["type"].__name__.upper()} if "type" in how else {}
        group.add_argument(f"--{name.replace('_', '-')}", default=argparse.SUPPRESS, **shown, **how)


def _sampling_params(args: argparse.Namespace, defaults: SamplingParams) -> SamplingParams:
    params = defaults.clone()
    params.max_tokens = 512
    for name in _SAMPLING:
        if hasattr(args, name):
            setattr(params, name, getattr(args, name))
    params.validate()
    return params


def _generate(args: argparse.Namespace) -> ExitCode:
    from ..engine.llm import LLM
    from .console import chat_prompt, media_part, stream

    if not args.prompts and not args.explain_model:
        raise InvalidArgumentError("there is no prompt; give one or more, in quotes")
    _sampling_params(args, SamplingParams())  # what is wrong there is known before a core is started
    failed, arguments = False, _llm_arguments(args)
    media = [media_part(kind, name) for kind in MODALITIES for name in getattr(args, kind) or ()]
    if args.image and args.connect is None:
        arguments.setdefault("model", str(VISION_MODEL_PATH))
    with LLM(**arguments) as llm:
        if args.explain_model:
            print("\n".join(llm.llm_engine.engine_core.call("explain_model")))
        params = _sampling_params(args, llm.get_default_sampling_params())
        prompts: list[Any] = list(args.prompts)
        if media:
            asked = [[*media, {"type": "text", "text": text}] for text in args.prompts]
            prompts = [chat_prompt(llm.llm_engine, [{"role": "user", "content": parts}]) for parts in asked]
        if len(prompts) == 1:
            stream(llm.llm_engine, prompts[0], params, special=not media)
        elif prompts:
            more: dict[str, Any] = {"tokenization_kwargs": {"add_special_tokens": not media}, "on_error": "return"}
            outputs = llm.generate(prompts, params, **more)
            for text, output in zip(args.prompts, outputs, strict=True):
                answer = output.outputs[0]
                failed = failed or answer.error is not None
                print(f"> {text}\n{answer.error or answer.text.strip()}\n")
    return ExitCode.FAILED if failed else ExitCode.OK


def _chat(args: argparse.Namespace) -> None:
    from ..engine.llm import LLM
    from .console import chat

    _sampling_params(args, SamplingParams())
    with LLM(**_llm_arguments(args)) as llm:
        chat(llm.llm_engine, _sampling_params(args, llm.get_default_sampling_params()), args.system)


def _demo(args: argparse.Namespace) -> None:
    from .console import demo

    demo(_engine_arguments(args))


def _bench(args: argparse.Namespace) -> ExitCode:
    from rich.console import Console

    found = bench.run(bench.options_of(args), _llm_arguments(args))
    Console().print(bench.table(found))
    bench.save(found)
    return ExitCode.FAILED if any(figures["failed"] for figures in found.results) else ExitCode.OK


def _batch(args: argparse.Namespace) -> ExitCode:
    from ..engine.async_llm_engine import AsyncEngineArgs, AsyncLLMEngine
    from . import batch

    given = _llm_arguments(args)
    options = serve_options.checked(
        serve_options.ServeOptions(
            trust_request_chat_template=True,  # the file is the user's own
            restart_wait=float("inf"),
            **{name: getattr(args, name) for name in _OF_BATCHES if hasattr(args, name)},
        )
    )
    given.pop("reasoning_parser", None)  # which is an argument of vLLM's engine, too
    next(batch.requests_of(args.source), None)  # that it can't be read is said before a core is started
    address = given.pop("connect", None)
    if address is None:
        engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(**given))
    else:
        engine = AsyncLLMEngine.connect(address, **{name: value for name, value in given.items() if value is not None})
    try:
        failed = batch.run(engine, options, args.source, args.target, args.max_concurrent)
    finally:
        engine.shutdown()
    return ExitCode.FAILED if failed else ExitCode.OK


def _engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in all_names() if hasattr(args, name)}


def _llm_arguments(args: argparse.Namespace) -> dict[str, Any]:
    given = _engine_arguments(args)
    if args.connect is None:
        if args.key or args.server_key:
            raise InvalidArgumentError("--key and --server-key are for --connect; give the daemon's address")
        return given
    given.pop("seed", None)  # the flag is the request's here
    return {"connect": args.connect, "key": args.key, "server_key": args.server_key, **given}


def _daemon(args: argparse.Namespace) -> None:
    from ..serve.daemon import serve

    options, config = daemon_options.from_cli_args(args)
    os.environ["MAINSPRING_LOG_FORMAT"] = options.log_format  # the core's too
    logs.set_up("daemon")
    serve(options, config, _say)


def _serve(args: argparse.Namespace) -> None:
    from ..web.server import serve

    options, engine = serve_options.from_cli_args(args)
    serve(options, engine, lambda url: _say(f"ready at {url}; the API is at {url}/v1"))


def _rank(args: argparse.Namespace) -> None:
    from ..ipc.rank_agent import num_gpus, run_agents
    from ..ipc.transport import ipc_path

    count = num_gpus() or 1 if args.ranks is None else args.ranks
    if count < 1:
        raise InvalidArgumentError(f"ranks is {count}; it must be at least 1")
    if ipc_path(args.join) is not None:
        raise InvalidArgumentError(f"join is {args.join}; it must be tcp://HOST:PORT")
    run_agents(args.join, keys.load_keypair(args.key_file or keys.config_folder() / keys.DEFAULT_KEY), count)


def _say(text: str) -> None:
    # that nobody listens is no reason to end; print() would fail again at exit
    with contextlib.suppress(OSError, AttributeError):  # sys.stdout is None if it was closed before the start
        os.write(sys.stdout.fileno(), f"{text}\n".encode())


def _status(args: argparse.Namespace) -> int:
    from rich.console import Console

    from ..serve.status import document, frame, is_ready, look, others

    address, keys_ = args.address or _default_address(), {"key": args.key, "server_key": args.server_key}
    try:
        found = look(address, **keys_)
        siblings = others(found, address, **keys_)
    except Exception as error:  # any other exit code would mean that somebody is there
        if args.json:
            print(json.dumps({"phase": "unreachable", "error": str(error)}))
        else:
            print(f"unreachable: {error}")
        return 2
    if args.json:
        print(json.dumps(document(found, siblings)))
    else:
        Console().print(frame(found, siblings=siblings))
    return 0 if is_ready(found) else 1


def _top(args: argparse.Namespace) -> None:
    from ..serve.status import show

    show(args.address or _default_address(), key=args.key, server_key=args.server_key)


def _scale(args: argparse.Namespace) -> None:
    from ..serve.scale import scale

    scale(args.count, args.address or _default_address(), args.key, args.server_key)
    print(f"{args.count} cores serve")


def _default_address() -> str:
    from ..ipc.transport import default_folder, ipc_address

    return ipc_address(default_folder())


def _new_key(args: argparse.Namespace) -> None:
    path = (args.output or keys.config_folder()) / f"{args.name}.key"
    pair = keys.new_keypair(path)
    print(f"secret key: {path}\npublic key: {path.with_suffix('.pub')}: {pair.public}")


def _allow_key(args: argparse.Namespace) -> None:
    key, name = keys.load_public(args.public)
    path = args.allowed_keys or keys.default_allowed()
    allowed = keys.AllowedKey(args.name or name, args.weight, args.admin)
    if not allowed.name:
        raise InvalidArgumentError("the key has no name; give --name")
    keys.append_allowed(path, key, allowed)
    print(f"{allowed.name} may connect, by {path}")


def _list_keys(args: argparse.Namespace) -> None:
    for key, allowed in keys.load_allowed(args.allowed_keys or keys.default_allowed()).items():
        print(f"{key} {allowed.name} weight={allowed.weight:g}{' admin' * allowed.admin}")


def _kernels(args: argparse.Namespace) -> int:
    command = [sys.executable, "-P", "-m", "mainspring.tools.build_kernels", *args.arguments]
    return subprocess.run(command, check=False).returncode  # it needs torch, which nothing here may import


if __name__ == "__main__":
    sys.exit(main())
