"""The demo model's questions and its training text, generated from a seed, with a held-out part kept back.

What is held out is decided by a stable hash (blake2b) of a question's content, its `fact`, not by drawing
lots, so training text and held-out questions can never meet, whatever the seed or the length of a run:

* sums: the fact is the operation and its two numbers (for addition in either order), so a held-out sum is
  never trained on in symbols, in words, in any phrasing, or as a chat;
* counting: the fact is the first and last number, in digits and in words alike;
* JSON: the fact is the values of the record, in all phrasings;
* capitals and spelling: there is nothing to infer a capital or a spelling from, so here the fact is the
  phrasing together with the item. A held-out question asks about a known item in a way in which that item
  was never asked about in training.

Stories and small talk have no single right answer and are only trained on. Every question is learned both as
text to continue and as a chat. Only the standard library is used here.
"""

import json
from collections.abc import Callable, Iterator
from hashlib import blake2b
from random import Random
from typing import NamedTuple

from facts import BOYS, CAPITALS, GIRLS, GOODS, NAMES, SPELLING_WORDS, in_words
from stories import ANIMALS, long_story, short_story

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"


class Question(NamedTuple):
    """A prompt with its one right answer; `fact` is the content by which it is held out or trained on."""

    prompt: str
    answer: str
    kind: str
    fact: str


class Piece(NamedTuple):
    """A stretch of a document: text the model should learn to write, or text it is given."""

    text: str
    is_answer: bool


class Document(NamedTuple):
    """One training document without its begin token, and the questions it contains."""

    pieces: list[Piece]
    questions: list[Question]


def _sum(rng: Random, words: bool) -> Question:
    left, right = (rng.randrange(10 if rng.random() < 0.15 else 100) for _ in range(2))
    if rng.random() < 0.5:
        sign, name, result = "+", "plus", left + right
        fact = f"{min(left, right)} + {max(left, right)}"
    else:
        if left < right and rng.random() < 0.8:  # negative results are worth knowing, not worth half the lesson
            left, right = right, left
        sign, name, result = "-", "minus", left - right
        fact = f"{left} - {right}"
    if words:
        said = f"{in_words(left)} {name} {in_words(right)}"
        prompt = rng.choice(
            (f"{said} is", f"{said} equals", f"What is {said}?", f"How much is {said}?", f"Work out {said}.")
        )
        return Question(prompt, in_words(result), "sum in words", fact)
    said = f"{left} {sign} {right}"
    prompt = rng.choice((
        f"{said} =", f"{said} =", f"What is {said}?", f"How much is {said}?", f"Work out {said}.",
        f"{left}{sign}{right}=", f"What is {left} {name} {right}?",
    ))  # fmt: skip
    return Question(prompt, str(result), "sum in symbols", fact)


def sum_in_symbols(rng: Random) -> Question:
    """17 + 25 = 42, with numbers up to 99 and negative results now and then."""
    return _sum(rng, words=False)


def sum_in_words(rng: Random) -> Question:
    """Seventeen plus twenty-five is forty-two."""
    return _sum(rng, words=True)


def counting(rng: Random) -> Question:
    """Count up or down by ones over three to twelve numbers below 100, in digits or in words."""
    length = rng.randrange(3, 13)
    low = rng.randrange(100 - length + 1)
    numbers = list(range(low, low + length))
    way = rng.choice(("up", "down"))
    if way == "down":
        numbers.reverse()
    write: Callable[[int], str] = in_words if rng.random() < 0.4 else str
    written = [write(number) for number in numbers]
    first, last = written[0], written[-1]
    prompt = rng.choice((
        f"Count {way} from {first} to {last}:", f"Count {way} from {first} to {last}.",
        f"Please count from {first} {way} to {last}.", f"Counting {way} from {first} to {last}:",
    ))  # fmt: skip
    return Question(prompt, ", ".join(written), "counting", f"{numbers[0]} to {numbers[-1]}")


_SPELLING_PHRASES = (
    "Spell {}.", "Spell {}:", "Spell the word {}.", "How do you spell {}?", "The letters of {} are",
    "Write {} letter by letter:",
)  # fmt: skip


def spelling(rng: Random) -> Question:
    """The letters of a word, with hyphens between."""
    word, phrase = rng.choice(SPELLING_WORDS), rng.choice(_SPELLING_PHRASES)
    prompt = phrase.format(word)
    return Question(prompt, "-".join(word), "spelling", prompt)


_CAPITAL_PHRASES = (
    "The capital of {} is", "What is the capital of {}?", "Name the capital of {}.", "The capital city of {} is",
    "What is the capital city of {}?", "Tell me the capital of {}.", "Which city is the capital of {}?",
)  # fmt: skip
_COUNTRY_PHRASES = (
    "Which country has the capital {}?", "Of which country is {} the capital?", "Name the country with the capital {}.",
    "The country with the capital {} is",
)  # fmt: skip


def capitals(rng: Random) -> Question:
    """The capital of a country, or the country of a capital."""
    country, capital = rng.choice(tuple(CAPITALS.items()))
    if rng.random() < 0.6:
        prompt = rng.choice(_CAPITAL_PHRASES).format(country)
        return Question(prompt, capital, "capitals", prompt)
    prompt = rng.choice(_COUNTRY_PHRASES).format(capital)
    return Question(prompt, country, "capitals", prompt)


def json_record(rng: Random) -> Question:
    """A sentence about a person or a purchase, as a JSON record."""
    name, count = rng.choice(NAMES), rng.randrange(2, 100)
    record: dict[str, str | int]
    sentences: tuple[str, ...]
    if rng.random() < 0.6:
        city = rng.choice(tuple(CAPITALS.values()))
        record = {"name": name, "age": count, "city": city}
        sentences = (
            f"{name} is {count} years old and lives in {city}.", f"{name} lives in {city} and is {count} years old.",
            f"In {city} lives {name}, who is {count}.", f"{name} from {city} is {count} years old.",
        )  # fmt: skip
    else:
        item, price = rng.choice(GOODS), rng.randrange(2, 100)
        record = {"buyer": name, "item": item, "count": count, "price": price}
        sentences = (
            f"{name} bought {count} {item} for {price} dollars.", f"For {price} dollars {name} bought {count} {item}.",
            f"{name} paid {price} dollars for {count} {item}.",
        )  # fmt: skip
    said = rng.choice(sentences)
    prompt = rng.choice((f"{said} As JSON:", f"Write as JSON: {said}", f"Make a JSON record: {said}"))
    fact = json.dumps(record)
    return Question(prompt, fact, "json", fact)


SUM_KINDS: tuple[Callable[[Random], Question], ...] = (sum_in_symbols, sum_in_words)
OTHER_KINDS: tuple[Callable[[Random], Question], ...] = (counting, spelling, capitals, json_record)

_KIND_WEIGHTS: dict[Callable[[Random], Question], int] = {
    sum_in_symbols: 45, sum_in_words: 24, counting: 9, spelling: 6, capitals: 10, json_record: 5,
}  # fmt: skip
_STORY_SHARE, _SMALL_TALK_SHARE, _CHAT_SHARE = 0.02, 0.01, 0.5

_SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are Mainspring, a very small model.", "Answer briefly.",
    "You are a patient teacher. Answer with the result only.",
)  # fmt: skip
_INTRODUCTION = (
    "I am the Mainspring demo model. I can add and subtract, count, spell words, name capitals, "
    "write JSON records and tell stories."
)
_SMALL_TALK: tuple[tuple[str, str], ...] = (
    ("Hello", "Hello! How can I help you?"), ("Hello!", "Hello! How can I help you?"),
    ("Hi", "Hello! How can I help you?"), ("Hi!", "Hello! How can I help you?"),
    ("Who are you?", _INTRODUCTION), ("What can you do?", _INTRODUCTION), ("What are you?", _INTRODUCTION),
    ("Thank you!", "You are welcome."), ("Thanks!", "You are welcome."), ("Goodbye!", "Goodbye!"),
)  # fmt: skip


def is_held_out(question: Question) -> bool:
    """Whether the question's content is kept back from training: about a sixth of the listed kinds, a twelfth else."""
    one_in = 6 if question.kind in ("capitals", "spelling") else 12
    digest = blake2b(f"{question.kind.split()[0]}|{question.fact}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % one_in == 0


def _training_question(rng: Random) -> Question:
    (maker,) = rng.choices(list(_KIND_WEIGHTS), list(_KIND_WEIGHTS.values()))
    while is_held_out(question := maker(rng)):
        pass
    return question


def _hero(rng: Random) -> tuple[str, str]:
    return rng.choice(GIRLS + BOYS), rng.choice(ANIMALS)


def _story_request(rng: Random) -> tuple[str, str]:
    hero, animal = _hero(rng)
    length, tell = rng.choice((("long", long_story), ("short", short_story)))
    article = "an" if animal[0] in "aeiou" else "a"
    prompt = rng.choice((
        f"Tell me a {length} story.", f"Write a {length} story about {article} {animal}.",
        f"Tell me a {length} story about {article} {animal} named {hero}.",
    ))  # fmt: skip
    return prompt, tell(rng, hero, animal)


def _chat(rng: Random) -> Document:
    """One to four exchanges, some under a system prompt; a story ends the conversation."""
    pieces: list[Piece] = []
    questions: list[Question] = []
    if rng.random() < 0.2:
        pieces.append(Piece(SYSTEM + rng.choice(_SYSTEM_PROMPTS), False))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        lot = rng.random()
        if lot < _STORY_SHARE:
            prompt, answer = _story_request(rng)
        elif lot < _STORY_SHARE + _SMALL_TALK_SHARE:
            prompt, answer = rng.choice(_SMALL_TALK)
        else:
            questions.append(_training_question(rng))
            prompt, answer = questions[-1].prompt, questions[-1].answer
        pieces += [Piece(USER + prompt + ASSISTANT, False), Piece(answer + END, True)]
        if lot < _STORY_SHARE:
            break
    return Document(pieces, questions)


def _plain(rng: Random) -> Document:
    """One story, or one question with its answer after a space."""
    if rng.random() < _STORY_SHARE:
        return Document([Piece(rng.choice((long_story, short_story))(rng, *_hero(rng)) + END, True)], [])
    question = _training_question(rng)
    return Document([Piece(question.prompt, False), Piece(f" {question.answer}{END}", True)], [question])


def documents(seed: str) -> Iterator[Document]:
    """Training documents without end, the same ones for the same seed, none with a held-out question."""
    rng = Random(f"mainspring demo documents {seed}")
    while True:
        yield (_chat if rng.random() < _CHAT_SHARE else _plain)(rng)


def _held_out(makers: tuple[Callable[[Random], Question], ...], number: int) -> list[Question]:
    """`number` different held-out questions, the kinds taking turns."""
    rng = Random(f"mainspring demo held-out {' '.join(maker.__name__ for maker in makers)}")
    found: dict[str, Question] = {}
    while len(found) < number:
        maker = makers[len(found) % len(makers)]
        while not is_held_out(question := maker(rng)) or question.prompt in found:
            pass
        found[question.prompt] = question
    return list(found.values())


def heldout_sums(n: int = 500) -> list[Question]:
    """Sums the model never saw, half in symbols and half in words."""
    return _held_out(SUM_KINDS, n)


def heldout_other(n: int = 200) -> list[Question]:
    """Counting, spelling, capitals and JSON questions the model never saw, as many of each."""
    return _held_out(OTHER_KINDS, n)


def is_right(question: Question, completion: str) -> bool:
    """Whether the completion, up to its end token or first line break, is exactly the answer."""
    return completion.split(END, 1)[0].split("\n", 1)[0].strip() == question.answer
