"""Fetch from the Hugging Face hub; every way this fails ends as one line.

Of a model its configuration first: one that transformers cannot load without running foreign code is refused before its weights,
which may be a terabyte, are fetched. What is fetched stays in the cache, so an interrupted fetch goes on.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from etude.errors import UserError, one_line
from etude.lineage.licences import LICENSES

if TYPE_CHECKING:
    from etude.progress import Reporter

SETTINGS = ["*.json", "*.jinja", "*.model", "*.txt", "README.md"]
LICENCE_STARTS = ("LICENSE", "LICENCE", "NOTICE", "COPYING", "COPYRIGHT", "USE_POLICY", "USAGE_POLICY")
LICENCES = [f"{start}*" for word in LICENCE_STARTS for start in (word, word.lower(), word.capitalize())]
INSTEAD = {
    "model": "a local folder or a known base such as `smollm2-135m` (`etude bases` lists them)",
    "dataset": "local files with `jsonl` or `parquet`",
}
FULL_DISK = {errno.ENOSPC, errno.EDQUOT}


def fetch_from_hub(name: str, revision: str | None, cache: Path, reporter: Reporter) -> tuple[Path, str]:
    """Return the folder of a hub model and the commit it is at."""
    from etude.models.shape import model_shape

    reporter.say(f"fetching {name} from the hub …")
    wanted = [*SETTINGS, *LICENCES]
    top = {"ignore_patterns": "*/*"}  # not what lies in folders, such as `original/`
    model_shape(fetch_files("model", name, revision, cache, allow_patterns=wanted, **top))
    reporter.check_stop()
    fetch_files("model", name, revision, cache, allow_patterns=f"{LICENSES}/*")
    folder = fetch_files("model", name, revision, cache, allow_patterns=[*wanted, "*.safetensors"], **top)
    return folder, folder.name


def fetch_files(kind: Literal["model", "dataset"], name: str, revision: str | None, cache: Path, **which: Any) -> Path:
    """Fetch the files of a hub repository that match the patterns in `which`; return their folder."""
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(name, repo_type=kind, revision=revision, cache_dir=cache, **which))
    except errors.GatedRepoError:
        raise UserError(f"{name} asks you to accept its terms on the hub; do so, then `hf auth login`") from None
    except errors.RevisionNotFoundError:
        raise UserError(f"{name} has no revision {revision!r} on the hub") from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise UserError(f"the hub knows no {kind} {name!r}; check the name, or give {INSTEAD[kind]}") from None
    except errors.HfHubHTTPError as error:
        raise UserError(f"the hub would not give {name}: {one_line(error)}") from None
    except OSError as error:
        if error.errno and (error.filename or error.errno in FULL_DISK):
            raise
        advice = f"connect, or give {INSTEAD[kind]}"
        raise UserError(f"the hub cannot be reached and {name} is not in {cache}; {advice}") from None
