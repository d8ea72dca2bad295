"""How large the pieces are that one program takes, as data.

Nothing here changes a bit: an element's additions are fixed by the shape alone. Rows
come in tiles of 16 or 32, which is one MMA instruction on every GPU; of 64 rows sm90
would make another. Never tuned by time in a run: a capture must find what was compiled.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """block: columns, keys or elements that a program takes at once."""

    block: int
    num_warps: int
    num_stages: int = 1


def rows_tile(num_rows: int) -> int:
    """Rows of a program of a GEMM."""
    return 16 if num_rows <= 16 else 32


# (output columns at most, tile): fewer columns need more programs to fill a GPU, and
# warps without columns of their own would decode their neighbours' weights again.
_GEMM = (
    (4096, Tile(block=16, num_warps=1, num_stages=6)),
    (16384, Tile(block=32, num_warps=2, num_stages=4)),
)
_GEMM_WIDE = Tile(block=64, num_warps=4, num_stages=4)
GEMM_HEADS = Tile(block=64, num_warps=4, num_stages=2)


def gemm_tile(num_rows: int, num_columns: int) -> Tile:
    for most, tile in _GEMM:
        if num_columns <= most and rows_tile(num_rows) == 16:
            return tile
    return _GEMM_WIDE


SPLIT = Tile(block=0, num_warps=4)
NORM = Tile(block=0, num_warps=8)
ROUTER_LOGITS = Tile(block=16, num_warps=1, num_stages=4)
INDEX_SCORES = Tile(block=64, num_warps=4)
SELECT = Tile(block=2048, num_warps=8)
ATTEND = Tile(block=32, num_warps=8)
MERGE = Tile(block=0, num_warps=4)
ROUTE = Tile(block=2048, num_warps=4)
