"""The import graph of src/shardwise: it points one way, has no cycles, and stays clear of torch's own DTensor."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

# The order in which a call passes through the library. A module may import from its own entry and from entries
# before it. A new package or top-level module gets its place here; "__init__" is src/shardwise/__init__.py.
ORDER = (
    "errors",
    "words",
    "layout",
    "placement_types",
    "device_mesh",
    "rules",
    "comm",
    "redistribute",
    "local",
    "from_local",
    "tensor",
    "dispatch",
    "factories",
    "parallel",
    "torch_hooks",
    "experimental",
    "debug",
    "terminal",
    "checkpoint",
    "graph",
    "explain",
    "sim",
    "proof",
    "cli",
    "__init__",
)

# We do this job ourselves and share no code with these.
FORBIDDEN = ("torch.distributed.tensor", "torch.distributed._shard", "torch.distributed._spmd")

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "shardwise"


@functools.cache
def ours() -> dict[str, Module]:
    return read_modules(PACKAGE)


def test_nothing_uses_the_distributed_tensors_of_torch() -> None:
    check(forbidden_uses(ours()), "torch's own distributed tensors are used")


def test_imports_follow_the_order() -> None:
    check(order_violations(ours()), "imports go against ORDER")


def test_there_are_no_import_cycles() -> None:
    check(cycles(ours()), "modules import each other in a cycle")


def check(problems: list[str], summary: str) -> None:
    __tracebackhide__ = True
    if problems:
        pytest.fail("\n  ".join([f"{summary}:", *problems]), pytrace=False)


# --------------------------------------------------------------------------------------------- reading modules


@dataclass(frozen=True)
class Import:
    """`target` is a dotted name: a module, or a name in one. `runs` is false below `if TYPE_CHECKING`."""

    target: str
    line: int
    runs: bool


@dataclass(frozen=True)
class Module:
    name: str
    file: Path
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.name if self.file.name == "__init__.py" else self.name.rpartition(".")[0]

    @property
    def entry(self) -> str:
        """The entry of ORDER that this module belongs to."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else "__init__"

    def where(self, line: int) -> str:
        file = self.file.relative_to(ROOT) if self.file.is_relative_to(ROOT) else self.file
        return f"{file}:{line}"

    def absolute(self, name: str | None, level: int) -> str:
        """The absolute form of a module name after `level` dots."""
        if level == 0:
            return name or ""
        parents = self.package.split(".")
        base = parents[: len(parents) - level + 1]
        return ".".join([*base, name] if name else base)

    @functools.cached_property
    def imports(self) -> list[Import]:
        return list(self._imports_in(self.tree, runs=True))

    def _imports_in(self, node: ast.AST, runs: bool) -> Iterator[Import]:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield Import(alias.name, node.lineno, runs)
            case ast.ImportFrom(module=name, names=names, level=level):
                for alias in names:
                    yield Import(f"{self.absolute(name, level)}.{alias.name}", node.lineno, runs)
            case ast.Call(args=[ast.Constant(value=str(name)), *_]) if _is_import_call(node):
                level = len(name) - len(name.lstrip("."))
                yield Import(self.absolute(name[level:], level), node.lineno, runs)
            case ast.If() if _is_type_checking(node.test):
                for child in node.body:
                    yield from self._imports_in(child, runs=False)
                for child in node.orelse:
                    yield from self._imports_in(child, runs)
                return
        for child in ast.iter_child_nodes(node):
            yield from self._imports_in(child, runs)


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _is_import_call(call: ast.Call) -> bool:
    return ast.unparse(call.func) in ("importlib.import_module", "import_module", "__import__")


def read_modules(package: Path) -> dict[str, Module]:
    modules = {}
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = Module(name, file, ast.parse(file.read_text(encoding="utf-8"), str(file)))
    return modules


def resolve(target: str, modules: dict[str, Module]) -> Module | None:
    """The module of ours that an import loads: `a.b.c` is module `a.b.c`, or else a name in module `a.b`.

    The parents that Python loads on the way are not counted: a package's `__init__` may import its own modules.
    """
    while target and target not in modules:
        target = target.rpartition(".")[0]
    return modules.get(target)


def edges(module: Module, modules: dict[str, Module]) -> Iterator[tuple[Module, int]]:
    """The modules of ours that `module` loads when it runs, each with the line that does it."""
    for imported in module.imports:
        target = resolve(imported.target, modules)
        if imported.runs and target is not None:
            yield target, imported.line


# -------------------------------------------------------------------------------------------------- the checks


def order_violations(modules: dict[str, Module]) -> list[str]:
    rank = {entry: place for place, entry in enumerate(ORDER)}
    unplaced = sorted({module.entry for module in modules.values()} - rank.keys())
    problems = [f"{entry!r} has no place in ORDER at the top of {Path(__file__).name}: add it" for entry in unplaced]
    for module in modules.values():
        for target, line in edges(module, modules):
            source_place, target_place = rank.get(module.entry), rank.get(target.entry)
            if source_place is not None and target_place is not None and target_place > source_place:
                problems.append(
                    f"{module.where(line)}: {module.name} -> {target.name}: "
                    f"{module.entry!r} comes before {target.entry!r} and may not import it"
                )
    return problems


def cycles(modules: dict[str, Module]) -> list[str]:
    """One line per cycle that a depth-first walk meets, with the place of each of its imports."""
    problems: list[str] = []
    finished: set[str] = set()
    path: list[tuple[Module, int]] = []  # each module, and the line in it that leads on

    def visit(module: Module) -> None:
        names = [step.name for step, _ in path]
        if module.name in names:
            loop = path[names.index(module.name) :]
            steps = [f"{step.name} ({step.where(line)})" for step, line in loop]
            problems.append(" -> ".join([*steps, module.name]))
        elif module.name not in finished:
            for target, line in edges(module, modules):
                path.append((module, line))
                visit(target)
                path.pop()
            finished.add(module.name)

    for module in modules.values():
        visit(module)
    return problems


def forbidden_uses(modules: dict[str, Module]) -> list[str]:
    """Imports of a forbidden module anywhere, and expressions such as `torch.distributed.tensor` that reach one."""
    problems = []
    for module in modules.values():
        uses = [(imported.target, imported.line) for imported in module.imports]
        uses += attribute_chains(module.tree)
        for name in FORBIDDEN:
            lines = sorted({line for used, line in uses if f"{used}.".startswith(f"{name}.")})
            problems += [f"{module.where(line)}: {module.name} -> {name}" for line in lines]
    return problems


def attribute_chains(tree: ast.Module) -> list[tuple[str, int]]:
    """`a.b.c` for every such expression, with `a` spelled out if it is an alias made by an import."""
    aliases = {}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                aliases |= {alias.asname: alias.name for alias in names if alias.asname}
            case ast.ImportFrom(module=str(name), names=names, level=0):
                aliases |= {alias.asname or alias.name: f"{name}.{alias.name}" for alias in names}
    chains = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            chains.append((f"{aliases.get(first, first)}.{rest}", node.lineno))
    return chains


# ------------------------------------------------------------------------------------------ the checks, checked


def tree_of(folder: Path, **files: str) -> dict[str, Module]:
    """Modules from source, named by path with "__" for "/": `layout__mesh="..."` is shardwise/layout/mesh.py."""
    for name, source in {"__init__": "", **files}.items():
        stem = name if name == "__init__" else name.replace("__", "/", 1)
        file = folder / "shardwise" / f"{stem}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    return read_modules(folder / "shardwise")


@pytest.mark.parametrize(
    "source",
    [
        "from shardwise.dispatch import plan",
        "from shardwise.dispatch.plan import Plan",
        "import shardwise.dispatch.plan",
        "from ..dispatch import plan",
        "from .. import dispatch\n",
        "def late():\n    from shardwise.dispatch.plan import Plan",
        "import importlib\nimportlib.import_module('shardwise.dispatch.plan')",
        "if TYPE_CHECKING:\n    pass\nelse:\n    import shardwise.dispatch.plan",
    ],
)
def test_an_import_against_the_order_is_found(source: str, tmp_path: Path) -> None:
    files = {"layout____init__": "", "layout__mesh": source, "dispatch____init__": "", "dispatch__plan": "Plan = 0"}
    modules = tree_of(tmp_path, **files)
    [problem] = order_violations(modules)
    assert "mesh.py:" in problem
    assert "shardwise.layout.mesh -> shardwise.dispatch" in problem
    assert "'layout' comes before 'dispatch' and may not import it" in problem


@pytest.mark.parametrize(
    "source",
    [
        "from shardwise.layout.mesh import Mesh",
        "from ..layout import mesh",
        "from . import key",
        "if TYPE_CHECKING:\n    from shardwise.tensor import DTensor",
        "import typing\nif typing.TYPE_CHECKING:\n    from shardwise import DTensor",
        "import torch.distributed as dist\nimport torch",
    ],
)
def test_an_import_along_the_order_is_fine(source: str, tmp_path: Path) -> None:
    files = {"layout__mesh": "Mesh = 0", "dispatch__plan": source, "dispatch__key": "", "tensor": "DTensor = 0"}
    modules = tree_of(tmp_path, **files)
    assert order_violations(modules) == []
    assert cycles(modules) == []
    assert forbidden_uses(modules) == []


def test_importing_the_public_face_from_below_is_found(tmp_path: Path) -> None:
    modules = tree_of(tmp_path, tensor="from shardwise import DTensor")
    [problem] = order_violations(modules)
    assert "shardwise.tensor -> shardwise: 'tensor' comes before '__init__'" in problem


def test_a_module_without_a_place_is_found(tmp_path: Path) -> None:
    modules = tree_of(tmp_path, drawer="")
    assert order_violations(modules) == ["'drawer' has no place in ORDER at the top of test_import_order.py: add it"]


def test_a_cycle_is_found_with_every_import_in_it(tmp_path: Path) -> None:
    modules = tree_of(
        tmp_path,
        rules__a="from shardwise.rules import b",
        rules__b="\nfrom .c import C",
        rules__c="C = 0\ndef late():\n    import shardwise.rules.a",
    )
    [problem] = cycles(modules)
    assert [part.split(" ")[0] for part in problem.split(" -> ")] == [f"shardwise.rules.{name}" for name in "abca"]
    assert [place in problem for place in ("a.py:1", "b.py:2", "c.py:3")] == [True, True, True]


def test_a_package_may_import_its_own_modules_but_they_not_it(tmp_path: Path) -> None:
    files = {"layout____init__": "from shardwise.layout.mesh import Mesh", "layout__size": ""}
    assert cycles(tree_of(tmp_path, **files, layout__mesh="from shardwise.layout import size")) == []
    [problem] = cycles(tree_of(tmp_path, **files, layout__mesh="from shardwise.layout import Mesh"))
    assert "shardwise.layout.mesh (" in problem


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed.tensor",
        "import torch.distributed.tensor as dt",
        "from torch.distributed.tensor import DTensor",
        "from torch.distributed.tensor.parallel import loss_parallel",
        "from torch.distributed import tensor",
        "from torch.distributed._shard.sharded_tensor import ShardedTensor",
        "from torch.distributed._spmd import api",
        "def late():\n    from torch.distributed.tensor import DTensor",
        "if TYPE_CHECKING:\n    from torch.distributed.tensor import DTensor",
        "import importlib\nimportlib.import_module('torch.distributed.tensor')",
        "__import__('torch.distributed.tensor')",
        "import torch\ntorch.distributed.tensor.DTensor",
        "import torch.distributed as dist\ndist.tensor.DTensor",
        "from torch import distributed\ndistributed.tensor.DTensor",
    ],
)
def test_every_way_to_torch_s_own_distributed_tensors_is_found(source: str, tmp_path: Path) -> None:
    [problem] = forbidden_uses(tree_of(tmp_path, tensor=source))
    line = source.count("\n") + 1
    assert f"tensor.py:{line}: shardwise.tensor -> torch.distributed." in problem


def test_names_that_only_look_alike_are_fine(tmp_path: Path) -> None:
    source = "import torch\nfrom torch.distributed import tensors\ntorch.distributed.tensor_model\ntorch.tensor(0)"
    assert forbidden_uses(tree_of(tmp_path, tensor=source)) == []
