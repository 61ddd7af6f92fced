"""The interactive parts of the command line: a streamed answer, a conversation, the demo."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from ..engine.chat_methods import chat_prompt as prompt_of_chat
from ..engine.llm import LLM
from ..engine.llm_engine import LLMEngine
from ..engine.request.outputs import CompletionOutput
from ..engine.request.prompts import Prompt
from ..ipc.errors import InvalidRequestError, NotSupportedError, OverloadedError, RequestFailedError
from ..ipc.params import SamplingParams

_DEMO_QUESTIONS = (
    "What is thirty-four plus fifty-one?",
    "What is the capital of France?",
    "Count up from 7 to 15.",
    "Tom bought 3 apples for 12 dollars. As JSON:",
    "Tell me a short story about a fox.",
)
_DEMO_BATCH = 64
_BARE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"  # stands for a missing chat template


def stream(engine: LLMEngine, prompt: Prompt, params: SamplingParams, special: bool = True) -> CompletionOutput:
    """Print one completion as it comes. Ctrl-C aborts it and is raised again. special: whether special tokens are added
    to the prompt; a chat template has written them.

    Returns:
        The whole completion.

    Raises:
        MainspringError: the request ended in an error; that error.
    """
    tokenization = {"add_special_tokens": special}
    request_id = engine.add_request(f"console-{time.monotonic_ns()}", prompt, params, tokenization_kwargs=tokenization)
    whole, shown = CompletionOutput(0, "", []), 0
    try:
        while not whole.finished():
            for output in engine.step():
                whole = output.outputs[0]
                text = whole.text.lstrip()  # a model often begins its answer with the space that follows the question
                print(text[shown:], end="", flush=True)
                shown = len(text)
    finally:
        print(flush=True)
        if not whole.finished():
            engine.abort_request(request_id)
            engine.step()  # its last output, which nobody reads
    if whole.error is not None:
        raise whole.error
    return whole


def chat(engine: LLMEngine, params: SamplingParams, system: str | None) -> None:
    """A conversation on the terminal, until /exit or the end of input."""
    beginning = [{"role": "system", "content": system}] if system else []
    messages: list[dict[str, Any]] = list(beginning)
    takes = engine.get_tokenizer().media
    attached: list[dict[str, Any]] = []  # media of the next message
    shown = "".join(f", /{kind} FILE shows one" for kind in takes)
    print(f"/exit leaves, /new begins again{shown}, Ctrl-C stops an answer.", file=sys.stderr)
    if sys.stdin.isatty():
        import readline  # noqa: F401  # input() then has a history and can be edited
    while True:
        try:
            said = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n/exit leaves")
            continue
        if said in ("/exit", "/quit"):
            return
        command, _, rest = said.partition(" ")
        if said == "/new":
            messages, attached = list(beginning), []
        elif command[:1] == "/" and command[1:] in takes:
            try:
                attached.append(media_part(command[1:], rest.strip()))
            except OSError as error:
                print(error, file=sys.stderr)
        elif said:
            _answer(engine, params, messages, [*attached, {"type": "text", "text": said}] if attached else said)
            attached = []


def _answer(engine: LLMEngine, params: SamplingParams, messages: list[dict[str, Any]], said: Any) -> None:
    messages.append({"role": "user", "content": said})
    try:
        answer = stream(engine, chat_prompt(engine, messages), params, special=False)
        messages.append({"role": "assistant", "content": answer.text.strip()})
    except KeyboardInterrupt:
        messages.pop()
    except (InvalidRequestError, NotSupportedError, OverloadedError, RequestFailedError) as error:
        messages.pop()
        print(f"{error} (/new begins a new conversation)", file=sys.stderr)


def chat_prompt(engine: LLMEngine, messages: list[dict[str, Any]]) -> Any:
    """The prompt of a conversation. A model without a chat template gets the contents one after another, if there are
    media among them."""
    tokenizer = engine.get_tokenizer()
    template = _BARE if tokenizer.media and not tokenizer.chat_template else None
    return prompt_of_chat(tokenizer, messages, add_generation_prompt=True, chat_template=template)


def media_part(modality: str, name: str) -> dict[str, Any]:
    """A part of a message with the content of a file, or with a URL, which a media worker fetches if it may."""
    content = name if "://" in name else Path(name).expanduser().read_bytes()
    return {"type": modality, modality: content}


def demo(engine_args: dict[str, Any]) -> None:
    """A few questions streamed, then a batch with its speed."""
    print("Starting the engine: a core process with the embedded model, and this thin frontend.")
    started = time.monotonic()
    with LLM(**engine_args) as llm:
        print(f"Ready in {time.monotonic() - started:.1f} s.\n")
        params = llm.get_default_sampling_params()
        params.max_tokens = 160
        for question in _DEMO_QUESTIONS:
            print(f"> {question}")
            stream(llm.llm_engine, chat_prompt(llm.llm_engine, [{"role": "user", "content": question}]), params, False)
            print()
        print(f"Now {_DEMO_BATCH} at once, sampled, each with a seed of its own:")
        stories = [f"Tell me a long story about a {('cat', 'fox', 'bear', 'owl')[i % 4]}." for i in range(_DEMO_BATCH)]
        conversations = [[{"role": "user", "content": story}] for story in stories]
        sampled = [SamplingParams(temperature=0.8, seed=seed, max_tokens=256) for seed in range(_DEMO_BATCH)]
        started = time.monotonic()
        outputs = llm.chat(conversations, sampled)
        seconds = time.monotonic() - started
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(f"\nOne of them: {outputs[0].outputs[0].text.strip()}\n")
        print(f"{len(outputs)} answers, {tokens} tokens in {seconds:.1f} s: {tokens / seconds:.0f} tokens/s")
