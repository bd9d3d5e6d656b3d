"""Drawings of the pages: a timber frame that shows progress, and a barn quilt for each run.

Pure.
"""

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

BENTS = 4  # cross frames, from the back to the front
BAY = 3.3  # distance between two cross frames
EAVE = 4.2
KNEE = 1.75  # where the gambrel roof bends, from each side
KNEE_HEIGHT = 6.7
RIDGE = 8.3
WIDTH = 8.0
# Oblique projection: how far a unit of depth moves to the right and up.
DEPTH_X = 0.62
DEPTH_Y = 0.3
SCALE = 26.0  # drawing units per unit of the frame
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


@dataclass(frozen=True)
class Beam:
    """One timber in units of the frame, from one point to another."""

    start: Point
    end: Point
    slender: bool = False


@lru_cache(maxsize=1)
def timber_frame() -> Drawing:
    """Draw a gambrel barn, the farthest timbers first: nearer ones are drawn over them."""
    beams = _raised_beams()
    farthest = BAY * (BENTS - 1)
    width = (WIDTH + farthest * DEPTH_X) * SCALE + 2 * MARGIN
    height = (RIDGE + farthest * DEPTH_Y) * SCALE + 2 * MARGIN

    def project(point: Point) -> tuple[float, float]:
        x, y, z = point
        across = x + z * DEPTH_X
        up = y + z * DEPTH_Y
        return round(across * SCALE + MARGIN, 1), round(height - up * SCALE - MARGIN, 1)

    timbers = [
        Timber(order, *project(beam.start), *project(beam.end), beam.slender)
        for order, beam in enumerate(beams)
    ]

    def nearest_depth(timber: Timber) -> float:
        beam = beams[timber.order]
        return min(beam.start[2], beam.end[2])

    return Drawing(width, height, tuple(sorted(timbers, key=nearest_depth, reverse=True)))


def _raised_beams() -> list[Beam]:
    """List the timbers in the order in which a barn is raised: sills, bents, plates, roof."""
    depths = [BAY * i for i in reversed(range(BENTS))]
    beams: list[Beam] = []

    def timber(start: Point, end: Point, slender: bool = False) -> None:
        beams.append(Beam(start, end, slender))

    far = depths[0]
    near = 0.0
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
    return beams


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

    palette = [f"quilt-{i}" for i in range(5)]
    first = palette.pop(draw(5))
    second = palette.pop(draw(4))
    quarter: list[tuple[str, list[tuple[float, float]]]] = []
    for y in range(3):
        for x in range(3):
            corners: list[tuple[float, float]] = [(x, y), (x + 1, y), (x + 1, y + 1), (x, y + 1)]
            kind = draw(4)  # 0: nothing, except at the centre; 1: square; 3: two triangles
            tint = (first, second)[draw(2)]
            if kind == 0 and (x, y) != (2, 2):
                continue
            turn = draw(4)
            if kind == 1:
                quarter.append((tint, corners))
                continue
            quarter.append((tint, [corners[(turn + i) % 4] for i in range(3)]))
            if kind == 3:
                other_tint = second if tint == first else first
                quarter.append((other_tint, [corners[(turn + i) % 4] for i in (2, 3, 0)]))
    patches: list[tuple[str, str]] = []
    for _ in range(4):
        for tint, points in quarter:
            patches.append((tint, " ".join(f"{x:g},{y:g}" for x, y in points)))
        quarter = [(tint, [(6 - y, x) for x, y in points]) for tint, points in quarter]
    return tuple(patches)


def sparkline(values: Sequence[float], width: float = 100, height: float = 24) -> str:
    """Return the points of a small curve as SVG writes them; "" for fewer than two values.

    Args:
        values: at equal distances.
        width: of the drawing in its units; a line of two units fits in it.
        height: of the drawing.
    """
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    across = (width - 2) / (len(values) - 1)
    scale = (height - 2) / (high - low) if high > low else 0.0
    points = (
        (1 + index * across, height - 1 - (value - low) * scale)
        for index, value in enumerate(values)
    )
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
