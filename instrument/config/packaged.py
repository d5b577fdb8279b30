"""The configuration files of the package."""

from __future__ import annotations

from pathlib import Path


def conf_folder() -> Path:
    """Return the folder with the configuration files of the package: inside it, or next to it in a checkout."""
    package = Path(__file__).parents[1]
    return next(folder for folder in (package / "conf", package.parent / "conf") if (folder / "config.yaml").exists())


def hook_sets() -> dict[str, Path]:
    """Return the files with the hook specs of the package, by the name in `hooks=NAME`."""
    return {file.stem: file for file in sorted((conf_folder() / "hooks").glob("*.yaml"))}
