"""The demo's prompts: whole, varied, split once and for all, with functions whose examples are true."""

import ast
import doctest
import json
import random
import re
import runpy
from collections import Counter
from pathlib import Path

import pytest

from torchspec_lite import demo_code, demo_prompts, demo_templates

SHARES = {"maths": (0.25, 0.38), "code": (0.25, 0.38), "other": (0.30, 0.45)}


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def kind(identity: str) -> str:
    if identity.startswith(("maths-", "hand-maths-")):
        return "maths"
    if identity.startswith(("code-", "task-", "stdlib-", "topic-", "hand-code-")):
        return "code"
    return "other"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return demo_prompts.demo_files(tmp_path_factory.mktemp("cache") / "made" / "here")


def test_format_and_sizes(files):
    train, held_out = map(read, files)
    assert 3500 <= len(train) <= 4500
    assert 50 <= len(held_out) <= 70
    for row in train + held_out:
        assert set(row) == {"id", "conversations"}
        turns = row["conversations"]
        assert [turn["role"] for turn in turns] == ["user", "assistant", "user", "assistant", "user"][: len(turns)]
        assert len(turns) % 2 == 1
        assert all(turn["content"].strip() for turn in turns)
        assert sum(len(turn["content"]) for turn in turns) < 1400


def test_ids_and_texts_are_unique_across_the_split(files):
    rows = read(files[0]) + read(files[1])
    assert len({row["id"] for row in rows}) == len(rows)
    assert len({json.dumps(row["conversations"]) for row in rows}) == len(rows)


def test_mixture_of_both_parts(files):
    train, held_out = map(read, files)
    for rows, slack in ((train, 0.0), (held_out, 0.07)):
        counts = Counter(kind(row["id"]) for row in rows)
        for name, (low, high) in SHARES.items():
            assert low - slack <= counts[name] / len(rows) <= high + slack, (name, counts)


def test_hand_written_prompts_are_many_and_some_have_several_turns():
    rows = demo_prompts.hand_written()
    assert len(rows) >= 300
    assert sum(len(row["conversations"]) >= 3 for row in rows) >= 20


def test_same_files_in_another_folder(files, tmp_path):
    again = demo_prompts.demo_files(tmp_path)
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in files]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "demo-held-out.jsonl", "demo-prompts.stamp", "demo-train.jsonl",
    ]


def test_split_depends_on_the_id_alone(files):
    held_out = {row["id"] for row in read(files[1])}
    rows = demo_prompts.demo_conversations()
    random.Random(0).shuffle(rows)
    assert {row["id"] for row in rows[:2000] if demo_prompts.is_held_out(row["id"])} <= held_out
    assert {row["id"] for row in rows if demo_prompts.is_held_out(row["id"])} == held_out


def test_written_again_only_when_old_or_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_prompts, "demo_conversations", lambda: demo_prompts.hand_written()[:100])
    train, held_out = demo_prompts.demo_files(tmp_path)
    train.write_text("mine", encoding="utf-8")
    demo_prompts.demo_files(tmp_path)
    assert train.read_text(encoding="utf-8") == "mine"
    monkeypatch.setattr(demo_prompts, "_stamp", lambda: "another version")
    demo_prompts.demo_files(tmp_path)
    assert len(read(train)) + len(read(held_out)) == 100
    held_out.unlink()
    demo_prompts.demo_files(tmp_path)
    assert held_out.exists()


def test_stamp_follows_the_tables(tmp_path, monkeypatch):
    before = demo_prompts._stamp()
    (tmp_path / "hand.jsonl").write_text("{}", encoding="utf-8")
    monkeypatch.setattr(demo_prompts, "PROMPTS", tmp_path)
    assert demo_prompts._stamp() != before


def test_no_template_mark_is_left():
    prompts = [*demo_templates.maths_prompts(), *demo_templates.writing_prompts()]
    for identity, text in prompts:
        assert not re.search(r"[{}\[\]|]", text), identity
        assert not re.search(r"\b[Aa] [aeiou]|  |\$-|\b-\d", text), (identity, text)
        assert text[0].isupper() or text[0].isdigit(), identity


def test_maths_has_many_structures_and_sensible_numbers():
    table = json.loads((demo_templates.PROMPTS / "maths.json").read_text(encoding="utf-8"))
    names = [template["name"] for template in table["templates"]]
    assert len(set(names)) == len(names) >= 25
    by_name = {template["name"]: template for template in table["templates"]}
    for seed in range(200):
        rng = random.Random(seed)
        numbers = {name: demo_templates.maths_numbers(template, rng) for name, template in by_name.items()}
        assert all(value > 0 for values in numbers.values() for value in values.values() if isinstance(value, int))
        give = numbers["give-away"]
        assert (give["total"] - give["a"]) % give["b"] == 0
        save = numbers["weekly-save"]
        assert (save["cost"] - save["a"]) % save["b"] == 0
        rows = numbers["rows"]
        assert rows["a"] * rows["b"] >= rows["c"] * 3 // 2
        pizza = numbers["pizza"]
        assert pizza["b"] * pizza["c"] > pizza["a"] * pizza["d"]
        test = numbers["test-average"]
        assert 0 <= 4 * test["d"] - test["a"] - test["b"] - test["c"] <= 100
        shop = numbers["buy-change"]
        assert shop["a"] * shop["b"] + shop["c"] * shop["d"] < 100


def test_examples_of_the_functions_are_true():
    paths = sorted(demo_code.PROMPTS.glob("functions_*.py"))
    functions = 0
    for path in paths:
        functions += sum(isinstance(node, ast.FunctionDef) for node in ast.parse(path.read_text("utf-8")).body)
        runner = doctest.DocTestRunner(verbose=False)
        for name, value in runpy.run_path(str(path)).items():
            if callable(value) and not name.startswith("_"):
                test = doctest.DocTestParser().get_doctest(value.__doc__, {name: value}, name, str(path), 0)
                assert test.examples, name
                runner.run(test)
        assert runner.summarize(verbose=False).failed == 0
    assert functions >= 60


def test_functions_are_cut_after_the_docstring():
    source = (
        'class A:\n    @staticmethod\n    def f(a, b=1):\n        """Add.\n\n'
        '        >>> 1\n        """\n        return a + b\n'
    )
    (function,) = demo_code.functions_of(source)
    assert function.name == "A.f" and function.method
    assert function.head == 'def f(a, b=1):\n    """Add.\n\n    >>> 1\n    """'
    assert function.bare == "def f(a, b=1):\n    return a + b"
    assert function.signature == "f(a, b=1)"
    assert demo_code.first_paragraph(function.docstring) == "Add."


def test_code_to_complete_is_python_once_it_has_a_body():
    checked = 0
    for identity, text in demo_code.code_prompts():
        if identity.startswith(("code-complete-", "stdlib-complete-")) and "```" not in text:
            ast.parse(text.split("\n\n", 1)[1] + "\n    pass\n")
            checked += 1
    assert checked > 60
