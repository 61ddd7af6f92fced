"""The command line: ``mainspring generate | chat | demo | version``."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .. import __version__
from ..ipc.errors import InvalidArgumentError, InvalidRequestError, MainspringError, UnknownArgumentError
from ..ipc.params import SamplingParams
from .args import EngineArgs

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
_SAMPLING: dict[str, tuple[Any, str]] = {
    "temperature": (float, "0: greedy (default: the generation config's, else 1)"),
    "top_p": (float, "keep the likeliest tokens that make up this probability"),
    "top_k": (int, "keep so many of the likeliest tokens"),
    "min_p": (float, "keep tokens of at least this share of the likeliest one's probability"),
    "max_tokens": (int, "most tokens of an answer (default: 512)"),
    "min_tokens": (int, "fewest tokens of an answer"),
    "seed": (int, "makes sampling repeatable; also the seed of --load-format dummy"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status: 0, 1 if it failed, 2 if it was called wrongly."""
    args = _parser().parse_args(arguments)
    level = "DEBUG" if args.debug else os.environ.get("MAINSPRING_LOG_LEVEL", "WARNING").upper()
    os.environ["MAINSPRING_LOG_LEVEL"] = level  # the core's too
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    run: Callable[[argparse.Namespace], None] = args.run
    try:
        run(args)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # whoever read our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except Exception as error:
        if level == "DEBUG":
            raise
        ours = isinstance(error, MainspringError)
        text = str(error) if ours else f"{type(error).__name__}: {error} (--debug shows where)"
        print(f"mainspring: error: {' '.join(text.split())}", file=sys.stderr)
        wrong_call = isinstance(error, (InvalidArgumentError, UnknownArgumentError))
        return EXIT_USAGE if wrong_call and not isinstance(error, InvalidRequestError) else EXIT_FAILED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mainspring", description="An LLM inference engine.")
    parser.add_argument("--version", action="version", version=f"mainspring {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = _command(commands, "generate", _generate, "complete one prompt, streaming, or several")
    generate.add_argument("prompts", nargs="*", metavar="PROMPT")
    generate.add_argument("--explain-model", action="store_true", help="say what was fused and why the rest was not")
    chat = _command(commands, "chat", _chat, "talk to the model")
    chat.add_argument("--system", help="a system message to begin with")
    _command(commands, "demo", _demo, "what the engine does, with the embedded model")
    for command in (generate, chat):
        _add_sampling(command)

    version = commands.add_parser("version", help="print the version")
    version.set_defaults(run=lambda args: print(__version__), debug=False)
    return parser


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
    # "resolve": the sampling flag --seed stands for the engine's, too
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text, conflict_handler="resolve", allow_abbrev=False
    )
    command.add_argument("--debug", action="store_true", help="log everything, and show tracebacks")
    command.set_defaults(run=run)
    EngineArgs.add_cli_args(command)
    return command


def _add_sampling(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("sampling")
    for name, (kind, text) in _SAMPLING.items():
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, type=kind, metavar=kind.__name__.upper(), default=argparse.SUPPRESS, help=text)
    group.add_argument(
        "--stop", action="append", metavar="TEXT", default=argparse.SUPPRESS, help="end before this text"
    )
    group.add_argument("--ignore-eos", action="store_true", default=argparse.SUPPRESS, help="go on to --max-tokens")


def _sampling_params(args: argparse.Namespace, defaults: SamplingParams) -> SamplingParams:
    params = defaults.clone()
    params.max_tokens = 512
    for name in (*_SAMPLING, "stop", "ignore_eos"):
        if hasattr(args, name):
            setattr(params, name, getattr(args, name))
    params.validate()
    return params


def _generate(args: argparse.Namespace) -> None:
    from .console import stream
    from .llm import LLM

    if not args.prompts and not args.explain_model:
        raise InvalidArgumentError("there is no prompt; give one or more, in quotes")
    _sampling_params(args, SamplingParams())  # what is wrong there is known before a core is started
    with LLM(**_engine_arguments(args)) as llm:
        if args.explain_model:
            print("\n".join(llm.llm_engine.engine_core.call("explain_model")))
        params = _sampling_params(args, llm.get_default_sampling_params())
        if len(args.prompts) == 1:
            stream(llm.llm_engine, args.prompts[0], params)
        elif args.prompts:
            for output in llm.generate(args.prompts, params):
                print(f"> {output.prompt}\n{output.outputs[0].text.strip()}\n")


def _chat(args: argparse.Namespace) -> None:
    from .console import chat
    from .llm import LLM

    _sampling_params(args, SamplingParams())
    with LLM(**_engine_arguments(args)) as llm:
        chat(llm.llm_engine, _sampling_params(args, llm.get_default_sampling_params()), args.system)


def _demo(args: argparse.Namespace) -> None:
    from .console import demo

    demo(_engine_arguments(args))


def _engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    given = EngineArgs.from_cli_args(args)
    return {name: getattr(given, name) for name in given.__dataclass_fields__}


if __name__ == "__main__":
    sys.exit(main())
