"""Places from which prepared folders may read files: downloaded ones name none outside of their download."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ..errors import BucketingError, MediaError
from ..hub import download_of
from ..media.remote import ALLOWED_PATHS, check_allowed


def check_places(places: Iterable[str | None], folder: Path, *, manifest: str) -> None:
    """Check that a prepared folder may name the places of its files.

    A downloaded one may name places in its download, on servers and on the hub. Any other may name all places but the
    whole disk, as its own record proves nothing. The environment variable `HF_BUCKETING_ALLOWED_PATHS` allows more.

    Args:
        places (iterable of `str`, *optional*): Folders and URLs.
        folder (`Path`): The prepared folder.
        manifest (`str`): Name of the file in it that names them.

    Raises:
        BucketingError: If it may not.
    """
    download = download_of(folder / manifest)
    for place in filter(None, places):
        whole_disk = os.path.dirname(place) == place
        if download is None and not whole_disk:
            continue
        try:
            check_allowed(place, str(download or os.path.abspath(folder)))
        except MediaError as error:
            why = "the whole disk" if download is None else f"outside of {download}, to which it was downloaded"
            raise BucketingError(
                f"{folder} reads files from {place}, {why}. If you trust it, prepare it again, or name that place in "
                f"the environment variable {ALLOWED_PATHS}, such as {ALLOWED_PATHS}={place}."
            ) from error


def root_of(root: str | None, folder: Path, *, manifest: str) -> str | None:
    """Return the root of a prepared folder that names one or none.

    Without a root, rows may name any file; rows of a downloaded folder then begin at its download.
    """
    download = download_of(folder / manifest)
    return root if root is not None or download is None else str(download)
