"""The keys of each source in TOML files of sd-scripts, musubi-tuner and diffusion-pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import MediaError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_tables(path: str | Path) -> list[dict[str, Any]]:
    """Read the keys of each source that a TOML file lists, those of the tables around it included.

    Raises:
        MediaError: If the file is not such a TOML, or lists no source.
    """
    file = Path(path)
    try:
        content = tomllib.loads(file.read_bytes().decode())
    except OSError as error:
        raise MediaError(f"{file} cannot be read ({error.strerror}); correct the path.") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise MediaError(f"{file} is no TOML ({error}); correct it.") from error
    tables = list(_tables(content))
    if not tables:
        raise MediaError(f"{file} lists no sources; write [[datasets]] as musubi-tuner, or [[directory]].")
    return tables


def _tables(content: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the keys of each source with those around it."""
    general = content.get("general", {})
    for dataset in content.get("datasets", []):
        shared = {**general, **{key: value for key, value in dataset.items() if key != "subsets"}}
        yield from ({**shared, **subset} for subset in dataset.get("subsets", [{}]))
    shared = {key: value for key, value in content.items() if not _is_table(value)}
    yield from ({**shared, **directory} for directory in content.get("directory", []))


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, dict) for item in value))
