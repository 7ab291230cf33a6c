"""The paper's tables and figures: a TOML file in `configs` and a function for each."""

from noisewise.paper.artefacts import Artefact, artefact_names, load_artefact
from noisewise.paper.reproduce import Overrides, reproduce

__all__ = ["Artefact", "Overrides", "artefact_names", "load_artefact", "reproduce"]
