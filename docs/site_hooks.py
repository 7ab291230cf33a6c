"""Add to the site what pages link to outside of docs/: results, notebooks and READMEs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "docs"))

from notebook_pages import notebook_markdown  # noqa: E402

NOTEBOOKS = "examples/notebooks"
RESULTS = "reproduction"
COPIES = {
    "src/noisewise/flower/template/README.md.txt": "flower_app.md",
    "src/noisewise/flower/site_template/README.md.txt": "flower_site.md",
}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the results and notebooks, and the READMEs of the Flower app and site."""
    for path in sorted((ROOT / RESULTS).rglob("*")):
        if path.suffix in (".md", ".svg"):
            name = f"results/{path.relative_to(ROOT / RESULTS).as_posix()}"
            files.append(File.generated(config, name, abs_src_path=str(path)))
    for path in sorted((ROOT / NOTEBOOKS).glob("*.ipynb")):
        content = notebook_markdown(json.loads(path.read_text()))
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=content))
    for source, name in COPIES.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Replace links to files of the repository by links to their copies in the site."""
    if "/" in page.file.src_uri:
        return markdown
    markdown = markdown.replace(f"](../{RESULTS})", "](results/README.md)")
    markdown = markdown.replace(f"](../{RESULTS}/", "](results/")
    for path in (ROOT / NOTEBOOKS).glob("*.ipynb"):
        address = f"](../{NOTEBOOKS}/{path.name})"
        markdown = markdown.replace(address, f"](notebooks/{path.stem}.md)")
    for source, name in COPIES.items():
        markdown = markdown.replace(f"](../{source})", f"]({name})")
    return markdown
