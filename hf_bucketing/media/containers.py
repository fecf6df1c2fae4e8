"""Recognise video containers by their first bytes, and read from their headers how a video is rotated for display.

PyAV exposes the display matrix of decoded frames only, and demuxed packets do not carry it. The headers of the two
families of containers that have one, mp4/mov and Matroska/WebM, are therefore read here, a few bytes at a time.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, Literal, NamedTuple

ContainerName = Literal["mov", "matroska"]
"""FFmpeg's names of the two families."""

_Span = tuple[int, int]
_Matrix = tuple[float, float, float, float]
_Walk = Callable[[BinaryIO, int, int], Iterator[tuple[Any, int, int]]]

_IDENTITY = (1.0, 0.0, 0.0, 1.0)
_MAX_ELEMENTS = 10_000
"""Largest number of elements read per level, so that no file keeps a process busy.

At worst a rotation is missed, which decoding notices.
"""

_MAX_TABLE = 2**16
"""Largest table of the items of a picture that is read, in bytes."""

_MOV_STARTS = {b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"}
_HEIF_BRANDS = {b"mif1", b"heic", b"heix", b"heim", b"heis"}
_IMAGE_BRANDS = {b"avif", b"avis", b"msf1", *_HEIF_BRANDS}
_COMPOSED = {
    b"irot": "is turned",
    b"imir": "is mirrored",
    b"clap": "is cropped",
    b"auxC": "has a plane beside its colours",
}
_PLAYLISTS = {
    b"#EXTM3U": "an HLS playlist",
    b"ffconcat": "a list of files for FFmpeg",
    b"<?xml": "an XML file, such as a playlist of DASH",
    b"<MPD": "a playlist of DASH",
    b"v=0": "a description of streams (SDP)",
}
_EBML = b"\x1a\x45\xdf\xa3"
_SEGMENT, _TRACKS, _TRACK, _TRACK_TYPE = 0x18538067, 0x1654AE6B, 0xAE, 0x83
_VIDEO, _PROJECTION, _YAW, _ROLL = 0xE0, 0x7670, 0x7673, 0x7675


class Turn(NamedTuple):
    """Steps that make a stored frame upright: transpose, then reverse rows, then reverse columns."""

    transposed: bool = False
    reverse_rows: bool = False
    reverse_columns: bool = False


def container_of(head: bytes) -> ContainerName | None:
    """Return the container of a file from its first 12 bytes; `None` for images and everything else."""
    if head.startswith(_EBML):
        return "matroska"
    if head[4:8] in _MOV_STARTS and head[8:12] not in _IMAGE_BRANDS:
        return "mov"
    return None


def playlist_of(head: bytes) -> str | None:
    """Return what a list that names other files is called, from the first 12 bytes of a file; `None` for media."""
    return next((name for start, name in _PLAYLISTS.items() if head.startswith(start)), None)


def is_heif(head: bytes) -> bool:
    """Return whether a file is a HEIF picture, such as HEIC, from its first 12 bytes."""
    return head[4:8] == b"ftyp" and head[8:12] in _HEIF_BRANDS


def picture_changes(file: BinaryIO) -> list[str]:
    """Return what a HEIF or AVIF picture does with its stored pixels that FFmpeg does not, in words."""
    head = _read_span(file, (0, 12), 12)
    if head[4:8] != b"ftyp" or head[8:12] not in _IMAGE_BRANDS:
        return []
    end = file.seek(0, 2)
    start, stop = next(_descend(_boxes, file, (0, end), b"meta"), (0, 0))
    meta = start + 4, stop  # after its version
    listed = [box for span in _descend(_boxes, file, meta, b"iprp", b"ipco") for box in _boxes(file, *span)]
    of_picture = _primary_properties(file, meta)
    kinds = {
        kind
        for number, (kind, *span) in enumerate(listed, start=1)
        if number in of_picture or kind == b"auxC"  # a plane is an item of its own
        if not (kind == b"irot" and _read_span(file, (span[0], span[1]), 1) == b"\0")  # turned by 0°
    }
    return [words for kind, words in _COMPOSED.items() if kind in kinds]


def _primary_properties(file: BinaryIO, meta: _Span) -> set[int]:
    """Return the numbers, from 1, of the properties of the item that a HEIF file shows (its boxes pitm and ipma)."""
    paths = (b"pitm",), (b"iprp", b"ipma")
    primary, table = (
        _read_span(file, next(_descend(_boxes, file, meta, *path), (0, 0)), _MAX_TABLE) for path in paths
    )
    id_length, number_length = 4 if table[:1] > b"\0" else 2, 1 + (table[3:4] > b"\0")
    at = 8
    while at + id_length < len(table):
        numbers = at + id_length + 1
        end = numbers + table[numbers - 1] * number_length
        if int.from_bytes(table[at : numbers - 1], "big") == int.from_bytes(primary[4:], "big"):
            essential = 1 << 8 * number_length - 1  # a flag beside each number
            return {
                int.from_bytes(table[place : place + number_length], "big") & ~essential
                for place in range(numbers, end, number_length)
            }
        at = end
    return set()


def read_turn(file: BinaryIO, container: ContainerName | None, *, track_id: int, position: int) -> Turn:
    """Read how a video is rotated for display; the identity if the header does not say.

    mp4 files name the video stream by its `track_id`, Matroska by its `position` among all video streams, from 0.
    """
    end = file.seek(0, 2)
    if container == "mov":
        return _turn(_mov_matrix(file, end, track_id))
    if container == "matroska":
        return _turn(_matroska_matrix(file, end, position))
    return Turn()


def _turn(matrix: _Matrix) -> Turn:
    """Round a matrix to quarter turns: it shows a stored pixel (x, y) at (a·x + c·y, b·x + d·y), y downwards."""
    a, b, c, d = matrix
    if abs(b) + abs(c) > abs(a) + abs(d):
        return Turn(True, b < 0, c < 0)
    return Turn(False, d < 0, a < 0)


def _descend(walk: _Walk, file: BinaryIO, span: _Span, *path: Any) -> Iterator[_Span]:
    """Yield the spans of all elements at a path of kinds."""
    for kind, start, end in walk(file, *span):
        if kind == path[0]:
            if len(path) == 1:
                yield start, end
            else:
                yield from _descend(walk, file, (start, end), *path[1:])


def _read_span(file: BinaryIO, span: _Span, limit: int) -> bytes:
    file.seek(span[0])
    return file.read(max(0, min(span[1] - span[0], limit)))


def _mov_matrix(file: BinaryIO, end: int, track_id: int) -> _Matrix:
    """Multiply the matrices of a track (tkhd) and of the movie (mvhd), as FFmpeg does."""
    moov = next(_descend(_boxes, file, (0, end), b"moov"), (0, 0))
    movie = next(_descend(_boxes, file, moov, b"mvhd"), (0, 0))
    a, b, c, d = _matrix_at(_read_span(file, movie, 128), (36, 48))
    for span in _descend(_boxes, file, moov, b"trak", b"tkhd"):
        header = _read_span(file, span, 128)
        id_at = 20 if header[:1] == b"\x01" else 12  # version 1 has times of 8 bytes
        if header[id_at : id_at + 4] == (track_id % 2**32).to_bytes(4, "big"):
            e, f, g, h = _matrix_at(header, (40, 52))
            return e * a + f * c, e * b + f * d, g * a + h * c, g * b + h * d
    return _IDENTITY


def _matrix_at(header: bytes, offsets: tuple[int, int]) -> _Matrix:
    """Read a, b, c, d of the 3×3 matrix `a b u, c d v, x y w`; it has one offset in version 0 and one in version 1."""
    offset = offsets[header[:1] == b"\x01"]
    if len(header) < offset + 20:
        return _IDENTITY
    a, b, _, c, d = struct.unpack_from(">5i", header, offset)
    return a / 65536, b / 65536, c / 65536, d / 65536


def _boxes(file: BinaryIO, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield the kind of each mp4 box, and the start and end of its contents; one may not leave its parent."""
    for _ in range(_MAX_ELEMENTS):
        if start >= end:  # a length is only what a file says
            return
        head = _read_span(file, (start, end), 16)
        if len(head) < 8:
            return
        size, kind = struct.unpack_from(">I4s", head)
        header = 8
        if size == 1 and len(head) == 16:
            size, header = int.from_bytes(head[8:], "big"), 16
        size = size or end - start
        if size < header:
            return
        yield kind, start + header, min(start + size, end)
        start += size


def _matroska_matrix(file: BinaryIO, end: int, position: int) -> _Matrix:
    """Make a matrix from the roll in degrees (counter-clockwise) and the yaw, where 180 mirrors."""
    tracks = next(_descend(_elements, file, (0, end), _SEGMENT, _TRACKS), (0, 0))
    for track in _descend(_elements, file, tracks, _TRACK):
        kind = next(_descend(_elements, file, track, _TRACK_TYPE), (0, 0))
        if _read_span(file, kind, 1) != b"\x01":
            continue
        if position == 0:
            roll, yaw = (
                _float(b"".join(_read_span(file, span, 8) for span in _descend(_elements, file, track, *path)))
                for path in ((_VIDEO, _PROJECTION, _ROLL), (_VIDEO, _PROJECTION, _YAW))
            )
            if abs(yaw) not in (0, 180):  # the viewing direction of a spherical video
                return _IDENTITY
            mirror = -1 if yaw else 1
            cosine, sine = math.cos(math.radians(roll)), mirror * math.sin(math.radians(roll))
            return mirror * cosine, -sine, mirror * sine, cosine
        position -= 1
    return _IDENTITY


def _float(value: bytes) -> float:
    number = struct.unpack({4: ">f", 8: ">d"}[len(value)], value)[0] if len(value) in (4, 8) else 0.0
    return number if math.isfinite(number) else 0.0


def _elements(file: BinaryIO, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the id of each Matroska element, and the start and end of its contents, within its parent."""
    for _ in range(_MAX_ELEMENTS):
        if start >= end:
            return
        head = _read_span(file, (start, end), 12)
        id_length = 9 - head[0].bit_length() if head else 9
        size_length = 9 - head[id_length].bit_length() if id_length < len(head) else 9
        header = id_length + size_length
        if size_length > 8 or header > len(head):
            return
        size = int.from_bytes(head[id_length:header], "big") - (1 << 7 * size_length)
        if size == (1 << 7 * size_length) - 1:  # unknown: it ends with its parent
            size = end - start - header
        start += header
        yield int.from_bytes(head[:id_length], "big"), start, min(start + size, end)
        start += size
