"""Structured outputs: with any sampling the answer has the requested form, and no grammar harms the core."""

from __future__ import annotations

import ipaddress
import json
import random
import re
import string
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from datetime import date
from pathlib import Path
from typing import Any
from uuid import UUID

import jsonschema
import numpy as np
import pytest
from pydantic import BaseModel
from tokenizers import Tokenizer

from mainspring.core.worker import grammar as structured
from mainspring.core.worker.grammar import Grammar, GrammarCompiler, Matcher
from mainspring.core.worker.registry import Registry
from mainspring.demo import MODEL_PATH
from mainspring.ipc.errors import InvalidArgumentError, InvalidRequestError, UnknownArgumentError
from mainspring.ipc.structured import (
    MAX_SPEC_BYTES,
    OPTIONS_KEY,
    WHITESPACE,
    GuidedDecodingParams,
    StructuredOutputsParams,
)
from tiers import examples

SOURCE = (MODEL_PATH / "tokenizer.json").read_text(encoding="utf-8")
TOKENIZER = Tokenizer.from_str(SOURCE)
KNOWN = TOKENIZER.get_vocab_size()
VOCAB_SIZE = KNOWN + 37  # vocabulary padded by the model; not a multiple of 32
EOS = 2
SPECIAL = frozenset(token for token, added in TOKENIZER.get_added_tokens_decoder().items() if added.special)
CLOSING = [TOKENIZER.token_to_id(text) for text in ('"', "}", "]")]
PATIENCE_S = 60  # seconds; limit for hostile input on a busy machine (a second or two on an idle one)
ANSWER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(SOURCE, VOCAB_SIZE, [EOS])


def encode(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


def allowed(matcher: Matcher, size: int = VOCAB_SIZE) -> set[int]:
    row = np.full((size + 31) // 32, -1, np.int32)
    matcher.fill(row)
    bits = np.unpackbits(row.astype("<i4").view(np.uint8), bitorder="little")
    assert not bits[size:].any()
    return set(np.flatnonzero(bits).tolist())


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether `text` is accepted: the mask allows each of its tokens, and the document is complete."""
    matcher = grammar.matcher()
    for token in encode(text):
        inside = token in allowed(matcher)
        assert matcher.accept(token) == inside
        if not inside:
            return False
    ends = EOS in allowed(matcher)
    assert matcher.accept(EOS) == ends == matcher.finished or not ends
    return ends


def walk(matcher: Matcher, rng: random.Random, patience: int = 40, longest: int = 3000) -> str:
    """A document of random tokens; after `patience` tokens, closing tokens are preferred if they are allowed."""
    tokens: list[int] = []
    while len(tokens) < longest:
        choices = allowed(matcher)
        assert not choices & (SPECIAL - {EOS})
        assert max(choices) < KNOWN
        hasty = len(tokens) >= patience
        if EOS in choices and (hasty or len(choices) == 1 or rng.random() < 0.2):
            assert matcher.accept(EOS)
            return str(TOKENIZER.decode(tokens, skip_special_tokens=False))
        choices.discard(EOS)
        closing = sorted(choices.intersection(CLOSING)) if hasty else []
        token = rng.choice(closing or sorted(choices))
        assert matcher.accept(token)
        tokens.append(token)
    raise AssertionError(f"no end after {longest} tokens: {TOKENIZER.decode(tokens)!r}")


# ---------------------------------------------------------------------- parameters


class Person(BaseModel):
    name: str
    age: int


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"regex": "a+"}, "regex", "a+"),
        ({"choice": ["yes", "no", "yes"]}, "choice", '["yes", "no"]'),
        ({"grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"structural_tag": "{}"}, "structural_tag", "{}"),
    ],
)
def test_a_form_becomes_a_kind_and_a_text(fields: dict[str, Any], kind: str, text: str) -> None:
    assert StructuredOutputsParams(**fields).spec() == (kind, text)


CLOSED = {
    "properties": {"a": {"items": {"properties": {}, "additionalProperties": False}}},
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("fields", "schema", "whitespace"),
    [
        ({"json": '{"type": "object"}'}, {"type": "object"}, {"whitespace_pattern": WHITESPACE}),
        ({"json": {"const": "é"}}, {"const": "é"}, {"whitespace_pattern": WHITESPACE}),
        ({"json": Person}, Person.model_json_schema(), {"whitespace_pattern": WHITESPACE}),
        ({"json_object": True}, {"type": "object"}, {"whitespace_pattern": WHITESPACE}),
        ({"json": {}, "whitespace_pattern": " ?"}, {}, {"whitespace_pattern": " ?"}),
        ({"json": {}, "disable_any_whitespace": True}, {}, {"whitespace_flexible": False}),
        (
            {"json": {"properties": {"a": {"items": {"properties": {}}}}}, "disable_additional_properties": True},
            CLOSED,
            {"whitespace_pattern": WHITESPACE},
        ),
    ],
)
def test_a_schema_travels_with_how_it_is_to_be_written(
    fields: dict[str, Any], schema: dict[str, Any], whitespace: dict[str, Any]
) -> None:
    kind, text = StructuredOutputsParams(**fields).spec()
    assert (kind, json.loads(text)) == ("json", {**schema, OPTIONS_KEY: whitespace})


def test_the_older_name_takes_its_older_fields() -> None:
    assert GuidedDecodingParams(choice=["a"], backend="xgrammar", disable_fallback=True).spec() == ("choice", '["a"]')


def test_a_schema_of_the_user_is_not_changed() -> None:
    schema: dict[str, Any] = {"properties": {"a": {"properties": {}}}}
    StructuredOutputsParams(json=schema, disable_additional_properties=True, disable_any_whitespace=True).spec()
    assert schema == {"properties": {"a": {"properties": {}}}}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "none of json, regex"),
        ({"json_object": False}, "none of json, regex"),
        ({"regex": "a", "choice": ["a"]}, "regex and choice"),
        ({"regex": ""}, "regex is ''"),
        ({"regex": 3}, "regex is 3"),
        ({"grammar": b"a"}, "grammar is b'a'"),
        ({"choice": []}, "choice is []"),
        ({"choice": "abc"}, "choice is 'abc'"),
        ({"choice": ["a", ""]}, "choice holds ''"),
        ({"choice": [1]}, "choice holds 1"),
        ({"json": "{"}, "json is no JSON"),
        ({"json": "[]"}, "json is '[]'"),
        ({"json": int}, "json is <class 'int'>"),
        ({"json": {"const": object()}}, "json is a schema that can't"),
        ({"json": {"const": float("nan")}}, "json is a schema that can't"),
        ({"json_object": 1}, "json_object is 1"),
        ({"structural_tag": "{"}, "structural_tag is no JSON"),
        ({"json": {}, "disable_any_whitespace": 1}, "disable_any_whitespace is 1"),
        ({"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}, "whitespace_pattern is given with"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern is given with regex"),
        ({"regex": "a" * (MAX_SPEC_BYTES + 1)}, f"the limit is {MAX_SPEC_BYTES}"),
        ({"regex": "\ud800"}, "regex holds half a surrogate pair"),
    ],
)
def test_a_wrong_parameter_is_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape(words)):
        StructuredOutputsParams(**fields)


def test_an_unknown_parameter_gets_the_nearest_name() -> None:
    with pytest.raises(UnknownArgumentError, match="did you mean 'regex'"):
        StructuredOutputsParams(regexp="a")  # type: ignore[call-arg]


def test_parameters_need_no_library() -> None:
    code = (
        "import sys; from mainspring.ipc.structured import StructuredOutputsParams as P; P(json={}).spec(); "
        "print(sorted({'torch', 'pydantic', 'llguidance', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


# ---------------------------------------------------------------------- documents

GBNF = """# from vLLM's documentation
root ::= select_statement
select_statement ::= "SELECT " column " from " table " where " condition
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
condition ::= column "= " number
number ::= "1 " | "2 "
"""
LARK = """
?start: sum
?sum: product | sum "+" product
?product: atom | product "*" atom
?atom: NUMBER | "(" sum ")"
NUMBER: /[0-9]+/
"""
TAG = json.dumps({"structures": [{"begin": "<f=a>", "schema": ANSWER, "end": "</f>"}], "triggers": ["<f="]})
PLAIN = StructuredOutputsParams(json=ANSWER).spec()[1]
COMPACT = StructuredOutputsParams(json=ANSWER, disable_any_whitespace=True).spec()[1]
ONE_SPACE = StructuredOutputsParams(json=ANSWER, whitespace_pattern="[ ]?").spec()[1]


@pytest.mark.parametrize(
    ("kind", "text", "right", "wrong"),
    [
        ("regex", "ab|abc", ["ab", "abc"], ["", "a", "abcd", "b"]),
        ("regex", r"^\d{3}-\d{4}$", ["555-1234"], ["5551234", "555-12345"]),
        ("regex", r"(é|東京|🙂)*", ["", "é🙂東京"], ["e", "東"]),
        ("choice", '["yes", "no", "yes, but"]', ["yes", "no", "yes, but"], ["", "y", "yes,", "maybe"]),
        ("choice", r'["a/b \"q\" \\ \n"]', ['a/b "q" \\ \n'], ["a"]),
        ("json", json.dumps(ANSWER), ['{"a":1}', '{ "a" : -12 }', '{"a":\n1}'], ["{}", '{"a":"1"}', '{"a":1,"b":2}']),
        ("json", PLAIN, ['{"a":' + " " * 40 + "1}"], ['{"a":' + " " * 41 + "1}"]),
        ("json", COMPACT, ['{"a":1}'], ['{ "a":1}', '{"a": 1}']),
        ("json", ONE_SPACE, ['{"a":1}', '{ "a": 1 }'], ['{"a":  1}', '{"a":\n1}']),
        ("json", '{"type": "object"}', ["{}", '{"x": [1, {"y": null}]}'], ["[]", "1", '{"x"}']),
        ("json", '{"enum": ["a", 1, null]}', ['"a"', "1", "null"], ["2", '"b"']),
        ("json", '{"type": "integer", "multipleOf": 7}', ["0", "-14", "7"], ["8", "1.5"]),
        ("json", '{"oneOf": [{"type": "string"}, {"type": "null"}]}', ['"x"', "null"], ["1"]),
        ("grammar", GBNF, ["SELECT col_1  from table_2  where col_1 = 1 "], ["SELECT", "DROP"]),
        ("grammar", LARK, ["1", "(1+22)*3"], ["", "1+", "(1"]),
        ("grammar", 'root ::= "(" root ")" | ""', ["", "()", "((()))"], ["(", "())"]),
        ("structural_tag", TAG, ["", "hi", 'hi <f=a>{"a": 1}</f> ho'], ["<f=b>", '<f=a>{"b": 1}</f>', '<f=a>{"a": 1}']),
    ],
)
def test_documents_of_each_kind(
    compiler: GrammarCompiler, kind: str, text: str, right: list[str], wrong: list[str]
) -> None:
    grammar = compiler.compile(kind, text)
    for document in right:
        assert accepts(grammar, document), document
    for document in wrong:
        assert not accepts(grammar, document), document


def test_the_name_of_a_special_token_is_spelt_as_text(compiler: GrammarCompiler) -> None:
    for kind, text in [("regex", r"<\|user\|>"), ("choice", '["<|user|>"]'), ("json", '{"const": "<|user|>"}')]:
        print(kind)
        assert walk(compiler.compile(kind, text).matcher(), random.Random(0)).strip('"') == "<|user|>"


def test_special_tokens_are_never_text(compiler: GrammarCompiler) -> None:
    for kind, text in [("regex", r"(.|\n)*"), ("grammar", 'start: "<|user|>"? /(.|\\n)*/ "<x>"')]:
        matcher = compiler.compile(kind, text).matcher()
        assert not allowed(matcher) & (SPECIAL - {EOS})
        assert max(allowed(matcher)) < KNOWN
        for token in (*SPECIAL - {EOS}, KNOWN, VOCAB_SIZE - 1, VOCAB_SIZE, 10**6, -1):
            assert not matcher.accept(token)
        assert matcher.accept(encode("x")[0])


@pytest.mark.parametrize("size", [KNOWN, KNOWN + 1, KNOWN + 31, KNOWN + 64, KNOWN - 5])
def test_any_vocabulary_of_the_model_fits_the_tokenizer(size: int) -> None:
    matcher = GrammarCompiler(TOKENIZER, size, [EOS]).compile("regex", "(.|\n)*").matcher()
    text = set(range(min(KNOWN, size))) - SPECIAL
    whole = {token for token in text if "\ufffd" not in TOKENIZER.decode([token])}  # other tokens are not allowed first
    assert whole | {EOS} <= allowed(matcher, size) <= text | {EOS}


def test_special_tokens_beyond_the_vocabulary_of_text_may_end_a_document() -> None:
    """Most checkpoints add them after all other tokens."""
    tokenizer = Tokenizer.from_str(SOURCE)
    tokenizer.add_special_tokens(["<|more|>", "<|stop|>"])
    stop = tokenizer.token_to_id("<|stop|>")
    tokenizer.add_tokens(["(call)"])
    call = tokenizer.token_to_id("(call)")
    matcher = GrammarCompiler(tokenizer, VOCAB_SIZE, [stop]).compile("choice", '["(call)"]').matcher()
    assert call in allowed(matcher)
    assert matcher.accept(call)
    assert allowed(matcher) == {stop}
    for ends in ([stop], [stop, KNOWN + 30]):
        matcher = GrammarCompiler(tokenizer, VOCAB_SIZE, ends).compile("regex", "a?").matcher()
        assert allowed(matcher) == {*encode("a"), *ends}
        assert matcher.accept(stop)


# ---------------------------------------------------------------------- the end


def test_the_end_is_allowed_exactly_where_the_document_may_end(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile("regex", "ab(cd)?").matcher()
    for char, may_end in zip("abcd", (False, True, False, True), strict=True):
        assert not matcher.finished
        assert matcher.accept(encode(char)[0])
        assert (EOS in allowed(matcher)) == may_end
    assert matcher.finished
    assert allowed(matcher) == {EOS}


def test_a_refused_token_changes_nothing(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile("regex", "ab").matcher()
    before = allowed(matcher)
    for token in (EOS, *encode("b"), *SPECIAL):
        assert not matcher.accept(token)
    assert allowed(matcher) == before
    assert not matcher.finished


def test_after_the_end_comes_the_end(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile("regex", "a*").matcher()
    assert matcher.accept(encode("a")[0])
    assert matcher.accept(EOS)
    assert matcher.finished
    assert allowed(matcher) == {EOS}
    assert not matcher.accept(encode("a")[0])
    assert matcher.accept(EOS)


def test_each_token_that_ends_ends() -> None:
    ends = [EOS, 5]
    matcher = GrammarCompiler(SOURCE, VOCAB_SIZE, ends).compile("regex", "a?").matcher()
    assert allowed(matcher).issuperset(ends)
    assert matcher.accept(5)
    assert allowed(matcher) == set(ends)


def test_without_a_token_that_ends_a_document_still_finishes() -> None:
    matcher = GrammarCompiler(SOURCE, VOCAB_SIZE, []).compile("regex", "a").matcher()
    assert allowed(matcher) == set(encode("a"))
    assert matcher.accept(encode("a")[0])
    assert matcher.finished
    assert allowed(matcher) == set()


# ---------------------------------------------------------------------- resumption

SCHEMAS = ['{"type": "object"}', json.dumps(ANSWER), '{"type": "array", "items": {"type": "string", "maxLength": 9}}']


def test_a_resumed_matcher_goes_on_as_the_first_would(compiler: GrammarCompiler) -> None:
    seed = 7
    print(f"seed {seed}")
    rng = random.Random(seed)
    for kind, text in [*(("json", schema) for schema in SCHEMAS), ("grammar", LARK), ("structural_tag", TAG)]:
        grammar = compiler.compile(kind, text)
        first, tokens = grammar.matcher(), []
        for _ in range(25):
            resumed = grammar.matcher()
            assert all(resumed.accept(token) for token in tokens)
            assert allowed(resumed) == allowed(first)
            assert resumed.finished == first.finished
            choices = sorted(allowed(first) - {EOS})
            if not choices:
                break
            tokens.append(rng.choice(choices))
            assert first.accept(tokens[-1])


def test_matchers_of_a_grammar_know_nothing_of_each_other(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile("regex", "ab")
    one, other = grammar.matcher(), grammar.matcher()
    assert one.accept(encode("a")[0])
    assert allowed(other) == set(encode("a")) | ({encode("ab")[0]} if len(encode("ab")) == 1 else set())


# ---------------------------------------------------------------------- random walks

PATTERNS = {
    r"[a-z]{2,5}": r"^[a-z]{2,5}$",
    r"\+?[0-9]{1,3}(-[0-9]{2})*": r"^\+?[0-9]{1,3}(-[0-9]{2})*$",
    r"(foo|ba[rz])+": r"^(foo|ba[rz])+$",
}
FORMATS: dict[str, Callable[[str], object]] = {
    "date": date.fromisoformat,
    "uuid": UUID,
    "ipv4": ipaddress.IPv4Address,
}
CHECKER = jsonschema.FormatChecker(formats=())
for name, read in FORMATS.items():
    CHECKER.checks(name, raises=ValueError)(lambda text, read=read: not isinstance(text, str) or bool(str(read(text))))


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A random schema of supported keywords."""
    kinds = ["string", "pattern", "format", "enum", "integer", "number", "boolean", "null"]
    if depth:
        kinds += ["array", "tuple", "object", "object", "map", "any", "ref"]
    kind = rng.choice(kinds)
    low = rng.randint(-50, 50)
    if kind == "string":
        return {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(3, 20)}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(list(PATTERNS.values()))}
    if kind == "format":
        return {"type": "string", "format": rng.choice(list(FORMATS))}
    if kind == "enum":
        return {"enum": rng.sample(["a", "é\n", "", 1, -2, None, True, [1, {"b": 2}], {"c": "d"}], rng.randint(1, 4))}
    if kind == "integer":
        return {
            "type": "integer",
            "minimum": low,
            "maximum": low + rng.randint(20, 1000),
            **({"multipleOf": rng.randint(2, 9)} if rng.random() < 0.3 else {}),
        }
    if kind == "number":
        return {"type": "number", "exclusiveMinimum": low / 4, "maximum": low / 4 + rng.randint(1, 99)}
    if kind == "array":
        least = rng.randint(0, 2)
        return {
            "type": "array",
            "items": random_schema(rng, depth - 1),
            "minItems": least,
            "maxItems": least + rng.randint(0, 3),
        }
    if kind == "tuple":
        return {
            "type": "array",
            "prefixItems": [random_schema(rng, depth - 1) for _ in range(2)],
            "items": False,
            "minItems": 1,
        }
    if kind == "object":
        names = rng.sample(string.ascii_lowercase, rng.randint(0, 4))
        return {
            "type": "object",
            "properties": {name: random_schema(rng, depth - 1) for name in names},
            "required": [name for name in names if rng.random() < 0.6],
            "additionalProperties": rng.random() < 0.2,
        }
    if kind == "map":
        return {"type": "object", "additionalProperties": random_schema(rng, depth - 1)}
    if kind == "any":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(2, 3))]}
    if kind == "ref":
        return {"$ref": "#/$defs/tree"}
    return {"type": kind}


TREE = {
    "type": "object",
    "properties": {"leaf": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    "required": ["leaf"],
    "additionalProperties": False,
}


def check_schema(compiler: GrammarCompiler, seed: int) -> None:
    rng = random.Random(seed)
    schema = {**random_schema(rng), "$defs": {"tree": TREE}}
    print(f"seed {seed}: {json.dumps(schema)}")
    grammar = compiler.compile("json", json.dumps(schema))
    for _ in range(2):
        document = walk(grammar.matcher(), rng)
        print(document)
        jsonschema.validate(json.loads(document), schema, cls=jsonschema.Draft202012Validator, format_checker=CHECKER)


@pytest.mark.parametrize("seed", range(60))
def test_random_tokens_make_documents_that_validate(compiler: GrammarCompiler, seed: int) -> None:
    check_schema(compiler, seed)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_random_tokens_make_documents_that_validate_for_a_thousand_schemas(compiler: GrammarCompiler) -> None:
    for seed in range(1000, 1000 + examples(100)):
        check_schema(compiler, seed)


@pytest.mark.parametrize(
    "regex", [*PATTERNS, r"[^\n]{0,30}", r"(\w+@\w+\.(com|org) ?){1,3}", r"\$\d+(\.\d\d)?|free", "(?i)ja|nein", r"a*?b"]
)
def test_random_tokens_make_text_that_matches(compiler: GrammarCompiler, regex: str) -> None:
    rng = random.Random(3)
    print("seed 3")
    grammar = compiler.compile("regex", regex)
    for _ in range(10):
        document = walk(grammar.matcher(), rng, longest=400) if "+" not in regex else None
        if document is not None:
            assert re.fullmatch(regex, document), document


@pytest.mark.parametrize("number", [1, 2, 300, 5000])
def test_random_tokens_make_one_of_the_choices(compiler: GrammarCompiler, number: int) -> None:
    print("seed 4")
    rng = random.Random(4)
    choices = {"".join(rng.choices('ab"\\é /\n', k=rng.randint(1, 9))) for _ in range(number)}
    grammar = compiler.compile("choice", json.dumps(sorted(choices)))
    assert all(walk(grammar.matcher(), rng) in choices for _ in range(10))


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("yaml", "", "no structured output of kind 'yaml'; there are json, regex"),
        ("regex", "(a", "regex can't be used: unclosed group"),
        ("regex", "a(?=b)", "look-ahead"),
        ("regex", r"(a)\1", "backreferences are not supported"),
        ("regex", r"\bfoo", "lookarounds not supported"),
        ("regex", "a" * 20_000, "regex comes to 20000 bytes; the limit is 16384"),
        ("regex", "a{10001}", "repeated 10001 times; the limit is 10000"),
        ("choice", "[]", "must be a list of strings"),
        ("choice", "{", "choice can't be used: it is no JSON"),
        ("json", "{", "json can't be used: it is no JSON"),
        ("json", "true", "must be a JSON object"),
        ("json", '{"type": "strin"}', "Invalid type: strin"),
        ("json", '{"not": {}}', "keys that are not supported: not"),
        ("json", '{"type": "string", "format": "zip"}', "Unknown format: zip"),
        ("json", '{"type": "string", "pattern": "a(?!b)"}', "look-ahead"),
        ("json", '{"$ref": "#/nowhere"}', "nowhere"),
        ("json", '{"$ref": "http://example.com/"}', "http://example.com/"),
        ("json", '{"$ref": "#"}', "nothing matches it"),
        ("json", '{"enum": []}', "Unsatisfiable"),
        ("json", '{"x-guidance": {"lenient": true}}', "x-guidance is"),
        ("grammar", "nonsense", "grammar can't be used"),
        ("grammar", "root ::= other", "Rule 'other' not found"),
        ("grammar", "start: a\na: b\nb: a", "nothing matches it"),
        ("grammar", 'start: "a" <|user|>', "it names the token <|user|>"),
        ("grammar", 'start: "a" <[2]> "b"', "it names the token <[2]>"),
        ("grammar", 'start: "a" <[300]> "b"', "it names the token <[300]>, which is not special"),
        ("grammar", 'start: "a" <[3-4]> "b"', "it names the token <[3-4]>"),
        ("structural_tag", "{}", "it must have triggers"),
        ("structural_tag", '{"triggers": ["<"], "structures": [{"begin": "["}]}', "structures[0] must have begin and"),
        (
            "structural_tag",
            '{"triggers": ["<"], "structures": [{"begin": "[", "schema": {}, "end": ""}]}',
            "begins with '[', which no trigger",
        ),
    ],
)
def test_what_cannot_be_used_is_an_error_that_says_why(
    compiler: GrammarCompiler, kind: str, text: str, words: str
) -> None:
    for _ in range(2):  # also from the cache
        with pytest.raises(InvalidRequestError, match=re.escape(words)) as caught:
            compiler.compile(kind, text)
        assert len(str(caught.value)) < 500
        assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------- what is hostile


_STRING, _NUMBER = {"type": "string"}, {"type": "number"}
# Keywords of JSON Schema, drafts 4 to 2020-12: key → a schema with it, and a document that it rules out.
FOLLOWED: dict[str, tuple[dict[str, Any], str]] = {
    "$ref": ({"$defs": {"a": _STRING}, "$ref": "#/$defs/a"}, "1"),
    "allOf": ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "2"),
    "anyOf": ({"anyOf": [_STRING, {"type": "null"}]}, "1"),
    "oneOf": ({"oneOf": [_STRING, {"type": "null"}]}, "1"),
    "prefixItems": ({"type": "array", "prefixItems": [_STRING]}, "[1]"),
    "items": ({"type": "array", "items": _STRING}, "[1]"),
    "additionalItems": ({"type": "array", "items": [_STRING], "additionalItems": False}, '["a",1]'),
    "properties": ({"type": "object", "properties": {"a": _STRING}}, '{"a":1}'),
    "patternProperties": ({"type": "object", "patternProperties": {"^a$": _STRING}}, '{"a":1}'),
    "additionalProperties": ({"type": "object", "additionalProperties": False}, '{"a":1}'),
    "type": ({"type": "string"}, "1"),
    "enum": ({"enum": ["a", "b"]}, '"c"'),
    "const": ({"const": "a"}, '"c"'),
    "multipleOf": ({"type": "integer", "multipleOf": 2}, "3"),
    "maximum": ({**_NUMBER, "maximum": 2}, "3"),
    "minimum": ({**_NUMBER, "minimum": 2}, "1"),
    "exclusiveMaximum": ({**_NUMBER, "exclusiveMaximum": 2}, "2"),
    "exclusiveMinimum": ({**_NUMBER, "exclusiveMinimum": 2}, "2"),
    "exclusiveMinimum of draft 4": ({**_NUMBER, "minimum": 2, "exclusiveMinimum": True}, "2"),
    "maxLength": ({**_STRING, "maxLength": 1}, '"ab"'),
    "minLength": ({**_STRING, "minLength": 1}, '""'),
    "pattern": ({**_STRING, "pattern": "^a$"}, '"b"'),
    "format": ({**_STRING, "format": "date"}, '"b"'),
    "maxItems": ({"type": "array", "maxItems": 1}, "[1,2]"),
    "minItems": ({"type": "array", "minItems": 1}, "[]"),
    "maxProperties": ({"type": "object", "maxProperties": 1}, '{"a":1,"b":2}'),
    "minProperties": ({"type": "object", "minProperties": 1}, "{}"),
    "required": ({"type": "object", "required": ["a"]}, "{}"),
}  # fmt: skip
REFUSED: dict[str, Any] = {  # key → a value of it
    "not": _STRING, "if": _STRING, "then": _STRING, "else": _STRING, "dependentSchemas": {"a": {}},
    "dependentRequired": {"a": ["b"]}, "dependencies": {"a": ["b"]}, "contains": _STRING, "minContains": 1,
    "maxContains": 1, "uniqueItems": True, "propertyNames": {"pattern": "^a"}, "unevaluatedItems": False,
    "unevaluatedProperties": False, "$dynamicRef": "#a", "$dynamicAnchor": "a", "$recursiveRef": "#",
    "$recursiveAnchor": True,
}  # fmt: skip


@pytest.mark.parametrize("key", FOLLOWED)
def test_a_key_of_a_schema_is_followed(compiler: GrammarCompiler, key: str) -> None:
    schema, wrong = FOLLOWED[key]
    assert key.split()[0] in schema
    assert not accepts(compiler.compile("json", json.dumps(schema)), wrong)
    loose = {other: value for other, value in schema.items() if other != key.split()[0]}
    assert accepts(compiler.compile("json", json.dumps(loose)), wrong), "without the key it is allowed"


@pytest.mark.parametrize("key", REFUSED)
def test_a_key_that_is_refused_is_named_wherever_it_stands(compiler: GrammarCompiler, key: str) -> None:
    inner = {key: REFUSED[key], "title": "t"}
    for schema in (
        inner,
        {"type": "array", "items": inner},
        {"properties": {"a": {"anyOf": [inner]}}, "type": "object"},
    ):
        with pytest.raises(
            InvalidRequestError, match=re.escape(f"keys that are not supported: {key} (docs/migrating.md")
        ):
            compiler.compile("json", json.dumps(schema))


def test_the_page_lists_what_is_refused(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequestError, match="not supported: contains, uniqueItems"):
        compiler.compile("json", '{"type": "array", "uniqueItems": true, "contains": {}}')
    page = (Path(__file__).resolve().parents[1] / "docs" / "migrating.md").read_text()
    section = page.split("## JSON schemas")[1].split("\n## ")[0]
    keys, formats = (re.findall(r"`([^`]+)`", part) for part in re.findall(r"(?<=: )`[^.]+(?=\.)", section)[:2])
    assert sorted(keys) == sorted(REFUSED)
    for name in ("binary", "regex", "uri-reference", "iri", "json-pointer", "password", *formats):
        schema = json.dumps({"type": "string", "format": name})
        if name in formats:
            compiler.compile("json", schema)
        else:
            with pytest.raises(InvalidRequestError, match=f"Unknown format: {name}"):
                compiler.compile("json", schema)


def nested(levels: int, start: str, end: str, inside: str = "") -> str:
    return start * levels + inside + end * levels


def chain(number: int, first: str, link: str, last: str) -> str:
    return first + "".join(link.format(here=at, next=at + 1) for at in range(number)) + last.format(here=number)


REFERENCES = chain(1900, '{"$ref":"#/a0",', '"a{here}":{{"items":{{"$ref":"#/a{next}"}}}},', '"a{here}":{{}}}}')
HOSTILE = {
    "repeats in repeats": ("regex", "(a{1,1000}){1,1000}"),
    "six repeats": ("regex", nested(6, "(", "){1,99}", "a")),
    "repeats of wide classes": ("regex", r"(\w{1,1000}\s{1,1000}){1,1000}"),
    "a thousand million": ("regex", "a{1000000000}"),
    "backtracking": ("regex", "(x+x+)+y"),
    "states that double": ("regex", "(a|b)*a(a|b){200}"),
    "states that double with any character": ("regex", r"((.|\n)*a(.|\n){200}){5}"),
    "a long regex": ("regex", "a" * 100_000),
    "a regex as long as allowed": ("regex", "[a-z]" * 3000),
    "parentheses": ("regex", nested(8000, "(", ")", "a")),
    "alternatives": ("regex", "|".join(f"{number}x" for number in range(2500))),
    "a schema that is itself": ("json", '{"allOf": [{"$ref": "#"}, {"type": "object"}]}'),
    "two that are each other": ("json", '{"$ref":"#/a","a":{"$ref":"#/b"},"b":{"$ref":"#/a"}}'),
    "a tree of itself": ("json", '{"properties": {"l": {"$ref": "#"}, "r": {"$ref": "#"}}, "required": ["l", "r"]}'),
    "references": ("json", REFERENCES),
    "more references": ("json", REFERENCES.replace("{", '{"x":{"$ref":"#/a9"},', 200)),
    "references that double": (
        "json",
        chain(60, '{"$ref":"#/a0",', '"a{here}":{{"allOf":[{{"$ref":"#/a{next}"}},{{"$ref":"#/a{next}"}}]}},', "")
        + '"a60":{"type":"string"}}',
    ),
    "alternatives of all": (
        "json",
        json.dumps({"allOf": [{"anyOf": [{"properties": {f"{i}_{j}": {}}} for j in range(4)]} for i in range(12)]}),
    ),
    "ten thousand alternatives": ("json", json.dumps({"anyOf": [{"const": f"k{at}"} for at in range(10_000)]})),
    "objects as alternatives": (
        "json",
        json.dumps(
            {"anyOf": [{"type": "object", "properties": {f"k{i}": {}}, "required": [f"k{i}"]} for i in range(3000)]}
        ),
    ),
    "a hundred thousand choices": ("json", json.dumps({"enum": [f"x{at}" for at in range(20_000)]})),
    "too many choices": ("choice", json.dumps([f"x{at}" for at in range(100_000)])),
    "properties": ("json", json.dumps({"type": "object", "properties": {f"p{at}": {} for at in range(3000)}})),
    "levels of a schema": ("json", nested(1000, '{"items":', "}", "{}")),
    "many levels of a schema": ("json", nested(10_000, '{"items":', "}", "{}")),
    "divisors": ("json", '{"type":"integer","allOf":[{"multipleOf":9973},{"multipleOf":9967},{"multipleOf":9949}]}'),
    "a divisor said twice": ("json", '{"type":"integer","multipleOf":99999989,"multipleOf":2}'),
    "a divisor in a grammar": ("grammar", 'start: %json {"type":"integer","multipleOf":99999989}'),
    "a divisor with digits": ("json", '{"type":"number","multipleOf":0.99999989}'),
    "a long constant": ("json", json.dumps({"const": "k" * 100_000})),
    "items": ("json", '{"type":"array","items":{"type":"string"},"minItems":1000000000,"maxItems":4000000000}'),
    "items of items": ("json", nested(9, '{"type":"array","minItems":1000,"maxItems":1000,"items":', "}", "{}")),
    "huge numbers": ("json", '{"type":"number","minimum":-1.2e300,"maximum":9.8e300}'),
    "ten thousand digits": ("json", '{"type":"integer","maximum":' + "9" * 10_000 + "}"),
    "patterns": (
        "json",
        json.dumps({"properties": {f"p{at}": {"pattern": f"^(.*a.{{{at + 50}}}){{3}}$"} for at in range(100)}}),
    ),
    "rules": ("grammar", chain(1900, "start: a0\n", 'a{here}: a{next} "y"\n', 'a{here}: "x"')),
    "terminals": ("grammar", chain(1900, "start: A0\n", 'A{here}: A{next} "y"\n', 'A{here}: "x"')),
    "rules in the other notation": ("grammar", chain(700, "root ::= a0\n", "a{here} ::= a{next}\n", 'a{here} ::= "x"')),
    "more rules": ("grammar", chain(5000, "start: a0\n", "a{here}: a{next}\n", 'a{here}: "x"')),
    "rules that double": ("grammar", chain(60, "start: a0\n", "a{here}: a{next} a{next}\n", 'a{here}: "x"')),
    "terminals that double": ("grammar", chain(60, "start: A0\n", "A{here}: A{next} A{next}\n", 'A{here}: "x"')),
    "an ambiguous grammar": ("grammar", 'start: a\na: a a a | a a | "x" | ""'),
    "an empty grammar": ("grammar", "start: a*\na: b*\nb: a*"),
    "repeats of rules": ("grammar", 'start: ((("a"{1,1000}){1,1000}){1,1000}){1,1000}'),
    "parentheses in a grammar": ("grammar", "start: " + nested(20_000, "(", ")", '"a"')),
    "parentheses in the other notation": ("grammar", "root ::= " + nested(20_000, "(", ")", '"a"')),
    "intersections": (
        "grammar",
        "start: A\nA: " + " & ".join(f"/(.*{letter}.*){{3,20}}/" for letter in string.ascii_lowercase),
    ),
    "complements": ("grammar", r"start: A" + "\n" + r"A: ~/(.*a.{50}){5}/ & ~/(.*b.{50}){5}/ & /(.|\n){1,10000}/"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_ends_in_an_error_or_is_followed(compiler: GrammarCompiler, name: str) -> None:
    rng, began = random.Random(5), time.monotonic()
    print("seed 5")
    try:
        matcher = compiler.compile(*HOSTILE[name]).matcher()
        for _ in range(60):
            choices = sorted(allowed(matcher) - {EOS})
            if not choices:
                break
            assert matcher.accept(rng.choice(choices))
    except InvalidRequestError as error:
        print(error)
    assert time.monotonic() - began < PATIENCE_S


@pytest.mark.slow
def test_what_nests_as_deeply_as_is_allowed_does_not_overflow_a_stack() -> None:
    """In a separate process, because a stack overflow would kill it."""
    code = (
        "import test_structured as t\n"
        "compiler = t.GrammarCompiler(t.SOURCE, t.VOCAB_SIZE, [t.EOS])\n"
        "for name in ('references', 'rules', 'terminals'):\n"
        "    matcher = compiler.compile(*t.HOSTILE[name]).matcher()\n"
        "    print(name, len(t.allowed(matcher)) > 0)\n"
    )
    path = str(sys.modules[__name__].__file__).rpartition("/")[0]
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {path!r})\n{code}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "references True\nrules True\nterminals True\n"), done.stderr


def test_as_many_properties_as_are_allowed_can_be_followed(compiler: GrammarCompiler) -> None:
    print("seed 6")
    rng = random.Random(6)
    properties = {f"p{at}": {"type": "integer"} for at in range(450)}
    text = json.dumps({"type": "object", "properties": properties})
    for _ in range(3):
        assert isinstance(json.loads(walk(compiler.compile("json", text).matcher(), rng, patience=300)), dict)


# ---------------------------------------------------------------------- the compiler


def test_a_request_for_a_grammar_does_not_block_and_shares_a_pending_compilation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, compiled = structured._compile, list[str]()
    monkeypatch.setattr(structured, "_compile", lambda *args: compiled.append(args[2]) or real(*args))
    compiler = GrammarCompiler(SOURCE, VOCAB_SIZE, [EOS])
    slow = HOSTILE["objects as alternatives"]
    first, second = compiler.submit(*slow), compiler.submit(*slow)
    assert isinstance(compiler.submit("regex", "a").result(PATIENCE_S), Grammar)
    assert first.done()
    assert second.done()
    assert compiled == [slow[1], "a"]


def test_grammars_are_kept_and_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured, "MAX_CACHED", 3)
    compiler = GrammarCompiler(SOURCE, VOCAB_SIZE, [EOS])
    grammars = {text: compiler.compile("regex", text) for text in "abc"}
    assert compiler.compile("regex", "a") is grammars["a"]
    compiler.compile("regex", "d")
    assert compiler.compile("regex", "a") is grammars["a"]
    assert compiler.compile("regex", "b") is not grammars["b"]


def test_the_cache_of_grammars_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured, "MAX_CACHED_BYTES", 1 << 20)
    compiler = GrammarCompiler(SOURCE, VOCAB_SIZE, [EOS])
    first = compiler.compile("regex", "a" * 4000)
    assert compiler.compile("regex", "a" * 4000) is first
    compiler.compile("regex", "b" * 4000)
    assert compiler.compile("regex", "a" * 4000) is not first


def test_however_many_wait_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a crash all requests are sent again at once."""
    begin = threading.Event()
    real = structured._compile
    monkeypatch.setattr(structured, "_compile", lambda *args: begin.wait(PATIENCE_S) and real(*args))
    compiler = GrammarCompiler(SOURCE, VOCAB_SIZE, [EOS])
    futures = [compiler.submit("choice", json.dumps([str(number)])) for number in range(1000)]
    begin.set()
    assert all(isinstance(future.result(PATIENCE_S), Grammar) for future in futures)


def test_frontends_take_turns_and_what_nobody_needs_any_more_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, compiled = threading.Event(), list[str]()
    real = structured._compile

    def record(vocabulary: Any, kind: str, text: str) -> Grammar:
        begin.wait(PATIENCE_S)
        compiled.append(text)
        return real(vocabulary, kind, text)

    monkeypatch.setattr(structured, "_compile", record)
    compiler = GrammarCompiler(SOURCE, VOCAB_SIZE, [EOS])
    registry = Registry(lambda: compiler)
    flood = [registry.prepare_grammar(number, "regex", f"a{number}", 1) for number in range(100)]
    shared = registry.prepare_grammar(100, "regex", "a99", 2)
    other = registry.prepare_grammar(101, "regex", "b", 2)
    for number in range(10, 100):
        registry.drop_grammar(number)
    begin.set()
    for future in (*flood[:10], shared, other):
        assert future.result(PATIENCE_S) is None
    assert set(compiled) == {"b", "a99", *(f"a{number}" for number in range(10))}
    assert compiled.index("b") <= 4
    with pytest.raises(CancelledError):
        flood[10].result(PATIENCE_S)
    assert registry.prepare_grammar(102, "regex", "a10", 1).result(PATIENCE_S) is None


def test_a_tokenizer_that_cannot_be_read_is_an_error_and_not_a_dead_thread() -> None:
    compiler = GrammarCompiler("{}", VOCAB_SIZE, [EOS])
    for text in "ab":
        with pytest.raises(InvalidRequestError, match="regex can't be compiled: KeyError"):
            compiler.compile("regex", text)
