"""What to say where a model or data set cannot be had from the Hugging Face hub."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import constants

from .errors import BucketingError, HubError

# By name, as huggingface_hub, datasets and httpx each raise their own, in other releases from other modules.
_UNREACHABLE = {
    "LocalEntryNotFoundError",
    "OfflineModeIsEnabled",
    "OfflineModeEnabled",
    "ConnectError",
    "ConnectTimeout",
    "ReadTimeout",
    "ConnectionError",
    "ConnectionRefusedError",
    "ProxyError",
    "MaxRetryError",
    "gaierror",
}
_REFUSED = {"RepositoryNotFoundError", "GatedRepoError", "DatasetNotFoundError"}


@contextmanager
def from_hub(name: str | os.PathLike[str]) -> Iterator[None]:
    """Turn errors of loading a model, data set or folder in a `with` block into one that says what is in the way.

    Raises:
        HubError: If the hub cannot be reached, or does not give it.
        BucketingError: If it is there and cannot be loaded.
    """
    try:
        yield
    except BucketingError:
        raise
    except Exception as error:
        reason = _reason(str(name), error)
        if reason is not None:
            raise HubError(reason) from error
        script = isinstance(error, RuntimeError) and "scripts are no longer supported" in str(error)
        unreadable = isinstance(error, OSError | ValueError) or type(error).__name__ == "SafetensorError" or script
        if unreadable and not getattr(error, "errno", None):
            raise BucketingError(f"{name} cannot be loaded: {_first_line(error)}") from error
        raise


def cache_folders() -> list[str]:
    """Return the folders into which huggingface_hub and datasets download files of the hub."""
    datasets = os.environ.get("HF_DATASETS_CACHE", os.path.join(constants.HF_HOME, "datasets"))
    return [os.path.abspath(constants.HF_HUB_CACHE), os.path.abspath(os.path.expanduser(datasets))]


_RECORDS = Path(".cache", "huggingface", "download")
"""Folder in which huggingface_hub records what it downloaded into a folder that a person chose."""


def download_of(file: Path) -> Path | None:
    """Return the folder to which huggingface_hub downloaded a file; None for a file of another origin.

    That is a folder in its cache, or one with a record of the contents that the file still has.
    """
    for parent in dict.fromkeys([os.path.abspath(file.parent), os.path.realpath(file.parent)]):
        place = Path(parent, file.name)
        if any(Path(cache) in place.parents for cache in cache_folders()):
            return place.parent
        for folder in place.parents:
            record = folder / _RECORDS / f"{place.relative_to(folder)}.metadata"
            if record.is_file() and _holds(record, place):
                return folder
    return None


def _holds(record: Path, file: Path) -> bool:
    """Return whether a record, of commit, ETag and time, is one of the contents of a file.

    The hub's ETags are the ids of git for small files, and SHA-256 for large ones.
    """
    data, (_, etag, *_) = file.read_bytes(), [*record.read_text().splitlines(), "", ""]
    blob = hashlib.sha1(b"blob %d\0%b" % (len(data), data), usedforsecurity=False).hexdigest()
    return etag.strip() in (blob, hashlib.sha256(data).hexdigest())


def _reason(name: str, error: BaseException) -> str | None:
    kinds = {type(cause).__name__ for cause in _chain(error)}
    folder = Path(name)
    if folder.exists():
        return None
    meant = f"If you meant a folder, {folder.absolute()} does not exist."
    offline = constants.HF_HUB_OFFLINE
    if kinds & _UNREACHABLE or (offline and kinds & _REFUSED):
        causes = [cause for cause in _chain(error) if type(cause).__name__ in _UNREACHABLE] or [error]
        why = "HF_HUB_OFFLINE is set" if offline else f"{constants.ENDPOINT}: {_first_line(causes[-1])}"
        return (
            f"Could not reach the Hugging Face hub to download {name} ({why}), and no earlier download is complete. "
            f"{meant}"
        )
    if "HFValidationError" in kinds:
        return f"{name} is no name of the Hugging Face hub, and no folder: {folder.absolute()} does not exist."
    if kinds & _REFUSED:
        return f"The Hugging Face hub has no {name}, or does not show it to you; log in with hf auth login. {meant}"
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    following: BaseException | None = error
    while following is not None:
        yield following
        following = following.__cause__ or following.__context__


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
