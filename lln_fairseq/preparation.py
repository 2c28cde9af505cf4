"""Where the data preparation is: data_prep/ beside the package in a checkout, inside it where a wheel is installed.

Nothing of this package imports data_prep but through here, and only to turn text into ids as the data was made.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from lln_fairseq.command import UserError

NAME = "lln_fairseq.data_prep"  # not "data_prep": any project may have a package of that name


def preparation(module: str) -> ModuleType:
    """A module of data_prep, imported under the name that it has in a wheel. Raises: UserError where it is missing."""
    if importlib.util.find_spec(NAME) is None:
        folder = Path(__file__).resolve().parents[1] / "data_prep"
        if not folder.is_dir():
            raise UserError(
                f"{folder} is missing: text becomes ids by the data preparation that belongs to lln_fairseq"
            )
        spec = importlib.util.spec_from_file_location(
            NAME, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        assert spec.loader is not None
        sys.modules[NAME] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[NAME])
    return importlib.import_module(f"{NAME}.{module}")
