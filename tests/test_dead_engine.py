"""A replica whose engine died, in the seconds before Ray Serve replaces it."""

import asyncio
from types import SimpleNamespace

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from cluster.pool import ReplicaDeployment


def asked(error: Exception, name="a"):
    """What the replica "a" answers when its method fails with this error."""
    async def shadow():
        raise error

    deployment = SimpleNamespace(replica=SimpleNamespace(name="a", shadow=shadow))
    return asyncio.run(ReplicaDeployment.func_or_class.on_replica(deployment, name, "shadow", []))


def test_it_has_no_say_so_that_the_rollout_waits_for_its_successor():
    assert asked(EngineDeadError()) is None
    assert asked(EngineDeadError(), name=None) is None


def test_any_other_error_is_told():
    with pytest.raises(ValueError, match="a fault"):
        asked(ValueError("a fault"))
