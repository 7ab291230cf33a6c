"""`write_app`: write a Flower app into a new folder, with the noise floor of its federation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from string import Template
from textwrap import wrap
from typing import Literal

from noisewise.aggregation.auto_steps import AUTO, auto_local_rate
from noisewise.aggregation.guard import as_guardable
from noisewise.aggregation.methods import Method, make_method
from noisewise.aggregation.permitted_plans import Permitted, floor_basis
from noisewise.errors import InvalidValueError
from noisewise.storage import write_atomic
from noisewise.training.models import make_model
from noisewise.training.parameters import ParameterLayout
from noisewise.training.tasks import make_task

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
    """What the server of an app decides, and which plans it permits.

    Args:
        method: one that can be guarded: RobustHDP, NoiseWise or your own ``"package.module:name"``.
        learning_rate: of the sites' local steps, or "auto"; see `NoiseAware`.
        model: name of the model.
        input_shape: of one record.
        classes: number of outputs of the model.
        task: name of a task; its loss and metrics are the sites' and the server's.
        permitted: the plans that the federation permits; by default those of the demo.
    """

    method: str = "RobustHDP"
    learning_rate: float | Literal["auto"] = 0.5
    model: str = "softmax"
    input_shape: tuple[int, ...] = (1, 8, 8)
    classes: int = 10
    permitted: Permitted = field(default_factory=Permitted)
    task: str = "classification"

    def __post_init__(self) -> None:
        make_task(self.task)

    def made_method(self) -> Method:
        """The method; if it needs a number of server steps, that of a typical permitted plan.

        Raises:
            InvalidValueError: the method cannot be guarded.
        """
        plans = list(self.permitted.plans())
        method = make_method(self.method).with_server_steps(plans)
        as_guardable(method.aggregator, self.method)
        if self.learning_rate == AUTO and method.server_steps is None:
            method = replace(method, server_steps=1.0 / auto_local_rate(plans))
        return method

    @property
    def local_rate(self) -> float:
        """The learning rate that the server requests from sites."""
        if self.learning_rate == AUTO:
            return 1.0 / (self.made_method().server_steps or 1.0)
        return float(self.learning_rate)

    @property
    def size(self) -> int:
        """p, the number of the model's parameters."""
        model = make_model(self.model, self.input_shape, self.classes, seed=0)
        return ParameterLayout.of(model).size

    def floor(self) -> float:
        """F, the least noise energy of an honest update; see `Permitted.floor`."""
        return self.permitted.floor(
            self.size, self.local_rate, normalised=self.made_method().normalise
        )

    def fields(self) -> dict[str, str]:
        """The values of the fields in the templates of ``pyproject.toml`` and ``site.toml``."""
        method = self.made_method()
        return {
            "method": self.method,
            "server_steps": f"{method.server_steps or 0.0:.1f}",
            "normalise": str(method.normalise).lower(),
            "noise_floor": f"{self.floor():g}",
            "floor_for": floor_basis(self.method, self.local_rate, self.size),
            "permitted": "\n".join(f"#   {line}" for line in wrap(self.permitted.words(), 100)),
            "learning_rate": f'"{AUTO}"' if self.learning_rate == AUTO else f"{self.local_rate!r}",
            "model": self.model,
            "input_shape": ", ".join(map(str, self.input_shape)),
            "classes": f"{self.classes}",
            "task": self.task,
        }


def write_app(folder: Path, settings: AppSettings | None = None) -> tuple[Path, ...]:
    """Write the files of an app. Flower is not needed.

    Args:
        folder: new or empty.
        settings: of the server; by default those of the demo.

    Returns:
        The files.

    Raises:
        InvalidValueError: the folder is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidValueError("DIR", str(folder), "must be a new or empty folder")
    fields = (settings or AppSettings()).fields()
    source = resources.files("noisewise.flower") / "template"
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
