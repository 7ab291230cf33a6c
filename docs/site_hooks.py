"""Add to the site what pages link to outside of docs/: results and the Flower app's README."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
RESULTS = "reproduction"
APP_README = "src/noisewise/flower/template/README.md.txt"


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and pictures of the results, and the README of the Flower app."""
    for path in sorted((ROOT / RESULTS).rglob("*")):
        if path.suffix in (".md", ".svg"):
            name = f"results/{path.relative_to(ROOT / RESULTS).as_posix()}"
            files.append(File.generated(config, name, abs_src_path=str(path)))
    files.append(File.generated(config, "flower_app.md", abs_src_path=str(ROOT / APP_README)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Replace links to files of the repository by links to their copies in the site."""
    if "/" in page.file.src_uri:
        return markdown
    markdown = markdown.replace(f"](../{RESULTS})", "](results/README.md)")
    markdown = markdown.replace(f"](../{RESULTS}/", "](results/")
    return markdown.replace(f"](../{APP_README})", "](flower_app.md)")
