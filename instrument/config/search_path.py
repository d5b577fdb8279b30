"""The Hydra search path: the configuration files of the package, then those of the working directory."""

from __future__ import annotations

import sys
from pathlib import Path

from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from .hydra_internals import loader_of
from .packaged import conf_folder


class WorkingDirectoryConf(SearchPathPlugin):
    """Hydra plugin that adds the folder `conf` of the working directory after the configurations of the package."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the folder, and warn about files that a different file of the package hides."""
        user_folder, packaged = Path.cwd() / "conf", conf_folder()
        if not user_folder.is_dir() or user_folder.samefile(packaged):
            return
        search_path.append("working directory", f"file://{user_folder}")
        for file in sorted(user_folder.rglob("*.yaml")):
            same = packaged / file.relative_to(user_folder)
            if same.exists() and same.read_bytes() != file.read_bytes():
                name = f"conf/{file.relative_to(user_folder)}"
                print(
                    f"warning: {name} is ignored: the package has a file of this name; choose another name",
                    file=sys.stderr,
                )


def config_loader() -> ConfigLoader:
    """Create a configuration loader with this search path, for compositions outside `hydra.main`."""
    Plugins.instance().register(WorkingDirectoryConf)
    return loader_of(conf_folder())
