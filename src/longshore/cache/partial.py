"""Partial prefixes: chunks that begin with the same tokens as the first chunk of a prompt that is not found.

    requested  ... b ── the quick brown cat          found up to b; the next chunk is in no tier
    resident   ... b ── the quick brown fox          three tokens in common: copy these, compute one
                     └─ the slow                     one

Keys do not contain tokens, so with the setting `partial` the tokens of each chunk are kept in one array (4 bytes per
token of the longest chunk, and about 130 bytes per chunk for the lists of children). The children of a key are a linked
list in columns, youngest first, of which the first `MAX_COMPARED` are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from longshore.boundary import Key
from longshore.cache.columns import count_leading, filled, resized
from longshore.cache.index import Index
from longshore.cache.nodes import ROOTED
from longshore.errors import CacheError, former_name

MAX_COMPARED = 256
"""The number of youngest children of a key that are compared."""

Tokens = npt.NDArray[np.uint32]


class PromptTokens(NamedTuple):
    """The tokens of a request, for partial matches.

    Attributes:
        tokens: Token ids from the first chunk on, in `[0, 2**32)`, as many as may be reused. Equal ids must mean equal
            content: replace placeholders of multimodal items by ids that are specific to the item.
        root: The root of the first key (`Scope.digest`).
        beside: Chunks on the device by parent key (or root): keys, and the tokens of each.
    """

    tokens: Sequence[int] | npt.NDArray[np.integer]
    root: Key
    beside: Mapping[Key, Iterable[tuple[Key, Sequence[int]]]] = {}

    def checked(self, least: int = 0) -> PromptTokens:
        """The tokens, checked. Raises `CacheError` for fewer than `least` tokens, or a root that is not bytes."""
        if len(self.tokens) < least or not isinstance(self.root, bytes) or not self.root:
            raise CacheError(f"expected {least} tokens and a root in bytes, got {len(self.tokens)} and {self.root!r}")
        return self._replace(tokens=as_ids(self.tokens[:least])) if least else self

    def chunk(self, position: int, chunk_tokens: int) -> Tokens:
        """The tokens of the chunk at `position`, fewer at the end."""
        return as_ids(self.tokens[position * chunk_tokens : (position + 1) * chunk_tokens])

    def parent_key(self, keys: Sequence[Key], position: int) -> Key:
        """The key before the chunk at `position`, or the root."""
        return keys[position - 1] if position else self.root


PromptTokens.before = former_name("before", "parent_key")  # type: ignore[attr-defined]


class Partial(NamedTuple):
    """The first `tokens` tokens of the chunk `key` are those requested. It is on the `device`, or in a tier."""

    key: Key
    tokens: int
    device: bool = False


def as_ids(tokens: Sequence[int] | npt.NDArray[np.integer]) -> Tokens:
    """`tokens` as uint32, shape `(tokens,)`. Raises `CacheError` for invalid token ids."""
    try:
        ids = np.array(tokens, np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise CacheError(f"expected token ids as integers in [0, 2**32): {error}") from error
    if ids.ndim != 1 or (ids.size and (int(ids.min()) < 0 or int(ids.max()) >= 1 << 32)):
        raise CacheError(f"expected token ids as a vector of integers in [0, 2**32), got shape {ids.shape}")
    return ids.astype(np.uint32)


class PartialPrefixes:
    """Tokens of the chunks in `index`, at most `width` each, and the children of each key; disabled at width 0."""

    def __init__(self, index: Index, width: int) -> None:
        self.on = width > 0
        self._index = index
        self._width = width
        self._tokens: Tokens = np.zeros((0, width), np.uint32)
        self._parent_key = np.empty(0, object)
        self._older, self._younger = filled(0), filled(0)
        self._youngest: dict[Key, int] = {}

    def grow(self, nodes: int) -> None:
        """Nodes may now have any number below `nodes`."""
        more = nodes - len(self._older)
        if self.on and more > 0:
            self._tokens = np.concatenate([self._tokens, np.zeros((more, self._width), np.uint32)])
            self._parent_key = np.concatenate([self._parent_key, np.empty(more, object)])
            self._older, self._younger = resized(self._older, nodes), resized(self._younger, nodes)

    def learn(self, keys: Sequence[Key], first: int, prompt_tokens: PromptTokens, chunk_tokens: int) -> None:
        """Store the tokens of those of `keys[first:]` that are in a tier; `prompt_tokens` has them."""
        get, parent_key = self._index.get, self._parent_key
        fresh = [(at, node) for at in range(first, len(keys)) if (node := get(keys[at])) and parent_key[node] is None]
        for at, node in fresh:
            self._tokens[node, :chunk_tokens] = prompt_tokens.chunk(at, chunk_tokens)
            self._link(node, prompt_tokens.parent_key(keys, at))

    def forget(self, nodes: Iterable[int]) -> None:
        """`nodes` are in no tier any more."""
        for node in nodes:
            parent_key = self._parent_key[node]
            if parent_key is None:
                continue
            older, younger = self._older[node], self._younger[node]
            if older:
                self._younger[older] = younger
            if younger:
                self._older[younger] = older
            elif older:
                self._youngest[parent_key] = older
            else:
                del self._youngest[parent_key]
            self._parent_key[node] = None

    def closest(
        self, keys: Sequence[Key], position: int, prompt_tokens: PromptTokens, chunk_tokens: int
    ) -> Partial | None:
        """The chunk with the most leading tokens of the chunk at `position`; of equals one on the device."""
        parent_key, best = prompt_tokens.parent_key(keys, position), None
        wanted = prompt_tokens.chunk(position, chunk_tokens)[: chunk_tokens - 1]
        for key, tokens in prompt_tokens.beside.get(parent_key, ()):
            best = _better(best, Partial(key, _common(as_ids(tokens), wanted), device=True))
        loadable = self._index.loadable
        nodes = [node for node in islice(self._children(parent_key), MAX_COMPARED) if loadable[node] == ROOTED]
        if nodes and len(wanted):
            equal = self._tokens[nodes, : len(wanted)] == wanted
            common = np.where(equal.all(axis=1), len(wanted), equal.argmin(axis=1))
            most = int(common.argmax())
            best = _better(best, Partial(self._index.key[nodes[most]], int(common[most])))
        return best

    def check_integrity(self) -> None:
        """Raise `CacheError` unless all listed chunks are in the index, as children of the right key."""
        linked = [int(node) for node in np.flatnonzero(self._parent_key != None)]  # noqa: E711
        listed = [node for parent_key in self._youngest for node in self._children(parent_key)]
        if sorted(listed) != linked or any(self._index.key[node] is None for node in linked):
            raise CacheError(f"{len(listed)} chunks are listed by parent, but {len(linked)} have tokens")

    def _children(self, parent_key: Key) -> Iterable[int]:
        node = self._youngest.get(parent_key, 0)
        while node:
            yield node
            node = self._older[node]

    def _link(self, node: int, parent_key: Key) -> None:
        elder = self._youngest.get(parent_key, 0)
        self._parent_key[node], self._youngest[parent_key] = parent_key, node
        self._older[node], self._younger[node] = elder, 0
        if elder:
            self._younger[elder] = node


def _common(tokens: Tokens, wanted: Tokens) -> int:
    count = min(len(tokens), len(wanted))
    return count_leading(tokens[:count] == wanted[:count]) if count else 0


def _better(best: Partial | None, other: Partial) -> Partial | None:
    return other if other.tokens > (best.tokens if best else 0) else best
