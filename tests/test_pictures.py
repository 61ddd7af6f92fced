"""The vision demo's pictures and the questions about them."""

from __future__ import annotations

from itertools import islice
from random import Random

from pictures import COLOURS, SHAPES, SIDES, heldout, pictures, question


def test_no_held_out_picture_is_trained_on() -> None:
    """Also with one seed: what decides is the picture."""
    trained_on = {picture[:2] for picture in islice(pictures("1", held_out=False), 5_000)}
    held_out = [picture[:2] for picture in islice(pictures("1", held_out=True), 500)]
    assert not trained_on & {picture[:2] for picture, _ in heldout()}
    assert not trained_on & set(held_out)


def test_answers_agree_with_what_a_picture_shows() -> None:
    """The words of a question alone pick the figures that it is about."""
    rng, kinds = Random(5), set()
    for picture in islice(pictures("5", held_out=False), 1000):
        asked = question(rng, picture)
        kinds.add(asked.kind)
        words = asked.prompt.rstrip("?.").replace("crosses", "cross").split()
        named = {word.removesuffix("s") if word != "cross" else word for word in words} & {*COLOURS, *SHAPES}
        about = [figure for figure in picture.figures if named <= {figure.colour, figure.name}]
        if asked.kind == "counts":
            assert asked.answer == str(len(about)), (asked, picture)
        elif asked.kind == "yes or no":
            assert asked.answer == ("yes" if about else "no"), (asked, picture)
        elif asked.kind == "sides":
            right, down = SIDES[f"{words[-3]} {words[-2]} {words[-1]}"]
            last = max(about, key=lambda figure: figure.x * right + figure.y * down)
            assert asked.answer in last, (asked, picture)
        else:
            assert len(about) == 1
            assert asked.answer in about[0], (asked, picture)
    assert kinds == {"counts", "yes or no", "sides", "colours", "shapes", "digits"}
