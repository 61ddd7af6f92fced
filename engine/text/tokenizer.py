"""The tokenizer: text to token ids and back, with the Rust library `tokenizers` if there is a tokenizer.json."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...ipc.errors import InvalidRequestError, ModelNotFoundError
from .chat_template import Message, render_chat
from .model_files import read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_RUST_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_SLOW_FILES = ("tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


class Tokenizer:
    """Encode, decode and chat, under the names that transformers uses.

    `special_tokens_map` holds the named special tokens (``bos_token`` …) as text; `chat_template` one template, several
    by name, or None.
    """

    def __init__(
        self,
        backend: RustTokenizer,
        special_tokens_map: Mapping[str, str],
        chat_template: str | Mapping[str, str] | None = None,
    ) -> None:
        self.backend = backend
        self.special_tokens_map = dict(special_tokens_map)
        self.chat_template = chat_template

    def encode(self, text: str, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """Token ids, by default with the special tokens that the model expects around a prompt; at most the first
        `most`, special tokens included."""
        if most is None or not add_special_tokens:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids[:most]
        encoding = self.backend.encode(text, add_special_tokens=False)
        encoding.truncate(max(0, most - self.backend.num_special_tokens_to_add(False)))
        return self.backend.post_process(encoding).ids[:most]

    def encode_pair(self, one: str, two: str) -> tuple[list[int], list[int]]:
        """Token ids of two texts as the model expects them together, and which of the two each token belongs to."""
        encoding = self.backend.encode(one, two)
        return encoding.ids, encoding.type_ids

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of token ids. Bytes that are no UTF-8 become U+FFFD. Ids outside the vocabulary are ignored."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, token_ids: Iterable[int]) -> list[str | None]:
        """The vocabulary's own spelling of each token; None outside the vocabulary."""
        return [self.backend.id_to_token(token) for token in token_ids]

    def convert_tokens_to_ids(self, tokens: Iterable[str]) -> list[int | None]:
        return [self.backend.token_to_id(token) for token in tokens]

    def __len__(self) -> int:
        """Size of the vocabulary, added tokens included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @functools.cached_property
    def all_special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out of text."""
        return frozenset(token for token, added in self.backend.get_added_tokens_decoder().items() if added.special)

    @functools.cached_property
    def added_ids(self) -> frozenset[int]:
        """Ids of tokens that were added to the vocabulary, special or not."""
        return frozenset(self.backend.get_added_tokens_decoder())

    def _special(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        return None if token is None else self.convert_tokens_to_ids([token])[0]

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens_map.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens_map.get("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._special("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._special("eos_token")

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
        conversation: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> str | list[int]:
        """The prompt of a conversation, as token ids or as text. The template writes all special tokens itself.

        Raises:
            InvalidRequestError: there is no template, or it refuses the conversation.
        """
        text = render_chat(
            self.get_chat_template(chat_template, bool(tools)),
            conversation,
            {**self.special_tokens_map, **variables},
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text


class SlowTokenizer(Tokenizer):
    """A tokenizer of transformers without a Rust implementation."""

    def __init__(self, hf: Any) -> None:
        self.hf = hf
        self.special_tokens_map = {name: text for name, text in hf.special_tokens_map.items() if isinstance(text, str)}
        self.chat_template = hf.chat_template

    def encode(self, text: str, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        cut = {} if most is None else {"truncation": True, "max_length": most}
        return list(self.hf.encode(text, add_special_tokens=add_special_tokens, **cut))

    def encode_pair(self, one: str, two: str) -> tuple[list[int], list[int]]:
        encoding = self.hf(one, two, return_token_type_ids=True)
        return list(encoding["input_ids"]), list(encoding["token_type_ids"])

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        return str(self.hf.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def convert_ids_to_tokens(self, token_ids: Iterable[int]) -> list[str | None]:
        return list(self.hf.convert_ids_to_tokens(list(token_ids)))

    def convert_tokens_to_ids(self, tokens: Iterable[str]) -> list[int | None]:
        return list(self.hf.convert_tokens_to_ids(list(tokens)))

    def __len__(self) -> int:
        return len(self.hf)

    @functools.cached_property
    def all_special_ids(self) -> frozenset[int]:
        return frozenset(self.hf.all_special_ids)

    @functools.cached_property
    def added_ids(self) -> frozenset[int]:
        return frozenset(self.hf.get_added_vocab().values())


def load_tokenizer(folder: Path, mode: str = "auto", trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer of a checkpoint folder. Mode ``hf`` builds it with transformers even where tokenizer.json exists.

    Raises:
        ModelNotFoundError: the folder holds no tokenizer, or a broken one.
    """
    if mode == "auto" and (folder / "tokenizer.json").is_file():
        return _load_rust(folder)
    if not any((folder / name).is_file() for name in ("tokenizer.json", *_SLOW_FILES)):
        raise ModelNotFoundError(
            f"{folder} holds no tokenizer; give one as tokenizer=…, or set skip_tokenizer_init=True and use token ids"
        )
    from transformers import AutoTokenizer

    try:
        hf = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        raise ModelNotFoundError(f"transformers can't load the tokenizer in {folder}: {error}") from error
    backend = getattr(hf, "backend_tokenizer", None)
    if backend is None:
        return SlowTokenizer(hf)
    named = {name: text for name, text in hf.special_tokens_map.items() if isinstance(text, str)}
    return Tokenizer(backend, named, hf.chat_template)


def _load_rust(folder: Path) -> Tokenizer:
    """Read tokenizer.json and the small files around it. The last tokenizer stays in a cache: connecting again is
    faster, and the library leaks one or two kilobytes each time it reads a file."""
    stats = [(path.stat() if path.exists() else None) for path in (folder / name for name in _RUST_FILES)]
    backend, named = _read_rust(folder, tuple(s and (s.st_ino, s.st_mtime_ns, s.st_size) for s in stats))
    return Tokenizer(backend, named, _chat_template(folder, read_json(folder / "tokenizer_config.json")))


@functools.lru_cache(maxsize=1)
def _read_rust(folder: Path, version: Any) -> tuple[RustTokenizer, dict[str, str]]:
    """The tokenizer of a folder with the special tokens that transformers adds. tokenizer.json decides which tokens are
    put around a prompt; `add_bos_token` in the config is ignored, as by transformers."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as RustTokenizer

    try:
        backend = RustTokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the Rust side raises plain Exception
        raise ModelNotFoundError(f"{folder / 'tokenizer.json'} can't be read: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    config = {**read_json(folder / "special_tokens_map.json"), **read_json(folder / "tokenizer_config.json")}

    known = {added.content for added in backend.get_added_tokens_decoder().values()}
    for _, entry in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
        if entry["content"] not in known:
            known.add(entry["content"])
            backend.add_tokens([AddedToken(**{key: entry[key] for key in _ADDED_FIELDS if key in entry})])
    named = {name: _text(config[name]) for name in _NAMED if config.get(name)}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    others = extra.values() if isinstance(extra, dict) else extra
    missing = [token for token in (*named.values(), *map(_text, others)) if token not in known]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in dict.fromkeys(missing)])
    return backend, named


_ADDED_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


def _text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """chat_template.jinja and chat_templates/*.jinja, else what tokenizer_config.json holds."""
    found = {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("chat_templates/*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        found["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if found:
        return found["default"] if list(found) == ["default"] else found
    own = config.get("chat_template")
    return {entry["name"]: entry["template"] for entry in own} if isinstance(own, list) else own
