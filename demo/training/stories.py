"""Short stories from templates, whose names, places and objects stay the same from first to last sentence.

They are there to give the engine long text to generate: a short story is one paragraph, a long one runs to
about 300 tokens. The opening tells which: "Once upon a time" always begins a long story and "One day" a short
one, so that a prompt alone decides the length.
"""

from random import Random

from facts import BOYS, GIRLS

ANIMALS: tuple[str, ...] = (
    "bear", "cat", "dog", "dragon", "duck", "fox", "frog", "goat", "hen", "horse", "lion", "mouse", "owl", "rabbit",
    "robot", "sheep", "tiger", "turtle", "wolf",
)  # fmt: skip
_QUALITIES = ("little", "brave", "clever", "kind", "quiet", "happy", "curious", "sleepy", "young", "gentle")
_HOMES = (
    "in a small house near the river", "in a warm cave under the hill", "at the edge of the forest",
    "on a farm by the lake", "in an old tower by the sea", "behind the garden wall",
)  # fmt: skip
_PLACES = ("forest", "market", "beach", "old mill", "castle", "lake", "mountain", "garden", "village", "bridge")
_TREASURES = (
    "golden key", "red kite", "silver bell", "blue stone", "magic lamp", "wooden boat", "green hat", "music box",
    "paper star", "lost map",
)  # fmt: skip
_WEATHER = ("The sun was warm.", "A soft rain was falling.", "The wind was cold.", "Snow lay on the ground.")
_TROUBLES: tuple[tuple[str, str], ...] = (
    ("was stuck in the mud", "pulled with a long rope"),
    ("was very hungry", "shared some bread and honey"),
    ("had lost the way home", "drew a map in the sand"),
    ("could not cross the water", "built a raft of old wood"),
    ("was afraid of the dark", "lit a little lamp"),
    ("had a thorn in one foot", "took it out with great care"),
    ("had nobody to play with", "taught a new song"),
)
_GIFTS = ("a warm scarf", "a sweet apple", "a bright feather", "a round shell", "a tiny drum", "a piece of cake")
_MORALS = (
    "A friend is better than gold.", "Kind hands make light work.", "Even the small can do great things.",
    "Nobody is lost who has a friend.", "What you give comes back to you.",
)  # fmt: skip


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _meeting(rng: Random, hero: str, friend: str, animal: str, place: str) -> str:
    """One episode: the hero meets somebody in trouble, helps, and is thanked."""
    trouble, help_given = rng.choice(_TROUBLES)
    arrival = rng.choice((f"At the {place}", f"On the way to the {place}", f"Near the {place}"))
    thanks = rng.choice(
        (
            f'"Thank you, {hero}," said {friend}, and gave {hero} {rng.choice(_GIFTS)}.',
            f'"I will not forget this," said {friend}. "Let me come with you."',
            f"{friend} smiled and said thank you three times.",
        )
    )
    return (
        f"{arrival} {hero} met {_article(animal)} named {friend}. {friend} {trouble}. "
        f"{hero} stopped to help and {help_given}. {thanks}"
    )


def _cast(rng: Random, hero: str, size: int) -> list[tuple[str, str, str]]:
    """Friends of the hero, each with an animal and a place, no two alike."""
    names = rng.sample([name for name in GIRLS + BOYS if name != hero], size)
    return list(zip(names, rng.sample(ANIMALS, size), rng.sample(_PLACES, size), strict=True))


def short_story(rng: Random, hero: str, animal: str) -> str:
    """One paragraph of about 80 tokens."""
    ((friend, other, place),) = _cast(rng, hero, 1)
    return (
        f"One day {_article(rng.choice(_QUALITIES))} {animal} named {hero} went to the {place}. "
        f"{rng.choice(_WEATHER)} {_meeting(rng, hero, friend, other, place)} "
        f"Then {hero} and {friend} walked home together. {rng.choice(_MORALS)}"
    )


def long_story(rng: Random, hero: str, animal: str) -> str:
    """A search with three meetings and a homecoming that names everyone again: 250 to 300 tokens."""
    she, her = ("she", "her") if hero in GIRLS else ("he", "his")
    home, treasure = rng.choice(_HOMES), rng.choice(_TREASURES)
    cast = _cast(rng, hero, 3)
    lost = rng.choice(
        (
            f"One morning the {treasure} was gone.",
            f"One night a thief came and took the {treasure}.",
            f"Then came a storm, and the {treasure} was lost.",
        )
    )
    paragraphs = [
        f"Once upon a time there {rng.choice(('was', 'lived'))} {_article(rng.choice(_QUALITIES))} {animal} "
        f"named {hero}. {hero} lived {home}. More than anything {she} loved {her} {treasure}. {lost} "
        f"So {hero} set out to look for the {treasure}. {rng.choice(_WEATHER)}"
    ]
    paragraphs += [_meeting(rng, hero, friend, other, place) for friend, other, place in cast]
    (first, _, _), (second, _, _), (third, _, place) = cast
    paragraphs[2] += f' "What are you looking for?" asked {second}. "My {treasure}," said {hero}.'
    paragraphs.append(
        f"And there, at the {place}, {hero} saw the {treasure} under a tree. {first}, {second} and {third} cheered. "
        f"They all went back to the house of {hero} and had a feast, and the {treasure} was never lost again. "
        f"{rng.choice(_MORALS)} The end."
    )
    return "\n\n".join(paragraphs)
