"""Pictures for the vision model of the demo: each has one right answer to "What is in this picture?".

Training draws pictures from here, evaluation and tests draw held-out ones. Everything is a function of a seeded
`random.Random`, and letters come from the font inside Pillow, so that every machine makes the same pictures.

    python scripts/demo_pictures.py pictures/ [--count 4]        a folder of held-out pictures, named by their answers
"""

import argparse
import functools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from demo_tasks import ANIMALS, NOUNS
from PIL import Image, ImageDraw, ImageFont

QUESTION = "What is in this picture?"
SIDE = 84  # rows and columns of pixels of a picture
_FINE = 3  # times as large while it is drawn: edges come out smooth

_COLORS = {
    "red": (215, 35, 35),
    "blue": (35, 70, 215),
    "green": (30, 150, 50),
    "yellow": (240, 205, 20),
    "pink": (250, 140, 185),
    "purple": (125, 40, 165),
    "brown": (125, 75, 35),
    "black": (25, 25, 25),
}
_WORDS = tuple(word for word in (*NOUNS, *ANIMALS) if 3 <= len(word) <= 4)

Point = tuple[float, float]


@dataclass(frozen=True)
class DemoPicture:
    """A picture and the only right answer to `QUESTION` about it."""

    task: str
    answer: str
    image: Image.Image


class _Canvas:
    """A picture while it is drawn, in pixels of its final size."""

    def __init__(self, rng: random.Random) -> None:
        shade = rng.randint(215, 250)
        self._background = tuple(shade + rng.randint(-5, 5) for _ in range(3))
        self._image = Image.new("RGB", (SIDE * _FINE, SIDE * _FINE), self._background)
        self._draw = ImageDraw.Draw(self._image)

    def disc(self, centre: Point, radius: float, color: tuple[int, ...] | None = None) -> None:
        """A filled circle; without a color, a hole."""
        (x, y), r = centre, radius
        self._draw.ellipse([v * _FINE for v in (x - r, y - r, x + r, y + r)], fill=color or self._background)

    def polygon(self, points: list[Point], color: tuple[int, ...]) -> None:
        """A filled polygon."""
        self._draw.polygon([(x * _FINE, y * _FINE) for x, y in points], fill=color)

    def text(self, centre: Point, text: str, size: float, color: tuple[int, ...]) -> None:
        """A text whose middle is at `centre`; `size` in pixels."""
        x, y = centre
        self._draw.text((x * _FINE, y * _FINE), text, fill=color, font=_font(round(size * _FINE)), anchor="mm")

    def image(self) -> Image.Image:
        """The picture at its final size."""
        return self._image.reduce(_FINE)


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


# ---------------------------------------------------------------------------------------------
# Things: silhouettes within a circle of radius 1 around (0, 0), y downwards
# ---------------------------------------------------------------------------------------------


def _round(count: int, inner: float = 1.0) -> list[Point]:
    """Corners on a circle from the top on; with `inner`, every second lies on a smaller one."""
    step = math.pi / count if inner < 1.0 else 2 * math.pi / count
    total = 2 * count if inner < 1.0 else count
    radii = [1.0 if i % 2 == 0 else inner for i in range(total)] if inner < 1.0 else [1.0] * total
    return [(r * math.sin(i * step), -r * math.cos(i * step)) for i, r in enumerate(radii)]


_POLYGONS: dict[str, list[Point]] = {
    "star": _round(5, 0.42),
    "box": [(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)],
    "kite": [(0, -1), (0.62, -0.25), (0, 1), (-0.62, -0.25)],
    "house": [(0, -1), (0.85, -0.2), (0.65, -0.2), (0.65, 0.85), (-0.65, 0.85), (-0.65, -0.2), (-0.85, -0.2)],
    "arrow": [(1, 0), (0.2, -0.7), (0.2, -0.25), (-1, -0.25), (-1, 0.25), (0.2, 0.25), (0.2, 0.7)],
    "flag": [(-0.7, -1), (0.85, -0.9), (0.85, 0.1), (-0.5, 0.1), (-0.5, 1), (-0.7, 1)],
    "tree": [(-0.14, 0.1), (0.14, 0.1), (0.14, 1), (-0.14, 1)],  # the trunk; the crown is a disc
}
_DISCS: dict[str, list[tuple[Point, float]]] = {
    "ball": [((0, 0), 0.95)],
    "ring": [((0, 0), 1.0)],
    "tree": [((0, -0.35), 0.64)],
    "cloud": [((-0.5, 0.15), 0.45), ((0.5, 0.15), 0.45), ((0, -0.15), 0.55), ((0, 0.2), 0.42)],
}
THINGS = ("ball", "box", "ring", "star", "kite", "house", "tree", "flag", "arrow", "cloud")
COUNTED = ("ball", "ring", "star", "kite", "tree", "flag")  # those whose plural takes an s


def _thing(canvas: _Canvas, name: str, centre: Point, radius: float, tilt: float, color: tuple[int, ...]) -> None:
    """One thing, turned by `tilt` radians."""
    sin, cos = math.sin(tilt), math.cos(tilt)

    def place(point: Point) -> Point:
        x, y = point
        return centre[0] + radius * (x * cos - y * sin), centre[1] + radius * (x * sin + y * cos)

    if name in _POLYGONS:
        canvas.polygon([place(point) for point in _POLYGONS[name]], color)
    for middle, share in _DISCS.get(name, ()):
        canvas.disc(place(middle), share * radius, color)
    if name == "ring":
        canvas.disc(centre, 0.55 * radius)


def _color(rng: random.Random) -> tuple[str, tuple[int, ...]]:
    name = rng.choice(list(_COLORS))
    return name, tuple(min(255, max(0, value + rng.randint(-14, 14))) for value in _COLORS[name])


def _ink(rng: random.Random) -> tuple[int, ...]:
    """A color that stands out, for letters and digits."""
    return tuple(rng.randint(0, 110) for _ in range(3))


# ---------------------------------------------------------------------------------------------
# Tasks: each draws on the canvas and returns the answer
# ---------------------------------------------------------------------------------------------


def thing(rng: random.Random, canvas: _Canvas) -> str:
    """One thing in one color."""
    name = rng.choice(THINGS)
    color, shade = _color(rng)
    radius = rng.uniform(17, 32)
    centre = (rng.uniform(radius, SIDE - radius), rng.uniform(radius, SIDE - radius))
    _thing(canvas, name, centre, radius, rng.uniform(-0.2, 0.2), shade)
    return f"A {color} {name}."


def count(rng: random.Random, canvas: _Canvas) -> str:
    """Two to six equal things; each has one of nine cells, so that they never touch."""
    name, number = rng.choice(COUNTED), rng.randint(2, 6)
    color, shade = _color(rng)
    cell, radius = SIDE / 3, rng.uniform(9.5, 11.5)
    tilt = rng.uniform(-0.2, 0.2)
    for index in rng.sample(range(9), number):
        row, column = divmod(index, 3)
        centre = ((column + 0.5) * cell + rng.uniform(-2, 2), (row + 0.5) * cell + rng.uniform(-2, 2))
        _thing(canvas, name, centre, radius, tilt, shade)
    return f"{number} {color} {name}s."


def number(rng: random.Random, canvas: _Canvas) -> str:
    """A number of one or two digits."""
    text = str(rng.randint(0, 9) if rng.random() < 0.25 else rng.randint(10, 99))
    size, middle = rng.uniform(42, 56), SIDE / 2
    color = _ink(rng)
    centre = (middle + rng.uniform(-5, 5), middle + rng.uniform(-8, 8))
    canvas.text(centre, text, size, color)
    return f"The number {text}."


def word(rng: random.Random, canvas: _Canvas) -> str:
    """A word of three or four capital letters, which stand as far apart as those of a typewriter."""
    text, color, size = rng.choice(_WORDS), _ink(rng), rng.uniform(22, 27)
    pitch = 19.5
    left, y = (SIDE - pitch * (len(text) - 1)) / 2 + rng.uniform(-2.5, 2.5), SIDE / 2 + rng.uniform(-12, 12)
    for index, letter in enumerate(text):
        canvas.text((left + pitch * index, y), letter.upper(), size, color)
    return f"The word {text}."


TASKS: dict[str, Callable[[random.Random, _Canvas], str]] = {
    "thing": thing,
    "count": count,
    "number": number,
    "word": word,
}


def draw(rng: random.Random, task: str) -> DemoPicture:
    """A new picture of this task."""
    canvas = _Canvas(rng)
    answer = TASKS[task](rng, canvas)
    return DemoPicture(task, answer, canvas.image())


def held_out(task: str, count: int, seed: int = 0) -> Iterator[DemoPicture]:
    """`count` pictures that training never draws: its seeds are others."""
    for index in range(count):
        yield draw(random.Random(f"held out {task} {seed} {index}"), task)


def answers() -> list[str]:
    """Every answer that a picture may have."""
    return [
        *(f"A {color} {name}." for color in _COLORS for name in THINGS),
        *(f"{number} {color} {name}s." for number in range(2, 7) for color in _COLORS for name in COUNTED),
        *(f"The number {number}." for number in range(100)),
        *(f"The word {word}." for word in _WORDS),
    ]


def task_of(answer: str) -> str:
    """The task that has this answer."""
    first, second, *_ = answer.split()
    return "thing" if first == "A" else second if first == "The" else "count"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=4, help="pictures of each task")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        for index, picture in enumerate(held_out(task, args.count, args.seed)):
            name = picture.answer.rstrip(".").replace(" ", "_").lower()
            picture.image.save(args.folder / f"{task}_{index}_{name}.png", optimize=True)


if __name__ == "__main__":
    main()
