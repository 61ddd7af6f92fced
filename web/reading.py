"""How the answer to a conversation is read and what it may say: the model's forms of tool calls and reasoning, and the
tools of the request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..engine.text.response_formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    ReasoningFormat,
    ToolFormat,
    reasoning_format,
    tool_format,
)
from ..engine.text.response_reader import Piece, ResponseReader, starts_in_reasoning
from ..engine.text.template_reader import TemplateReader
from ..engine.text.tool_grammar import NO_TOKENS, SpecialTokens, after_reasoning, tool_choice, tool_grammar
from ..ipc.errors import InvalidRequestError
from ..ipc.structured import StructuredOutputsParams
from .reader import MessageReader

if TYPE_CHECKING:
    from ..engine.async_llm_engine import AsyncLLMEngine
    from .bodies import ChatBody


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reading:
    """Args:
    form: what the answer must be like; None: as the request says.
    show_special: whether special tokens must be in the text, because the model marks calls or reasoning with them.
    reader: what makes the reader of a completion; None: its text is content.
    """

    form: StructuredOutputsParams | None = None
    show_special: bool = False
    reader: Callable[[], MessageReader] | None = None


class Readings:
    """Args:
    tools, reasoning: names of formats; ``auto``: as the chat template shows; ``none``.
    """

    def __init__(self, tools: str, reasoning: str) -> None:
        self._tools, self._reasoning = tools, reasoning
        self._shipped: dict[str, Any] | None = None  # the response template of the checkpoint
        self._special = NO_TOKENS

    def prepare(self, engine: AsyncLLMEngine) -> None:
        """Use the special tokens of the engine's tokenizer, and the response template of its checkpoint, if there is
        one and both forms are ``auto``."""
        if (tokenizer := engine.tokenizer) is None:
            return
        ends = engine.input_processor.eos_token_ids.union(engine.input_processor.model.eos_token_ids)
        known = [text for tools in TOOL_FORMATS.values() for text in _written(tools, None)]
        known += [text for reasoning in REASONING_FORMATS.values() for text in _written(None, reasoning)]
        special = {
            token: one.content
            for token, one in tokenizer.added_tokens_decoder.items()
            if one.special and any(one.content in text for text in known)
        }
        self._special = SpecialTokens(
            {text: token for token, text in special.items() if token not in ends},
            frozenset(text for token, text in special.items() if token in ends),
        )
        given = tokenizer.response_template
        if given and self._tools == self._reasoning == "auto":
            try:
                TemplateReader(given).read("-")  # imports its parser, before there are streams that would wait
                self._shipped = given
            except (ValueError, TypeError, ImportError, AttributeError) as error:
                logger.warning("the response_template of the checkpoint can't be used: %s", error)

    def of(
        self, engine: AsyncLLMEngine, body: ChatBody, prompt: str | None, form: StructuredOutputsParams | None
    ) -> Reading:
        """How the answers to a conversation are read.

        Args:
            prompt: its text, because a prompt may end inside of the reasoning.
            form: that the request asks for.

        Raises:
            InvalidRequestError: the tools or the choice of them are not in OpenAI's form.
        """
        choice = tool_choice(body.tools, body.tool_choice, body.parallel_tool_calls)
        template = body.chat_template or _template(engine, bool(body.tools))
        end = (prompt or "")[-256:]
        tools = tool_format(self._tools, template) if choice.mode != "none" else None
        if choice.mode == "required":
            tools = tools or TOOL_FORMATS["hermes"]
        reasoning = reasoning_format(self._reasoning, template)
        if body.continue_final_message and not (reasoning and starts_in_reasoning(reasoning, end)):
            reasoning = None  # the message has begun with its content
        special, made = self._special, None
        if form is None or choice.mode == "required":
            made = tool_grammar(choice, tools, reasoning, end, special)
        if made is None and form is not None and reasoning is not None and not end.rstrip().endswith(reasoning.close):
            made = after_reasoning(form, reasoning, end, special)
            if made is None and starts_in_reasoning(reasoning, end):
                reasoning = None
        shipped = self._shipped if made is None and (choice.mode == "auto" or not body.tools) else None
        if tools is None and reasoning is None and shipped is None:
            return Reading(made)
        show = any(map(special.in_text, _written(tools, reasoning)))
        make: Callable[[], MessageReader] = partial(ResponseReader, tools, reasoning, choice.schemas, end)
        if shipped is not None:
            make, show = partial(TemplateReader, shipped, body.tools or (), prompt or ""), True
        hides = body.include_reasoning is False
        if not (hides or choice.one):
            return Reading(made, show, make)

        def shown(piece: Piece) -> bool:
            return not (hides and piece.kind == "reasoning") and not (choice.one and piece.call > 0)

        return Reading(made, show, lambda: _Filtered(make(), shown))


class _Filtered:
    """A reader that keeps some pieces to itself."""

    def __init__(self, reader: MessageReader, shown: Callable[[Piece], bool]) -> None:
        self._reader, self._shown = reader, shown

    def read(self, text: str, token_ids: Sequence[int]) -> list[Piece]:
        return [piece for piece in self._reader.read(text, token_ids) if self._shown(piece)]

    def end(self) -> list[Piece]:
        return [piece for piece in self._reader.end() if self._shown(piece)]

    @property
    def has_calls(self) -> bool:
        return self._reader.has_calls

    @property
    def num_reasoning_tokens(self) -> float:
        return self._reader.num_reasoning_tokens


def _template(engine: AsyncLLMEngine, with_tools: bool) -> str | None:
    tokenizer = engine.tokenizer
    if tokenizer is None:
        return None
    try:
        return tokenizer.get_chat_template(None, with_tools)
    except InvalidRequestError:
        return "[TOOL_CALLS] [ARGS] [THINK]" if tokenizer.chats_in_tokens else None  # Mistral's own encoder


def _written(tools: ToolFormat | None, reasoning: ReasoningFormat | None) -> list[str]:
    """What a model writes around calls, reasoning and content."""
    texts: list[str] = []
    if reasoning is not None:
        texts += [*reasoning.opens, reasoning.close, reasoning.after, *reasoning.content]
    for form in () if tools is None else tools.forms:
        texts += [form.start, form.call, form.between, form.end, *form.params]
    return [*texts, *(() if tools is None else tools.dropped)]
