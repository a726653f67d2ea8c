"""Adds the user's options and experiments: `conf/` of the current folder extends the groups."""

from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from resnet8ptq.config import folders


class OwnConf(SearchPathPlugin):
    """Appends the user's folder to the search path of this program; other programs keep theirs."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the user's `conf` folder if it exists; the package's options take precedence."""
        conf = folders.find_conf()
        mains = []
        for part in search_path.get_path():
            if part.provider == "main":
                mains.append(Path(part.path))

        # Hydra loads this plugin in other programs too
        if conf not in mains:
            return
        own = folders.find_own_conf(Path.cwd())
        if own is not None:
            search_path.append("own", f"file://{own}")
