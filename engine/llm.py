"""`LLM`: prompts in, completions out, in one call."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from ..compat.forms import one_prompt
from ..compat.members import UsageContext
from ..compat.missing import knows_members
from ..ipc.adapters import LoRARequest, PromptAdapterRequest
from ..ipc.config import ModelConfig
from ..ipc.errors import InvalidArgumentError, names_prompt
from ..ipc.params import BeamSearchParams, RequestOutputKind, SamplingParams
from .args import FIELDS, EngineArgs
from .chat_methods import ChatMethods
from .engine_methods import EngineMethods
from .frontend import CONNECT_OPTIONS
from .llm_engine import LLMEngine
from .pooling_methods import OnError, PoolingMethods, check_on_error
from .request.input_processor import Ahead, EngineCoreRequest, InputProcessor, check_message
from .request.outputs import RequestOutput, raise_first_failure
from .request.prompts import Prompt, listed_prompts, with_processor_kwargs
from .request_queue import OutputType, Progress, ProgressBar, RequestQueue
from .text.model_files import default_sampling_params

if TYPE_CHECKING:
    from .request.beam_search import BeamSearchOutput


@knows_members("LLM")
class LLM(EngineMethods, ChatMethods, PoolingMethods):
    """A model to call from a script or a notebook. Its core runs in a process of its own; no ``__main__`` guard needed.

    Args:
        model: folder or Hugging Face id of a checkpoint; None: the embedded model.
        connect: address of a running daemon to use instead; `model`, if given, must then be the daemon's.
        chat_template: for `chat`, in place of the model's own.
        engine_args: the fields of `EngineArgs`; under `connect` the options of `LLMEngine.connect`. The core runs in
            this process if `logits_processors` has a class of a script or notebook.

    Raises:
        MainspringError: an argument is wrong, the model is not found or not supported, or the core did not start.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        connect: str | None = None,
        chat_template: str | None = None,
        **engine_args: Any,
    ) -> None:
        self.chat_template = chat_template
        if connect is None:
            args = EngineArgs(model, **engine_args)
            self.llm_engine = LLMEngine.from_engine_args(args, UsageContext.LLM_CLASS)
        else:
            self.llm_engine = _connected(connect, model, engine_args)
        self._engine = self.llm_engine
        self._numbers = itertools.count()
        self._queue = RequestQueue(self.llm_engine)

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
        priority: int | Sequence[int] | None = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        on_error: OnError = "raise",
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many. Nothing is computed before every prompt, grammar and adapter has been checked.

        Args:
            prompts: see prompts.py for the forms; a list of ints is one prompt.
            sampling_params: one for all prompts or one each; None: `get_default_sampling_params()`.
            use_tqdm: show a progress bar; a callable is used in place of `tqdm.tqdm`.
            lora_request: the LoRA adapter of all prompts, or one or None for each.
            priority: one for all prompts or one each, lower first, under `scheduling_policy="priority"`.
            prompt_token_ids: the older form of prompts of token ids: one list or several.
            prompt_adapter_request: virtual tokens before each prompt.
            tokenization_kwargs: ``add_special_tokens`` (default True) for prompts that are text.
            on_error: ``"raise"``, or ``"return"``: an output whose finish reason is ``error`` holds the error of its
                request, with the text in `stop_reason`; grammars and adapters are then not checked in advance.
            mm_processor_kwargs: arguments of the checkpoint's processor, for prompts with media.

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
        listed = with_processor_kwargs(listed, mm_processor_kwargs)
        more = (tokenization_kwargs, on_error, prompt_adapter_request)
        requests = self._requests(listed, sampling_params, lora_request, priority, *more)
        outputs = self._queue.run(requests, use_tqdm)
        if on_error == "raise":
            raise_first_failure(outputs)
        return outputs

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: Progress = True,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        *,
        on_error: OnError = "raise",
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Send one prompt or many, and go on; `wait_for_completion` gives the outputs. Nothing is sent before every
        prompt, grammar and adapter has been checked. The core begins at once, unless it is in this process: it then
        computes only while a method waits for outputs.

        Args: as `generate`.
            use_tqdm: show a progress bar while the prompts are checked.
            on_error: ``"return"``: grammars and adapters are not checked in advance.

        Returns:
            The id of each request.

        Raises:
            InvalidRequestError: as `generate`; nothing was sent.
            EngineDeadError: the core is gone.
        """
        check_on_error(on_error)
        listed = with_processor_kwargs(listed_prompts(prompts), mm_processor_kwargs)
        with ProgressBar(use_tqdm, len(listed), "Checking prompts") as progress:
            more = (tokenization_kwargs, on_error, None, progress)
            requests = self._requests(listed, sampling_params, lora_request, priority, *more)
        self._queue.enqueue(requests)
        return [request.request_id for request in requests]

    def wait_for_completion(
        self,
        output_type: OutputType | None = None,
        *,
        use_tqdm: Progress = True,
        on_error: OnError = "raise",
    ) -> list[Any]:
        """Wait until all requests of `enqueue` and `enqueue_chat` have ended.

        Args:
            output_type: the class that the outputs must have, or several; None: any.
            use_tqdm, on_error: as `generate`.

        Returns:
            Their outputs, in the order of the requests; a second call gives those of later requests.

        Raises:
            InvalidArgumentError: an output will be of another type. All requests stay enqueued.
            MainspringError, EngineDeadError, KeyboardInterrupt: as `generate`. An index in a message is that of the
                output.
        """
        check_on_error(on_error)
        outputs = self._queue.run_enqueued(output_type, use_tqdm)
        if on_error == "raise":
            raise_first_failure(outputs)
        return outputs

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
        from .request.beam_search import BeamSearchOutput, BeamSearchSequence

        found = []
        for output in self.generate(prompts, params.sampling_params(), use_tqdm, lora_request, on_error=on_error):
            before = output.prompt_token_ids or []
            tokenizer, prompt = self.llm_engine.tokenizer, output.prompt
            if prompt is None:
                prompt = "" if tokenizer is None else tokenizer.decode(before)
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

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Use another tokenizer from now on: for prompts, stop strings and the text of outputs. If its vocabulary is
        not that of the model's, requests with structured outputs are refused, because the core compiles these.

        Args:
            tokenizer: one of transformers, of which a copy is used, or what `get_tokenizer` of an engine gives.

        Raises:
            InvalidArgumentError: it is neither.
            InvalidRequestError: requests are unfinished.
        """
        self._queue.check_all_sent()
        self.llm_engine.tokenizer = tokenizer

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """As `get_supported_tasks`."""
        return self.get_supported_tasks()

    @property
    def renderer(self) -> InputProcessor:
        """As `LLMEngine.renderer`."""
        return self.llm_engine.renderer

    def get_world_size(self, include_dp: bool = True) -> int:
        """The number of ranks that compute, those of all copies of the model with `include_dp`."""
        parallel = self.llm_engine.get_parallel_config()
        copies = parallel.data_parallel_size if include_dp else 1
        return parallel.tensor_parallel_size * parallel.pipeline_parallel_size * copies

    def do_log_stats(self) -> None:
        """As `LLMEngine.do_log_stats`."""
        self.llm_engine.do_log_stats()

    def shutdown(self) -> None:
        """End the core. Twice is once; also done when the object is collected or the interpreter ends."""
        self.llm_engine.shutdown()

    def _requests(
        self,
        prompts: Sequence[Any],
        sampling_params: Any,
        lora_request: Any,
        priority: Any,
        tokenization_kwargs: Mapping[str, Any] | None,
        on_error: OnError,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        progress: ProgressBar | None = None,
    ) -> list[EngineCoreRequest]:
        """A checked request for each prompt; under ``on_error="raise"`` the core has checked it, too."""
        given = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = _one_each("sampling_params", given, len(prompts))
        priorities = _one_each("priority", 0 if priority is None else priority, len(prompts))
        loras = _one_each("lora_request", lora_request, len(prompts))
        requests = []
        ahead = Ahead(self.llm_engine.input_processor, prompts, tokenization_kwargs)
        for at in range(len(prompts)):
            with names_prompt(at, len(prompts)):
                prompt = ahead.prompt(at)
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
                self.llm_engine._check_functions(request)
            request.params.output_kind = RequestOutputKind.FINAL_ONLY
            requests.append(request)
            if progress is not None:
                progress.add()
        if on_error == "raise":
            self._check_in_core(requests)
        return requests

    def _check_in_core(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Let the core prepare all grammars and adapters, because only the core can tell whether they are usable."""
        checked = set()
        for at, request in enumerate(requests):
            message = check_message(request)
            if message is not None and (key := msgspec.msgpack.encode(message)) not in checked:
                checked.add(key)
                with names_prompt(at, len(requests)):
                    self.llm_engine.engine_core.call("check_request", message)


def _one_each(name: str, given: Any, count: int) -> list[Any]:
    if not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise InvalidArgumentError(f"{name} has {len(given)} entries for {count} prompts; give one for each")
    return list(given)


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
