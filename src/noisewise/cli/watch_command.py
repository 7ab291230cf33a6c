"""`noisewise watch`: show runs in a browser while they train."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from noisewise.cli.common import TRAIN, app, say

if TYPE_CHECKING:
    from noisewise.report.watch_server import WatchServer


@app.command("watch", rich_help_panel=TRAIN)
def watch_command(
    folder: Annotated[
        Path, typer.Argument(help="Folder of a run, comparison, sweep or Flower server.")
    ],
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="N", help="Port; 0 selects a free one.")
    ] = 8750,
) -> None:
    """Show runs in a browser while they train: progress, scores, who took part, time left.

    The page is served to this computer only (127.0.0.1) and updates itself. The command reads the
    folder and writes nothing. It ends with Ctrl-C; runs are not affected.

    Example:
      noisewise watch runs/demo
    """
    from noisewise.report.watch_server import watch_folder

    def announce(server: WatchServer) -> None:
        say(f"{server.address} shows {folder}; Ctrl-C ends")

    try:
        watch_folder(folder, port, announce)
    except KeyboardInterrupt:
        say("ended")
