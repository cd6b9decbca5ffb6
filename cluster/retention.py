"""Which drafter versions stay on the disk."""

import logging
import shutil
from collections.abc import Iterable
from pathlib import Path

from torchspec_lite.config import Config
from torchspec_lite.export import versions
from workers.reports import Export

log = logging.getLogger(__name__)


async def retain(config: Config, coordinator, in_use: Iterable[int] = ()) -> None:
    """Delete version folders of a run beyond the newest `rollout.keep`, but none in use or needed by the ledger's word. A folder
    that is being written has another name until it is whole."""
    needed = await coordinator.needed_versions()
    found = versions(config.run_dir / "drafters")
    for version in found.keys() - {*needed, *in_use, *sorted(found)[-config.rollout.keep:]}:
        try:
            shutil.rmtree(found[version])
        except OSError as error:  # a run does not end because a folder stays
            log.warning("version %d is old, but its folder could not be deleted: %s", version, error)


def gone(export: Export) -> str | None:
    """The reason not to use a version whose folder is not where it was written any more."""
    return None if Path(export.directory).is_dir() else f"drafter {export.directory}: its folder is gone"
