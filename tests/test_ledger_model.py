"""Random reports, crashes and restores: the ledger against a simple model of it."""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test)

from torchspec_lite.ledger import STATES, Ledger

WORKERS = ("w0", "w1")


class LedgerMachine(RuleBasedStateMachine):
    """The model keeps for each sample its state, its attempt and the set of steps that trained it."""

    @initialize(reuse=st.integers(1, 3))
    def start(self, reuse):
        self.folder = Path(tempfile.mkdtemp())
        self.path = self.folder / "l"
        self.reuse, self.step, self.checkpoint, self.copies = reuse, 0, 0, 0
        self.ledger = Ledger(self.path, reuse)
        self.model = {}     # id -> dict(state, attempt, steps, worker)
        self.old = []       # (id, attempt) pairs ever leased

    def teardown(self):
        if hasattr(self, "ledger"):
            self.ledger.close()
            shutil.rmtree(self.folder)

    def ids(self, *states):
        return [id for id, sample in self.model.items() if sample["state"] in states]

    def pick(self, data, *states):
        chosen = data.draw(st.lists(st.sampled_from(self.ids(*states)), unique=True, max_size=4))
        return [(id, self.model[id]["attempt"]) for id in chosen]

    @rule(count=st.integers(0, 4))
    def add(self, count):
        new = [(f"s{len(self.model) + i}", len(self.model) + i) for i in range(count)]
        assert self.ledger.add_samples(new, "train") == count
        for id, _ in new:
            self.model[id] = dict(state="queued", attempt=0, steps=set(), worker=None)

    @rule(worker=st.sampled_from(WORKERS), count=st.integers(0, 4))
    def lease(self, worker, count):
        expected = sorted(self.ids("queued"), key=lambda id: int(id[1:]))[:count]
        leases = self.ledger.lease(worker, count, 0)
        assert [lease.id for lease in leases] == expected
        for lease in leases:
            sample = self.model[lease.id]
            sample.update(state="leased", worker=worker, attempt=sample["attempt"] + 1)
            assert lease.attempt == sample["attempt"]
            self.old.append((lease.id, lease.attempt))

    @precondition(lambda self: self.ids("leased", "streamed"))
    @rule(data=st.data())
    def stream(self, data):
        chosen = self.pick(data, "leased", "streamed")
        accepted = self.ledger.streamed([(id, attempt, 1) for id, attempt in chosen])
        assert accepted == {id: len(self.model[id]["steps"]) for id, _ in chosen}
        for id, _ in chosen:
            self.model[id]["state"] = "streamed"

    @precondition(lambda self: self.ids("streamed"))
    @rule(data=st.data())
    def train(self, data):
        self.step += 1
        chosen = self.pick(data, "streamed")
        done = self.ledger.trained(chosen, self.step)
        for id, _ in chosen:
            sample = self.model[id]
            sample["steps"].add(self.step)
            if len(sample["steps"]) == self.reuse:
                sample["state"] = "trained"
        assert done == [id for id, _ in chosen if self.model[id]["state"] == "trained"]

    @rule(data=st.data())
    def save(self, data):
        """Training may be ahead of the checkpoint that has just become whole, and an older one may be reported late."""
        step = data.draw(st.just(self.step) | st.integers(0, self.step))
        self.ledger.checkpointed(step)
        self.checkpoint = max(self.checkpoint, step)
        for id in self.ids("trained"):
            if max(self.model[id]["steps"]) <= self.checkpoint:
                self.model[id]["state"] = "durable"

    @precondition(lambda self: self.ids("queued", "leased", "streamed"))
    @rule(data=st.data())
    def reject(self, data):
        for id, attempt in self.pick(data, "queued", "leased", "streamed")[:1]:
            assert self.ledger.rejected(id, attempt, "bad")
            self.model[id]["state"] = "rejected"

    @rule(worker=st.sampled_from(WORKERS))
    def worker_dies(self, worker):
        mine = [id for id in self.ids("leased") if self.model[id]["worker"] == worker]
        assert self.ledger.requeue_worker(worker) == len(mine)
        for id in mine:
            self.model[id].update(state="queued", worker=None)

    @precondition(lambda self: self.ids("leased", "streamed", "trained", "durable"))
    @rule(data=st.data())
    def delivery_fails(self, data):
        chosen = self.pick(data, "leased", "streamed", "trained", "durable")
        back = [id for id, _ in chosen if self.model[id]["state"] == "leased"]
        assert self.ledger.requeue_ids(chosen) == len(back)
        for id in back:
            self.model[id].update(state="queued", worker=None)

    @precondition(lambda self: self.old)
    @rule(data=st.data())
    def late_report(self, data):
        id, attempt = data.draw(st.sampled_from(self.old))
        if attempt < self.model[id]["attempt"]:
            assert self.ledger.streamed([(id, attempt, 1)]) == {}
            assert self.ledger.trained([(id, attempt)], self.step + 1) == []
            assert not self.ledger.rejected(id, attempt, "late")

    @rule(data=st.data(), in_transaction=st.booleans())
    def crash(self, data, in_transaction):
        """The files as they are, perhaps amid a transaction, are all that the next process finds."""
        self.copies += 1
        path = self.folder / f"copy{self.copies}"
        if in_transaction:
            with pytest.raises(ZeroDivisionError), self.ledger._transaction() as db:
                db.execute("UPDATE samples SET state = 'durable', passes = 9")
                self.copy(path)
                1 / 0
        else:
            self.copy(path)
        self.ledger.close()
        self.path = path
        self.ledger = Ledger(path, self.reuse)
        self.check()
        step = data.draw(st.sampled_from([0, self.checkpoint, self.step]) | st.integers(0, self.step))
        self.ledger.restore(step)
        self.step = self.checkpoint = step
        for sample in self.model.values():
            sample["steps"] = {passed for passed in sample["steps"] if passed <= step}
            if sample["state"] == "queued" and sample["attempt"]:
                sample["attempt"] += 1
            elif sample["state"] not in ("queued", "rejected"):
                if sample["state"] in ("trained", "durable") and len(sample["steps"]) == self.reuse:
                    sample["state"] = "durable"
                else:
                    sample.update(state="queued", attempt=sample["attempt"] + 1, worker=None)

    def copy(self, path):
        for suffix in ("", "-wal"):
            source = self.path.with_name(self.path.name + suffix)
            if source.exists():
                shutil.copy(source, path.with_name(path.name + suffix))

    @invariant()
    def check(self):
        if not hasattr(self, "ledger"):
            return
        for id, sample in self.model.items():
            row = self.ledger.get(id)
            durable = len([step for step in sample["steps"] if step <= self.checkpoint])
            assert (row.state, row.attempt, row.passes, row.passes_durable) == (
                sample["state"], sample["attempt"], len(sample["steps"]), durable)
        account = self.ledger.account()
        assert sum(account[state] for state in STATES) == account["all"] == len(self.model)


def test_the_ledger_is_its_model():
    run_state_machine_as_test(LedgerMachine, settings=settings(
        max_examples=50, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)))
