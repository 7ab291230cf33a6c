"""`noisewise attacks`: what hostile clients do to each method."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from noisewise.cli.common import (
    AsJson,
    Config,
    Output,
    Set,
    Workers,
    app,
    cores,
    output_folder,
    overrides,
    say,
    words,
)


@app.command("attacks")
def attacks_command(
    config: Config,
    attackers: Annotated[
        str, typer.Option(help="Ids of the attackers, comma-separated; two for sybils.")
    ] = "client-00,client-01",
    methods: Annotated[
        str | None, typer.Option(help="Comma-separated, instead of the config's.")
    ] = None,
    attacks: Annotated[str | None, typer.Option(help="Comma-separated; default: all.")] = None,
    together: Annotated[
        bool, typer.Option("--together", help="All attackers attack at once, in every attack.")
    ] = False,
    output: Output = None,
    workers: Workers = None,
    settings: Set = None,
    as_json: AsJson = False,
) -> None:
    """Attack every method in every way and show the attackers' weight and the accuracy left.

    Noise-aware methods run twice, with and without the guard of the config's policy. Interrupted
    studies go on where they stopped.

    Example:
      noisewise attacks configs/attacks.toml --methods NoiseWise,RobustHDP --attacks zero,sign_flip
    """
    from noisewise.experiments.attack_study import (
        attack_cells,
        attack_rows,
        default_methods,
        run_cells,
    )
    from noisewise.experiments.comparison import wanted_methods
    from noisewise.experiments.config import load_config
    from noisewise.federation.results import to_json
    from noisewise.report.attacks import attack_figure, attack_text
    from noisewise.report.chart import save_figure
    from noisewise.storage import write_atomic

    wanted = load_config(config, overrides(settings))
    chosen = default_methods(wanted)
    names = words("--methods", methods)
    if names is not None:
        chosen = tuple(wanted_methods(wanted, names))
    cells = attack_cells(
        wanted,
        words("--attackers", attackers) or [],
        methods=chosen,
        attacks=words("--attacks", attacks),
        together=together,
    )
    folder = output_folder(output, config)
    number = {cell.folder_name: k + 1 for k, cell in enumerate(cells)}
    outcomes = list(
        run_cells(
            cells,
            folder,
            workers=workers or cores(),
            on_cell=lambda cell: say(
                f"{number[cell.folder_name]} of {len(cells)}: {cell.label}, {cell.attack}",
                err=True,
            ),
        )
    )
    rows = attack_rows(outcomes)
    write_atomic(folder / "attacks.json", (to_json([asdict(r) for r in rows], indent=1)).encode())
    png, *_ = save_figure(attack_figure(rows), folder / "figures", "attacks")
    if as_json:
        say(json.dumps(json.loads(to_json([asdict(row) for row in rows]))))
        return
    say(attack_text(rows))
    say(f"\nfigure: {png}")
