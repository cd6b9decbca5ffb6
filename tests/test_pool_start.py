"""Who may start a pool, and how long its start may take; Ray Serve's answers are made up, no engine."""

import itertools
import logging
import socket
from types import SimpleNamespace

import pytest

from cluster import pool, pool_owner
from torchspec_lite.config import build
from torchspec_lite.errors import UserError

NO_ROOM = "1 replicas that have taken more than 30s to be scheduled"
LOADING = "1 replicas that have taken more than 30s to initialize"


@pytest.fixture
def answers(monkeypatch):
    """Has Ray Serve tell (status, message of the deployment) pairs, the last one for ever."""
    def script(*said):
        said = itertools.chain(said, itertools.repeat(said[-1]))

        def status():
            word, message = next(said)
            return SimpleNamespace(applications={"p": SimpleNamespace(
                status=word, message="", deployments={"Replica": SimpleNamespace(message=message)})})
        monkeypatch.setattr(pool.serve, "status", status)
        monkeypatch.setattr(pool.time, "sleep", lambda s: None)
    return script


def test_what_ray_serve_tells_is_told_once(answers, caplog):
    answers(("DEPLOYING", ""), ("DEPLOYING", LOADING), ("DEPLOYING", LOADING), ("RUNNING", ""))
    with caplog.at_level(logging.WARNING, "cluster.pool"):
        pool._await_running("p")
    assert [record.getMessage() for record in caplog.records] == [f"serving pool: {LOADING}"]


@pytest.mark.parametrize("limit, message, told", [
    ("ROOM_WAIT_S", NO_ROOM, "no node has room for a replica"), ("LOAD_WAIT_S", LOADING, "a replica does not answer")])
def test_a_pool_that_does_not_start_is_given_up(answers, monkeypatch, limit, message, told):
    other = {"ROOM_WAIT_S": "LOAD_WAIT_S", "LOAD_WAIT_S": "ROOM_WAIT_S"}[limit]
    monkeypatch.setattr(pool, limit, 0.0)
    monkeypatch.setattr(pool, other, 0.0 if limit == "LOAD_WAIT_S" else 1e9)
    answers(("DEPLOYING", message))
    with pytest.raises(UserError, match=told) as error:
        pool._await_running("p")
    assert message in str(error.value)


def test_a_replica_that_fails_is_named(answers):
    answers(("DEPLOYING", ""), ("DEPLOY_FAILED", "no such layer"))
    with pytest.raises(UserError, match="a replica did not start.*no such layer"):
        pool._await_running("p")


def test_a_taken_port_and_an_open_address_are_refused_before_anything_starts(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        values = {"target": {"model": "x"}, "serve": {"port": taken.getsockname()[1]}}
        with pytest.raises(UserError, match="cannot listen on 127.0.0.1"):
            pool.check(build(values, "test"))
        pool.check(build(values | {"ray": {"address": "10.0.0.1:6379"}}, "test"))
    with pytest.raises(UserError, match="serve.api_key"):
        pool.check(build({"target": {"model": "x"}, "serve": {"host": "0.0.0.0", "port": 0}}, "test"))


def test_one_process_serves_from_a_run_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(pool_owner, "WAIT_S", 0.1)
    pool_owner.take("one", str(tmp_path))
    assert pool_owner.owns("one") and not pool_owner.owns("two")
    with pytest.raises(UserError, match="another command serves from it"):
        pool_owner.take("two", str(tmp_path))  # a lock taken twice by one process is refused as another's is
    pool_owner.give_up("one")
    pool_owner.take("two", str(tmp_path))
    pool_owner.give_up("two")


def test_only_the_owner_stops_a_pool(monkeypatch):
    def touched():
        raise AssertionError("Ray Serve was asked")
    monkeypatch.setattr(pool.serve, "status", touched)
    pool.stop(build({"target": {"model": "x"}}, "test"))


def test_runs_of_one_name_in_two_folders_have_two_pools(tmp_path):
    first, second = (pool.application(build({"name": "n", "run_root": str(tmp_path / folder), "target": {"model": "x"}}, "test"))
                     for folder in ("a", "b"))
    assert first != second and first.startswith("torchspec-lite n ")
