"""Write HEIF pictures of several tiles, as telephones and cameras do, of tiles that an encoder makes."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pillow_heif
from PIL import Image

TILE = 64


def blocks(width: int, height: int, *, seed: int = 1) -> Image.Image:
    """Return a picture of random blocks of 16 pixels, which survive encoding, and of which no part is like another."""
    colours = np.random.default_rng(seed).integers(0, 255, (height // 16 + 1, width // 16 + 1, 3))
    return Image.fromarray(np.kron(colours, np.ones((16, 16, 1))).astype(np.uint8)[:height, :width])


def save_heic(path: Path, *pictures: Image.Image, thumbnail: bool = False) -> None:
    """Write pictures as items of one HEIC file, the first of which is its own."""
    file = pillow_heif.HeifFile()
    for picture in pictures:
        image = file.add_from_pillow(picture)
        if thumbnail:
            image.info["thumbnails"] = [32]
    file.save(path, quality=95, chroma=444)


def save_tiles(path: Path, picture: Image.Image, *, rows: int, columns: int, quarter_turns: int = 0) -> None:
    """Write a picture as tiles of 64 pixels: HEIC or, by the ending of its name, AVIF.

    A reader shows it after `quarter_turns` anti-clockwise. Its lower and right tiles are larger than what is left.
    """
    canvas = Image.new("RGB", (columns * TILE, rows * TILE))
    canvas.paste(picture)
    boxes = [
        (left * TILE, top * TILE, (left + 1) * TILE, (top + 1) * TILE)
        for top in range(rows)
        for left in range(columns)
    ]
    avif = path.suffix == ".avif"
    tiles = [_encoded(canvas.crop(box), avif=avif) for box in boxes]
    whole = len(tiles) + 1  # items are numbered from 1, and that of the whole picture is the last
    grid = struct.pack(">4B2H", 0, 0, rows - 1, columns - 1, *picture.size)
    kind, configuration, brand = (b"av01", b"av1C", b"avif") if avif else (b"hvc1", b"hvcC", b"heic")
    properties = [
        _box(configuration, tiles[0][0]),
        _box(b"ispe", bytes(4), struct.pack(">2I", TILE, TILE)),
        _box(b"ispe", bytes(4), struct.pack(">2I", *picture.size)),
        _box(b"pixi", bytes(4), b"\3\x08\x08\x08"),
        _box(b"irot", bytes([quarter_turns])),
    ]
    of_tile, of_whole = bytes([3, 0x81, 2, 4]), bytes([3, 3, 4, 0x85])
    associations = [struct.pack(">H", item) + (of_whole if item == whole else of_tile) for item in range(1, whole + 1)]
    items = [(item, kind, 1) for item in range(1, whole)] + [(whole, b"grid", 0)]
    start = _box(b"ftyp", brand, bytes(4), b"mif1", b"miaf", brand)

    def meta(offset: int) -> bytes:
        places = []
        for item, (_, data) in enumerate(tiles, start=1):
            places.append(struct.pack(">4H2I", item, 0, 0, 1, offset, len(data)))
            offset += len(data)
        places.append(struct.pack(">4H2I", whole, 1, 0, 1, 0, len(grid)))
        return _box(
            b"meta",
            bytes(4),
            _box(b"hdlr", bytes(8), b"pict", bytes(13)),
            _box(b"pitm", bytes(4), struct.pack(">H", whole)),
            _box(b"iinf", bytes(4), struct.pack(">H", whole), *(_item(*values) for values in items)),
            _box(b"iref", bytes(4), _box(b"dimg", struct.pack(f">{whole + 1}H", whole, whole - 1, *range(1, whole)))),
            _box(
                b"iprp",
                _box(b"ipco", *properties),
                _box(b"ipma", bytes(4), struct.pack(">I", whole), *associations),
            ),
            _box(b"idat", grid),
            _box(b"iloc", b"\1\0\0\0", struct.pack(">2BH", 0x44, 0, whole), *places),
        )

    data = b"".join(data for _, data in tiles)
    path.write_bytes(start + meta(len(start) + len(meta(0)) + 8) + _box(b"mdat", data))


def _encoded(tile: Image.Image, *, avif: bool) -> tuple[bytes, bytes]:
    """Return the configuration of a decoder and the data of a tile."""
    file = io.BytesIO()
    if avif:
        tile.save(file, "AVIF", quality=95)
    else:
        pillow_heif.from_pillow(tile).save(file, quality=95, chroma=420)
    content = file.getvalue()
    path = [b"meta", b"iprp", b"ipco", b"av1C" if avif else b"hvcC"]
    return _find(content, path), _find(content, [b"mdat"])


def _find(content: bytes, path: list[bytes]) -> bytes:
    """Return the content of the first box at a path of kinds."""
    for kind, inside in _boxes(content):
        if kind == path[0]:
            inside = inside[4:] if kind == b"meta" else inside
            return inside if len(path) == 1 else _find(inside, path[1:])
    raise KeyError(path)


def _boxes(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    while content:
        size, kind = struct.unpack_from(">I4s", content)
        yield kind, content[8:size]
        content = content[size:]


def _box(kind: bytes, *parts: bytes) -> bytes:
    content = b"".join(parts)
    return struct.pack(">I", 8 + len(content)) + kind + content


def _item(number: int, kind: bytes, hidden: int) -> bytes:
    return _box(b"infe", struct.pack(">I2H4s", 2 << 24 | hidden, number, 0, kind), b"\0")
