"""How to cite the paper and the software."""

from __future__ import annotations

from noisewise import __version__

__all__ = ["PAPER", "PAPER_BIBTEX", "software_bibtex"]

PAPER = (
    "Saber Malekmohammadi, Yaoliang Yu and Yang Cao: Noise-Aware Algorithm for Heterogeneous "
    "Differentially Private Federated Learning. Proceedings of the 41st International Conference "
    "on Machine Learning (ICML), 2024."
)
PAPER_BIBTEX = """@inproceedings{malekmohammadi2024noise,
  title     = {Noise-Aware Algorithm for Heterogeneous Differentially Private Federated Learning},
  author    = {Malekmohammadi, Saber and Yu, Yaoliang and Cao, Yang},
  booktitle = {Proceedings of the 41st International Conference on Machine Learning (ICML)},
  year      = {2024}
}"""


def software_bibtex() -> str:
    """Return the BibTeX entry of this version of noisewise."""
    return f"""@software{{noisewise,
  title   = {{noisewise: federated learning with a privacy budget for every client}},
  author  = {{{{The noisewise authors}}}},
  version = {{{__version__}}}
}}"""
