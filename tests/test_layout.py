"""The rooms' rules: arrows go cluster → workers → torchspec_lite, the library knows no engine, files stay short."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FORBIDDEN = {
    "torchspec_lite": {"ray", "vllm", "workers", "cluster"},
    "workers": {"cluster"},
    "cluster": set(),
}
# The command line opens the other rooms when a command needs them, never by being imported.
DOORS = {"torchspec_lite/cli.py"}
FILES = sorted(path for room in FORBIDDEN for path in (ROOT / room).rglob("*.py"))
MOST_LINES = 400


def imports(source: str) -> set[str]:
    """Top-level names of every import in a file, those inside functions and import_module("…") included."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module.split(".")[0])
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            found |= {argument.value.split(".")[0] for argument in node.args[:1] if isinstance(argument, ast.Constant)}
    return found


def at_import(source: str) -> set[str]:
    """As `imports`, of what runs when the file is imported: the statements outside functions."""
    body = [node for node in ast.parse(source).body if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return imports(ast.unparse(ast.Module(body, [])))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=name)
def test_a_file_imports_only_what_its_room_may(path):
    forbidden = FORBIDDEN[path.relative_to(ROOT).parts[0]]
    if name(path) in DOORS:
        forbidden = forbidden - {"workers", "cluster"}
        assert not at_import(path.read_text()) & {"workers", "cluster"}
    assert imports(path.read_text()) & forbidden == set()


@pytest.mark.parametrize("path", FILES + sorted((ROOT / "tests").rglob("*.py")), ids=name)
def test_a_file_is_short(path):
    assert len(path.read_text().splitlines()) <= MOST_LINES


def test_the_reader_of_imports_sees_every_kind():
    source = "import ray.util\ndef f():\n    from vllm.config import X\n    importlib.import_module('cluster.run')\n"
    assert imports(source) == {"ray", "vllm", "cluster"}
    assert at_import(source) == {"ray"}
    assert len(FILES) > 20
