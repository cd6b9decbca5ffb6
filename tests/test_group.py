"""A group of ranks: no sum waits for ever, whatever carries the gradients."""

import datetime

import pytest
import torch.distributed as dist

from workers.group import GROUP_TIMEOUT_S, Group

LIMIT = datetime.timedelta(seconds=GROUP_TIMEOUT_S)


@pytest.mark.parametrize("backend, decisions", [("nccl", "beside"), ("gloo", dist.group.WORLD)])
def test_every_collective_has_a_limit(monkeypatch, backend, decisions):
    made = []
    monkeypatch.setattr(dist, "init_process_group", lambda *name, **options: made.append((*name, options["timeout"])))
    monkeypatch.setattr(dist, "new_group", lambda **options: made.append((options["backend"], options["timeout"])) or "beside")
    group = Group(0, 2, backend, None)
    assert group.decisions == decisions
    assert made == [(backend, LIMIT), ("gloo", LIMIT)][:1 + (backend == "nccl")]
