"""An export on the Hugging Face hub."""

from __future__ import annotations

import shlex
from pathlib import Path

from accel_train.errors import UserError, reason_of


def check_login() -> None:
    """Raise UserError if the hub cannot be reached, or does not know the user: before the work of an export."""
    from huggingface_hub import HfApi

    try:
        HfApi(library_name="accel-train").whoami()
    except Exception as error:  # of the HTTP library: a refused connection, a proxy, a status
        raise UserError(f"--push-to-hub: {_reason(error)}.") from error


def push(folder: Path, repository: str) -> str:
    """Upload the files of `folder` in one commit, and return the address. Creates the repository if there is none.

    Raises UserError.
    """
    from huggingface_hub import HfApi

    api = HfApi(library_name="accel-train")
    try:
        address = api.create_repo(repository, repo_type="model", exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Export by accel-train")
    except Exception as error:
        raise UserError(
            f"--push-to-hub: {_reason(error)}. The export is in {folder}; to push it later: "
            f"hf upload {repository} {shlex.quote(str(folder))}",
            code=1,
        ) from error
    return str(address)


def _reason(error: Exception) -> str:
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return "the hub is not used, because HF_HUB_OFFLINE is set"
    status = error.response.status_code if isinstance(error, HfHubHTTPError) and error.response is not None else None
    if isinstance(error, LocalTokenNotFoundError) or status == 401:
        return "the hub does not know who you are; log in with: hf auth login"
    if status == 403:
        return "your token may not write there; give it write access, or name another repository"
    return f"the hub cannot be used ({reason_of(error, 200)})"
