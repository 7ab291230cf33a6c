"""Check that the built documentation works from disk: `python .ci/check_site.py site [--browser]`.

Every link and picture must be a file of the site. With ``--browser``, Chromium opens the home page
from disk, searches, and follows a result; axe-core looks for serious faults in one page.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parents[1]


class _Addresses(HTMLParser):
    """Collect the addresses that a page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep the targets of links, pictures, scripts and styles."""
        names = {"a": "href", "link": "href", "img": "src", "script": "src"}
        value = dict(attrs).get(names.get(tag, ""))
        if value:
            self.found.append(value)


def broken_links(site: Path) -> list[str]:
    """Return addresses inside the site that are not a file, as `page: address`."""
    broken = []
    for page in sorted(site.rglob("*.html")):
        if page.name == "404.html":  # a server's page, with addresses from its root
            continue
        addresses = _Addresses()
        addresses.feed(page.read_text())
        for address in addresses.found:
            parts = urlsplit(address)
            target = page if not parts.path else page.parent / unquote(parts.path)
            if not parts.scheme and not parts.netloc and not target.is_file():
                broken.append(f"{page.relative_to(site)}: {address}")
    return broken


def search_faults(site: Path, words: str) -> list[str]:
    """Search in the home page from disk and open the first result; return what does not work."""
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    from browser import Browser

    with tempfile.TemporaryDirectory() as folder, Browser(Path(folder)) as browser:
        browser.open(site / "index.html", width=1400)
        browser.evaluate("document.querySelector('.md-search__input').focus()")
        browser.call("Input.insertText", text=words)
        deadline, address = time.monotonic() + 30, None
        first = "document.querySelector('.md-search-result__link')?.href"
        while address is None and time.monotonic() < deadline:
            time.sleep(0.2)
            address = browser.evaluate(first)
        if address is None:
            return [f"the search for {words!r} finds nothing"]
        target = Path(unquote(urlsplit(address).path))
        if urlsplit(address).scheme != "file" or not target.is_file():
            return [f"the result {address} is not a file"]
        outside = [
            url for url in browser.requests() if not url.startswith(("file:", "data:", "blob:"))
        ]
        return [f"the page requests {url}" for url in outside]


def accessibility_faults(site: Path, page: str) -> list[str]:
    """Return the serious faults that axe-core finds in a page of the site."""
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    from axe import serious_faults
    from browser import Browser

    with tempfile.TemporaryDirectory() as folder, Browser(Path(folder)) as browser:
        browser.open(site / page, width=1400)
        return [f"{page}: {fault}" for fault in serious_faults(browser)]


def main() -> int:
    """Print what does not work; return 1 if there is anything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=Path, nargs="?", default=Path("site"))
    parser.add_argument("--browser", action="store_true", help="search in Chromium, too")
    given = parser.parse_args()
    pages = len(list(given.site.rglob("*.html")))
    faults = broken_links(given.site) if pages else [f"{given.site}: has no pages"]
    if given.browser and not faults:
        site = given.site.resolve()
        faults = search_faults(site, "privacy budget")
        faults = faults or accessibility_faults(site, "get_started.html")
    print("\n".join(faults) or f"{pages} pages of {given.site} work from disk")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
