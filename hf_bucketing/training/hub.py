"""Upload the result of a run to the Hugging Face hub: its repository is tried before training, and filled after it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, constants
from huggingface_hub.utils import HFValidationError

from ..adapters.files import ADAPTER_FILES
from ..adapters.loading import expert_folder
from ..configuration.outputs import HubConfig
from ..errors import HubError
from ..models.experts import TrainedComponent, transformers_of
from ..models.index import MODULAR_INDEX, copy_index, read_index

_NO_NAME = 'expected "name" or "owner/name" of letters, digits, -, _ and .'


def open_repository(config: HubConfig, *, folder: Path) -> str:
    """Create the repository unless it exists, and check that files may be uploaded to it; none is.

    Args:
        config ([`HubConfig`]): Its name, and whether it is private.
        folder (`Path`): Output folder, whose name it has by default.

    Returns:
        `str`: Its name with its owner's, as `"owner/name"`.

    Raises:
        HubError: If the hub cannot be reached or does not allow it.
    """
    name, api = config.hub_model_id or folder.resolve().name, HfApi()
    try:
        repository = api.create_repo(name, private=config.hub_private_repo, exist_ok=True).repo_id
        # Every upload begins with this request. The hub answers it only to those who may write.
        api.preupload_lfs_files(repository, [CommitOperationAdd(constants.REPOCARD_NAME, b"text")])
    except HFValidationError as error:
        raise HubError(f"{name} cannot name a repository, {_NO_NAME}; give `hub_model_id`.") from error
    except Exception as error:  # releases of huggingface_hub raise errors of three HTTP libraries
        raise HubError(
            f"The repository {name} cannot be written on {constants.ENDPOINT}: {_first_line(error)}.",
            advice=[
                "log in with `hf auth login`, or set HF_TOKEN to a token that may write to it",
                "name another repository as `hub_model_id`",
                "train without `push_to_hub`",
            ],
        ) from error
    return str(repository)


def result_parts(folder: Path, *, adapters: bool, trained: TrainedComponent = "transformer") -> list[str]:
    """Return the names of the files and folders in an output folder that hold the adapters, or the pipeline."""
    if adapters:
        if trained == "both":
            return [expert_folder(name, trained=trained) for name in transformers_of(trained)]
        return [name for name in ADAPTER_FILES if (folder / name).is_file()]
    index = read_index(str(folder))
    return [*(name for name, entry in index.components.items() if entry.is_below(folder)), index.file_name]


def upload(folder: Path, repository: str, parts: Sequence[str]) -> str:
    """Upload parts of an output folder, and nothing else of it; return where they are, as a message.

    Args:
        folder (`Path`): Output folder.
        repository (`str`): Repository that [`open_repository`] returned.
        parts (sequence of `str`): Files and folders, relative to the output folder.

    Raises:
        HubError: If the upload fails; the message says how to repeat it.
    """
    if MODULAR_INDEX in parts:
        copy_index(folder, folder, place=repository)
    patterns = [f"{part}/*" if (folder / part).is_dir() else part for part in parts]
    try:
        HfApi().upload_folder(
            repo_id=repository, folder_path=folder, allow_patterns=patterns, commit_message="End of training"
        )
    except Exception as error:  # as above
        included = [word for pattern in patterns for word in ("--include", pattern)]
        command = shlex.join(["hf", "upload", repository, str(folder), ".", *included])
        raise HubError(
            f"Training ended and its result is complete in {folder}, but its upload to {repository} failed: "
            f"{_first_line(error)}. Repeat the upload alone with: {command}"
        ) from error
    return f"Uploaded to {constants.ENDPOINT}/{repository}"


def _first_line(error: BaseException) -> str:
    line = str(error).strip().partition("\n")[0].rstrip(".")
    return f"{type(error).__name__}, {line}"
