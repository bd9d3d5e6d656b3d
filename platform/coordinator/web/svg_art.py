"""Drawings of the pages: a timber frame that shows progress, and a barn quilt for each run.

Pure.
"""

import hashlib
import itertools
from dataclasses import dataclass
from functools import lru_cache

BENTS = 4  # cross frames, from the back to the front
BAY = 3.3  # between two of them
EAVE = 4.2
KNEE, KNEE_HEIGHT = 1.75, 6.7  # where the gambrel roof bends
RIDGE = 8.3
WIDTH = 8.0
DEPTH_X, DEPTH_Y = (
    0.62,
    0.3,
)  # oblique projection: how far a unit of depth moves to the right and up
SCALE = 26.0  # drawing units a unit of the frame
MARGIN = 8.0

Point = tuple[float, float, float]  # x to the right, y up, z away


@dataclass(frozen=True)
class Timber:
    """One timber in drawing units; `order` is its place in the order of raising."""

    order: int
    x1: float
    y1: float
    x2: float
    y2: float
    slender: bool


@dataclass(frozen=True)
class Drawing:
    """The timbers with the size of the drawing."""

    width: float
    height: float
    members: tuple[Timber, ...]


@lru_cache(maxsize=1)
def timber_frame() -> Drawing:
    """Draw a gambrel barn; timbers are in the order in which a barn is raised."""
    depths = [BAY * i for i in reversed(range(BENTS))]
    timbers: list[tuple[Point, Point, bool]] = []

    def timber(a: Point, b: Point, slender: bool = False) -> None:
        timbers.append((a, b, slender))

    far, near = depths[0], 0.0
    timber((0, 0, far), (WIDTH, 0, far))
    timber((0, 0, far), (0, 0, near))
    timber((WIDTH, 0, far), (WIDTH, 0, near))
    timber((0, 0, near), (WIDTH, 0, near))
    for z in depths:
        inner = (WIDTH * 0.34, WIDTH * 0.66)
        if 0 < z < far:
            timber((0, 0, z), (WIDTH, 0, z))
        for x in (0.0, *inner, WIDTH):
            timber((x, 0, z), (x, EAVE, z))
        timber((0, EAVE, z), (WIDTH, EAVE, z))
        timber((0, EAVE - 1.2, z), (1.2, EAVE, z), True)
        timber((WIDTH, EAVE - 1.2, z), (WIDTH - 1.2, EAVE, z), True)
        timber((KNEE, EAVE, z), (KNEE, KNEE_HEIGHT, z), True)
        timber((WIDTH - KNEE, EAVE, z), (WIDTH - KNEE, KNEE_HEIGHT, z), True)
        timber((KNEE, KNEE_HEIGHT, z), (WIDTH - KNEE, KNEE_HEIGHT, z), True)
    for x, y in ((WIDTH, EAVE), (0, EAVE), (WIDTH - KNEE, KNEE_HEIGHT), (KNEE, KNEE_HEIGHT)):
        for start, end in itertools.pairwise(depths):
            timber((x, y, start), (x, y, end))
    for z in depths:
        timber((0, EAVE, z), (KNEE, KNEE_HEIGHT, z))
        timber((WIDTH, EAVE, z), (WIDTH - KNEE, KNEE_HEIGHT, z))
        timber((KNEE, KNEE_HEIGHT, z), (WIDTH / 2, RIDGE, z))
        timber((WIDTH - KNEE, KNEE_HEIGHT, z), (WIDTH / 2, RIDGE, z))
    for start, end in itertools.pairwise(depths):
        timber((WIDTH / 2, RIDGE, start), (WIDTH / 2, RIDGE, end))

    top = RIDGE + far * DEPTH_Y
    width, height = (WIDTH + far * DEPTH_X) * SCALE + 2 * MARGIN, top * SCALE + 2 * MARGIN

    def flat(point: Point) -> tuple[float, float]:
        x, y, z = point
        across, up = x + z * DEPTH_X, y + z * DEPTH_Y
        return round(across * SCALE + MARGIN, 1), round(height - up * SCALE - MARGIN, 1)

    drawn = [Timber(i, *flat(a), *flat(b), slender) for i, (a, b, slender) in enumerate(timbers)]
    far_first = sorted(
        drawn, key=lambda member: -min(timbers[member.order][0][2], timbers[member.order][1][2])
    )
    return Drawing(width, height, tuple(far_first))


def count_raised(share: float, members: int) -> int:
    """Count the raised timbers: one from the first token on, all only at the end.

    The frontend has the same formula.
    """
    if share <= 0:
        return 0
    return members if share >= 1 else min(members - 1, 1 + int(share * (members - 1)))


@lru_cache(maxsize=500)
def quilt(name: str) -> tuple[tuple[str, str], ...]:
    """Return (CSS class, polygon points) of a block of 6 × 6 patches, determined by the name.

    One quarter has 3 × 3 patches, each a square or two triangles; it is drawn four times, rotated.
    """
    bits = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "big")

    def draw(choices: int) -> int:
        nonlocal bits
        bits, choice = divmod(bits, choices)
        return choice

    palette = [f"q{i}" for i in range(5)]
    first = palette.pop(draw(5))
    second = palette.pop(draw(4))
    shapes: list[tuple[str, list[tuple[float, float]]]] = []
    for row in range(3):
        for column in range(3):
            x, y = column, row
            corners = [(x, y), (x + 1, y), (x + 1, y + 1), (x, y + 1)]
            kind, tint = draw(4), (first, second)[draw(2)]
            if kind == 0 and (row, column) != (2, 2):
                continue
            turn = draw(4)
            triangle = [corners[(turn + i) % 4] for i in range(3)]
            if kind == 1:
                shapes.append((tint, corners))
            else:
                shapes.append((tint, triangle))
                if kind == 3:
                    other = second if tint == first else first
                    shapes.append((other, [corners[(turn + i) % 4] for i in (2, 3, 0)]))
    turned: list[tuple[str, str]] = []
    for _ in range(4):
        turned += [(tint, " ".join(f"{x:g},{y:g}" for x, y in points)) for tint, points in shapes]
        shapes = [(tint, [(6 - y, x) for x, y in points]) for tint, points in shapes]
    return tuple(turned)
