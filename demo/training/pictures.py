"""The vision demo's pictures and the questions about them, generated from a seed, with a held-out part kept back.

A picture is 64 x 64 pixels and shows either one digit or one to four shapes. They lie in the cells of a grid of
4 x 4, about in the middle: a vision tower that takes a cell as a patch learns in minutes what it holds. What a picture
shows (every place, size and colour in it) is its `fact`; a stable hash (blake2b) of it decides whether the
picture is held out, so a held-out picture is never trained on, whatever the seed or the length of a run.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from math import cos, pi, sin
from pathlib import Path
from random import Random
from typing import NamedTuple

from PIL import Image, ImageDraw

VISION_FOLDER = Path(__file__).resolve().parent.parent / "vision"  # of the trained checkpoint
SIDE = 64  # pixels
CELL = 16  # pixels; a cell holds one figure at most
SCALE = 4  # a picture is drawn this many times larger, then made smaller, which smooths its edges
CELLS = (SIDE // CELL) ** 2
MAX_SHAPES = 4
MARGIN = 8  # pixels by which a shape must lie farther out than all others to be "on the left"
HELD_OUT_SHARE = 16  # of 256

SHAPES = ("circle", "square", "triangle", "cross")
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (240, 215, 50),
    "purple": (150, 50, 180),
    "orange": (245, 140, 35),
}
BACKGROUNDS = ((255, 255, 255), (225, 225, 225), (30, 30, 30), (0, 0, 0))
SIDES = {"on the left": (-1, 0), "on the right": (1, 0), "at the top": (0, -1), "at the bottom": (0, 1)}
DIGITS = tuple("0123456789")


def _arc(x: float, y: float, width: float, height: float, first: float, last: float) -> list[tuple[float, float]]:
    """Points of an ellipse around (x, y); angles in turns, clockwise from the right."""
    turns = [first + (last - first) * step / 12 for step in range(13)]
    return [(x + width * cos(2 * pi * turn), y + height * sin(2 * pi * turn)) for turn in turns]


# The strokes of each digit, in a box from (-0.5, -1) to (0.5, 1), y pointing down.
STROKES: dict[str, list[list[tuple[float, float]]]] = {
    "0": [_arc(0, 0, 0.5, 1, 0, 1)],
    "1": [[(-0.35, -0.6), (0.1, -1), (0.1, 1)]],
    "2": [[*_arc(0, -0.5, 0.5, 0.5, 0.5, 1.08), (-0.5, 1), (0.5, 1)]],
    "3": [_arc(-0.05, -0.5, 0.5, 0.5, 0.6, 1.25), _arc(-0.05, 0.5, 0.55, 0.5, 0.75, 1.4)],
    "4": [[(0.25, 1), (0.25, -1), (-0.5, 0.4), (0.5, 0.4)]],
    "5": [[(0.45, -1), (-0.4, -1), (-0.45, -0.1)], [(-0.45, -0.1), *_arc(-0.05, 0.35, 0.55, 0.63, 0.65, 1.4)]],
    "6": [_arc(0, 0.45, 0.5, 0.53, 0, 1), [(0.3, -1), (-0.2, -0.5), (-0.5, 0.35)]],
    "7": [[(-0.5, -1), (0.5, -1), (-0.1, 1)]],
    "8": [_arc(0, -0.5, 0.42, 0.48, 0, 1), _arc(0, 0.5, 0.5, 0.5, 0, 1)],
    "9": [_arc(0, -0.45, 0.5, 0.53, 0, 1), [(0.5, -0.4), (0.4, 0.4), (-0.1, 1)]],
}


class Figure(NamedTuple):
    """A shape or a digit: its name, its colour, its centre and half its height in pixels."""

    name: str
    colour: str
    x: float
    y: float
    radius: float


class Picture(NamedTuple):
    """What a picture shows; `look` seeds the details that no question asks about."""

    figures: tuple[Figure, ...]
    background: tuple[int, int, int]
    look: int

    @property
    def is_held_out(self) -> bool:
        """Whether the picture is kept out of training."""
        return blake2b(repr((self.figures, self.background)).encode()).digest()[0] < HELD_OUT_SHARE


class Question(NamedTuple):
    """A question about a picture with its one right answer, and the figures that the answer follows from."""

    prompt: str
    answer: str
    kind: str
    about: tuple[Figure, ...]


def _figure(rng: Random, cell: int, names: Sequence[str], colours: Sequence[str]) -> Figure:
    """A figure in a cell, at most a pixel off its middle."""
    down, right = divmod(cell, SIDE // CELL)
    x, y = (CELL * steps + CELL / 2 - 0.5 + rng.choice((-1, -0.5, 0, 0.5, 1)) for steps in (right, down))
    return Figure(rng.choice(names), rng.choice(colours), x, y, rng.choice((5, 5.5, 6, 6.5)))


def _shapes(rng: Random) -> tuple[Figure, ...]:
    """Half the pictures have few names and colours, so that counts above 1 are common."""
    few = rng.random() < 0.5
    names = rng.sample(SHAPES, 2) if few else SHAPES
    colours = rng.sample(sorted(COLOURS), 2) if few else sorted(COLOURS)
    cells = rng.sample(range(CELLS), rng.randint(1, MAX_SHAPES))
    return tuple(_figure(rng, cell, names, colours) for cell in cells)


def _digit(rng: Random) -> tuple[Figure, ...]:
    return (_figure(rng, rng.randrange(CELLS), DIGITS, sorted(COLOURS)),)


def pictures(seed: str, held_out: bool) -> Iterator[Picture]:
    """Without end: pictures of the held-out part, or of the part to train on."""
    rng = Random(f"pictures {seed}")
    while True:
        figures = _digit(rng) if rng.random() < 0.25 else _shapes(rng)
        picture = Picture(figures, rng.choice(BACKGROUNDS), rng.randrange(2**32))
        if picture.is_held_out == held_out:
            yield picture


def draw(picture: Picture) -> Image.Image:
    """The picture in RGB, 64 x 64 pixels."""
    rng = Random(picture.look)
    image = Image.new("RGB", (SIDE * SCALE, SIDE * SCALE), picture.background)
    canvas = ImageDraw.Draw(image)
    for figure in picture.figures:
        colour = tuple(min(255, max(0, part + rng.randint(-12, 12))) for part in COLOURS[figure.colour])
        x, y, radius = (SCALE * length for length in (figure.x, figure.y, figure.radius))
        if figure.name == "circle":
            canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
        elif figure.name == "square":
            side = 0.9 * radius
            canvas.rectangle((x - side, y - side, x + side, y + side), fill=colour)
        elif figure.name == "triangle":
            canvas.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=colour)
        elif figure.name == "cross":
            arm = 0.3 * radius
            canvas.rectangle((x - radius, y - arm, x + radius, y + arm), fill=colour)
            canvas.rectangle((x - arm, y - radius, x + arm, y + radius), fill=colour)
        else:
            width, slant, pen = radius * rng.uniform(0.9, 1.3), rng.uniform(-0.2, 0.2), radius * rng.uniform(0.25, 0.35)
            for stroke in STROKES[figure.name]:
                points = [(x + width * left - slant * radius * down, y + radius * down) for left, down in stroke]
                canvas.line(points, fill=colour, width=round(pen), joint="curve")
                for left, down in points:
                    canvas.ellipse((left - pen / 2, down - pen / 2, left + pen / 2, down + pen / 2), fill=colour)
    return image.resize((SIDE, SIDE), Image.Resampling.BOX)


def _article(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def _digit_question(rng: Random, figure: Figure) -> Question:
    if rng.random() < 0.3:
        prompt = rng.choice(("What colour is the digit?", "What color is the digit?", "Which colour is the digit?"))
        return Question(prompt, figure.colour, "colours", (figure,))
    prompt = rng.choice(("Which digit is shown?", "What digit is this?", "Which digit is this?", "Read the digit."))
    return Question(prompt, figure.name, "digits", (figure,))


def _exists(rng: Random, figures: tuple[Figure, ...]) -> Question:
    """Half the answers are yes; of the others, most have the shape in another colour or the colour on another shape."""
    shown = {(figure.colour, figure.name) for figure in figures}
    if rng.random() < 0.5:
        colour, name = rng.choice(sorted(shown))
    else:
        missing = [(colour, name) for colour in COLOURS for name in SHAPES if (colour, name) not in shown]
        near = [pair for pair in missing if any(pair[0] == one[0] or pair[1] == one[1] for one in shown)]
        colour, name = rng.choice(near if rng.random() < 0.8 else missing)
    prompt = rng.choice((f"Is there {_article(colour)} {name}?", f"Do you see {_article(colour)} {name}?"))
    about = tuple(figure for figure in figures if (figure.colour, figure.name) == (colour, name))
    return Question(prompt, "yes" if about else "no", "yes or no", about)


def _count(rng: Random, figures: tuple[Figure, ...]) -> Question:
    kind = rng.random()
    if kind < 0.2:
        word, about = "shapes", figures
    elif kind < 0.6:
        name = rng.choice(figures).name if rng.random() < 0.6 else rng.choice(SHAPES)
        word = "crosses" if name == "cross" else name + "s"
        about = tuple(figure for figure in figures if figure.name == name)
    else:
        colour = rng.choice(figures).colour if rng.random() < 0.6 else rng.choice(sorted(COLOURS))
        word, about = f"{colour} shapes", tuple(figure for figure in figures if figure.colour == colour)
    prompt = rng.choice((f"How many {word}?", f"How many {word} are there?", f"Count the {word}."))
    return Question(prompt, str(len(about)), "counts", about)


def _side(rng: Random, figures: tuple[Figure, ...]) -> Question | None:
    """Which shape lies farthest to one side, if one clearly does."""
    side = rng.choice(sorted(SIDES))
    right, down = SIDES[side]
    ranked = sorted(figures, key=lambda figure: figure.x * right + figure.y * down)
    if len(ranked) < 2 or (ranked[-1].x - ranked[-2].x) * right + (ranked[-1].y - ranked[-2].y) * down < MARGIN:
        return None
    if rng.random() < 0.3:
        return Question(f"What colour is the shape {side}?", ranked[-1].colour, "sides", (ranked[-1],))
    return Question(
        rng.choice((f"Which shape is {side}?", f"What is {side}?")), ranked[-1].name, "sides", (ranked[-1],)
    )


def _single(rng: Random, figures: tuple[Figure, ...]) -> Question | None:
    """The colour of the only shape of its name, or the name of the only shape of its colour."""
    figure = rng.choice(figures)
    if rng.random() < 0.5:
        if Counter(other.name for other in figures)[figure.name] > 1:
            return None
        word = rng.choice(("What colour", "What color", "Which colour"))
        return Question(f"{word} is the {figure.name}?", figure.colour, "colours", (figure,))
    if Counter(other.colour for other in figures)[figure.colour] > 1:
        return None
    prompt = rng.choice((f"Which shape is {figure.colour}?", f"What is {figure.colour}?"))
    return Question(prompt, figure.name, "shapes", (figure,))


def question(rng: Random, picture: Picture) -> Question:
    """A question about the picture."""
    figures = picture.figures
    if figures[0].name in STROKES:
        return _digit_question(rng, figures[0])
    while True:
        asked = rng.choice((_exists, _count, _count, _side, _single, _single))(rng, figures)
        if asked is not None:
            return asked


def heldout(count: int = 300, seed: str = "held out") -> list[tuple[Picture, Question]]:
    """Held-out pictures, each with one question; the same list everywhere."""
    source, rng = pictures(seed, held_out=True), Random(f"questions {seed}")
    return [(picture, question(rng, picture)) for picture in islice(source, count)]
