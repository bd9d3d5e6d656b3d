"""Cut fragments into tiles, and state which optimizer trains which elements of a tile. Pure.

With AdamW all tiles of a fragment are alike. Muon updates a matrix as a whole: a tile ends at a
multiple of `TILE_GRAIN` elements near its size where no matrix is cut.
"""

from dataclasses import dataclass

from barnraise.spec import MUON, TENSOR_ALIGN, Fragment

# Tiles are multiples of this many elements, so that they begin on whole pages in every precision
# and on whole blocks of 8-bit moments.
TILE_GRAIN = 2048


@dataclass(frozen=True)
class Matrix:
    """One matrix that Muon orthogonalises, stored row by row.

    Attributes:
        begin: its first element, from the fragment's or tile's start.
        rows: the number of its rows.
        columns: the number of its columns.
    """

    begin: int
    rows: int
    columns: int

    @property
    def elements(self) -> int:
        """Return the number of elements."""
        return self.rows * self.columns

    @property
    def end(self) -> int:
        """Return the index after its last element."""
        return self.begin + self.elements

    @property
    def short_and_long(self) -> tuple[int, int]:
        """Return (m, n), m ≤ n, the smaller and the larger of its sides."""
        return min(self.rows, self.columns), max(self.rows, self.columns)


@dataclass(frozen=True)
class TileLayout:
    """One tile of a fragment.

    Attributes:
        begin: its first element in the fragment.
        end: the index after its last element in the fragment.
        matrices: those that Muon trains; each begins from the tile's start.
        spans: (begin, end) from the tile's start of all that AdamW trains. Only these elements have
            a second moment.
        second_begin: the second moments that the fragment's earlier tiles hold.
    """

    begin: int
    end: int
    matrices: tuple[Matrix, ...]
    spans: tuple[tuple[int, int], ...]
    second_begin: int

    @property
    def elements(self) -> int:
        """Return the number of elements."""
        return self.end - self.begin

    @property
    def second_moments(self) -> int:
        """Return the number of elements that have a second moment."""
        return sum(end - begin for begin, end in self.spans)

    @property
    def second_end(self) -> int:
        """Return the second moments that the tiles up to this one hold."""
        return self.second_begin + self.second_moments


def list_matrices(fragment: Fragment) -> tuple[Matrix, ...]:
    """Return the matrices of a fragment that Muon trains, in order.

    Matrices that are stored as one, such as queries, keys and values, are trained each by itself.
    """
    matrices: list[Matrix] = []
    for slot in fragment.slots:
        if slot.kind != "matrix":
            continue
        begin, columns = slot.offset, slot.shape[1]
        for rows in slot.parts or slot.shape[:1]:
            matrices.append(Matrix(begin, rows, columns))
            begin = matrices[-1].end
    return tuple(matrices)


def lay_out_tiles(fragment: Fragment, tile: int, optimizer: str) -> tuple[TileLayout, ...]:
    """Cut a fragment into tiles of `tile` elements, under Muon of about so many or more."""
    matrices = list_matrices(fragment) if optimizer == MUON else ()
    tiles: list[TileLayout] = []
    begin = second = 0
    while begin < fragment.size:
        end = _find_cut(matrices, begin, begin + tile, fragment.size)
        inside = [m for m in matrices if begin <= m.begin < end]
        moved = tuple(Matrix(m.begin - begin, m.rows, m.columns) for m in inside)
        spans = _spans_between(inside, begin, end)
        tiles.append(TileLayout(begin, end, moved, spans, second))
        second = tiles[-1].second_end
        begin = end
    return tuple(tiles)


def _find_cut(matrices: tuple[Matrix, ...], begin: int, end: int, size: int) -> int:
    """Return where a tile from `begin` ends, near `end`: before a matrix there, or after it.

    A tile that ends before has at least half of its size.
    """
    shortest = begin + (end - begin) // 2
    for matrix in matrices:
        if matrix.begin < end < matrix.end:
            before = matrix.begin // TILE_GRAIN * TILE_GRAIN
            if before >= shortest and not any(m.begin < before < m.end for m in matrices):
                return before
            end = -(-matrix.end // TILE_GRAIN) * TILE_GRAIN
    return min(end, size)


def _spans_between(matrices: list[Matrix], begin: int, end: int) -> tuple[tuple[int, int], ...]:
    """Return the spans of the tile [begin, end) around its matrices, from the tile's start.

    What pads a matrix belongs to no span: each span begins with a tensor.
    """
    spans: list[tuple[int, int]] = []
    first = begin
    for matrix in matrices:
        if matrix.begin > first:
            spans.append((first - begin, matrix.begin - begin))
        first = -(-matrix.end // TENSOR_ALIGN) * TENSOR_ALIGN
    if first < end:
        spans.append((first - begin, end - begin))
    return tuple(spans)
