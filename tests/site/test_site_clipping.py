"""A site chooses its clipping rule itself; plan and accounting do not depend on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from site_cases import make_site

from noisewise.errors import NoisewiseError
from noisewise.site.site_file import load_site


def test_the_rule_of_the_file_is_the_rule_of_the_plan(tmp_path: Path) -> None:
    file = make_site(tmp_path / "site", records=60)
    plain = load_site(file).plan
    file.write_text(file.read_text().replace("[training]", '[training]\nclip = "normalise"'))
    plan = load_site(file).plan
    assert plan.clip_rule == "normalise"
    assert replace(plan, clip_rule="norm") == plain  # the same q, z, steps and budget


def test_another_rule_is_refused(tmp_path: Path) -> None:
    file = make_site(tmp_path / "site", records=60)
    file.write_text(file.read_text().replace("[training]", '[training]\nclip = "none"'))
    with pytest.raises(NoisewiseError, match="clip"):
        load_site(file)
