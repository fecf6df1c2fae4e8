"""Tell the prepared folders that this user made from those of strangers, which may not name files everywhere.

A record in the folder proves nothing, as its maker wrote it. Saving therefore seals the manifest with a
key that lies beside the user's caches of Hugging Face.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import BucketingError, MediaError
from ..hub import user_folder
from ..media.remote import ALLOWED_PATHS, check_allowed, is_url

SEAL = "seal"
"""Entry of a manifest that shows who wrote the others."""

_KEY_FILE = "seal_key"
_KEY_BYTES = 32


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest with the seal of this user; without one where no key can be kept."""
    key = _key(make=True)
    return {**manifest, SEAL: None if key is None else _seal(manifest, key)}


def is_sealed(manifest: Mapping[str, Any]) -> bool:
    """Return whether this user sealed a manifest, and nobody changed it since."""
    key, seal = _key(make=False), manifest.get(SEAL)
    return key is not None and isinstance(seal, str) and hmac.compare_digest(seal, _seal(manifest, key))


def check_places(places: Iterable[str | None], folder: Path, manifest: Mapping[str, Any]) -> None:
    """Check that a prepared folder may name places of its files.

    The user's own may name any place. Others may name places in the folder and beside it, because both are copied
    together, those on servers and the hub, and what the environment variable allows.

    Args:
        places (iterable of `str`, *optional*): Folders and URLs.
        folder (`Path`): The prepared folder.
        manifest (mapping): Its manifest.

    Raises:
        BucketingError: If it may not.
    """
    if is_sealed(manifest):
        return
    folder = Path(os.path.abspath(folder))
    for place in filter(None, places):
        beside = not is_url(place) and folder.parent in Path(os.path.abspath(place)).parents
        try:
            check_allowed(place, str(folder.parent if beside else folder))
        except MediaError as error:
            raise BucketingError(
                f"{folder} reads files from {place}, which lies neither in it nor beside it, and you did not prepare "
                "it on this machine, or it was changed since. If you trust it, prepare it again, or name that place "
                f"in the environment variable {ALLOWED_PATHS}, such as {ALLOWED_PATHS}={place}."
            ) from error


def root_of(root: str | None, folder: Path, manifest: Mapping[str, Any]) -> str | None:
    """Return the root of a prepared folder whose manifest names one or none.

    None lets rows name any file, which only the user's own rows may; those of others then start from the folder.
    """
    return str(folder) if root is None and not is_sealed(manifest) else root


def _seal(manifest: Mapping[str, Any], key: bytes) -> str:
    values = json.loads(json.dumps({name: value for name, value in manifest.items() if name != SEAL}))
    return hmac.new(key, json.dumps(values, sort_keys=True).encode(), hashlib.sha256).hexdigest()


def _key(*, make: bool) -> bytes | None:
    """Return the key of this user, which the first call with `make` makes; None where none can be kept."""
    file = user_folder() / _KEY_FILE
    try:
        if make and not file.exists():
            _make_key(file)
        key = file.read_bytes()
    except OSError:  # in a home that cannot be written, folders count as those of a stranger, which the error explains
        return None
    if len(key) != _KEY_BYTES:
        raise BucketingError(f"{file} is empty or damaged; delete it, and prepare again what is then refused.")
    return key


def _make_key(file: Path) -> None:
    """Write a key that only this user can read; of processes that do so at once, the first one wins."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as written:
            written.write(secrets.token_bytes(_KEY_BYTES))
        with contextlib.suppress(FileExistsError):
            os.link(partial, file)
    finally:
        partial.unlink(missing_ok=True)
