"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from .bodies import ChatBody
from .chat import chat_prompt
from .exchange import Answer, Request, answer
from .failures import HttpError
from .service import Service, made

if TYPE_CHECKING:
    from ..engine.text.tokenizer import Tokenizer


class TokenizeBody(ChatBody, kw_only=True):
    """A text in `prompt`, or a conversation in `messages`."""

    messages: list[dict[str, Any]] = msgspec.field(default_factory=list)
    prompt: str | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    tokens: list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]
    model: str | None = None


class TextApi:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, request: Request, body: TokenizeBody) -> Answer:
        self._service.model(body.model)
        self._service.check_template(body.chat_template)
        engine = await request.tenant.engine()
        tokenizer = await self._tokenizer(request)
        if (body.prompt is None) == (not body.messages):
            raise HttpError(400, "give prompt or messages", "prompt")

        def make() -> list[int]:
            prompt: Any = body.prompt
            special = body.add_special_tokens is not False
            if prompt is None:
                prompt, special = chat_prompt(engine, body), bool(body.add_special_tokens)
            if isinstance(prompt, str):
                return engine.input_processor.encode(prompt, special)
            if "prompt_token_ids" not in prompt:
                raise HttpError(
                    400, "the tokens of a conversation with media are known only when it is computed", "messages"
                )
            return list(prompt["prompt_token_ids"])

        ids = await made(request, make)
        strings = None
        if body.return_token_strs:
            strings = await made(request, lambda: tokenizer.convert_ids_to_tokens(ids))
        longest = engine.engine_core.model.max_model_len
        return answer({"count": len(ids), "max_model_len": longest, "tokens": ids, "token_strs": strings})

    async def detokenize(self, request: Request, body: DetokenizeBody) -> Answer:
        self._service.model(body.model)
        tokenizer = await self._tokenizer(request)
        return answer({"prompt": await made(request, lambda: tokenizer.decode(body.tokens))})

    async def _tokenizer(self, request: Request) -> Tokenizer:
        engine = await request.tenant.engine()
        if engine.tokenizer is None:
            raise HttpError(400, "this engine has no tokenizer")
        return engine.tokenizer
