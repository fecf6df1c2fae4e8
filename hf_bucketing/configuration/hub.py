"""Settings of the upload to the hub."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import BucketingError, quoted
from ..settings import not_default

_NO_NAME = 'expected "name" or "owner/name" of letters, digits, -, _ and .'


@dataclass(frozen=True, slots=True, kw_only=True)
class HubConfig:
    """Upload to the Hugging Face hub.

    The token is that of `hf auth login`, or the environment variable HF_TOKEN; it is written nowhere.

    Args:
        push_to_hub (`bool`): Whether to upload the pipeline or the adapters, with their model card, after training.
        hub_model_id (`str`, *optional*): Repository as "name" or "owner/name"; by default the name of `output_dir`, in
            the account that the token belongs to.
        hub_private_repo (`bool`, *optional*): Whether a repository that does not exist yet becomes private; by default
            what its owner chose for new repositories.

    Raises:
        BucketingError: If the repository has no usable name, or there is one without `push_to_hub`.
    """

    push_to_hub: bool = False
    hub_model_id: str | None = None
    hub_private_repo: bool | None = None

    def __post_init__(self) -> None:
        if not self.push_to_hub and (given := not_default(self, "hub_model_id", "hub_private_repo")):
            raise BucketingError(f"Omit {quoted(given)}: no effect without `push_to_hub`.")
        if self.hub_model_id is not None:
            from huggingface_hub.utils import HFValidationError, validate_repo_id

            try:
                validate_repo_id(self.hub_model_id)
            except HFValidationError as error:
                raise BucketingError(f"`hub_model_id` is {self.hub_model_id!r}; {_NO_NAME}.") from error
