"""The names of `import noisewise`, the docstring examples, and the map from paper to code."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import noisewise

ROOT = Path(__file__).parents[2]
MODULES = sorted(module.name for module in pkgutil.walk_packages(noisewise.__path__, "noisewise."))


@pytest.mark.parametrize("name", noisewise.__all__)
def test_public_names_exist_and_have_a_docstring_with_an_example(name: str) -> None:
    public = getattr(noisewise, name)
    assert name in dir(noisewise)
    assert name == "__version__" or re.search(r"^ *Examples?:$", public.__doc__, flags=re.M)


def test_the_lazy_table_is_the_public_list() -> None:
    assert set(noisewise._HOMES) == set(noisewise.__all__) - {"__version__"}
    with pytest.raises(AttributeError, match="nonsense"):
        _ = noisewise.nonsense


def test_import_is_cheap() -> None:
    """Neither the package nor its command line loads torch before it is needed."""
    code = "import sys, noisewise, noisewise.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=600).returncode == 0


def with_marker(name: str) -> Any:
    """The modules of Flower's transport import it, so they need requirements-extras.lock."""
    marks = [pytest.mark.extras] if name.startswith("noisewise.flower.") else []
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", map(with_marker, MODULES))
def test_docstring_examples(name: str) -> None:
    module = importlib.import_module(name)
    outcome = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert outcome.failed == 0


PAPER_MAP = (ROOT / "docs" / "paper_map.md").read_text()
ENTRIES = re.findall(r"`(noisewise(?:\.\w+)+):([\w.]+)`", PAPER_MAP)


def test_the_paper_map_has_entries() -> None:
    assert len(ENTRIES) >= 15


@pytest.mark.parametrize(("module", "name"), ENTRIES)
def test_every_entry_of_the_paper_map_exists(module: str, name: str) -> None:
    found: object = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    assert found is not None
