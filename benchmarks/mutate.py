"""What the tests would catch: random lines of the core are changed, one at a time, and the tests run.

    python benchmarks/mutate.py draw                     twenty mutants of today's core, into benchmarks/mutants.json
    python benchmarks/mutate.py run                      all tests on each of them
    python benchmarks/mutate.py run --first 3 -- tests/unit/layout -m "not slow"
    python benchmarks/mutate.py run --json after.json --against before.json

A mutant is the text of a line and what stands there instead, not a place: it can be run again when files have moved,
for as long as the line is still somewhere in the package, once. Each runs in a copy of the repository, until the first
test fails or time runs out. `--against` compares with an earlier run: the exit status is 1 if a mutant that was caught
then now survives. A mutant that changes nothing that can be seen survives all tests; look at each survivor.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
MUTANTS = Path(__file__).parent / "mutants.json"
PACKAGE = Path("src") / "shardwise"
CORE = (
    "layout/*.py",
    "redistribute/*.py",
    *(f"dispatch/{name}.py" for name in ("call", "key", "plan")),
    *(f"dispatch/planning/{name}.py" for name in ("first_call", "build", "lower", "realise", "trace", "choose")),
    *(f"rules/kit/{name}.py" for name in ("types", "registry", "notation", "agreement", "guards", "indices")),
    *("tensor/*.py", "local.py", "from_local.py"),
)


@dataclasses.dataclass(frozen=True)
class Mutant:
    file: str
    """Below the package, when it was drawn."""
    line: str
    """Without the blanks around it."""
    replacement: str

    def __str__(self) -> str:
        return f"{self.file}\n- {self.line}\n+ {self.replacement}"

    def find(self, package: Path) -> tuple[Path, int] | None:
        """The one place of the line: in its file, or wherever it has moved to."""
        first = package / self.file
        for files in ([first] if first.exists() else [], sorted(package.rglob("*.py"))):
            lines = [(file, n, text) for file in files for n, text in enumerate(file.read_text().splitlines())]
            found = [(file, n) for file, n, text in lines if text.strip() == self.line]
            if len(found) == 1:
                return found[0]
        return None


# --- Drawing ---

OPPOSITES = {
    **{"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"},
    **{"is not": "is", "is": "is not", "not in": "in", "in": "not in"},
    **{"and": "or", "or": "and", "+": "-", "-": "+", "*": "//", "//": "*"},
}
OPERATOR = re.compile(r"\s*(is not|not in|==|!=|<=|>=|//|is|in|and|or|<|>|\+|-|\*)\s*")

Edit = tuple[int, int, int, str]
"""In a line, counted from 1: from one column to another stands this instead."""


def edits_of(node: ast.AST, lines: Sequence[str]) -> Iterator[Edit]:
    """The ways to change what a node says, within its line. A local variable that is not set would be too easy."""
    match node:
        case ast.Compare(left=left, comparators=[right]):
            yield from _opposite(left, right, lines)
        case ast.BinOp(left=left, right=right) | ast.BoolOp(values=[left, right]):
            yield from _opposite(left, right, lines)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node.lineno, node.col_offset, operand.col_offset, ""
        case ast.Constant(value=bool(value)):
            yield node.lineno, node.col_offset, node.end_col_offset or 0, str(not value)
        case ast.Constant(value=int(value)):
            yield node.lineno, node.col_offset, node.end_col_offset or 0, str(value + 1)
        case ast.If(test=test) | ast.IfExp(test=test) if isinstance(test, (ast.Name, ast.Attribute, ast.Call)):
            yield test.lineno, test.col_offset, test.col_offset, "not "
        case ast.Expr() | ast.AugAssign() | ast.Continue() | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node.lineno, node.col_offset, node.end_col_offset or 0, "pass"


def _opposite(left: ast.expr, right: ast.expr, lines: Sequence[str]) -> Iterator[Edit]:
    if left.end_lineno == right.lineno:
        start, stop = left.end_col_offset or 0, right.col_offset
        found = OPERATOR.fullmatch(lines[right.lineno - 1][start:stop])
        if found is not None:  # there are no brackets in between
            yield right.lineno, start, stop, f" {OPPOSITES[found[1]]} "


def mutants_of(path: Path, package: Path) -> Iterator[Mutant]:
    """The ways to change one line inside a function. Columns of the tree are counted in bytes: ASCII lines only."""
    source = path.read_text()
    lines = source.splitlines()
    for node in _inside_functions(ast.parse(source)):
        if not isinstance(node, ast.If) and getattr(node, "lineno", 0) != getattr(node, "end_lineno", -1):
            continue
        for number, start, stop, text in edits_of(node, lines):
            line = lines[number - 1]
            if line.isascii():
                changed = line[:start] + text + line[stop:]
                yield Mutant(str(path.relative_to(package)), line.strip(), changed.strip())


def _inside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of all functions' bodies, without docstrings, messages of errors, types and f-strings."""
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.Lambda)):
            body = function.body if isinstance(function.body, list) else [function.body]
            for statement in body:
                yield from _told(statement)


def _told(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.FunctionDef() | ast.Lambda() | ast.ClassDef() | ast.Raise() | ast.JoinedStr() | ast.Assert():
            return
        case ast.Expr(value=ast.Constant()):
            return
        case ast.AnnAssign(value=value):
            yield from _told(value) if value is not None else ()
            return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _told(child)


def draw(package: Path, number: int, seed: int) -> list[Mutant]:
    """Some mutants of the core, each of another line that stands once in the package; all such lines are as likely."""
    seen = Counter(line.strip() for file in package.rglob("*.py") for line in file.read_text().splitlines())
    by_line: dict[str, list[Mutant]] = {}
    for file in sorted({file for pattern in CORE for file in package.glob(pattern)}):
        for mutant in mutants_of(file, package):
            if seen[mutant.line] == 1 and mutant.line != mutant.replacement:
                by_line.setdefault(mutant.line, []).append(mutant)
    chance = random.Random(seed)
    lines = chance.sample(sorted(by_line), len(by_line))
    drawn = (chance.choice(by_line[line]) for line in lines)
    return list(itertools.islice((mutant for mutant in drawn if _compiles(mutant, package)), number))


def _compiles(mutant: Mutant, package: Path) -> bool:
    found = mutant.find(package)
    try:
        return found is not None and bool(ast.parse(replaced(*found, mutant.replacement)))
    except SyntaxError:
        return False


def replaced(file: Path, number: int, text: str) -> str:
    """A file's source with the text of one line replaced; it stays as far to the right."""
    lines = file.read_text().splitlines()
    indent = len(lines[number]) - len(lines[number].lstrip())
    lines[number] = " " * indent + text
    return "\n".join([*lines, ""])


# --- Running ---


@dataclasses.dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    outcome: str
    """caught, survived, timeout (caught, too), or gone: there is no such line any more."""
    failed: tuple[str, ...] = ()
    """The tests that failed, as far as they ran."""
    seconds: float = 0.0

    @property
    def is_caught(self) -> bool:
        return self.outcome in ("caught", "timeout")


def run_tests(root: Path, arguments: Sequence[str], timeout: float) -> tuple[int | None, str]:
    """The exit status of pytest, None if it ran out of time, and what it says."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", *arguments]
    # No bytecode: a mutant of the same size, made within a second, would be taken for the original.
    env = {**os.environ, "PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=root, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            said, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the ranks that tests have started
            return None, process.communicate()[0]
    return process.returncode, said


def failed_tests(said: str) -> tuple[str, ...]:
    found = re.findall(r"^(?:FAILED|ERROR) ([^\s\[]+(?:\[.*?\](?= - |$))?)", said, re.MULTILINE)
    return tuple(dict.fromkeys(found))


def judge(mutant: Mutant, root: Path, arguments: Sequence[str], timeout: float) -> Verdict:
    """Run the tests on a mutant, and put the line back."""
    place = mutant.find(root / PACKAGE)
    if place is None:
        return Verdict(mutant, "gone")
    file, number = place
    original, began = file.read_text(), time.monotonic()
    file.write_text(replaced(file, number, mutant.replacement))
    try:
        status, said = run_tests(root, arguments, timeout)
    finally:
        file.write_text(original)
    outcome = "timeout" if status is None else "caught" if status else "survived"
    return Verdict(mutant, outcome, failed_tests(said), time.monotonic() - began)


def copy_of(root: Path, folder: Path) -> Path:
    """A copy of what git would: no caches, no environments."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in names:
        if (root / name).exists():  # or it is deleted, and git not told yet
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, folder / name)
    return folder


def run(mutants: Sequence[Mutant], arguments: Sequence[str], timeout: float | None, console: Console) -> list[Verdict]:
    with tempfile.TemporaryDirectory() as folder:
        root, began = copy_of(ROOT, Path(folder)), time.monotonic()
        status, said = run_tests(root, arguments, timeout or 3600)
        if status != 0:
            console.print(said[-4000:], markup=False)
            sys.exit("the tests must pass before anything is changed")
        seconds = time.monotonic() - began
        limit = timeout or 3 * seconds + 60
        console.print(f"unchanged: passes in {seconds:.0f} s; each mutant has {limit:.0f} s")
        return [judge(m, root, arguments, limit) for m in track(mutants, "mutants", console=console)]


# --- The report ---


def table(verdicts: Sequence[Verdict], before: dict[Mutant, Verdict]) -> Table:
    made = Table(title="Mutants", title_justify="left", show_lines=True)
    for column in ("", "mutant", "outcome", *(["before"] if before else []), "failed", "the first", "s"):
        made.add_column(column, overflow="fold")
    for number, verdict in enumerate(verdicts):
        was = before.get(verdict.mutant)
        cells = [str(number), str(verdict.mutant), verdict.outcome]
        cells += [was.outcome if was else "-"] if before else []
        cells += [str(len(verdict.failed)), *(verdict.failed[:1] or ("",)), f"{verdict.seconds:.0f}"]
        made.add_row(*map(escape, cells), style="" if verdict.is_caught else "yellow")
    return made


def read_verdicts(file: Path) -> dict[Mutant, Verdict]:
    rows = json.loads(file.read_text())
    verdicts = (Verdict(Mutant(**row.pop("mutant")), **row) for row in rows)
    return {verdict.mutant: verdict for verdict in verdicts}


def lost(verdicts: Sequence[Verdict], before: dict[Mutant, Verdict]) -> list[Verdict]:
    """The mutants that were caught before and survive now."""
    return [v for v in verdicts if v.outcome == "survived" and v.mutant in before and before[v.mutant].is_caught]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw", help="draw mutants at random")
    drawing.add_argument("--number", type=int, default=20)
    drawing.add_argument("--seed", type=int, default=0)
    running = commands.add_parser("run", help="run tests on them")
    running.add_argument("--first", type=int, help="only so many of them")
    running.add_argument("--timeout", type=float, metavar="S", help="seconds a mutant has (three times the unchanged)")
    running.add_argument("--maxfail", type=int, default=1, metavar="N", help="go on until so many tests fail (1)")
    running.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes to FILE")
    running.add_argument("--against", type=Path, metavar="FILE", help="compare with such a FILE")
    running.add_argument("tests", nargs="*", help="arguments of pytest, after --: which tests to run (all)")
    for command in (drawing, running):
        command.add_argument("--mutants", type=Path, default=MUTANTS, metavar="FILE", help="where they are kept")
    return parser.parse_args()


def main() -> None:
    options, console = arguments(), Console()
    if options.command == "draw":
        drawn = draw(ROOT / PACKAGE, options.number, options.seed)
        options.mutants.write_text(json.dumps([dataclasses.asdict(mutant) for mutant in drawn], indent=1) + "\n")
        console.print("\n\n".join(map(str, drawn)), markup=False, highlight=False)
        return
    mutants = [Mutant(**row) for row in json.loads(options.mutants.read_text())][: options.first]
    before = read_verdicts(options.against) if options.against else {}
    verdicts = run(mutants, [f"--maxfail={options.maxfail}", *options.tests], options.timeout, console)
    console.print(table(verdicts, before))
    console.print(", ".join(f"{count} {outcome}" for outcome, count in Counter(v.outcome for v in verdicts).items()))
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(verdict) for verdict in verdicts], indent=1) + "\n")
    if missed := lost(verdicts, before):
        sys.exit(f"{len(missed)} caught before and not now:\n" + "\n".join(str(v.mutant) for v in missed))


if __name__ == "__main__":
    main()
