"""The tokenizer: text to token ids and back, with the Rust library `tokenizers` if there is a tokenizer.json."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ...ipc.config import MODALITIES
from ...ipc.errors import InvalidArgumentError, InvalidRequestError, ModelNotFoundError, NotSupportedError, shown
from .model_files import read_json

if TYPE_CHECKING:
    from tokenizers import AddedToken, Encoding
    from tokenizers import Tokenizer as RustTokenizer

    from .batch_encoding import BatchEncoding
    from .chat_template import ContentFormat, Message

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SETTINGS: dict[str, Any] = {
    "model_max_length": int(1e30),  # no limit
    "padding_side": "right",
    "truncation_side": "right",
    "model_input_names": ["input_ids", "attention_mask"],
    "clean_up_tokenization_spaces": False,
    "extra_special_tokens": [],
    "response_template": None,  # how the model's answers are written, as transformers' parser takes it
}
# defaults of transformers' classes, which tokenizer_config.json may leave out
_WITH_TYPE_IDS = {"Bert", "DPRQuestionEncoder", "Deberta", "DebertaV2", "Lxmert", "MobileBert"}
_PADDED_LEFT = {"CodeLlama", "Cohere", "Gemma", "Llama", "Siglip2", "XLNet"}
_CLEANED = {" .": ".", " ?": "?", " !": "!", " ,": ",", " ' ": "'"} | {
    f" {end}": end for end in ("n't", "'m", "'s", "'ve", "'re")
}
# characters or tokens from which on a text is encoded or decoded as a batch: only that releases the interpreter's lock
_LONG_TEXT = 10_000
_RUST_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_SLOW_FILES = ("tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


class Tokenizer:
    """Encode, decode and chat, under the names that transformers uses.

    The named special tokens are attributes: `bos_token`, `bos_token_id` … They may be set. `settings` holds values of
    tokenizer_config.json; `chat_template` is one template, several by name, or None.
    """

    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    sep_token: str | None
    pad_token: str | None
    cls_token: str | None
    mask_token: str | None
    is_fast = True
    media: Mapping[str, str] = {}  # what the model takes beside text → the text for it in templates that know only text
    template_variables: Mapping[str, Any] = {}  # what chat templates see where a caller gives no other value
    chats_in_tokens = False  # whether the prompt of a conversation is token ids, which no text encodes to

    def __init__(
        self,
        backend: RustTokenizer,
        special_tokens_map: Mapping[str, str],
        chat_template: str | Mapping[str, str] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.backend = backend
        self.chat_template = chat_template
        self._names = tuple(dict.fromkeys((*_NAMED, *special_tokens_map)))
        for name in self._names:
            setattr(self, name, special_tokens_map.get(name))
        found = {**_SETTINGS, **(settings or {})}
        self.model_max_length: int = found["model_max_length"]
        self.padding_side: str = found["padding_side"]
        self.truncation_side: str = found["truncation_side"]
        self.model_input_names: list[str] = list(found["model_input_names"])
        self.clean_up_tokenization_spaces: bool = found["clean_up_tokenization_spaces"]
        self.extra_special_tokens: list[str] = list(found["extra_special_tokens"])
        self.response_template: dict[str, Any] | None = found["response_template"]

    def __getattr__(self, name: str) -> int | None:
        """The id of a named special token."""
        token_name = name.removesuffix("_id")
        if token_name == name or token_name not in self.__dict__.get("_names", ()):
            raise AttributeError(f"the tokenizer has no attribute {name!r}")
        token = getattr(self, token_name)
        return None if token is None else cast(int, self.convert_tokens_to_ids(token))

    def __setattr__(self, name: str, value: Any) -> None:
        if name.endswith("_token_id"):
            name, value = name.removesuffix("_id"), None if value is None else self.convert_ids_to_tokens(value)
        super().__setattr__(name, value)

    def __call__(
        self,
        text: str | Sequence[Any],
        text_pair: str | Sequence[Any] | None = None,
        *,
        add_special_tokens: bool = True,
        padding: bool | str = False,
        truncation: bool | str | None = None,
        max_length: int | None = None,
        is_split_into_words: bool = False,
        pad_to_multiple_of: int | None = None,
        padding_side: str | None = None,
        return_tensors: str | None = None,
        return_token_type_ids: bool | None = None,
        return_attention_mask: bool | None = None,
        return_special_tokens_mask: bool = False,
        return_offsets_mapping: bool = False,
        return_length: bool = False,
    ) -> BatchEncoding:
        """Token ids of a text or of several, or of pairs of texts, and what is known of each token.

        Raises:
            InvalidArgumentError: an argument has a wrong value, or there is no token to pad with.
            NotSupportedError: `return_tensors` is not ``np``.
        """
        from .batch_encoding import BatchEncoding, Row, as_arrays, pad, truncated, width_of  # few frontends call it

        one = isinstance(text, str) or (is_split_into_words and isinstance((*text, "")[0], str))
        if one:
            texts: Sequence[Any] = [(text, text_pair)] if text_pair else [text]
        else:
            texts = text if text_pair is None else list(zip(text, text_pair, strict=True))
        encodings = self.backend.encode_batch(
            texts, is_pretokenized=is_split_into_words, add_special_tokens=add_special_tokens
        )
        limit = max_length
        if limit is None and self.model_max_length <= 1e20:
            limit = self.model_max_length
        if truncation is None:
            truncation = max_length is not None and padding is False
        cut = limit is not None and truncation not in (False, "do_not_truncate")
        rows = []
        for encoding in encodings:
            kept = truncated(encoding, cast(int, limit), truncation, self.truncation_side) if cut else None
            kept = list(range(len(encoding))) if kept is None else kept
            rows.append(Row(encoding, kept, self.pad_token, self.pad_token_id))
        width = width_of(rows, padding, limit, pad_to_multiple_of)
        if width is not None:
            rows = pad(rows, width, padding_side or self.padding_side)
        names = self.model_input_names
        wanted = {
            "input_ids": ("ids", True),
            "token_type_ids": ("type_ids", return_token_type_ids),
            "attention_mask": ("attention_mask", return_attention_mask),
            "special_tokens_mask": ("special_tokens_mask", return_special_tokens_mask),
            "offset_mapping": ("offsets", return_offsets_mapping),
        }
        columns: dict[str, Any] = {
            name: [row.column(column) for row in rows]
            for name, (column, asked) in wanted.items()
            if (name in names if asked is None else asked)
        }
        if return_tensors is None and one:
            columns = {name: values[0] for name, values in columns.items()}
        if return_length:
            columns["length"] = [len(row.kept) for row in rows]
        return BatchEncoding(columns if return_tensors is None else as_arrays(columns, return_tensors), rows)

    def encode(self, text: Any, text_pair: Any = None, add_special_tokens: bool = True, **options: Any) -> list[int]:
        """Token ids, by default with the special tokens that the model expects around a prompt. `options` as in a
        call."""
        if options or not isinstance(text, str):
            ids = self(text, text_pair, add_special_tokens=add_special_tokens, **options)["input_ids"]
            return cast(list[int], ids)
        if text_pair:
            return self.backend.encode(text, text_pair, add_special_tokens=add_special_tokens).ids
        return self._encoding(text, add_special_tokens).ids

    def _encoding(self, text: str, add_special_tokens: bool) -> Encoding:
        if len(text) > _LONG_TEXT:
            return self.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        return self.backend.encode(text, add_special_tokens=add_special_tokens)

    def encode_first(self, text: str, add_special_tokens: bool, most: int) -> list[int]:
        """At most the first `most` token ids of a text, special tokens included."""
        if not add_special_tokens:
            return self.encode(text, add_special_tokens=False)[:most]
        encoding = self._encoding(text, False)
        encoding.truncate(max(0, most - self.backend.num_special_tokens_to_add(False)))
        return self.backend.post_process(encoding).ids[:most]

    def encode_pair(self, one: str, two: str) -> tuple[list[int], list[int]]:
        """Token ids of two texts as the model expects them together, and which of the two each token belongs to."""
        found = self(one, two, return_token_type_ids=True)
        return found["input_ids"], found["token_type_ids"]

    def decode(
        self,
        token_ids: int | Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """Text of token ids. Bytes that are no UTF-8 become U+FFFD. Ids outside the vocabulary are ignored."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        if len(ids) > _LONG_TEXT:
            (text,) = self.backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        else:
            text = self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        clean = clean_up_tokenization_spaces
        if (self.clean_up_tokenization_spaces if clean is None else clean) and (
            type(self.backend.model).__name__ != "BPE"  # transformers never does it there
        ):
            for spaced, cleaned in _CLEANED.items():
                text = text.replace(spaced, cleaned)
        return text

    def batch_decode(self, sequences: Sequence[Any], *args: Any, **options: Any) -> list[str]:
        """`decode` of each sequence."""
        several = len(sequences) > 0 and hasattr(sequences[0], "__len__")
        return [self.decode(sequence, *args, **options) for sequence in (sequences if several else [sequences])]

    def tokenize(self, text: str, pair: str | None = None, add_special_tokens: bool = False) -> list[str]:
        """The tokens of a text as text."""
        return self.backend.encode(text, pair, add_special_tokens=add_special_tokens).tokens

    def convert_ids_to_tokens(self, ids: int | Iterable[int], skip_special_tokens: bool = False) -> Any:
        """The vocabulary's own spelling of a token or of each token; None outside the vocabulary."""
        if isinstance(ids, int):
            return self.backend.id_to_token(ids)
        skipped = set(self.all_special_ids) if skip_special_tokens else ()
        return [self.backend.id_to_token(token) for token in ids if token not in skipped]

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> Any:
        """The id of a token or of each token; outside the vocabulary `unk_token_id`."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        found = self.backend.token_to_id(tokens)
        return self.unk_token_id if found is None and tokens != self.unk_token else found

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Text of tokens that are given in the vocabulary's own spelling."""
        decoder = self.backend.decoder
        return " ".join(tokens) if decoder is None else decoder.decode(tokens)

    def num_special_tokens_to_add(self, pair: bool = False) -> int:
        """The number of special tokens around a text or a pair of texts."""
        return self.backend.num_special_tokens_to_add(pair)

    def __len__(self) -> int:
        """Size of the vocabulary, added tokens included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary without added tokens."""
        return self.backend.get_vocab_size(with_added_tokens=False)

    def get_vocab(self) -> dict[str, int]:
        """The id of each token, added tokens included."""
        return self.backend.get_vocab(with_added_tokens=True)

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """The tokens that were added to the vocabulary, special or not, by id."""
        return self.backend.get_added_tokens_decoder()

    def get_added_vocab(self) -> dict[str, int]:
        """The ids of the tokens that were added to the vocabulary."""
        return {added.content: token for token, added in sorted(self.added_tokens_decoder.items())}

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """The named special tokens that are set."""
        return {name: token for name in self._names if (token := getattr(self, name)) is not None}

    @property
    def all_special_tokens(self) -> list[str]:
        """The named special tokens and the extra ones."""
        return list(dict.fromkeys((*self.special_tokens_map.values(), *self.extra_special_tokens)))

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of `all_special_tokens`."""
        return cast(list[int], self.convert_tokens_to_ids(self.all_special_tokens))

    @functools.cached_property
    def skipped_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out of text."""
        return frozenset(token for token, added in self.added_tokens_decoder.items() if added.special)

    @functools.cached_property
    def added_ids(self) -> frozenset[int]:
        """Ids of tokens that were added to the vocabulary, special or not."""
        return frozenset(self.added_tokens_decoder)

    def get_chat_template(self, chat_template: str | None = None, with_tools: bool = False) -> str:
        """The template to use: the text given, the one of that name, or the model's own.

        Raises:
            InvalidRequestError: there is none.
        """
        own = self.chat_template
        if isinstance(own, Mapping):
            name = chat_template or ("tool_use" if with_tools and "tool_use" in own else "default")
            if name in own:
                return own[name]
        elif own is not None and chat_template is None:
            return own
        if chat_template is None:
            raise InvalidRequestError("this model has no chat template; give one as chat_template, or use generate()")
        return chat_template

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
        chat_template_content_format: ContentFormat = "auto",
        **variables: Any,
    ) -> Any:
        """The prompt of a conversation, or of each in a list: as token ids, as what a call returns (`return_dict`), or
        as text. The template writes all special tokens itself and sees `variables`. It gets contents as text with
        `chat_template_content_format` "string", as lists of parts with "openai", and as it reads them with "auto".

        Raises:
            InvalidArgumentError: there is no such content format.
            InvalidRequestError: there is no template, or it refuses the conversation.
            NotSupportedError: `return_assistant_tokens_mask` is set.
        """
        from .chat_template import render_chat  # imported here, because not all frontends chat

        if return_assistant_tokens_mask:
            raise NotSupportedError("return_assistant_tokens_mask is not supported yet")
        several = bool(conversation) and not isinstance(conversation[0], Mapping)
        template = self.get_chat_template(chat_template, bool(tools))
        texts = [
            render_chat(
                template,
                messages,
                {**self.special_tokens_map, "documents": documents, **self.template_variables, **variables},
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                content_format=chat_template_content_format,
                media=self.media,
            )
            for messages in cast("Sequence[Sequence[Message]]", conversation if several else [conversation])
        ]
        if not tokenize:
            return texts if several else texts[0]
        found = self(
            texts if several else texts[0],
            add_special_tokens=False,
            padding=padding,
            truncation=truncation,
            max_length=max_length,
            return_tensors=return_tensors,
            **(tokenizer_kwargs or {}),
        )
        return found if return_dict else found["input_ids"]


def _delegated(name: str) -> Any:
    """A method that calls the tokenizer of transformers."""
    return lambda self, *args, **options: getattr(self.hf, name)(*args, **options)


class SlowTokenizer(Tokenizer):
    """A tokenizer of transformers without a Rust implementation."""

    is_fast = False

    def __init__(self, hf: Any, special_tokens_map: Mapping[str, str]) -> None:
        self.hf = hf
        super().__init__(cast(Any, None), special_tokens_map, hf.chat_template, _settings_of(hf))

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name.endswith(("_token", "_token_id", "_side")):
            setattr(self.hf, name, value)

    __call__ = _delegated("__call__")
    encode = _delegated("encode")
    decode = _delegated("decode")
    tokenize = _delegated("tokenize")
    convert_ids_to_tokens = _delegated("convert_ids_to_tokens")
    convert_tokens_to_ids = _delegated("convert_tokens_to_ids")
    convert_tokens_to_string = _delegated("convert_tokens_to_string")
    num_special_tokens_to_add = _delegated("num_special_tokens_to_add")
    get_vocab = _delegated("get_vocab")
    __len__ = _delegated("__len__")

    def encode_first(self, text: str, add_special_tokens: bool, most: int) -> list[int]:
        return list(self.hf.encode(text, add_special_tokens=add_special_tokens, truncation=True, max_length=most))

    @property
    def vocab_size(self) -> int:
        return int(self.hf.vocab_size)

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return dict(self.hf.added_tokens_decoder)

    @functools.cached_property
    def skipped_ids(self) -> frozenset[int]:
        return frozenset(self.hf.all_special_ids)

    @functools.cached_property
    def added_ids(self) -> frozenset[int]:
        return frozenset(self.hf.get_added_vocab().values())


def _settings_of(hf: Any) -> dict[str, Any]:
    return {name: getattr(hf, name, default) for name, default in _SETTINGS.items()}


def load_tokenizer(folder: Path, mode: str = "auto", trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer of a checkpoint folder. Mode ``hf`` builds it with transformers even where tokenizer.json exists,
    mode ``mistral`` with mistral-common, as is done where there are only Mistral's files.

    Raises:
        ModelNotFoundError: the folder holds no tokenizer, or a broken one.
        NotSupportedError: it is Mistral's, and mistral-common is not installed.
    """
    if mode == "auto" and (folder / "tokenizer.json").is_file():
        return _load_rust(folder)
    if mode != "hf":
        from .mistral_tokenizer import load_mistral, mistral_file

        if mode == "mistral" or not (mistral_file(folder) is None or (folder / "tokenizer_config.json").is_file()):
            return load_mistral(folder)
    if not any((folder / name).is_file() for name in ("tokenizer.json", *_SLOW_FILES)):
        raise ModelNotFoundError(
            f"{folder} holds no tokenizer; give one as tokenizer=…, or set skip_tokenizer_init=True and use token ids"
        )
    from transformers import AutoTokenizer

    try:
        hf = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        raise ModelNotFoundError(f"transformers can't load the tokenizer in {folder}: {error}") from error
    return _wrapped(hf, getattr(hf, "backend_tokenizer", None))


def media_tokens(folder: Path, tokenizer: Tokenizer) -> dict[str, str]:
    """Modality → the token that stands for an item in a prompt, as far as a checkpoint's config.json says."""
    config, vocabulary = read_json(folder / "config.json"), range(len(tokenizer))
    ids = {
        modality: config.get(f"{modality}_token_id", config.get(f"{modality}_token_index")) for modality in MODALITIES
    }
    known = {modality: at for modality, at in ids.items() if isinstance(at, int) and at in vocabulary}
    return {modality: str(tokenizer.convert_ids_to_tokens(at)) for modality, at in known.items()}


def as_tokenizer(given: Any) -> Tokenizer:
    """The tokenizer that the user gives: one of ours, or one of transformers, whose Rust part is copied.

    Raises:
        InvalidArgumentError: it is neither.
    """
    if isinstance(given, Tokenizer):
        return given
    transformers = sys.modules.get("transformers")  # a tokenizer of it can only come from a process that has it
    if transformers is None or not isinstance(given, transformers.PreTrainedTokenizerBase):
        raise InvalidArgumentError(
            f"tokenizer is {shown(given)}; it must be a tokenizer of transformers, or what get_tokenizer() gives"
        )
    try:
        backend = copy.deepcopy(getattr(given, "backend_tokenizer", None))
    except Exception:  # a part that is written in Python can't be copied
        backend = None
    if backend is not None:  # calls of the user's set these
        backend.no_truncation()
        backend.no_padding()
    return _wrapped(given, backend)


def _wrapped(hf: Any, backend: RustTokenizer | None) -> Tokenizer:
    named = {name: text for name, text in hf.special_tokens_map.items() if isinstance(text, str)}
    if backend is None:
        return SlowTokenizer(hf, named)
    return Tokenizer(backend, named, hf.chat_template, _settings_of(hf))


def _load_rust(folder: Path) -> Tokenizer:
    """Read tokenizer.json and the small files around it. The last tokenizer stays in a cache: connecting again is
    faster, and the library leaks one or two kilobytes each time it reads a file."""
    stats = [(path.stat() if path.exists() else None) for path in (folder / name for name in _RUST_FILES)]
    backend, named, extra = _read_rust(folder, tuple(s and (s.st_ino, s.st_mtime_ns, s.st_size) for s in stats))
    config = read_json(folder / "tokenizer_config.json")
    kind = str(config.get("tokenizer_class")).removesuffix("Fast").removesuffix("Tokenizer")
    settings = {name: config[name] for name in _SETTINGS if config.get(name) is not None}
    settings |= {"extra_special_tokens": extra}
    if kind in _WITH_TYPE_IDS:
        settings.setdefault("model_input_names", ["input_ids", "token_type_ids", "attention_mask"])
    if kind in _PADDED_LEFT:
        settings.setdefault("padding_side", "left")
    return Tokenizer(backend, named, _chat_template(folder, config), settings)


@functools.lru_cache(maxsize=1)
def _read_rust(folder: Path, version: Any) -> tuple[RustTokenizer, dict[str, str], list[str]]:
    """The tokenizer of a folder, with the special tokens that transformers adds, and those: named and extra ones.
    tokenizer.json decides which tokens are put around a prompt; `add_bos_token` in the config is ignored, as by
    transformers."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as RustTokenizer

    try:
        backend = RustTokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the Rust side raises plain Exception
        raise ModelNotFoundError(f"{folder / 'tokenizer.json'} can't be read: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    config = read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= read_json(folder / "special_tokens_map.json")

    known = {added.content for added in backend.get_added_tokens_decoder().values()}
    for _, entry in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
        if entry["content"] not in known:
            known.add(entry["content"])
            backend.add_tokens([AddedToken(**{key: entry[key] for key in _ADDED_FIELDS if key in entry})])
    others = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    own = {name: token for name, token in config.items() if name.endswith("_token") and isinstance(token, str)}
    own |= others if isinstance(others, dict) else {}
    named = {name: config[name] for name in _NAMED if config.get(name)}
    named |= {name: token for name, token in own.items() if name not in _NAMED}
    extra = [] if isinstance(others, dict) else list(others)
    for token in (*named.values(), *extra):
        if _text(token) not in known:
            known.add(_text(token))
            given = {key: token[key] for key in _ADDED_FIELDS if key in token} if isinstance(token, dict) else {}
            backend.add_special_tokens(
                [AddedToken(**{"content": token, "normalized": False, **given, "special": True})]
            )
    return backend, {name: _text(token) for name, token in named.items()}, [_text(token) for token in extra]


_ADDED_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


def _text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """chat_template.jinja and chat_templates/*.jinja, else what tokenizer_config.json or chat_template.json holds."""
    found = {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("chat_templates/*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        found["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if found:
        return found["default"] if list(found) == ["default"] else found
    own = config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    return {entry["name"]: entry["template"] for entry in own} if isinstance(own, list) else own


@functools.cache
def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 characters stand for themselves, the others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}
