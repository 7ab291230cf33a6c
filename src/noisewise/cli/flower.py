"""`noisewise flower`: a ready Flower app, a check of a site's own file, how a run ended."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from noisewise.cli.common import app, say
from noisewise.errors import InvalidValueError

if TYPE_CHECKING:
    from noisewise.aggregation.permitted import Permitted
    from noisewise.federation.flower.app import AppSettings

flower_app = typer.Typer(
    help="Real federations with Flower: write an app, check a site, see how a run ended.",
    no_args_is_help=True,
)
app.add_typer(flower_app, name="flower")


MethodName = Annotated[str, typer.Option(help="RobustHDP or NoiseWise.")]
Rate = Annotated[float, typer.Option(help="Learning rate that the server asks sites for.")]
ModelName = Annotated[str, typer.Option(help="The federation's model.")]
Shape = Annotated[str, typer.Option(help="Shape of one record.", metavar="N,N,...")]
Classes = Annotated[int, typer.Option(help="Outputs of the model.")]
EpsilonMax = Annotated[float, typer.Option(help="Largest epsilon of a site.")]
DeltaMax = Annotated[float, typer.Option(help="Largest delta of a site.")]
Records = Annotated[str, typer.Option(help="Records of a site.", metavar="MIN:MAX")]
Batch = Annotated[str, typer.Option(help="Batch sizes of sites.", metavar="MIN:MAX")]
Epochs = Annotated[str, typer.Option(help="Local epochs of sites.", metavar="MIN:MAX")]
RoundsMin = Annotated[int, typer.Option(help="Least rounds for which a site plans its budget.")]
ClipNormMin = Annotated[float, typer.Option(help="Least clipping norm of a site.")]


@flower_app.command("new")
def flower_new_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
    method: MethodName = "RobustHDP",
    learning_rate: Rate = 0.5,
    model: ModelName = "softmax",
    input_shape: Shape = "1,8,8",
    classes: Classes = 10,
    epsilon_max: EpsilonMax = 16.0,
    delta_max: DeltaMax = 1e-4,
    records: Records = "64:400",
    batch: Batch = "64",
    epochs: Epochs = "4",
    rounds_min: RoundsMin = 3,
    clip_norm_min: ClipNormMin = 1.0,
) -> None:
    """Write a ready Flower app: server, client, a site's file, keys, README.

    The options say what the server asks for and which plans it permits to sites. The noise floor
    of the app follows from them; the defaults are those of the app's demo.

    Example:
      noisewise flower new my-federation --epsilon-max 4 --delta-max 1e-6 --records 500:5000
        --batch 32:64 --epochs 1 --rounds-min 50
    """
    from noisewise.federation.flower.app import write_app

    settings = _settings(
        method, learning_rate, model, input_shape, classes,
        _permitted(epsilon_max, delta_max, records, batch, epochs, rounds_min, clip_norm_min),
    )  # fmt: skip
    for path in write_app(folder, settings):
        say(f"{path}")
    say(f"Permitted to sites: {settings.permitted.words()}.")
    say(f"Noise floor: {settings.floor():g}, in {folder / 'pyproject.toml'}.")
    say(f"Read {folder / 'README.md'} next.")


@flower_app.command("floor")
def flower_floor_command(
    method: MethodName = "RobustHDP",
    learning_rate: Rate = 0.5,
    model: ModelName = "softmax",
    input_shape: Shape = "1,8,8",
    classes: Classes = 10,
    epsilon_max: EpsilonMax = 16.0,
    delta_max: DeltaMax = 1e-4,
    records: Records = "64:400",
    batch: Batch = "64",
    epochs: Epochs = "4",
    rounds_min: RoundsMin = 3,
    clip_norm_min: ClipNormMin = 1.0,
) -> None:
    """Compute the noise floor of an app whose settings have changed.

    Example:
      noisewise flower floor --learning-rate 0.1 --epsilon-max 4 --records 500:5000 --batch 64
    """
    settings = _settings(
        method, learning_rate, model, input_shape, classes,
        _permitted(epsilon_max, delta_max, records, batch, epochs, rounds_min, clip_norm_min),
    )  # fmt: skip
    fields = settings.fields()
    say(f"# {settings.permitted.words()}")
    say(f"noise-floor = {fields['noise_floor']}")
    say(f'noise-floor-for = "{fields["floor_for"]}"')


def _settings(
    method: str,
    learning_rate: float,
    model: str,
    input_shape: str,
    classes: int,
    permitted: Permitted,
) -> AppSettings:
    from noisewise.federation.flower.app import AppSettings

    shape = _numbers("input-shape", input_shape, ",")
    return AppSettings(method, learning_rate, model, shape, classes, permitted)


def _permitted(
    epsilon: float,
    delta: float,
    records: str,
    batch: str,
    epochs: str,
    rounds: int,
    clip_norm: float,
) -> Permitted:
    from noisewise.aggregation.permitted import Permitted

    return Permitted(
        epsilon,
        delta,
        _range("records", records),
        _range("batch", batch),
        _range("epochs", epochs),
        rounds,
        clip_norm,
    )


def _range(name: str, text: str) -> tuple[int, int]:
    """``"64"`` or ``"64:400"``."""
    ends = _numbers(name, text, ":")
    if len(ends) > 2:
        raise InvalidValueError(f"--{name}", text, "must be a whole number or MIN:MAX")
    return ends[0], ends[-1]


def _numbers(name: str, text: str, between: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(between))
    except ValueError:
        allowed = f"must be whole numbers with {between!r} between"
        raise InvalidValueError(f"--{name}", text, allowed) from None


@flower_app.command("check")
def flower_check_command(
    site: Annotated[Path, typer.Argument(help="A site's own file, site.toml.")],
) -> None:
    """Check a site's file, records and ledger, and say what a round costs. Nothing is charged.

    Example:
      noisewise flower check site.toml
    """
    from noisewise.federation.flower.check import check_site
    from noisewise.federation.flower.site import load_site

    say(f"{site}\n{check_site(load_site(site))}")


@flower_app.command("status")
def flower_status_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The server's folder of a run.")],
) -> None:
    """Say how a server's run ended and what the server saw. Exit code 0 only for a finished run.

    `flwr run --stream` ends with 0 also where the run failed; this command does not.

    Example:
      noisewise flower status runs/first
    """
    from noisewise.federation.results import load_run
    from noisewise.report.page import STATUS_WORDS
    from noisewise.report.server_view import server_views

    result = load_run(run)
    say(f"status: {STATUS_WORDS[result.status]}")
    for words, table in server_views([result]):
        say(f"\n{words}")
        for name, value in table.rows:
            say(textwrap.fill(f"{name}: {value}", 100, subsequent_indent="    "))
    if result.status != "finished":
        raise typer.Exit(1)
