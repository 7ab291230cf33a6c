"""The trusted core: a site runs no transport code, and docs/trusted_core.md lists what it runs.

``python tests/site/test_trusted_core.py`` brings the list and the numbers of the page up to date.
"""

from __future__ import annotations

import ast
import io
import re
import shutil
import subprocess
import sys
import tokenize
from functools import cache
from pathlib import Path

import pytest

from noisewise.site import core_files as core
from noisewise.site.core_files import PACKAGE, core_hash, import_closure, imported_modules

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "trusted_core.md"
TRANSPORT = {
    "flwr", "grpc", "ray", "socket", "socketserver", "asyncio", "ssl", "http", "urllib", "requests",
    "xmlrpc", "ftplib", "smtplib", "matplotlib", "jinja2", "typer", "click", "rich",
}  # fmt: skip
ROW = re.compile(r"^\| `([\w/]+\.py)` \| (\d+) \| (.+) \|$", flags=re.MULTILINE)
TOTAL = re.compile(r"(\d+) files with ([\d,]+) lines of code")


@cache
def code_lines(path: Path) -> int:
    """Lines without docstrings, comments and blanks."""
    text = path.read_text()
    lines: set[int] = set()
    quiet = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in quiet and token.type != tokenize.ENDMARKER:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


CORE = set(core.core_files())
ADAPTER = import_closure([PACKAGE / "flower" / "client.py"]) - CORE


def name(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def transport_of(path: Path) -> set[str]:
    return {module.split(".")[0] for module in imported_modules(path)} & TRANSPORT


def test_nothing_that_a_site_trusts_imports_a_transport_library() -> None:
    folders = [file for folder in ("site", "privacy", "training")
               for file in PACKAGE.joinpath(folder).rglob("*.py")]  # fmt: skip
    files = import_closure(folders)
    assert files >= CORE
    found = {name(path): transport_of(path) for path in files if transport_of(path)}
    assert found == {"site/vault_socket.py": {"socket"}}
    assert {name(path).split("/")[0] for path in CORE if "/" in name(path)} == {
        "data", "privacy", "site", "training",
    }  # fmt: skip


def socket_uses(path: Path) -> tuple[set[str], set[str]]:
    """The names that a file imports from ``socket``, and the arguments of its sockets."""
    names: set[str] = set()
    arguments: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {f"import {one.name}" for one in node.names if one.name.startswith("socket")}
        if isinstance(node, ast.ImportFrom) and node.module == "socket":
            names |= {alias.asname or alias.name for alias in node.names}
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "socket":
            arguments.add(", ".join(map(ast.unparse, [*node.args, *node.keywords])))
    return names, arguments


UNIX_ONLY = ({"AF_UNIX", "SHUT_RD", "SO_PEERCRED", "SOCK_STREAM", "SOL_SOCKET", "socket"},
             {"AF_UNIX, SOCK_STREAM"})  # fmt: skip


def test_the_only_sockets_of_a_site_are_unix_sockets(tmp_path: Path) -> None:
    file = PACKAGE / "site" / "vault_socket.py"
    assert socket_uses(file) == UNIX_ONLY
    faults = {
        "another family": file.read_text().replace("socket(AF_UNIX,", "socket(2,", 1),
        "the default family": file.read_text() + "\n\nx = socket()\n",
        "another name": file.read_text().replace("AF_UNIX,", "AF_INET, AF_UNIX,", 1),
        "the whole module": file.read_text() + "\n\nimport socket\n",
        "a helper": file.read_text() + "\n\nfrom socket import create_connection\n",
    }
    for fault, text in faults.items():
        planted = tmp_path / "planted.py"
        planted.write_text(text)
        assert socket_uses(planted) != UNIX_ONLY, fault


@pytest.mark.parametrize(
    "line",
    [
        "import socket",
        "from flwr.app import Message",
        "def f():\n    import http.client",
        "if x:\n    from urllib import request",
        "try:\n    import ray\nexcept ImportError:\n    pass",
    ],
)
def test_a_planted_import_is_seen(line: str, tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text(f"x = 1\n{line}\n")
    assert transport_of(planted)


def test_the_closure_is_what_python_imports() -> None:
    """In a new process: what is imported when every module of the core is imported."""
    files = [path.relative_to(PACKAGE.parent).with_suffix("") for path in sorted(CORE)]
    modules = [".".join(file.parts).removesuffix(".__init__") for file in files]
    program = (
        f"import importlib, sys\nfor module in {modules!r}: importlib.import_module(module)\n"
        "print(*(m.__file__ for n, m in sys.modules.items() if n.startswith('noisewise')))\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ours, everything = done.stdout.splitlines()
    assert {Path(file) for file in ours.split()} == CORE
    assert not {"flwr", "grpc", "ray", "matplotlib", "jinja2", "typer"} & set(everything.split())


def test_the_hash_covers_every_byte_and_name_of_the_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy has the same hash. A changed, added or renamed file changes it; other files do not."""
    copy = tmp_path / "noisewise"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    original = core_hash()
    monkeypatch.setattr(core, "PACKAGE", copy)
    (copy / "report" / "html.py").write_text("changed = 1\n")
    assert core_hash() == original
    (copy / "site" / "new_file.py").write_text("")
    added = core_hash()
    (copy / "site" / "new_file.py").rename(copy / "site" / "other_file.py")
    assert len({original, added, core_hash()}) == 3
    files = tuple(sorted(copy / name(file) for file in CORE))
    monkeypatch.setattr(core, "core_files", lambda: files)  # parsing them all takes a second
    for file in files:
        content = file.read_bytes()
        file.write_bytes(content + b"\n")
        assert core_hash() != original, file
        file.write_bytes(content)
    assert core_hash() == original


def sections(page: str) -> tuple[str, str]:
    """The part of the page about the core, and that about the adapter."""
    core, adapter = page.split("## The adapter\n")
    return core, adapter.split("\n## ")[0]


def check_page(page: str) -> None:
    for part, files in zip(sections(page), (CORE, ADAPTER), strict=True):
        rows = ROW.findall(part)
        assert sorted(file for file, _, _ in rows) == sorted(map(name, files))
        for file, lines, words in rows:
            actual = code_lines(PACKAGE / file)
            assert abs(int(lines) - actual) <= max(10, 0.25 * actual), f"{file}: {actual} lines"
            assert len(words) > 10
        total = TOTAL.search(part)
        assert total is not None
        assert int(total[1]) == len(files)
        actual = sum(map(code_lines, files))
        stated = int(total[2].replace(",", ""))
        assert abs(stated - actual) <= 0.05 * actual, f"{stated} lines stated, {actual} counted"


def test_the_page_lists_every_file_and_its_size(capsys: pytest.CaptureFixture[str]) -> None:
    page = PAGE.read_text()
    check_page(page)
    with capsys.disabled():
        print(f"\ntrusted core: {len(CORE)} files, {sum(map(code_lines, CORE))} lines of code")


def test_the_check_of_the_page_sees_faults() -> None:
    page = PAGE.read_text()
    row = next(line for line in page.splitlines() if line.startswith("| `site/interface.py`"))
    total = TOTAL.search(page)
    assert total is not None
    faults = {
        "missing file": page.replace(f"{row}\n", ""),
        "extra file": page.replace(row, f"{row}\n{row.replace('interface', 'other')}"),
        "listed twice": page.replace(row, f"{row}\n{row}"),
        "total": page.replace(total[0], f"{total[1]} files with 4,000 lines of code"),
        "number of files": page.replace(total[0], f"7 files with {total[2]} lines of code"),
    }
    for fault, changed in faults.items():
        assert changed != page, fault
        with pytest.raises(AssertionError):
            check_page(changed)


def test_lines_of_code_leave_out_docstrings_comments_and_blanks(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text('"""Words\n\nand words."""\n\n# why\nx = """a\nb"""  # two lines\n"""x."""\n')
    assert code_lines(file) == 2


def updated_part(part: str, files: set[Path]) -> str:
    """One part of the page with today's files and numbers."""
    lines: list[str] = []
    folders: dict[str, int] = {}  # line after the last file of a folder
    for line in part.splitlines():
        row = ROW.match(line)
        if row is None:
            lines.append(line)
        elif PACKAGE / row[1] in files:
            lines.append(f"| `{row[1]}` | {code_lines(PACKAGE / row[1])} | {row[3]} |")
            if not row[1].endswith("__init__.py"):
                folders[row[1].rpartition("/")[0]] = len(lines)
    listed = {file for file, _, _ in ROW.findall(part)}
    for file in sorted({name(path) for path in files} - listed, reverse=True):
        words = (ast.get_docstring(ast.parse((PACKAGE / file).read_text())) or "").splitlines()[0]
        row_line = f"| `{file}` | {code_lines(PACKAGE / file)} | {words} |"
        lines.insert(folders.get(file.rpartition("/")[0], len(lines)), row_line)
    size = f"{len(files)} files with {sum(map(code_lines, files)):,} lines of code"
    return TOTAL.sub(size, "\n".join(lines) + "\n")


def updated(page: str) -> str:
    """The page with today's files and numbers; a new file gets its docstring's first line."""
    core, adapter = sections(page)
    rest = page[len(core) + len("## The adapter\n") + len(adapter) :]
    return f"{updated_part(core, CORE)}## The adapter\n{updated_part(adapter, ADAPTER)}{rest}"


def test_updating_the_page_lists_a_new_file() -> None:
    page = PAGE.read_text()
    row = next(line for line in page.splitlines() if line.startswith("| `site/interface.py`"))
    check_page(updated(page.replace(f"{row}\n", "")))


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
