"""Folders named by the current time, and unique names for runs that start at the same moment."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

NOW_RESOLVER = "${now:"


def contains_time(part: DictConfig) -> bool:
    """Return whether a folder name contains the current time (`${now:...}`), so that another name also serves.

    Args:
        part: Section `hydra.run` or `hydra.sweep`, with the key `dir`.
    """
    return NOW_RESOLVER in str(OmegaConf.to_container(part, resolve=False)["dir"])  # type: ignore[call-overload,index]


def create_unique_folder(folder: Path) -> Path:
    """Create a folder that does not exist yet.

    Args:
        folder: Preferred path. If it exists, `_2`, `_3`, ... is appended to its name.

    Returns:
        The created folder; `folder` itself if it cannot be created. The first write to it then raises the error.
    """
    for number in count(1):
        own = folder if number == 1 else folder.with_name(f"{folder.name}_{number}")
        try:
            own.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError:
            return folder
        return own
    raise AssertionError("unreachable: count() never ends")
