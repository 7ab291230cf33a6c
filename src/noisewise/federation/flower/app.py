"""`write_app`: a ready Flower app in a new folder, with the noise floor of its federation."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from string import Template
from textwrap import wrap

from noisewise.aggregation.methods import Method, make_method
from noisewise.aggregation.permitted import Permitted, floor_basis, is_unguarded
from noisewise.errors import InvalidValueError
from noisewise.storage import write_atomic
from noisewise.training.models import make_model
from noisewise.training.parameters import ParameterLayout

__all__ = ["AppSettings", "write_app"]

_FILES = {
    "pyproject.toml.txt": "pyproject.toml",
    "README.md.txt": "README.md",
    "server_app.py.txt": "noisewise_app/server_app.py",
    "client_app.py.txt": "noisewise_app/client_app.py",
    "site.toml.txt": "site.toml",
    "demo.py.txt": "demo.py",
    "certificates.sh.txt": "certificates.sh",
}
_FILLED_IN = ("pyproject.toml", "site.toml")
_GITIGNORE = "demo/\nsimulated/\nauthority*/\nkeys*/\nflwr/\nruns/\nstate.db*\n*.ledger*\n*.npz\n"


@dataclass(frozen=True)
class AppSettings:
    """What the server of an app decides, and what it permits to sites.

    Args:
        method: one that weighs by noise: RobustHDP or NoiseWise.
        learning_rate: of the sites' local steps.
        model: name of the model.
        input_shape: of one record.
        classes: outputs of the model.
        permitted: the plans that the federation permits; the defaults are those of the demo.
    """

    method: str = "RobustHDP"
    learning_rate: float = 0.5
    model: str = "softmax"
    input_shape: tuple[int, ...] = (1, 8, 8)
    classes: int = 10
    permitted: Permitted = field(default_factory=Permitted)

    def settled(self) -> Method:
        """The method with the steps of a typical permitted plan, where it needs them.

        Raises:
            InvalidValueError: the method does not weigh by noise.
        """
        made = make_method(self.method).settled(list(self.permitted.plans()))
        if not is_unguarded(made.aggregator):
            raise InvalidValueError("method", self.method, "must be RobustHDP or NoiseWise")
        return made

    @property
    def size(self) -> int:
        """p, the number of the model's parameters."""
        model = make_model(self.model, self.input_shape, self.classes, seed=0)
        return ParameterLayout.of(model).size

    def floor(self) -> float:
        """F, see `Permitted.floor`."""
        return self.permitted.floor(
            self.size, self.learning_rate, normalised=self.settled().normalise
        )

    def fields(self) -> dict[str, str]:
        """What the templates of ``pyproject.toml`` and ``site.toml`` leave open."""
        method = self.settled()
        return {
            "method": self.method,
            "server_steps": f"{method.server_steps or 0.0:.1f}",
            "normalise": str(method.normalise).lower(),
            "noise_floor": f"{self.floor():g}",
            "floor_for": floor_basis(self.method, self.learning_rate, self.size),
            "permitted": "\n".join(f"#   {line}" for line in wrap(self.permitted.words(), 100)),
            "learning_rate": f"{float(self.learning_rate)!r}",
            "model": self.model,
            "input_shape": ", ".join(map(str, self.input_shape)),
            "classes": f"{self.classes}",
        }


def write_app(folder: Path, settings: AppSettings | None = None) -> tuple[Path, ...]:
    """Write the app's files; needs no Flower.

    Args:
        folder: new or empty.
        settings: of the server; by default those of the template's demo.

    Raises:
        InvalidValueError: the folder has something in it already.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidValueError("DIR", str(folder), "must be a new or empty folder")
    fields = (settings or AppSettings()).fields()
    source = resources.files("noisewise.federation.flower") / "template"
    written = []
    for name, target in _FILES.items():
        content = (source / name).read_bytes()
        if target in _FILLED_IN:
            content = Template(content.decode()).substitute(fields).encode()
        write_atomic(folder / target, content)
        written.append(folder / target)
    write_atomic(folder / "noisewise_app" / "__init__.py", b'"""The Flower app."""\n')
    write_atomic(folder / ".gitignore", _GITIGNORE.encode())
    return (*written, folder / "noisewise_app" / "__init__.py", folder / ".gitignore")
