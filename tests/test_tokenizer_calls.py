"""Every call of the tokenizer gives what transformers gives, for tokenizer files of many kinds, trained here."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RustTokenizer

from mainspring.engine.text.tokenizer import SlowTokenizer, Tokenizer, load_tokenizer
from mainspring.ipc.errors import InvalidArgumentError, NotSupportedError

CORPUS = [
    "The quick brown fox jumps over the lazy dog, doesn't it?",
    "She sells 1234567 sea shells by the sea shore; they're hers!",
    "naïve café in 東京 and Zürich 🙂 \t tabs\nand lines",
    "Hello world. How are you ? I 'm fine , thanks .",
] * 3
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}{{ documents | tojson }}"
)


def _byte_level(regex: str | None, special: list[str]) -> RustTokenizer:
    rust = RustTokenizer(models.BPE())
    if regex is None:
        rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(regex), "isolated")
        rust.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    rust.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    rust.train_from_iterator(CORPUS, trainer)
    return rust


def _bpe(rust: RustTokenizer) -> dict[str, Any]:
    """Vocabulary and merges, as the constructors of transformers' classes take them."""
    model = json.loads(rust.to_str())["model"]
    return {"vocab": model["vocab"], "merges": [tuple(merge) for merge in model["merges"]]}


def _unigram(special: list[str]) -> list[tuple[str, float]]:
    rust = RustTokenizer(models.Unigram())
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=special, unk_token="<unk>")
    rust.train_from_iterator(CORPUS, trainer)
    return [(token, score) for token, score in json.loads(rust.to_str())["model"]["vocab"]]


def _save(rust: RustTokenizer, folder: Path, **config: Any) -> None:
    folder.mkdir(exist_ok=True)
    rust.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def gpt2(folder: Path) -> None:
    from transformers import GPT2Tokenizer

    GPT2Tokenizer(**_bpe(_byte_level(None, ["<|endoftext|>"])), model_max_length=1024).save_pretrained(folder)


def llama3(folder: Path) -> None:
    rust = _byte_level(LLAMA3, [])
    rust.add_special_tokens(["<|begin|>", "<|end|>", "<|reserved_0|>"])
    begin = ("<|begin|>", rust.token_to_id("<|begin|>"))
    template = processors.TemplateProcessing("<|begin|> $A", "<|begin|>:0 $A:0 <|begin|>:1 $B:1", [begin])
    rust.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), template])
    _save(
        rust,
        folder,
        bos_token="<|begin|>",
        eos_token="<|end|>",
        clean_up_tokenization_spaces=True,
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=16,
    )


def qwen2(folder: Path) -> None:
    from transformers import Qwen2Tokenizer

    extra = ["<|im_start|>", "<|im_end|>"]
    model = _bpe(_byte_level(LLAMA3, ["<|endoftext|>"]))
    Qwen2Tokenizer(**model, extra_special_tokens=extra, image_token="<|image|>").save_pretrained(folder)


def llama2(folder: Path) -> None:
    from transformers import LlamaTokenizer

    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    rust = RustTokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    rust.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    rust.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    rust.train_from_iterator(CORPUS[:2], trainers.BpeTrainer(vocab_size=360, special_tokens=special))
    LlamaTokenizer(**_bpe(rust), pad_token="<unk>").save_pretrained(folder)


def t5(folder: Path) -> None:
    from transformers import T5Tokenizer

    vocab = _unigram(["<pad>", "</s>", "<unk>"])
    T5Tokenizer(vocab=vocab, extra_ids=3, clean_up_tokenization_spaces=True).save_pretrained(folder)


def xlm_roberta(folder: Path) -> None:
    from transformers import XLMRobertaTokenizer

    XLMRobertaTokenizer(vocab=_unigram(["<s>", "<pad>", "</s>", "<unk>", "<mask>"])).save_pretrained(folder)


def bert(folder: Path) -> None:
    from transformers import BertTokenizer

    rust = RustTokenizer(models.WordPiece(unk_token="[UNK]"))
    rust.normalizer, rust.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    rust.train_from_iterator(CORPUS[:2], trainers.WordPieceTrainer(vocab_size=150, special_tokens=special))
    vocab = rust.get_vocab()
    BertTokenizer(vocab=vocab, model_max_length=64, clean_up_tokenization_spaces=True).save_pretrained(folder)


def roberta(folder: Path) -> None:
    from transformers import RobertaTokenizer

    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    RobertaTokenizer(**_bpe(_byte_level(None, special)), truncation_side="left").save_pretrained(folder)


def added(folder: Path) -> None:
    """Added tokens with all their flags, and special tokens that only special_tokens_map.json names."""
    rust = _byte_level(None, ["<s>", "</s>"])
    rust.normalizer = normalizers.Lowercase()
    rust.add_tokens(
        [
            AddedToken("<left>", lstrip=True),
            AddedToken("<right>", rstrip=True, normalized=False),
            AddedToken("fox", single_word=True),
            AddedToken("DOG", normalized=True),
        ]
    )
    rust.add_special_tokens([AddedToken("<both>", lstrip=True, rstrip=True, special=True)])
    _save(rust, folder, bos_token="<s>", padding_side="left", audio_token="<audio>", model_max_length=None)
    mask = {"content": "<mask>", "lstrip": True, "rstrip": False, "single_word": False, "normalized": False}
    named = {"eos_token": "</s>", "pad_token": "<new pad>", "mask_token": mask}
    (folder / "special_tokens_map.json").write_text(json.dumps(named))


def no_processor(folder: Path) -> None:
    """Words without post-processor and decoder; tokens that only tokenizer_config.json adds."""
    rust = RustTokenizer(models.WordLevel(unk_token="<unk>"))
    rust.pre_tokenizer = pre_tokenizers.Whitespace()
    rust.train_from_iterator(CORPUS, trainers.WordLevelTrainer(special_tokens=["<unk>", "<pad>"]))
    size = rust.get_vocab_size()
    entry = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    decoder = {str(size): {"content": "<one>", **entry}, str(size + 1): {"content": "<two>", **entry, "special": False}}
    config = {"unk_token": "<unk>", "pad_token": "<pad>", "added_tokens_decoder": decoder}
    _save(rust, folder, **config, additional_special_tokens=["<one>"], model_input_names=["input_ids"])


KINDS = [gpt2, llama3, qwen2, llama2, t5, xlm_roberta, bert, roberta, added, no_processor]
TEXTS = [
    "Hello world. How are you ? I 'm fine , don't .",
    "  two  spaces, the quick brown fox\n\tand 12345 DOGs ",
    "naïve café 東京 🙂 ☃",
    "a<s>b </s> c <left> d <right> e <both> f fox foxes dog DOG <mask> [MASK] <new pad><one> <two>",
    "<|begin|>x<|im_start|>user<|image|>",
    "word",
]
PAIRS = (TEXTS, TEXTS[::-1])
OFFSETS = {"return_offsets_mapping": True, "return_special_tokens_mask": True, "return_length": True}
LIMITS = (5, 6, 9)
CHATS = [
    [{"role": "user", "content": "Hi <b> & é"}, {"role": "assistant", "content": "fine."}],
    [{"role": "user", "content": "once"}],
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "naïve", "parameters": {}}}]
NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")

Call = Callable[[Any], Any]
CALLS: dict[str, Call] = {
    "one text": lambda t: t(TEXTS[0]),
    "each text": lambda t: [t(text, **OFFSETS) for text in TEXTS],
    "texts": lambda t: t(TEXTS, **OFFSETS),
    "no special tokens": lambda t: t(TEXTS, add_special_tokens=False, **OFFSETS),
    "a pair": lambda t: t(*TEXTS[:2], **OFFSETS, return_token_type_ids=True),
    "pairs": lambda t: t(*PAIRS, **OFFSETS, return_token_type_ids=True),
    "pairs as tuples": lambda t: t(list(zip(*PAIRS, strict=True))),
    "an empty second text": lambda t: t("word", ""),
    "empty text": lambda t: [t(""), t(["", "word"])],
    "words": lambda t: [
        t(["two", "words"], is_split_into_words=True),
        t([["a"], ["b", "c"]], is_split_into_words=True),
    ],
    "chosen columns": lambda t: t(TEXTS, return_attention_mask=False, return_token_type_ids=True),
    "longest": lambda t: padded(t)(TEXTS, padding=True, **OFFSETS),
    "longest on both sides": lambda t: [padded(t)(TEXTS, padding="longest", padding_side=s) for s in ("left", "right")],
    "to a multiple": lambda t: padded(t)(TEXTS, padding=True, pad_to_multiple_of=8),
    "to a length": lambda t: padded(t)(TEXTS[-1], padding="max_length", max_length=12, return_token_type_ids=True),
    "to the longest length": lambda t: len(padded(t)("a", padding="max_length")["input_ids"]),
    "truncated": lambda t: [t(TEXTS, truncation=True, max_length=limit, **OFFSETS) for limit in LIMITS],
    "by max_length alone": lambda t: t(TEXTS, max_length=4),
    "by model_max_length": lambda t: t(TEXTS[1] * 3, truncation=True),
    "not truncated": lambda t: [t(TEXTS, max_length=4, truncation=no) for no in (False, "do_not_truncate")],
    "pairs truncated": lambda t: [
        t(*PAIRS, truncation=True, max_length=limit, **OFFSETS) for limit in (4, *LIMITS, 14)
    ],
    "first truncated": lambda t: t(TEXTS[1], TEXTS[5], truncation="only_first", max_length=12, **OFFSETS),
    "second truncated": lambda t: t(TEXTS[5], TEXTS[1], truncation="only_second", max_length=12, **OFFSETS),
    "truncated and padded": lambda t: padded(t)(TEXTS, truncation=True, max_length=8, padding="max_length"),
    "arrays": lambda t: padded(t)(TEXTS, padding=True, return_tensors="np", return_offsets_mapping=True),
    "one array": lambda t: t(TEXTS[0], return_tensors="np", return_length=True),
    "attributes": lambda t: [t(TEXTS[0]).input_ids, *t(TEXTS[0]).keys()],
    "tokens of a row": lambda t: [t(*PAIRS).tokens(at) for at in range(len(TEXTS))],
    "word numbers": lambda t: [t(*PAIRS).word_ids(1), t(TEXTS[0]).word_ids()],
    "text numbers": lambda t: [t(*PAIRS).sequence_ids(1), t(TEXTS[0]).sequence_ids()],
    "encode": lambda t: (
        [t.encode(text) for text in TEXTS] + [t.encode(text, add_special_tokens=False) for text in TEXTS]
    ),
    "encode a pair": lambda t: t.encode(*TEXTS[:2], truncation=True, max_length=9),
    "tokenize": lambda t: [t.tokenize(text) for text in TEXTS] + [t.tokenize("a", add_special_tokens=True)],
    "decode": lambda t: [
        t.decode(t.encode(text), skip_special_tokens=skip) for text in TEXTS for skip in (True, False)
    ],
    "clean up": lambda t: [t.decode(t.encode(TEXTS[0]), clean_up_tokenization_spaces=clean) for clean in (True, False)],
    "decode an array": lambda t: [t.decode(np.array(t.encode(TEXTS[0]))), t.decode(7), t.decode([])],
    "batch_decode": lambda t: [t.batch_decode(t(TEXTS)["input_ids"], skip_special_tokens=s) for s in (True, False)],
    "batch_decode of arrays": lambda t: t.batch_decode(np.array([[5, 6, 7], [8, 9, 10]])),
    "batch_decode of one": lambda t: [t.batch_decode([5, 6, 7]), t.batch_decode([])],
    "ids to tokens": lambda t: [t.convert_ids_to_tokens(t.encode(text)) for text in TEXTS],
    "an id to a token": lambda t: [t.convert_ids_to_tokens(9), t.convert_ids_to_tokens(10**6)],
    "ids to tokens without special ones": lambda t: t.convert_ids_to_tokens(
        t.encode(TEXTS[3]), skip_special_tokens=True
    ),
    "tokens to ids": lambda t: t.convert_tokens_to_ids([*sorted(t.get_vocab()), "no such token"]),
    "a token to an id": lambda t: [t.convert_tokens_to_ids(sorted(t.get_vocab())[9]), t.convert_tokens_to_ids("zzzzz")],
    "tokens to text": lambda t: [t.convert_tokens_to_string(t.tokenize(text)) for text in TEXTS],
    "sizes": lambda t: [t.vocab_size, len(t), bool(t), t.is_fast],
    "vocabulary": lambda t: [t.get_vocab(), t.get_added_vocab(), sorted(t.added_tokens_decoder)],
    "special tokens": lambda t: [t.all_special_tokens, t.all_special_ids, t.special_tokens_map, t.extra_special_tokens],
    "named tokens": lambda t: [getattr(t, f"{name}_token{end}") for name in NAMES for end in ("", "_id")],
    "settings": lambda t: [t.model_max_length, t.padding_side, t.truncation_side, set(t.model_input_names)],
    "number of special tokens": lambda t: [t.num_special_tokens_to_add(), t.num_special_tokens_to_add(pair=True)],
    "chat": lambda t: [t.apply_chat_template(chat, chat_template=CHAT, tokenize=False) for chat in CHATS],
    "chat with tools": lambda t: t.apply_chat_template(
        CHATS[0], TOOLS, [{"text": "d"}], CHAT, add_generation_prompt=True, tokenize=False
    ),
    "chat as ids": lambda t: t.apply_chat_template(CHATS[1], TOOLS, chat_template=CHAT, return_dict=False),
    "chats": lambda t: [
        t.apply_chat_template(CHATS, chat_template=CHAT, tokenize=False),
        t.apply_chat_template(CHATS, chat_template=CHAT, return_dict=True, tokenizer_kwargs=OFFSETS),
    ],
    "chats as arrays": lambda t: padded(t).apply_chat_template(
        CHATS, chat_template=CHAT, return_dict=True, padding=True, return_tensors="np", truncation=True, max_length=9
    ),
}


def padded(tokenizer: Any) -> Any:
    """The tokenizer, with a pad token."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(3)
    return tokenizer


def plain(value: Any) -> Any:
    """A value that == compares deeply: arrays with their type, and the names of columns."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tolist()
    if hasattr(value, "keys"):
        return {key: plain(value[key]) for key in value}
    return [plain(one) for one in value] if isinstance(value, (list, tuple)) else value


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.__name__)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param.__name__)
    request.param(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Callable[[], tuple[Any, Tokenizer]]:
    from transformers import AutoTokenizer

    return lambda: (AutoTokenizer.from_pretrained(folder), load_tokenizer(folder))


def test_every_call_gives_what_transformers_gives(loaded: Callable[[], tuple[Any, Tokenizer]]) -> None:
    theirs, ours = loaded()
    assert not isinstance(ours, SlowTokenizer)
    before = ours.backend.to_str()
    wrong = {}
    for name, call in CALLS.items():
        expected, found = plain(call(theirs)), plain(call(ours))
        if found != expected:
            wrong[name] = (expected, found)
    assert not wrong, "\n".join(f"{name}:\n  {expected}\n  {found}" for name, (expected, found) in wrong.items())
    assert ours.backend.to_str() == before, "other engines use it at the same time"


def test_special_tokens_can_be_set(loaded: Callable[[], tuple[Any, Tokenizer]]) -> None:
    for one in (pair := loaded()):
        one.pad_token = one.convert_ids_to_tokens(4)
        one.eos_token_id = 6
        one.padding_side = "left"
        one.truncation_side = "left"
    theirs, ours = (
        (
            one.pad_token_id,
            one.eos_token,
            one.all_special_ids,
            plain(one(TEXTS, padding=True, max_length=7, truncation=True)),
        )
        for one in pair
    )
    assert ours == theirs
    assert (ours[0], ours[3]["input_ids"][-1][0]) == (4, 4)


def test_model_specific_tokens_are_attributes(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    added(tmp_path)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    assert (ours.audio_token, ours.audio_token_id) == (theirs.audio_token, theirs.audio_token_id)
    with pytest.raises(AttributeError, match="video_token_id"):
        ours.video_token_id  # noqa: B018


def test_mode_hf_has_the_same_settings(tmp_path: Path) -> None:
    bert(tmp_path)
    ours, through_hf = load_tokenizer(tmp_path), load_tokenizer(tmp_path, mode="hf")
    assert plain(through_hf(TEXTS, **OFFSETS)) == plain(ours(TEXTS, **OFFSETS))
    assert CALLS["settings"](through_hf) == CALLS["settings"](ours)


def test_a_python_tokenizer_takes_the_same_calls(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, ByT5Tokenizer

    ByT5Tokenizer().save_pretrained(tmp_path)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    for name in ("texts", "truncated and padded", "batch_decode", "tokens to text", "special tokens", "sizes", "chats"):
        if name == "texts":  # without offsets, which need the Rust library
            assert plain(ours(TEXTS)) == plain(theirs(TEXTS))
        elif name != "chats":
            assert plain(CALLS[name](ours)) == plain(CALLS[name](theirs)), name
    ours.pad_token = "</s>"
    assert set(ours(["a", "abc"], padding=True)["input_ids"][0][-2:]) == {ours.eos_token_id}


def test_what_can_not_be_done_is_an_error(tmp_path: Path) -> None:
    gpt2(tmp_path)
    ours = load_tokenizer(tmp_path)
    ours.pad_token = None
    for options, reason in (
        ({"padding": True}, "pad token"),
        ({"padding": "longest_first"}, "padding is"),
        ({"truncation": "some", "max_length": 3}, "truncation is"),
        ({"truncation": "only_second", "max_length": 3}, "can't remove"),
        ({"return_tensors": "np"}, "different lengths"),
        ({"padding": True, "padding_side": "up"}, "padding_side is"),
    ):
        with pytest.raises(InvalidArgumentError, match=reason):
            ours(TEXTS, **options)  # type: ignore[arg-type]
    with pytest.raises(NotSupportedError, match="'pt'"):
        ours(TEXTS[0], return_tensors="pt")
    with pytest.raises(NotSupportedError, match="return_assistant_tokens_mask"):
        ours.apply_chat_template(CHATS[0], chat_template=CHAT, return_assistant_tokens_mask=True)
    with pytest.raises(TypeError, match="stride"):
        ours(TEXTS[0], stride=2)  # type: ignore[call-arg]
    with pytest.raises(AttributeError, match="input_ids, attention_mask"):
        ours(TEXTS[0]).offset_mapping  # noqa: B018


def test_a_result_can_be_pickled(tmp_path: Path) -> None:
    gpt2(tmp_path)
    found = load_tokenizer(tmp_path)(TEXTS)
    again = pickle.loads(pickle.dumps(found))
    assert (again, again.tokens(2)) == (found, found.tokens(2))
