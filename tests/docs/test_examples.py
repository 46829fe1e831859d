"""Every example that a reader may copy is run: `python` blocks in Markdown, and `>>>` in docstrings."""

from __future__ import annotations

import doctest
import importlib
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from shardwise.rules.kit import registry

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
# On the line before a block: the reader needs something that a test machine has not, such as eight GPUs.
NO_TEST = "<!-- no-test -->"


def markdown_files() -> list[Path]:
    readme = ROOT / "README.md"
    return [file for file in (readme, *sorted((ROOT / "docs").glob("*.md"))) if file.exists()]


def module_names() -> list[str]:
    files = sorted((SOURCE / "shardwise").rglob("*.py"))
    parts = [file.relative_to(SOURCE).with_suffix("").parts for file in files if file.stem != "__main__"]
    return [".".join(part[:-1] if part[-1] == "__init__" else part) for part in parts]


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Examples may write files, and register rules and kernels."""
    monkeypatch.chdir(tmp_path)
    with registry.restored():
        yield


@pytest.mark.parametrize("file", markdown_files(), ids=lambda file: str(file.relative_to(ROOT)))
def test_markdown(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_blocks(file, monkeypatch)


@pytest.mark.parametrize("name", module_names())
def test_docstrings(name: str) -> None:
    if "triton" in name:
        pytest.importorskip("triton", reason="needs Triton")
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    output: list[str] = []
    for example in doctest.DocTestFinder(exclude_empty=True).find(module, name):
        runner.run(example, out=output.append)
    if runner.summarize(verbose=False).failed:
        pytest.fail("".join(output), pytrace=False)


# ------------------------------------------------------------------------------------------------- the blocks


@dataclass(frozen=True)
class Block:
    line: int  # of the first line of code, from 1
    code: str


def python_blocks(text: str) -> list[Block]:
    """The blocks fenced by ```python that are not marked with NO_TEST on the line before."""
    blocks: list[Block] = []
    fence, language, marked, code, before = "", "", False, [], ""
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if not fence and stripped.startswith("```"):
            info = stripped.lstrip("`")
            fence, language, marked, code = stripped[: len(stripped) - len(info)], info.strip(), before == NO_TEST, []
        elif fence and stripped == fence:
            if language.split(maxsplit=1)[:1] in (["python"], ["py"]) and not marked:
                blocks.append(Block(number - len(code), textwrap.dedent("\n".join(code))))
            fence = ""
        elif fence:
            code.append(line)
        before = stripped or before
    if fence:
        raise ValueError(f"the {fence}{language} block at the end is not closed")
    return blocks


def run_blocks(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the blocks of one file in order, in one namespace; a traceback shows the file's own lines."""
    module = ModuleType(f"example_{file.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses and pickle look there
    for block in python_blocks(file.read_text(encoding="utf-8")):
        padding = "\n" * (block.line - 1)
        exec(compile(padding + block.code, str(file), "exec"), module.__dict__)


# ----------------------------------------------------------------------------------------- the tests, tested


EXAMPLE = """\
Text, then code:

```python
x = 20
```

1. In a list, and it goes on where the first left off:

   ```python
   y = x + 1
   if y > 20:
       y *= 2
   ```

<!-- no-test -->

```python
raise RuntimeError("eight GPUs")
```

```sh
make test
```

````markdown
```python
raise RuntimeError("only shown")
```
````

```
raise RuntimeError("no language")
```
"""


def test_blocks_are_found_with_their_lines() -> None:
    assert python_blocks(EXAMPLE) == [Block(4, "x = 20"), Block(10, "y = x + 1\nif y > 20:\n    y *= 2")]


def test_blocks_share_a_namespace_and_fail_at_their_own_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "page.md"
    file.write_text(EXAMPLE + "\n```python\nassert y == 42\nassert y == 43\n```\n")
    with pytest.raises(AssertionError) as caught:
        run_blocks(file, monkeypatch)
    last = caught.traceback[-1]
    assert Path(last.path) == file
    assert file.read_text().splitlines()[last.lineno] == "assert y == 43"


def test_a_block_that_is_not_closed_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"^the ```python block at the end is not closed$"):
        python_blocks("```python\nx = 1\n")
