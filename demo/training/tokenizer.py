"""Trains the demo model's byte-level BPE on the demo corpus and writes it with its chat template.

Every digit is a token of its own, so that a number's digits line up whatever its length, and the post-processor
adds the begin token, so that a plain `encode` gives exactly what a training document starts with.
"""

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from corpus import ASSISTANT, BEGIN, END, PAD, SYSTEM, USER, documents

SPECIAL_TOKENS: tuple[str, ...] = (PAD, BEGIN, END, SYSTEM, USER, ASSISTANT)
TRAINING_DOCUMENTS = 40_000

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('unknown role: ' + message['role']) }}
    {%- endif %}
    {{- '<|' + message['role'] + '|>' + (message['content'] | trim) }}
    {%- if message['role'] == 'assistant' %}
        {{- eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""


def _text(seed: str) -> Iterator[str]:
    """Documents as bare text: the special tokens between their pieces are no business of the merges."""
    for document in islice(documents(seed), TRAINING_DOCUMENTS):
        for piece in document.pieces:
            text = piece.text
            for token in SPECIAL_TOKENS:
                text = text.replace(token, "")
            yield text


def train_tokenizer(seed: str, vocab_size: int) -> Tokenizer:
    """A tokenizer of exactly `vocab_size` tokens, special tokens first."""
    return byte_level_bpe(_text(seed), SPECIAL_TOKENS, vocab_size)


def byte_level_bpe(texts: Iterable[str], special_tokens: Iterable[str], vocab_size: int) -> Tokenizer:
    """A BPE trained on `texts`, special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in special_tokens],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A",
        pair=f"{BEGIN} $A {BEGIN} $B",
        special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))],
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja, as transformers reads them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
