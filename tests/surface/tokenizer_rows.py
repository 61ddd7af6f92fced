"""Rows of the tokenizer that `get_tokenizer()` gives. tests/test_tokenizer_calls.py compares it with transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .harness import Place, row

TEXT = "Once upon a time"
CHAT = [{"role": "user", "content": "hi"}]
TEMPLATE = "{{ eos_token }}{{ messages[0].content }}{{ tools[0].name }}"


def tokenizer_row(name: str, test: Callable[[Any], bool], says: str = "") -> None:
    def run(at: Place) -> None:
        assert test(at.engine().get_tokenizer())

    row(f"Tokenizer.{name}", says=says)(run)


def _end(t: Any) -> str:
    """The first special token."""
    return next(added.content for added in t.backend.get_added_tokens_decoder().values() if added.special)


def _chat(t: Any, tokenize: bool) -> Any:
    return t.apply_chat_template(CHAT, tools=[{"name": "tool"}], chat_template=TEMPLATE, tokenize=tokenize)


def _sees_variables(t: Any) -> bool:
    before, t.template_variables = t.template_variables, {"x": "a", "y": "b"}
    try:
        return str(t.apply_chat_template(CHAT, chat_template="{{ x }}{{ y }}", tokenize=False, y="c")) == "ac"
    finally:
        t.template_variables = before


def _settable(name: str, value: Any) -> Callable[[Any], bool]:
    def test(t: Any) -> bool:
        before = getattr(t, name)
        setattr(t, name, value)
        found = getattr(t, name)
        setattr(t, name, before)
        return bool(found == value and type(before) is type(value))

    return test


def _padded(t: Any, side: str) -> bool:
    pad, before, t.pad_token, t.padding_side = t.pad_token, t.padding_side, _end(t), side
    short = t([TEXT, "a"], padding=True)["attention_mask"][1]
    t.pad_token, t.padding_side = pad, before
    return bool(short[0 if side == "left" else -1] == 0)


def _called(t: Any) -> bool:
    found = t([TEXT], return_tensors="np", return_offsets_mapping=True)
    assert isinstance(found.input_ids, np.ndarray)
    return bool(
        found.input_ids.tolist() == [t.encode(TEXT)] and found.offset_mapping.shape == (*found.input_ids.shape, 2)
    )


TESTS: dict[str, Callable[[Any], bool]] = {
    "__init__": lambda t: type(t)(t.backend, {"bos_token": _end(t)}).bos_token == _end(t),
    "__call__": _called,
    "encode": lambda t: (
        t.encode(TEXT, add_special_tokens=False) == t.backend.encode(TEXT, add_special_tokens=False).ids
    ),
    "encode_first": lambda t: t.encode_first(TEXT, True, 2) == t.encode(TEXT)[:2],
    "encode_pair": lambda t: (
        t.encode_pair("a", "b") == (t.backend.encode("a", "b").ids, t.backend.encode("a", "b").type_ids)
    ),
    "decode": lambda t: t.decode(t.encode(TEXT, add_special_tokens=False)).strip() == TEXT,
    "batch_decode": lambda t: (
        [x.strip() for x in t.batch_decode(t([TEXT], add_special_tokens=False).input_ids)] == [TEXT]
    ),
    "tokenize": lambda t: t.convert_tokens_to_ids(t.tokenize(TEXT)) == t.encode(TEXT, add_special_tokens=False),
    "convert_ids_to_tokens": lambda t: t.convert_ids_to_tokens(9) == t.backend.id_to_token(9),
    "convert_tokens_to_ids": lambda t: t.convert_tokens_to_ids([t.backend.id_to_token(9)]) == [9],
    "convert_tokens_to_string": lambda t: t.convert_tokens_to_string(t.tokenize(TEXT)).strip() == TEXT,
    "num_special_tokens_to_add": lambda t: t.num_special_tokens_to_add() == len(t.encode("a")) - len(t.tokenize("a")),
    "vocab_size": lambda t: 0 < t.vocab_size <= len(t),
    "get_vocab": lambda t: len(t.get_vocab()) == len(t),
    "get_added_vocab": lambda t: t.get_added_vocab()[_end(t)] == t.get_vocab()[_end(t)],
    "added_tokens_decoder": lambda t: t.added_tokens_decoder[t.get_vocab()[_end(t)]].content == _end(t),
    "special_tokens_map": lambda t: t.special_tokens_map["eos_token"] == t.eos_token,
    "all_special_tokens": lambda t: t.eos_token in t.all_special_tokens,
    "all_special_ids": lambda t: t.eos_token_id in t.all_special_ids,
    "skipped_ids": lambda t: t.eos_token_id in t.skipped_ids,
    "added_ids": lambda t: t.eos_token_id in t.added_ids,
    "get_chat_template": lambda t: t.get_chat_template("own text") == "own text",
    "apply_chat_template": lambda t: (
        t.apply_chat_template(CHAT, [{"name": "f"}], chat_template=TEMPLATE, tokenize=False) == f"{t.eos_token}hif"
    ),
}
for _name, _test in TESTS.items():
    tokenizer_row(_name, _test)

tokenizer_row("backend", lambda t: len(t.backend.get_vocab()) == len(t), "The tokenizer of the library `tokenizers`.")
tokenizer_row("is_fast", lambda t: t.is_fast is True, "Whether the library `tokenizers` does the work.")
tokenizer_row(
    "chats_in_tokens",
    lambda t: t.chats_in_tokens is False and t.encode(_chat(t, False), add_special_tokens=False) == _chat(t, True),
    "Whether the prompt of a conversation is token ids, which no text encodes to, as with Mistral's tokenizers.",
)
tokenizer_row(
    "chat_template", lambda t: t.get_chat_template() == t.chat_template, "The template, several by name, or None."
)
tokenizer_row(
    "template_variables", _sees_variables, "What chat templates see where `apply_chat_template` gets no other value."
)
tokenizer_row(
    "model_max_length", _settable("model_max_length", 77), "The most tokens that truncation keeps by default."
)
tokenizer_row("padding_side", lambda t: _padded(t, "left") and _padded(t, "right"), "`right` or `left`.")
tokenizer_row("truncation_side", _settable("truncation_side", "left"), "`right` or `left`.")
tokenizer_row("model_input_names", lambda t: t(TEXT).keys() == set(t.model_input_names), "The columns of a call.")
tokenizer_row(
    "clean_up_tokenization_spaces",
    _settable("clean_up_tokenization_spaces", True),
    "Whether `decode` removes spaces before punctuation.",
)
tokenizer_row(
    "extra_special_tokens", _settable("extra_special_tokens", ["x"]), "Special tokens that have no name of their own."
)
