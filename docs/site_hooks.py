"""The site has what pages link to outside of docs/: committed results and the Flower example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# folder of the repository -> folder of the site; pages of the site have names of their own there
SHOWN = {"reproduction": "results", "examples/flower": "example-flower"}


def on_files(files: Files, config: Any) -> Files:
    """Add Markdown and pictures of those folders."""
    for folder, place in SHOWN.items():
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".md", ".png"):
                name = f"{place}/{path.relative_to(ROOT / folder).as_posix()}"
                files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead links of the repository to the site's copies."""
    if "/" in page.file.src_uri:
        return markdown
    for folder, place in SHOWN.items():
        markdown = markdown.replace(f"](../{folder})", f"]({place}/README.md)")
        markdown = markdown.replace(f"](../{folder}/", f"]({place}/")
    return markdown
