"""Folders that are named by the clock, and what keeps two runs of one moment apart."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

BY_THE_CLOCK = "${now:"


def is_named_by_clock(part: DictConfig) -> bool:
    """Whether a folder's name, `hydra.run.dir` or `hydra.sweep.dir`, is made of the time, so that another one does as well.

    Args:
        part: `hydra.run` or `hydra.sweep`.
    """
    return BY_THE_CLOCK in str(OmegaConf.to_container(part, resolve=False)["dir"])  # type: ignore[call-overload,index]


def claim(folder: Path) -> Path:
    """Make a folder that nobody has made: of this name, or with `_2`, `_3`, ... behind it where another process has it.

    A folder that cannot be made is given as it is: whoever writes to it tells why.
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
    raise AssertionError("there is always a next number")
