"""A dataset of the Hugging Face hub: its files at a revision are fetched into the cache and read as tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from etude.data.sources.opened import OpenSource
from etude.data.sources.table import table_parts
from etude.errors import UserError, one_line

if TYPE_CHECKING:
    from etude.data.settings import SourceSettings
    from etude.progress import Reporter


def name_and_revision(settings: SourceSettings) -> tuple[str, str]:
    """Return the dataset's name and its revision, which must be given: the default branch moves."""
    name, at, revision = str(settings.dataset).partition("@")
    if not at or not revision:
        raise UserError(
            f"source {settings.name!r}: {name} needs a revision, such as {name}@COMMIT; without one it would change"
        )
    return name, revision


def open_dataset(settings: SourceSettings, most_bytes: int, cache: Path, reporter: Reporter) -> OpenSource:
    """Fetch the files that match, and share their rows out in parts."""
    name, revision = name_and_revision(settings)
    reporter.say(f"fetching {name} from the hub …")
    folder = _snapshot(name, revision, settings.files, cache / "hub")
    files = sorted(path for path in folder.glob(settings.files) if path.is_file())
    if not files:
        raise UserError(f"source {settings.name!r}: {name} has no files that match {settings.files!r}; set `files`")
    return OpenSource(f"dataset {name}", folder.name, table_parts(files, folder, settings, most_bytes))


def _snapshot(name: str, revision: str, files: str, cache: Path) -> Path:
    from huggingface_hub import errors, snapshot_download

    wanted = [files, files.replace("**/", "")]  # for the hub `**/` is one folder or more, not none
    try:
        return Path(
            snapshot_download(name, repo_type="dataset", revision=revision, cache_dir=cache, allow_patterns=wanted)
        )
    except errors.GatedRepoError:
        raise UserError(f"{name} asks you to accept its terms on the hub first; do so, then `hf auth login`") from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError):
        raise UserError(f"the hub knows no dataset {name!r} at {revision!r}; check both") from None
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError) as error:
        raise UserError(f"cannot fetch {name} from the hub: {one_line(error)}") from None
