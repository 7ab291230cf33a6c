"""`noisewise flower`: write a Flower app, check a site's file, show how a run ended."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from noisewise.checks import positive_number
from noisewise.cli.common import (
    SERVER,
    app,
    say,
)
from noisewise.errors import InvalidValueError

if TYPE_CHECKING:
    from noisewise.flower.new_app import AppSettings
else:
    AppSettings = Any  # typer evaluates annotations, and the import takes a second

flower_app = typer.Typer(
    help="Real federations with Flower: write an app, check a site, show how a run ended.",
    no_args_is_help=True,
)
app.add_typer(flower_app, name="flower", rich_help_panel=SERVER)


MethodName = Annotated[
    str, typer.Option(help="RobustHDP, NoiseWise, or package.module:name if it can be guarded.")
]
Rate = Annotated[
    str,
    typer.Option(
        help='Learning rate that the server requests from sites, or "auto" for a head on features '
        "of norm 1.",
        metavar="NUMBER|auto",
    ),
]
ModelName = Annotated[str, typer.Option(help="The federation's model.")]
Shape = Annotated[str, typer.Option(help="Shape of one record.", metavar="N,N,...")]
Classes = Annotated[int, typer.Option(help="Number of outputs of the model.")]
TaskName = Annotated[str, typer.Option(help="Task of the model, such as regression.")]
EpsilonMax = Annotated[float, typer.Option(help="Largest epsilon of a site.")]
DeltaMax = Annotated[float, typer.Option(help="Largest delta of a site.")]
Records = Annotated[
    str, typer.Option(help="Range of a site's number of records.", metavar="MIN:MAX")
]
Batch = Annotated[str, typer.Option(help="Range of a site's batch size.", metavar="MIN:MAX")]
Epochs = Annotated[str, typer.Option(help="Range of a site's local epochs.", metavar="MIN:MAX")]
RoundsMin = Annotated[
    int, typer.Option(help="Smallest number of rounds for which a site plans its budget.")
]
ClipNormMin = Annotated[float, typer.Option(help="Smallest clipping norm of a site.")]


def _app_settings(
    method: MethodName = "RobustHDP",
    learning_rate: Rate = "0.5",
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
    task: TaskName = "classification",
) -> AppSettings:
    """The settings of an app, from the options of `flower new` and `flower floor`."""
    from noisewise.aggregation.permitted_plans import Permitted
    from noisewise.flower.new_app import AppSettings

    permitted = Permitted(
        epsilon_max,
        delta_max,
        _range("records", records),
        _range("batch", batch),
        _range("epochs", epochs),
        rounds_min,
        clip_norm_min,
    )
    shape = _numbers("input-shape", input_shape, ",")
    return AppSettings(method, _rate(learning_rate), model, shape, classes, permitted, task)


def _with_app_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `_app_settings`; it receives the result as ``settings``."""
    options = inspect.signature(_app_settings, eval_str=True).parameters
    parameters = dict(inspect.signature(command, eval_str=True).parameters)
    del parameters["settings"]

    def run(**values: Any) -> None:
        settings = _app_settings(**{name: values.pop(name) for name in options})
        command(settings=settings, **values)

    run.__doc__ = command.__doc__
    signature = inspect.Signature([*parameters.values(), *options.values()])
    run.__signature__ = signature  # type: ignore[attr-defined]
    return run


@flower_app.command("new")
@_with_app_options
def flower_new_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
    settings: AppSettings,
) -> None:
    """Write a complete Flower app: server, client, a site's file, keys, README.

    The options set what the server requests and which plans it permits. The app's noise floor
    follows from them. The defaults are those of the app's demo.

    Example:
      noisewise flower new my-federation --epsilon-max 4 --delta-max 1e-6 --records 500:5000
        --batch 32:64 --epochs 1 --rounds-min 50
    """
    from noisewise.flower.new_app import write_app

    for path in write_app(folder, settings):
        say(f"{path}")
    say(f"Permitted for sites: {settings.permitted.words()}.")
    say(f"Noise floor: {settings.floor():g}, in {folder / 'pyproject.toml'}.")
    say(f"Read {folder / 'README.md'} next.")


@flower_app.command("floor")
@_with_app_options
def flower_floor_command(settings: AppSettings) -> None:
    """Compute the noise floor again after the settings of an app have changed.

    Example:
      noisewise flower floor --learning-rate 0.1 --epsilon-max 4 --records 500:5000 --batch 64
    """
    fields = settings.fields()
    say(f"# {settings.permitted.words()}")
    say(f"noise-floor = {fields['noise_floor']}")
    say(f'noise-floor-for = "{fields["floor_for"]}"')


def _rate(text: str) -> float | Literal["auto"]:
    if text == "auto":
        return "auto"
    try:
        return positive_number("--learning-rate", float(text))
    except ValueError:
        raise InvalidValueError("--learning-rate", text, 'must be a number > 0 or "auto"') from None


def _range(name: str, text: str) -> tuple[int, int]:
    """``"64"`` or ``"64:400"``."""
    ends = _numbers(name, text, ":")
    if len(ends) > 2:
        raise InvalidValueError(f"--{name}", text, "must be a whole number or MIN:MAX")
    return ends[0], ends[-1]


def _numbers(name: str, text: str, separator: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(separator))
    except ValueError:
        allowed = f"must be whole numbers separated by {separator!r}"
        raise InvalidValueError(f"--{name}", text, allowed) from None


@flower_app.command("check")
def flower_check_command(
    site: Annotated[Path, typer.Argument(help="A site's own file, site.toml.")],
) -> None:
    """Check a site's file, records and ledger, and show what a round costs. Nothing is charged.

    Example:
      noisewise flower check site.toml
    """
    from noisewise.site.check_site import check_site
    from noisewise.site.site_file import load_site

    loaded = load_site(site)
    if loaded.features is not None:
        say("Features that are not stored yet are computed, which can take minutes.")
    say(f"{site}\n{check_site(loaded)}")


@flower_app.command("status")
def flower_status_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder on the server.")],
) -> None:
    """Show how a run ended and what the server received. Exit code 0 only for a finished run.

    `flwr run --stream` exits with 0 even if the run failed; this command does not.

    Example:
      noisewise flower status runs/first
    """
    from noisewise.federation.results import load_run
    from noisewise.report.page import STATUS_TEXT
    from noisewise.report.server_view import server_views

    result = load_run(run)
    say(f"status: {STATUS_TEXT[result.status]}")
    for words, table in server_views([result]):
        say(f"\n{words}")
        for name, value in table.rows:
            say(textwrap.fill(f"{name}: {value}", 100, subsequent_indent="    "))
    if result.status != "finished":
        raise typer.Exit(1)
