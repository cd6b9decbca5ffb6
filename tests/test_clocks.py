"""Waits, limits and rates go by the monotonic clock: a wall clock that is set, or jumps, changes none of them.

(That a run bears such a clock is tried in tests/chaos/test_small_run.py.)
"""

import ast

from tests.test_layout import ROOT

WALL = {"time", "time_ns", "ctime", "localtime", "gmtime", "now", "utcnow", "today"}
# Each of these says when something happened, in a file, in a log or on the page.
STAMPS = {
    ("cluster/run.py", "story"),
    ("cluster/observer.py", "alarm"), ("cluster/observer.py", "snapshot"),
    ("cluster/doctor.py", "check_clock"), ("cluster/doctor.py", "doctor"),  # how far this clock is from a file server's
    ("torchspec_lite/export.py", "export"), ("torchspec_lite/logs.py", "format"),
    ("workers/server.py", "__init__"), ("workers/serving_capture.py", "_sample")}
LEDGER = "torchspec_lite/ledger.py"  # every row says when it changed last; no rule reads it


def wall_clock_calls(source: str) -> list[tuple[str, int]]:
    """(innermost function, line) of each call like `time.time()` or `datetime.now()`."""
    found = []

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WALL:
            if ast.unparse(node.func.value) in ("time", "datetime", "datetime.datetime", "date", "datetime.date"):
                found.append((function, node.lineno))
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(ast.parse(source), "")
    return found


def test_the_wall_clock_only_stamps():
    found = {(str(path.relative_to(ROOT)), function) for room in ("torchspec_lite", "workers", "cluster")
             for path in sorted((ROOT / room).rglob("*.py")) for function, _ in wall_clock_calls(path.read_text())}
    assert {place for place in found if place[0] != LEDGER} == STAMPS


def test_the_ledger_reads_no_time_that_it_wrote():
    source = (ROOT / LEDGER).read_text() + (ROOT / "torchspec_lite" / "ledger_file.py").read_text()
    read = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)
            and isinstance(node.value, str) and "SELECT" in node.value]
    assert read and not any(word in query for query in read for word in ("updated", "created", "time"))


def test_the_reader_of_clocks_sees_every_kind():
    source = "def f():\n    time.time()\nclass A:\n    def g(self):\n        datetime.now()\ntime.monotonic()\n"
    assert wall_clock_calls(source) == [("f", 2), ("g", 5)]
