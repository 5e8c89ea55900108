"""The process of Mooncake's client: started by `longshore.tiers.remote.mooncake` only, as a program without Longshore.

    socket      orders, one JSON list a line, and an answer to each
    memory      descriptors of the arena and of a buffer; both are mapped here, and registered with the client

    ["exist", keys]                                 1: it is there; 0: it is not; below 0: an error
    ["get", keys, offsets, lengths, area]           the bytes of each value, as they are; below 0: an error
    ["read", keys, offsets, lengths]                the same, as one range each at an offset in the buffer
    ["put", keys, offsets, lengths, area, replace]  0; below 0: an error. What is there stays, unless it is replaced
    ["write", keys, offsets, lengths, replace]      the same, as one range each at an offset in the buffer
    ["remove", pattern]                             how many keys matched the regular expression; below 0: an error

The header of the value at index N of a get or put is at area + 128 * N in the buffer, its image at its offset in the
arena. Orders are carried out one after the other; some may wait. The first answer is Mooncake's code of its `setup`, 0
if it is connected, or the text of an error. The process ends at the end of its input, and with the thread that started
it, whatever the client is doing.
"""

import ctypes
import json
import mmap
import os
import signal
import socket
import sys
from typing import Any

HEADER_BYTES = 128
_PR_SET_PDEATHSIG = 1
_WRONG_LENGTHS = frozenset({-600, -800})
"""Codes of a get whose value has another length, among others."""


def _address_of(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def carried_out(client: Any, arena: int, buffer: int, kind: str, order: list[Any]) -> list[int]:
    """The codes of an order to `client`, a `MooncakeDistributedStore`; arena and buffer are at these addresses."""
    if kind == "exist":
        return list(client.batch_is_exist(*order))
    if kind == "remove":
        return [client.remove_by_regex(*order, True)]
    keys, offsets, lengths, *more = order
    if kind == "read":
        codes = list(client.batch_get_into(keys, [buffer + offset for offset in offsets], lengths))
        return _with_lengths(client, keys, codes, lengths)
    if kind == "write":
        _remove(client, keys, *more)
        return list(client.batch_put_from(keys, [buffer + offset for offset in offsets], lengths))
    area, *more = more
    places = [[buffer + area + HEADER_BYTES * index, arena + offset] for index, offset in enumerate(offsets)]
    sizes = [[HEADER_BYTES, length] for length in lengths]
    if kind == "put":
        _remove(client, keys, *more)
        return list(client.batch_put_from_multi_buffers(keys, places, sizes))
    codes = list(client.batch_get_into_multi_buffers(keys, places, sizes))
    return _with_lengths(client, keys, codes, list(map(sum, sizes)))


def _remove(client: Any, keys: list[str], replaced: list[bool]) -> None:
    for key, is_replaced in zip(keys, replaced, strict=True):
        if is_replaced:
            client.remove(key, True)


def _with_lengths(client: Any, keys: list[str], codes: list[int], expected: list[int]) -> list[int]:
    """The codes, and the length of each value that has another one than expected."""
    for index, code in enumerate(codes):
        if code in _WRONG_LENGTHS:
            found = client.get_size(keys[index])
            codes[index] = code if found == expected[index] else found
    return codes


def main() -> None:
    """Connect as the arguments say, and carry out orders until there are no more."""
    sock, arena, arena_bytes, buffer, buffer_bytes, parent = map(int, sys.argv[1:7])
    local, metadata, master = sys.argv[7:]
    for each in (signal.SIGINT, signal.SIGTERM):  # meant for the engine
        signal.signal(each, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before
        return
    connection = socket.socket(fileno=sock)

    def answer(said: object) -> None:
        connection.sendall(json.dumps(said).encode() + b"\n")

    try:
        from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415 - its errors are answers

        client = MooncakeDistributedStore()
        code = client.setup(local, metadata, 0, 0, "tcp", "", master)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told
        answer(f"{type(error).__name__}: {error}")
        return
    mappings = mmap.mmap(arena, arena_bytes), mmap.mmap(buffer, buffer_bytes)  # as long as the process lives
    first, second = map(_address_of, mappings)
    if code == 0:
        code = client.register_buffer(first, arena_bytes) or client.register_buffer(second, buffer_bytes)
    answer(code)
    with connection.makefile("rb") as orders:
        for line in orders:
            kind, *order = json.loads(line)
            answer(carried_out(client, first, second, kind, order))


if __name__ == "__main__":
    main()
    os._exit(0)  # the client's own end takes a second
