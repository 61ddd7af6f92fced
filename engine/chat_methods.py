"""The methods of `LLM` for conversations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from ..ipc.adapters import LoRARequest
from ..ipc.errors import InvalidRequestError, names_prompt, shown
from ..ipc.params import SamplingParams
from .pooling_methods import OnError
from .request.outputs import RequestOutput
from .request.prompts import TextPrompt, TokensPrompt, with_processor_kwargs
from .request_queue import Progress
from .text.chat_media import media_of, take_media
from .text.chat_template import template_messages

if TYPE_CHECKING:
    from .llm_engine import LLMEngine
    from .text.chat_template import ContentFormat, Message
    from .text.tokenizer import Tokenizer


class ChatMethods:
    """`LLM`'s methods for conversations."""

    llm_engine: LLMEngine
    chat_template: str | None
    generate: Callable[..., list[RequestOutput]]
    enqueue: Callable[..., list[str]]
    get_tokenizer: Callable[[], Tokenizer]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Progress = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormat = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        on_error: OnError = "raise",
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Reply to one conversation or to many, through the model's chat template.

        Args:
            messages: dicts with ``role`` and ``content``; a list of such lists is several conversations. A content may
                have parts that are media, see docs/media.md.
            chat_template: the template's text, or the name of one of the model's; None: that of this object.
            add_generation_prompt: end the prompt where the assistant's reply begins.
            continue_final_message: have the last message continued instead; needs `add_generation_prompt=False`.
            tools: JSON schemas of functions, for templates that show them.
            chat_template_kwargs: more variables for the template.
            on_error: as `generate`.
            priority, tokenization_kwargs: as `generate`; special tokens are not added unless asked for.
            chat_template_content_format: contents of messages are given to the template as text (``"string"``), as
                lists of parts (``"openai"``), or as the template reads them (``"auto"``).
            mm_processor_kwargs: as `generate`.

        Returns, raises: as `generate`.
        """
        how = (add_generation_prompt, continue_final_message, tools, chat_template_kwargs, mm_processor_kwargs)
        prompts = self._chat_prompts(messages, chat_template, chat_template_content_format, *how)
        more: dict[str, Any] = {"priority": priority, "on_error": on_error}
        more["tokenization_kwargs"] = _without_special_tokens(tokenization_kwargs)
        return self.generate(prompts, sampling_params, use_tqdm, lora_request, **more)

    def enqueue_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Progress = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormat = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        *,
        on_error: OnError = "raise",
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """`enqueue` with the prompts of conversations. Arguments as `chat`; returns and raises as `enqueue`."""
        how = (add_generation_prompt, continue_final_message, tools, chat_template_kwargs, mm_processor_kwargs)
        prompts = self._chat_prompts(messages, chat_template, chat_template_content_format, *how)
        kwargs = _without_special_tokens(tokenization_kwargs)
        return self.enqueue(prompts, sampling_params, lora_request, priority, use_tqdm, kwargs, on_error=on_error)

    def preprocess_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        chat_template: str | None = None,
        chat_template_content_format: ContentFormat = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[TokensPrompt]:
        """The prompt of each conversation, with its text and token ids, as `chat` makes it. Arguments and errors as
        `chat`."""
        how = (add_generation_prompt, continue_final_message, tools, chat_template_kwargs, mm_processor_kwargs)
        prompts = self._chat_prompts(messages, chat_template, chat_template_content_format, *how)
        made = []
        for at, prompt in enumerate(prompts):
            given: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else dict(prompt)
            if "prompt_token_ids" not in given:
                with names_prompt(at, len(prompts)):
                    ids = self.llm_engine.input_processor.encode(given["prompt"], add_special_tokens=False)
                given = {"prompt_token_ids": ids, **given}
            made.append(cast(TokensPrompt, given))
        return made

    def _chat_prompts(
        self,
        messages: Any,
        chat_template: str | None,
        content_format: ContentFormat,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        chat_template_kwargs: Mapping[str, Any] | None,
        mm_processor_kwargs: Mapping[str, Any] | None,
    ) -> list[str | TextPrompt | TokensPrompt]:
        """The prompt of each conversation."""
        if not isinstance(messages, (list, tuple)):
            raise InvalidRequestError(f"messages is {shown(messages)}; it must be a list of dicts, or of such lists")
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations = cast("Sequence[Sequence[Message]]", messages if several else [messages])
        options = {
            "tools": tools,
            "chat_template": self.chat_template if chat_template is None else chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_content_format": content_format,
            **(chat_template_kwargs or {}),  # which wins, as in vLLM
        }
        prompts: list[str | TextPrompt | TokensPrompt] = []
        for at, conversation in enumerate(conversations):
            with names_prompt(at, len(conversations)):
                prompt = chat_prompt(self.get_tokenizer(), template_messages(conversation), **options)
                prompts += with_processor_kwargs([prompt], mm_processor_kwargs)
        return prompts


def chat_prompt(
    tokenizer: Tokenizer, conversation: Sequence[Message], /, **options: Any
) -> str | TextPrompt | TokensPrompt:
    """The prompt of a conversation: text, with the conversation's media if it has some, or tokens if the tokenizer can
    encode conversations only.

    Args:
        options: of `Tokenizer.apply_chat_template`.

    Raises:
        InvalidRequestError: and whatever that raises; an option is not the caller's to set.
    """
    for name in ("self", "conversation", "tokenize"):
        if name in options:
            raise InvalidRequestError(f"chat_template_kwargs has {name!r}, which no template is given")
    messages, parts = take_media(conversation, tokenizer.media)
    made = tokenizer.apply_chat_template(messages, tokenize=tokenizer.chats_in_tokens, **options)
    if tokenizer.chats_in_tokens:
        ids = cast("list[int]", made)
        return TokensPrompt(prompt_token_ids=ids, prompt=tokenizer.decode(ids))
    return cast(TextPrompt, {"prompt": made, **media_of(parts)}) if parts else cast(str, made)


def _without_special_tokens(tokenization_kwargs: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The template writes all special tokens itself."""
    return {"add_special_tokens": False, **(tokenization_kwargs or {})}
