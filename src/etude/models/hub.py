"""Fetch a model from the Hugging Face hub; every way this fails ends as one line.

Configuration first: a model that transformers cannot load without running foreign code is refused before its weights,
which may be a terabyte, are fetched. What is fetched stays in the cache, so an interrupted fetch goes on.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING

from etude.errors import UserError, one_line

if TYPE_CHECKING:
    from etude.progress import Reporter

SETTINGS = ["*.json", "*.jinja", "*.model", "*.txt", "README.md"]
LICENCE_STARTS = ("LICENSE", "LICENCE", "NOTICE", "COPYING", "COPYRIGHT", "USE_POLICY", "USAGE_POLICY")
LICENCES = [f"{start}*" for word in LICENCE_STARTS for start in (word, word.lower(), word.capitalize())]
FULL_DISK = {errno.ENOSPC, errno.EDQUOT}


def fetch_from_hub(name: str, revision: str | None, cache: Path, reporter: Reporter) -> tuple[Path, str]:
    """Return the folder of a hub model and the commit it is at."""
    from etude.models.shape import model_shape

    reporter.say(f"fetching {name} from the hub …")
    model_shape(_snapshot(name, revision, cache, [*SETTINGS, *LICENCES]))
    reporter.check_stop()
    folder = _snapshot(name, revision, cache, [*SETTINGS, *LICENCES, "*.safetensors"])
    return folder, folder.name


def _snapshot(name: str, revision: str | None, cache: Path, wanted: list[str]) -> Path:
    """Fetch the files at the top of a hub repository that match; not those in its folders, such as `original/`."""
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(
            snapshot_download(name, revision=revision, cache_dir=cache, allow_patterns=wanted, ignore_patterns="*/*")
        )
    except errors.GatedRepoError:
        raise UserError(
            f"{name} asks you to accept its licence on the hub first; do so, then `hf auth login`"
        ) from None
    except errors.RevisionNotFoundError:
        raise UserError(f"{name} has no revision {revision!r} on the hub") from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise UserError(f"the hub knows no model {name!r}; check the name (etude bases lists known ones)") from None
    except errors.LocalEntryNotFoundError:
        raise _unreachable(name, cache) from None
    except errors.HfHubHTTPError as error:
        raise UserError(f"the hub would not give {name}: {one_line(error)}") from None
    except OSError as error:
        if error.errno and (error.filename or error.errno in FULL_DISK):
            raise
        raise _unreachable(name, cache) from None


def _unreachable(name: str, cache: Path) -> UserError:
    return UserError(
        f"the hub cannot be reached and {name} is not in {cache}; connect, or give a local folder or `smollm2-135m`"
    )
