"""Whether a model can be had at all, asked before anything slow begins."""

from __future__ import annotations

from pathlib import Path

from posttrain.errors import CheckpointError

TIMEOUT_S = 10.0
WITHIN_A_CHECKPOINT = ("checkpoint-", "final", "base")


def check_available(name: str, *, file: str = "config.json", what: str = "checkpoint", revision: str | None = None) -> None:
    """Return where `name` is a folder, a hub id in the local cache, or a hub id that the hub knows; one short request at most.

    Without it `from_pretrained` asks the hub for each of several files, five times each, before it says that a folder is missing.

    Args:
        file: what must be there, such as config.json or tokenizer_config.json.

    Raises:
        CheckpointError: it cannot be had; the message says whether it is a missing folder, an unknown id or an unreachable hub.
    """
    check_path(name, what=what)
    if not Path(name).is_dir():
        _ask_hub(name, file, what, revision)


def check_path(name: str, *, what: str = "checkpoint") -> None:
    """Return where `name` is a folder, or may be a hub id; nobody is asked.

    Raises:
        CheckpointError: it can only be meant as a folder, and there is none.
    """
    if Path(name).is_dir():
        return
    if Path(name).is_file():
        raise CheckpointError(f"{name} is a file; a {what} is a folder in Hugging Face format")
    reason = why_no_hub_id(name)
    if reason is not None:
        raise CheckpointError(f"{what} {name}: no such folder ({reason}, so that it is no hub id either)")


def why_no_hub_id(name: str) -> str | None:
    """Why a name that is no folder here can only be meant as one; None where it may be an id on the hub."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if name.startswith((".", "/", "~")):
        return "it is written as a path"
    try:
        validate_repo_id(name)
    except HFValidationError:
        return "an id is OWNER/NAME of letters, digits, '-', '_' and '.'"
    first, _, last = name.rpartition("/")
    if first and Path(first).is_dir():
        return f"the folder {first} exists, and has no {last}"
    if last.startswith(WITHIN_A_CHECKPOINT[0]) or last in WITHIN_A_CHECKPOINT:
        return f"{last} is the name of a training checkpoint"
    return None


def _ask_hub(name: str, file: str, what: str, revision: str | None) -> None:
    import httpx
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    if isinstance(try_to_load_from_cache(name, file, revision=revision), str):
        return
    if constants.HF_HUB_OFFLINE:
        raise CheckpointError(f"{what} {name}: no such folder, not in the local cache, and HF_HUB_OFFLINE forbids asking the hub")
    try:
        get_hf_file_metadata(hf_hub_url(name, file, revision=revision), timeout=TIMEOUT_S, retry_on_errors=False)
    except GatedRepoError as error:
        raise CheckpointError(
            f"{what} {name}: the hub gives it only to those who asked its owner; log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(f"{what} {name}: no such folder, and no such model on the hub (or a private one)") from error
    except EntryNotFoundError:
        return  # the repository is there; what it lacks, its loader says better
    except (HfHubHTTPError, httpx.HTTPError, OSError) as error:
        raise CheckpointError(
            f"{what} {name}: no such folder, not in the local cache, and the hub cannot be asked ({type(error).__name__}); "
            "give a folder, or look at the network"
        ) from error
