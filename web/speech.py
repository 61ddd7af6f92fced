"""How the decoder of a speech model is told what to write: the tokens of Whisper's prompts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

from .failures import HttpError

if TYPE_CHECKING:
    from ..engine.async_llm_engine import AsyncLLMEngine

Task = Literal["transcribe", "translate"]

_LANGUAGE = re.compile(r"<\|[a-z]{2,3}\|>")
_ENCODED = 10_000  # characters at the end of a text said before that are encoded: more than its tokens that are used


class Speech:
    """The special tokens are found by their text, because their ids differ.

    Attributes:
        start: what a prompt begins with; empty: the model has no such tokens, and its prompts are empty.
        languages: code → token; empty: the model knows one language, which no prompt names.
        never: tokens that the checkpoint's generation config does not allow.
        never_empty: whether it does not allow a transcript without a token.

    Raises:
        HttpError: the model transcribes no sounds, or its prompts are of another form.
    """

    def __init__(self, engine: AsyncLLMEngine) -> None:
        model, tokenizer, config = engine.engine_core.model, engine.tokenizer, engine.generation_config
        if not model.encoder_input or "audio" not in model.media:
            instead = ": it takes sounds in chats, as input_audio" if "audio" in model.media else ""
            raise HttpError(400, f"this model is no encoder-decoder model that transcribes sounds{instead}")
        if tokenizer is None:
            raise HttpError(400, "this engine has no tokenizer")
        self._tokenizer, self._longest = tokenizer, model.max_model_len
        self._tokens = tokens = tokenizer.get_added_vocab()
        self.start, self._end = (
            [tokens[text]] if text in tokens else [] for text in ("<|startoftranscript|>", "<|notimestamps|>")
        )
        if len(self.start) != len(self._end) or (not self.start and tokenizer.chat_template):
            raise HttpError(400, "prompts of this model are not of Whisper's form; LLM.generate takes any")
        named = config.get("lang_to_id")
        if named is None and config.get("is_multilingual", True):
            named = {text: token for text, token in tokens.items() if self.start and _LANGUAGE.fullmatch(text)}
        self.languages: dict[str, int] = {text.strip("<|>"): token for text, token in (named or {}).items()}
        self.never = [token for token in config.get("suppress_tokens") or () if token >= 0]
        first = config.get("begin_suppress_tokens") or ()
        self.never_empty = not engine.input_processor.eos_token_ids.isdisjoint(first)

    def prompt(self, task: Task, language: str, before: str) -> list[int]:
        """Token ids of the decoder's prompt.

        Args:
            language: one of `languages`; without effect if there are none.
            before: what was said before, or how it is written.

        Raises:
            HttpError: the model can't do the task, or takes no such text.
        """
        tokens, said = self._tokens, list[int]()
        if task == "translate" and (not self.languages or "<|translate|>" not in tokens):
            raise HttpError(400, "this model does not translate")
        if before.strip():
            said = self._tokenizer.encode(f" {before.strip()[-_ENCODED:]}", add_special_tokens=False)
            if "<|startofprev|>" not in tokens or not set(tokens.values()).isdisjoint(said):
                raise HttpError(400, "prompt must have no special tokens, and the model must take one", "prompt")
            said = [tokens["<|startofprev|>"], *said[1 - self._longest // 2 :]]
        asked = [self.languages[language], tokens[f"<|{task}|>"]] if self.languages else []
        return [*said, *self.start, *asked, *self._end]
