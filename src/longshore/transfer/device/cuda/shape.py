"""Launch parameters of a kernel for a rectangle of pages; does not need Triton."""

from __future__ import annotations

from typing import NamedTuple

COLUMNS = 5
"""Columns of a kernel's table: base, stride, width, offset, step; int64, one row per reference."""

WIDEST_WORD = 16
"""Bytes of the widest access."""

_WORDS_AT_ONCE = 1024  # 16 KiB for each program: 256 threads with four accesses of 16 bytes each
_LONGEST_SPAN = 512
_MOST_TAILS = 64  # each of up to 15 bytes, one by one: more of them do not fit the registers


class Shape(NamedTuple):
    """How a kernel goes about a rectangle of pages.

    Attributes:
        chunks: Chunks, hence rows.
        refs: References, hence lines of the table.
        subs: Blocks of each chunk.
        segments: Parts that each page is moved in.
        word: Bytes of an access: 16, 8, 4, 2 or 1.
        span: Words of a segment, a power of two.
        tail: Whether some page is not a whole number of words.
    """

    chunks: int
    refs: int
    subs: int
    segments: int
    word: int
    span: int
    tail: bool

    @classmethod
    def of(
        cls, chunks: int, refs: int, subs: int, *, widest: int, alignment: int, tail: bool, longest: int | None = None
    ) -> Shape:
        """The shape for pages of at most `widest` bytes at multiples of `alignment`, a power of two.

        `longest` is the longest page for the same kernel, by default `widest`.
        """
        word = min(alignment, WIDEST_WORD)
        words = max(1, widest // word)
        span = min(1 << (max(1, (longest or widest) // word) - 1).bit_length(), _LONGEST_SPAN)
        return cls(chunks, refs, subs, -(-words // span), word, span, tail)

    @property
    def rows_at_once(self) -> int:
        """Segments per program iteration, a power of two."""
        return min(max(1, _WORDS_AT_ONCE // self.span), _MOST_TAILS if self.tail else _WORDS_AT_ONCE)

    @property
    def compiled(self) -> tuple[int, int, bool]:
        """The attributes that a kernel is compiled for."""
        return self.word, self.span, self.tail

    @property
    def segments_in_all(self) -> int:
        """Segments of all pages."""
        return self.chunks * self.refs * self.subs * self.segments
