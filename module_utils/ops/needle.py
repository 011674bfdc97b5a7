# SPDX-License-Identifier: GPL-3.0-or-later
"""Long texts with facts hidden in them, to see whether a model finds what stands far away from the question.

A model whose sparse attention picks the wrong tokens answers short prompts right. The facts are numbers, so that an
answer can be compared; the text around them holds none, so that no other number is a candidate.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

_TIMES = (
    "In early spring",
    "On quiet evenings",
    "During the long winter",
    "After the harvest",
    "Before sunrise",
    "On market days",
    "In late autumn",
    "When the rain stops",
)
_WHO = (
    "the ferryman",
    "an old gardener",
    "the village teacher",
    "a travelling clockmaker",
    "the baker's daughter",
    "a retired surveyor",
    "the bell ringer",
    "a young carpenter",
    "the miller",
    "an amateur astronomer",
)
_DOES = (
    "walks along the river",
    "repairs the wooden bridge",
    "sorts the letters of the week",
    "paints the garden fence",
    "listens to the geese",
    "copies maps of the coast",
    "waters the apple trees",
    "tells stories about the sea",
    "carries baskets to the chapel",
    "counts the boats in the harbour",
)
_BESIDE = (
    "while the dogs sleep in the shade",
    "and the wind smells of hay",
    "although nobody asked for it",
    "because the path is dry again",
    "until the lamps are lit",
    "and the children watch from the wall",
    "while smoke rises from the kilns",
    "so that everything is ready in time",
)
_PLACES = ("lighthouse", "observatory", "greenhouse", "library", "windmill", "aqueduct", "foundry", "boathouse")
MAX_NEEDLES = len(_PLACES)


@dataclass(frozen=True)
class Needle:
    """One hidden fact. depth is its place in the text, 0 at the start and 1 at the end."""

    place: str
    value: int
    depth: float

    def sentence(self) -> str:
        return f"The access code of the {self.place} is {self.value}."

    def question(self) -> str:
        return f"What is the access code of the {self.place}? Answer with the number only."


def needles(count: int, seed: int) -> tuple[Needle, ...]:
    """Facts spread evenly over the text, their values different in every digit count of one seed."""
    source = random.Random(seed)
    values = source.sample(range(10000, 100000), count)
    places = source.sample(_PLACES, count)
    return tuple(
        Needle(place, value, (index + 0.5) / count) for index, (place, value) in enumerate(zip(places, values))
    )


def haystack(sentences: int, hidden: tuple[Needle, ...], seed: int) -> str:
    """A text of so many sentences without numbers, with the facts in it."""
    source = random.Random(seed)
    lines = [
        f"{source.choice(_TIMES)} {source.choice(_WHO)} {source.choice(_DOES)} {source.choice(_BESIDE)}."
        for _index in range(sentences)
    ]
    for needle in sorted(hidden, key=lambda one: one.depth, reverse=True):
        lines.insert(int(needle.depth * sentences), needle.sentence())
    return " ".join(lines)
