"""The configuration is strict, says what is wrong and where, and keeps secrets to itself."""

import pytest
import yaml
from pydantic import ValidationError

from torchspec_lite import config
from torchspec_lite.errors import UserError


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "run.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path
    return write


def refusal(call):
    with pytest.raises(UserError) as caught:
        call()
    return str(caught.value)


def test_file_and_overrides_make_a_config(write):
    path = write("target: {model: smollm2}\ntrainer: {ranks: 2, betas: [0.8, 0.9]}\nserve:\n")
    loaded = config.load(path, ["trainer.ranks=3", "serve.port=0", "name=fresh", "capture.layer_ids=[1, 2]",
                                "drafter.draft_vocab_size=null", "serve.api_key=env:KEY"])
    assert (loaded.target.model, loaded.trainer.ranks, loaded.trainer.betas) == ("smollm2", 3, (0.8, 0.9))
    assert (loaded.serve.port, loaded.name, loaded.capture.layer_ids) == (0, "fresh", [1, 2])
    assert loaded.drafter.draft_vocab_size is None and loaded.serve.api_key == "env:KEY"
    assert loaded.run_dir.is_absolute() and loaded.run_dir.parts[-2:] == ("runs", "fresh")


@pytest.mark.parametrize("text, overrides, words", [
    ("target: {model: a}\ntrainer: {learning_rat: 1}", [], ["key trainer.learning_rat;", "trainer.learning_rate?"]),
    ("target: {model: a}\ntraner: {}", [], ["unknown key traner", "trainer?"]),
    ("target: {model: a}\nbatch_tokens: 5", [], ["unknown key batch_tokens", "trainer.batch_tokens?"]),
    ("target: {model: a}", ["serve.prt=1"], ["unknown key serve.prt", "serve.port?"]),
    ("target: {model: a}\n3: 4", [], ["3"]),
    ("trainer: {ranks: 1}", [], ["target: this key is needed"]),
    ("target:\ntrainer: {ranks: 1}", [], ["target.model: this key is needed"]),
    ("target: {model: a}\ntrainer: {ranks: many}", [], ["trainer.ranks", "integer", "'many'"]),
    ("target: {model: a}\ntrainer: {ranks: 0}", [], ["trainer.ranks", "greater than or equal to 1"]),
    ("target: {model: a, dtype: int4}", [], ["target.dtype", "bfloat16"]),
    ("target: {model: a}\ntrainer: {ranks: 0, ttt_steps: 99}", [], ["trainer.ranks", "trainer.ttt_steps"]),
    ("target: {model: a}\ntrainer: {batch_tokens: 64, micro_batch_tokens: 128}", [], ["must not exceed batch_tokens"]),
    ("target: {model: a}\nname: ../elsewhere", [], ["name", "pattern"]),
    ("target: {model: a}\ntrainer: 5", [], ["trainer"]),
    ("target: {model: a}", ["trainer.ranks.deep=1"], ["trainer.ranks", "int"]),
    ("target: {model: a}\ntrainer: {ranks: 1}", ["trainer.ranks.deep=1"], ["ranks is a value, not a section"]),
    ("target: {model: a}", ["trainer.ranks"], ["'trainer.ranks'", "dotted.key=value"]),
    ("target: {model: a}", ["trainer.ranks=[1"], ["not valid YAML"]),
    ("target: {model: a}", ["name=2024-99-99"], ["not valid YAML"]),
    ("- a list", [], ["expected keys and values at the top, found list"]),
    ("just text", [], ["found str"]),
    ("target: {model: [unclosed", [], ["not valid YAML"]),
    ("when: 2024-99-99", [], ["not valid YAML"]),
    ("a: " + "[" * 3000, [], ["not valid YAML"]),
    (b"target: {model: \xff\xfe}", [], ["not UTF-8"]),
    ("", [], ["target: this key is needed"]),
])
def test_faults_name_the_file_and_the_key(write, text, overrides, words):
    path = write(text)
    said = refusal(lambda: config.load(path, overrides))
    assert all(word in said for word in words), said
    assert "run.yaml" in said or "override" in said
    assert len(said) < 1000


def test_a_missing_file_is_named(tmp_path):
    assert "nothing.yaml: No such file" in refusal(lambda: config.load(tmp_path / "nothing.yaml"))
    assert "Is a directory" in refusal(lambda: config.load(tmp_path))


def test_assignment_is_checked_and_a_refused_one_changes_nothing():
    built = config.build({"target": {"model": "a"}}, "here")
    with pytest.raises(ValidationError):
        built.trainer.ranks = "many"
    with pytest.raises(ValidationError):
        built.trainer.rank = 2
    with pytest.raises(ValidationError):
        built.trainer.micro_batch_tokens = 1_000_000
    assert (built.trainer.ranks, built.trainer.micro_batch_tokens) == (1, None)
    built.trainer.ranks = 2
    assert built.trainer.ranks == 2


def test_two_configs_share_no_section():
    one, two = (config.build({"target": {"model": "a"}}, "here") for _ in range(2))
    one.trainer.ranks = 5
    one.data.train.append("x")
    assert two.trainer.ranks == 1 and two.data.train == []
    assert config.build({"target": {"model": "a"}}, "here").data.train == []


def test_what_is_saved_loads_as_the_same_config(tmp_path):
    built = config.build({"target": {"model": "a"}, "trainer": {"betas": [0.5, 0.6], "max_minutes": 2.5},
                          "serve": {"api_key": "env:MY_KEY"}, "run_root": str(tmp_path)}, "here")
    config.save(built, tmp_path / "config.yaml")
    assert config.load(tmp_path / "config.yaml") == built


def test_what_is_saved_leads_to_the_same_files_from_anywhere(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("demo", "mine.jsonl", "target"):
        (tmp_path / "here" / name).mkdir()
    built = config.build({"target": {"model": "target"}, "data": {"train": ["demo", "mine.jsonl"], "held_out": ["org/hub"]}}, "here")
    config.save(built, tmp_path / "config.yaml")
    monkeypatch.chdir(tmp_path / "there")
    loaded = config.load(tmp_path / "config.yaml")
    assert loaded.run_dir == tmp_path / "here" / "runs" / "run" and loaded.target.model == str(tmp_path / "here" / "target")
    assert loaded.data.train == ["demo", str(tmp_path / "here" / "mine.jsonl")] and loaded.data.held_out == ["org/hub"]


def test_secrets_are_not_saved_and_not_shown(tmp_path):
    built = config.build({"target": {"model": "a"}, "serve": {"api_key": "hush-1"}, "dashboard": {"token": "hush-2"}},
                         "here")
    config.save(built, tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    assert "hush" not in text
    saved = yaml.safe_load(text)
    assert saved["serve"]["api_key"] == "env:TORCHSPEC_LITE_API_KEY"
    assert saved["dashboard"]["token"] == "env:TORCHSPEC_LITE_TOKEN"
    assert built.serve.api_key == "hush-1"
    said = refusal(lambda: config.build({"target": {"model": "a"}, "serve": {"api_key": 77123}}, "here"))
    assert "serve.api_key" in said and "77123" not in said
    said = refusal(lambda: config.build({"target": {"model": "a"}, "serve": {"api_key": "hush", "prot": 1}}, "here"))
    assert "hush" not in said


def test_secrets_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("MY_KEY", "open sesame")
    monkeypatch.delenv("NO_KEY", raising=False)
    assert config.resolve_secret("env:MY_KEY", "serve.api_key") == "open sesame"
    assert config.resolve_secret("plain", "serve.api_key") == "plain"
    assert config.resolve_secret(None, "serve.api_key") is None
    said = refusal(lambda: config.resolve_secret("env:NO_KEY", "serve.api_key"))
    assert "serve.api_key" in said and "NO_KEY" in said


def test_every_key_is_known_and_explained():
    keys = config.known_keys()
    assert {"target.model", "trainer.reuse", "serve.port", "trainer"} <= set(keys)
    assert len(keys) == len(set(keys))


def test_engines_of_others_give_no_second_answers():
    said = refusal(lambda: config.build({"target": {"model": "a"}, "serve": {"external": ["http://127.0.0.1:8000"]},
                                         "traffic": {"second_answers": 1}}, "here"))
    assert "traffic.second_answers" in said and "set 0" in said


def test_second_answers_leave_a_place_for_users():
    target = {"target": {"model": "a"}, "serve": {"max_num_seqs": 8}}
    said = refusal(lambda: config.build(target | {"traffic": {"second_answers": 1, "second_answers_below": 8}}, "here"))
    assert "traffic.second_answers_below" in said and "serve.max_num_seqs" in said
    assert config.build(target | {"traffic": {"second_answers": 1, "second_answers_below": 7}}, "here")
