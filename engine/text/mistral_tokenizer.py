"""Mistral's own tokenizers, with the package `mistral-common`: tekken.json, or SentencePiece in tokenizer.model.v3.

Text never encodes to special tokens, so the prompt of a conversation exists as token ids only.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ...ipc.errors import InvalidRequestError, ModelNotFoundError, NotSupportedError
from .chat_template import Message, text_messages
from .tokenizer import Tokenizer, byte_level_alphabet

if TYPE_CHECKING:
    from mistral_common.tokens.tokenizers.base import Tokenizer as MistralVocabulary
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer as ChatEncoder
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers.decoders import Decoder

_ID_LENGTH = 9  # characters of the id of a tool call, which Mistral's models were trained with
_VERSIONED = re.compile(r".+\.model\.v(\d+)(m\d+)?")


def mistral_file(folder: Path) -> Path | None:
    """The file of Mistral's tokenizer: tekken.json, else SentencePiece of the highest version."""
    if (tekken := folder / "tekken.json").is_file():
        return tekken
    found = [(int(match[1]), path) for path in folder.glob("*.model.v*") if (match := _VERSIONED.fullmatch(path.name))]
    return max(found)[1] if found else None


def load_mistral(folder: Path) -> MistralTokenizer:
    """The tokenizer in a folder.

    Raises:
        ModelNotFoundError: there is none, or a broken one.
        NotSupportedError: mistral-common is not installed.
    """
    path = mistral_file(folder)
    if path is None:
        raise ModelNotFoundError(
            f"tokenizer_mode is 'mistral', but {folder} holds no tekken.json or tokenizer.model.v*"
        )
    try:
        from mistral_common.tokens.tokenizers.mistral import MistralTokenizer as ChatEncoder
    except ImportError as error:
        raise NotSupportedError(
            f"{path.name} needs mistral-common: install it with pip install 'mainspring[mistral]' ({error})"
        ) from error
    try:
        return MistralTokenizer(ChatEncoder.from_file(path))
    except Exception as error:  # of any type: assertions, KeyError, those of two other libraries
        raise ModelNotFoundError(f"{path} can't be read: {type(error).__name__}: {error}") from error


@dataclass
class _Encoding:
    """What is known of the tokens of a text, in the form of `tokenizers`."""

    ids: list[int]
    tokens: list[str]
    special_tokens_mask: list[int]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def attention_mask(self) -> list[int]:
        return [1] * len(self.ids)

    @property
    def type_ids(self) -> list[int]:
        return [0] * len(self.ids)

    @property
    def sequence_ids(self) -> list[int | None]:
        return [None if special else 0 for special in self.special_tokens_mask]

    @property
    def offsets(self) -> list[tuple[int, int]]:
        raise NotSupportedError("Mistral's tokenizers do not say where their tokens are in the text")

    word_ids = offsets


class _Backend:
    """Mistral's vocabulary with the methods of `tokenizers.Tokenizer` that `Tokenizer` calls."""

    def __init__(self, vocabulary: MistralVocabulary) -> None:
        from tokenizers import decoders

        self._vocabulary = vocabulary
        self._spelling = {byte: char for char, byte in byte_level_alphabet().items()}
        self.is_tekken = hasattr(vocabulary, "id_to_byte_piece")
        if self.is_tekken:  # spelled as byte-level BPE
            self.decoder: Decoder = decoders.ByteLevel()
        else:
            steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
            self.decoder = decoders.Sequence(steps)

    def encode(
        self, text: Any, pair: Any = None, is_pretokenized: bool = False, add_special_tokens: bool = True
    ) -> _Encoding:
        if not isinstance(text, str) or pair is not None or is_pretokenized:
            raise NotSupportedError("Mistral's tokenizers encode one text, no pair of texts and no list of words")
        ids = self._vocabulary.encode(text, bos=add_special_tokens, eos=False)
        mask = [int(add_special_tokens), *([0] * len(ids))][: len(ids)]
        return _Encoding(ids, [str(self.id_to_token(token)) for token in ids], mask)

    def encode_batch(self, texts: Sequence[Any], **options: Any) -> list[_Encoding]:
        return [self.encode(text, **options) for text in texts]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        special = self.special_ids if skip_special_tokens else ()
        spelled = [self.id_to_token(token) for token in ids if token not in special]
        return self.decoder.decode([piece for piece in spelled if piece is not None])

    def id_to_token(self, token: int) -> str | None:
        vocabulary: Any = self._vocabulary
        if not 0 <= token < vocabulary.n_words:
            return None
        if self.is_tekken and token not in self.special_ids:
            return "".join(self._spelling[byte] for byte in vocabulary.id_to_byte_piece(token, "ignore"))
        return str(vocabulary.id_to_piece(token))

    def token_to_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def num_special_tokens_to_add(self, pair: bool) -> int:
        return 1

    def get_vocab_size(self, with_added_tokens: bool = True) -> int:
        return self._vocabulary.n_words

    def get_vocab(self, with_added_tokens: bool = True) -> dict[str, int]:
        return dict(self._ids)

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        from tokenizers import AddedToken

        return {token: AddedToken(str(self.id_to_token(token)), special=True) for token in sorted(self.special_ids)}

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(cast(Any, self._vocabulary).special_ids)

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        return {str(self.id_to_token(token)): token for token in reversed(range(self._vocabulary.n_words))}


class MistralTokenizer(Tokenizer):
    """A tokenizer of mistral-common. Its chat encoding takes the place of a chat template."""

    chats_in_tokens = True

    def __init__(self, chat: ChatEncoder[Any, Any, Any, Any, Any]) -> None:
        vocabulary: Any = chat.instruct_tokenizer.tokenizer
        backend = _Backend(vocabulary)
        named = {f"{name}_token": _optional(vocabulary, f"{name}_id") for name in ("bos", "eos", "unk", "pad")}
        tokens = {name: backend.id_to_token(token) for name, token in named.items() if token is not None}
        self.chat = chat
        super().__init__(
            cast("RustTokenizer", backend),
            {name: token for name, token in tokens.items() if token is not None},
            settings={
                "padding_side": "left",
                "extra_special_tokens": [str(backend.id_to_token(token)) for token in sorted(backend.special_ids)],
            },
        )

    def encode_first(self, text: str, add_special_tokens: bool, most: int) -> list[int]:
        return self.encode(text, add_special_tokens=add_special_tokens)[:most]

    def decode(
        self,
        token_ids: int | Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        return super().decode(token_ids, skip_special_tokens, clean_up_tokenization_spaces=False)

    def get_chat_template(self, chat_template: str | None = None, with_tools: bool = False) -> str:
        raise InvalidRequestError("Mistral's tokenizers have no chat template; they encode conversations themselves")

    def _chat_ids(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, continue_final_message: bool
    ) -> list[int]:
        from mistral_common.exceptions import MistralCommonException
        from mistral_common.protocol.instruct.request import ChatCompletionRequest

        plain, plain_tools = text_messages(messages, tools)
        for message in plain:
            for call in (message, *(message.get("tool_calls") or ())):
                for key in ("id", "tool_call_id"):
                    if isinstance(call, dict) and isinstance(call.get(key), str):
                        call[key] = call[key][-_ID_LENGTH:]
        try:
            request: Any = ChatCompletionRequest.from_openai(
                plain, tools=plain_tools, continue_final_message=continue_final_message
            )
            return list(self.chat.encode_chat_completion(request).tokens)
        except (MistralCommonException, ValueError, TypeError, KeyError, AttributeError, AssertionError) as error:
            reason = str(error).replace("\n", " ")
            raise InvalidRequestError(f"Mistral's tokenizer refused the conversation: {reason:.300}") from error

    def apply_chat_template(
        self,
        conversation: Sequence[Message] | Sequence[Sequence[Message]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        padding: bool | str = False,
        truncation: bool | str = False,
        max_length: int | None = None,
        return_tensors: str | None = None,
        return_dict: bool = False,
        return_assistant_tokens_mask: bool = False,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        chat_template_content_format: str = "auto",
        **variables: Any,
    ) -> Any:
        """The prompt of a conversation, or of each in a list, as mistral-common encodes it: as token ids, or as text to
        read, which does not encode to the same ids. It always ends where the assistant's reply begins. The format of
        contents has no effect, because no template reads them.

        Raises:
            InvalidRequestError: mistral-common refuses the conversation.
            NotSupportedError: another argument is set, which only a template could read.
        """
        others = {
            "documents": documents,
            "chat_template": chat_template,
            "padding": padding,
            "truncation": truncation,
            "max_length": max_length,
            "return_tensors": return_tensors,
            "return_dict": return_dict,
            "return_assistant_tokens_mask": return_assistant_tokens_mask,
            **(tokenizer_kwargs or {}),
            **variables,
        }
        for name, value in others.items():
            if value not in (None, False):
                raise NotSupportedError(f"{name} is set, but Mistral's tokenizers encode conversations themselves")
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError("continue_final_message and add_generation_prompt can't both be set")
        several = bool(conversation) and not isinstance(conversation[0], Mapping)
        prompts = [
            self._chat_ids(messages, tools, continue_final_message)
            for messages in cast(Sequence[Sequence[Message]], conversation if several else [conversation])
        ]
        found: list[Any] = prompts if tokenize else [self.decode(ids) for ids in prompts]
        return found if several else found[0]


def _optional(vocabulary: Any, name: str) -> int | None:
    """An id of a special token; None if the vocabulary lacks it, which tekken and SentencePiece say differently."""
    try:
        token = int(getattr(vocabulary, name))
    except ValueError:
        return None
    return token if token >= 0 else None
