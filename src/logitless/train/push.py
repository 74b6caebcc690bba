"""Push an exported folder to a repository of the hub, private by default."""

from pathlib import Path

import httpx
import huggingface_hub
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from logitless.errors import ConfigurationError, UnavailableError
from logitless.hub import use_cache_if_unreachable


def check_push(repo: str, *, private: bool) -> None:
    """Refuse a push that would fail, or that would make public what should be private.

    Args:
        repo: ``name``, or ``owner/name``.

    Raises:
        UnavailableError: the hub does not answer, or nobody is logged in.
        ConfigurationError: an invalid name, or a repository that exists and is public.
    """
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigurationError(needed="OWNER/NAME on the hub", given=str(error), remedy="Correct it.") from error
    if use_cache_if_unreachable():
        raise UnavailableError(
            needed="a hub that answers, to push to",
            given="none",
            remedy="Export without --push-to-hub, and push later.",
        )
    api = huggingface_hub.HfApi()
    try:
        me = api.whoami()["name"]
        whole = repo if "/" in repo else f"{me}/{repo}"  # without an owner the hub looks among its own repositories
        public = api.repo_exists(whole) and not api.repo_info(whole).private
    except (OSError, httpx.HTTPError) as error:  # no login, or the hub's refusal
        raise UnavailableError(
            needed="a login at the hub that may write", given=str(error), remedy="Run `hf auth login`."
        ) from error
    if private and public:
        raise ConfigurationError(
            needed="a private repository, or --public", given=f"{whole}, which is public", remedy="Name another one."
        )


def push_folder(folder: Path, repo: str, *, private: bool, message: str) -> str:
    """Upload a folder as one commit; the repository is created if missing.

    Returns:
        The repository's address.

    Raises:
        UnavailableError: the hub refuses, or the connection broke; the folder stays.
    """
    api, flag = huggingface_hub.HfApi(), " --private" if private else ""
    try:
        made = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message=message)
    except (OSError, httpx.HTTPError) as error:
        raise UnavailableError(
            needed=f"a hub that takes {folder}",
            given=str(error),
            remedy=f"The folder is complete: push it with `hf upload {repo} {folder}{flag}`.",
        ) from error
    return str(made)
