"""The one kind of PNG picture that a data set here has: square, grey, 8 bits."""

import struct
import zlib
from collections.abc import Callable

from .command import DataError


def read_png(content: bytes, side: int, where: str) -> bytes:
    """The side² pixels of a grey picture of 8 bits, row by row. Raises DataError for any other."""
    head = content[:8] == b"\x89PNG\r\n\x1a\n" and content[12:16] == b"IHDR" and len(content) > 33
    if not head:
        raise DataError(f"{where} is no PNG picture")
    width, height, *kind = struct.unpack(">IIBBBBB", content[16:29])
    if (width, height) != (side, side) or kind != [8, 0, 0, 0, 0]:
        raise DataError(f"{where}: {width} x {height} pixels, kind {kind}; expected {side} x {side} in 8 bits of grey")
    data, place = b"", 8
    while place < len(content):
        size, name = struct.unpack_from(">I4s", content, place) if place + 8 <= len(content) else (0, b"")
        if not name:
            break
        data += content[place + 8 : place + 8 + size] if name == b"IDAT" else b""
        place += 12 + size
    try:
        rows = zlib.decompressobj().decompress(data, side * (side + 1))
        return _unfilter(rows, side)
    except (zlib.error, ValueError, IndexError) as error:
        raise DataError(f"{where} is a damaged picture: {error}") from error


def _unfilter(rows: bytes, side: int) -> bytes:
    """PNG's five predictors, each row's named by its first byte. Raises ValueError, IndexError."""
    above, out = bytes(side), b""
    if len(rows) != side * (side + 1):
        raise ValueError("it is cut off")
    for start in range(0, len(rows), side + 1):
        line, predictor = bytearray(rows[start + 1 : start + 1 + side]), rows[start]
        for i in range(side):
            left, corner = (line[i - 1], above[i - 1]) if i else (0, 0)
            line[i] = (line[i] + PREDICTORS[predictor](left, above[i], corner)) & 255
        above = bytes(line)
        out += above
    return out


def _paeth(left: int, up: int, corner: int) -> int:
    return min((left, up, corner), key=lambda value: abs(left + up - corner - value))  # the first of equals


PREDICTORS: list[Callable[[int, int, int], int]] = [
    lambda left, up, corner: 0,
    lambda left, up, corner: left,
    lambda left, up, corner: up,
    lambda left, up, corner: (left + up) // 2,
    _paeth,
]
