"""The paper's tables and figures: each is a TOML in `configs` plus a function that makes it."""

from noisewise.experiments.paper.registry import Artefact, artefact_names, load_artefact
from noisewise.experiments.paper.reproduce import Wishes, reproduce

__all__ = ["Artefact", "Wishes", "artefact_names", "load_artefact", "reproduce"]
