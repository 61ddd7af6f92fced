"""`LLM`: prompts in, completions out, in one call."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, cast

import msgspec

from ..compat.forms import one_prompt
from ..compat.logits_processors import functions_of, processor_classes
from ..compat.members import UsageContext
from ..compat.missing import knows_members
from ..ipc.adapters import LoRARequest, PromptAdapterRequest
from ..ipc.config import ModelConfig
from ..ipc.errors import InvalidArgumentError, InvalidRequestError, OverloadedError, names_prompt, shown
from ..ipc.params import BeamSearchParams, RequestOutputKind, SamplingParams
from .args import FIELDS, EngineArgs
from .engine_methods import EngineMethods
from .frontend import CONNECT_OPTIONS
from .llm_engine import LLMEngine
from .pooling_methods import OnError, PoolingMethods, Progress, check_on_error
from .request.input_processor import EngineCoreRequest, check_message
from .request.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    RequestOutput,
    errors_of,
    num_tokens_of,
    raise_first_failure,
)
from .request.prompts import Prompt, TokensPrompt, listed_prompts
from .text.chat_template import Message
from .text.model_files import default_sampling_params

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 5.0  # seconds before requests that an overloaded core refused are sent again
PATIENCE_S = 300.0  # seconds without any request ending, after which a refusal is returned to the caller


@knows_members("LLM")
class LLM(EngineMethods, PoolingMethods):
    """A model to call from a script or a notebook. Its core runs in a process of its own; no ``__main__`` guard needed.

    Args:
        model: folder or Hugging Face id of a checkpoint; None: the embedded model.
        connect: address of a running daemon to use instead; `model`, if given, must then be the daemon's.
        logits_processors: classes as in compat/logits_processors.py, or their dotted names, for all requests. The core
            then runs in this process.
        chat_template: for `chat`, in place of the model's own.
        engine_args: the fields of `EngineArgs`; under `connect` the options of `LLMEngine.connect`.

    Raises:
        MainspringError: an argument is wrong, the model is not found or not supported, or the core did not start.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        connect: str | None = None,
        logits_processors: Sequence[type | str] | None = None,
        chat_template: str | None = None,
        **engine_args: Any,
    ) -> None:
        self.chat_template = chat_template
        self._processors = processor_classes(logits_processors)
        if connect is None:
            args = EngineArgs(model, **engine_args)
            multiprocess = False if self._processors else None
            self.llm_engine = LLMEngine.from_engine_args(args, UsageContext.LLM_CLASS, None, multiprocess)
        else:
            self.llm_engine = _connected(connect, model, engine_args)
        self._engine = self.llm_engine
        self._numbers = itertools.count()
        self._one_batch = threading.Lock()  # batches of several threads take turns: `step` returns outputs of all

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """An `LLM` with these arguments."""
        return cls(**vars(engine_args))

    @property
    def model_config(self) -> ModelConfig:
        """The model's part of the configuration."""
        return self.llm_engine.model_config

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Progress = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Complete one prompt or many. Nothing is computed before every prompt, grammar and adapter has been checked.

        Args:
            prompts: see prompts.py for the forms; a list of ints is one prompt.
            sampling_params: one for all prompts or one each; None: `get_default_sampling_params()`.
            use_tqdm: show a progress bar; a callable is used in place of `tqdm.tqdm`.
            lora_request: the LoRA adapter of all prompts, or one or None for each.
            priority: one each, lower first, under `scheduling_policy="priority"`.
            prompt_token_ids: the older form of prompts of token ids: one list or several.
            prompt_adapter_request: virtual tokens before each prompt.
            tokenization_kwargs: ``add_special_tokens`` (default True) for prompts that are text.
            on_error: ``"raise"``, or ``"return"``: an output whose finish reason is ``error`` holds the error of its
                request, with the text in `stop_reason`; grammars and adapters are then not checked in advance.

        Returns:
            One output for each prompt, in order.

        Raises:
            InvalidRequestError: a prompt, its parameters, grammar or adapter can't be served. The message names the
                index of the prompt.
            MainspringError: a request failed while it ran. This is raised when all have ended: the error of the first
                one that failed, whose `outputs` are the outputs of all.
            EngineDeadError: the core is gone.
            KeyboardInterrupt: the batch was aborted, and the engine goes on.
        """
        check_on_error(on_error)
        listed = listed_prompts(prompts)
        if prompt_token_ids is not None:
            ids = listed_prompts(prompt_token_ids)
            texts = [None] * len(ids) if prompts is None else listed
            if len(texts) != len(ids):
                raise InvalidArgumentError(f"prompt_token_ids has {len(ids)} entries for {len(texts)} prompts")
            listed = [one_prompt(text, None, tokens) for text, tokens in zip(texts, ids, strict=True)]
        params = self._one_each("sampling_params", sampling_params or self.get_default_sampling_params(), len(listed))
        priorities = self._one_each("priority", 0 if priority is None else priority, len(listed))
        loras = self._one_each("lora_request", lora_request, len(listed))
        requests = []
        for at, prompt in enumerate(listed):
            with names_prompt(at, len(listed)):
                request = self.llm_engine.input_processor.process_inputs(
                    str(next(self._numbers)),
                    prompt,
                    params[at],
                    None,
                    tokenization_kwargs,
                    priorities[at],
                    lora_request=loras[at],
                    prompt_adapter_request=prompt_adapter_request,
                )
                given = request.params.logits_processors or []
                classes = functions_of(self._processors, self.llm_engine.vllm_config, request.params)
                request.params.logits_processors = [*given, *classes]
            request.params.output_kind = RequestOutputKind.FINAL_ONLY
            requests.append(request)
        if on_error == "raise":
            self._check_in_core(requests)
        with self._one_batch:
            outputs = self._run(requests, use_tqdm)
        if on_error == "raise":
            raise_first_failure(outputs)
        return outputs

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Progress = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        on_error: OnError = "raise",
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Reply to one conversation or to many, through the model's chat template.

        Args:
            messages: dicts with ``role`` and ``content``; a list of such lists is several conversations.
            chat_template: the template's text, or the name of one of the model's; None: that of this object.
            add_generation_prompt: end the prompt where the assistant's reply begins.
            continue_final_message: have the last message continued instead; needs `add_generation_prompt=False`.
            tools: JSON schemas of functions, for templates that show them.
            chat_template_kwargs: more variables for the template.
            on_error: as `generate`.
            priority, tokenization_kwargs: as `generate`; special tokens are not added unless asked for.

        Returns, raises: as `generate`.
        """
        tokenizer = self.get_tokenizer()
        if not isinstance(messages, (list, tuple)):
            raise InvalidRequestError(f"messages is {shown(messages)}; it must be a list of dicts, or of such lists")
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations = cast(Sequence[Sequence[Message]], messages if several else [messages])
        prompts: list[Prompt] = []
        for at, conversation in enumerate(conversations):
            with names_prompt(at, len(conversations)):
                made = tokenizer.apply_chat_template(
                    conversation,
                    tools=tools,
                    chat_template=self.chat_template if chat_template is None else chat_template,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    tokenize=tokenizer.chats_in_tokens,
                    **(chat_template_kwargs or {}),
                )
            if tokenizer.chats_in_tokens:
                made = TokensPrompt(prompt_token_ids=made, prompt=tokenizer.decode(made))
            prompts.append(made)
        # the template writes all special tokens itself
        kwargs = {"add_special_tokens": False, **(tokenization_kwargs or {})}
        more: dict[str, Any] = {"priority": priority, "tokenization_kwargs": kwargs, "on_error": on_error}
        return self.generate(prompts, sampling_params, use_tqdm, lora_request, **more)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: Progress = False,
        *,
        on_error: OnError = "raise",
    ) -> list[BeamSearchOutput]:
        """The `params.beam_width` continuations of each prompt that beam search finds, see beam_search.py.

        With ``on_error="return"`` the one sequence of a prompt that failed has the finish reason ``error``.

        Raises: as `generate`.
        """
        found = []
        for output in self.generate(prompts, params.sampling_params(), use_tqdm, lora_request, on_error=on_error):
            before = output.prompt_token_ids or []
            prompt = self.get_tokenizer().decode(before) if output.prompt is None else output.prompt
            found.append(
                BeamSearchOutput(
                    [
                        BeamSearchSequence(
                            [*before, *one.token_ids],
                            one.logprobs or [],
                            one.cumulative_logprob or 0.0,
                            prompt + one.text,
                            one.finish_reason,
                            one.stop_reason,
                            one.lora_request,
                        )
                        for one in output.outputs
                    ]
                )
            )
        return found

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation config asks for; vLLM's defaults where it says nothing."""
        return default_sampling_params(self.llm_engine.generation_config)

    def do_log_stats(self) -> None:
        """As `LLMEngine.do_log_stats`."""
        self.llm_engine.do_log_stats()

    def shutdown(self) -> None:
        """End the core. Twice is once; also done when the object is collected or the interpreter ends."""
        self.llm_engine.shutdown()

    @staticmethod
    def _one_each(name: str, given: Any, count: int) -> list[Any]:
        if not isinstance(given, Sequence):
            return [given] * count
        if len(given) != count:
            raise InvalidArgumentError(f"{name} has {len(given)} entries for {count} prompts; give one for each")
        return list(given)

    def _check_in_core(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Let the core prepare all grammars and adapters, because only the core can tell whether they are usable."""
        checked = set()
        for at, request in enumerate(requests):
            message = check_message(request)
            if message is not None and (key := msgspec.msgpack.encode(message)) not in checked:
                checked.add(key)
                with names_prompt(at, len(requests)):
                    self.llm_engine.engine_core.call("check_request", message)

    def _run(self, requests: Sequence[EngineCoreRequest], use_tqdm: Progress) -> list[RequestOutput]:
        engine = self.llm_engine
        limits = engine.get_scheduler_config()
        room = _Room(limits.max_requests_per_frontend, limits.max_tokens_per_frontend)
        waiting = {request.request_id: at for at, request in enumerate(requests)}
        unsent = deque(requests)
        found: list[RequestOutput | None] = [None] * len(requests)
        progress = _Progress(use_tqdm, len(requests))
        pause, not_before, deadline = FIRST_PAUSE_S, 0.0, time.monotonic() + PATIENCE_S
        try:
            while waiting:
                while unsent and time.monotonic() >= not_before and room.has(unsent[0]):
                    request = unsent.popleft()
                    room.take(request)
                    engine.add_request(request.request_id, request)
                if room.is_free:  # nothing is in flight: wait until requests may be sent again
                    time.sleep(max(0.0, not_before - time.monotonic()))
                for output in engine.step():
                    at = waiting.get(output.request_id)
                    if at is None:
                        continue
                    room.take(requests[at], -1)
                    now = time.monotonic()
                    refused = any(isinstance(error, OverloadedError) for error in errors_of(output))
                    if refused and now < deadline and room.allows(requests[at]):
                        unsent.append(requests[at])
                        if now >= not_before:
                            not_before, pause = now + pause, min(2 * pause, LONGEST_PAUSE_S)
                            logger.info("the core is busy; sending again in %.2f s", not_before - now)
                        continue
                    del waiting[output.request_id]
                    found[at] = output
                    progress.add(output)
                    pause, deadline = FIRST_PAUSE_S, now + PATIENCE_S
        except BaseException:
            engine._end_requests(waiting)
            raise
        finally:
            progress.close()
        return cast(list[RequestOutput], found)


class _Room:
    """Counts completions and tokens in flight against the core's limits of a frontend, to avoid refused requests."""

    def __init__(self, *limits: int | None) -> None:
        self._limits = [math.inf if limit is None else limit for limit in limits]
        self._used = [0] * len(limits)

    @property
    def is_free(self) -> bool:
        return not any(self._used)

    def has(self, request: EngineCoreRequest) -> bool:
        """Whether a request fits beside those in flight. A single request is always sent: the core may refuse it."""
        return self.is_free or self.allows(request, self._used)

    def allows(self, request: EngineCoreRequest, used: Sequence[int] = (0, 0)) -> bool:
        return all(u + c <= limit for u, c, limit in zip(used, _cost(request), self._limits, strict=True))

    def take(self, request: EngineCoreRequest, times: int = 1) -> None:
        """Count a request `times` times; -1: it has ended."""
        self._used = [u + times * c for u, c in zip(self._used, _cost(request), strict=True)]


def _cost(request: EngineCoreRequest) -> tuple[int, int]:
    n = request.params.width
    return n, n * (len(request.prompt_token_ids) + (request.params.max_tokens or 0))


def _connected(address: str, model: str | None, options: Mapping[str, Any]) -> LLMEngine:
    for name in options:
        if name in FIELDS and name not in CONNECT_OPTIONS:
            raise InvalidArgumentError(f"{name} is given beside connect, but it is for the daemon to decide")
    engine = LLMEngine.connect(address, **options)
    theirs = str(engine.model_config.model)
    if model is not None and model != theirs and str(Path(model).expanduser().resolve()) != theirs:
        engine.shutdown()
        raise InvalidArgumentError(
            f"model mismatch: model is {model!r}, but the daemon at {address} serves {theirs!r}; leave model out"
        )
    return engine


class _Progress:
    """The progress bar of a batch, with tokens a second."""

    def __init__(self, use_tqdm: Progress, total: int) -> None:
        make: Any = use_tqdm
        if use_tqdm is True:
            from tqdm.auto import tqdm as make  # type: ignore[import-untyped,no-redef]
        self._bar = make(total=total, desc="Processed prompts", dynamic_ncols=True) if make and total else None
        self._started = time.monotonic()
        self._prompt_tokens = self._output_tokens = 0

    def add(self, output: RequestOutput) -> None:
        if self._bar is None:
            return
        self._prompt_tokens += len(output.prompt_token_ids or ())
        self._output_tokens += num_tokens_of(output)
        seconds = max(time.monotonic() - self._started, 1e-6)
        speeds = self._prompt_tokens / seconds, self._output_tokens / seconds
        self._bar.set_postfix_str("input: {:.0f} tokens/s, output: {:.0f} tokens/s".format(*speeds), refresh=False)
        self._bar.update(1)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
