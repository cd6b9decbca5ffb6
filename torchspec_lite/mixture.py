"""Batches mixed from two buffers: a least share of general samples, the rest from served traffic."""

import math

from torchspec_lite.reuse import Entry, ReuseBuffer


class Mixture:
    """Draws from `general` and `served` so that, over time, at least `share` of all tokens are general ones; what one
    buffer does not have the other gives.

    Traffic goes on when general samples have had their passes, and forgetting with it: those are then rehearsed, in
    turns, as long as served samples wait beside them. What is rehearsed takes at most as much memory as the buffer.
    """

    def __init__(self, general: ReuseBuffer, served: ReuseBuffer, share: float):
        self.general, self.served, self.share = general, served, share
        self.rehearsal = ReuseBuffer(math.inf, general.max_bytes, general.seed)
        self.general_tokens = self.tokens = 0

    def draw(self, max_tokens: int) -> list[Entry]:
        """Entries for one optimizer step, at most `max_tokens` together (one longer sample is drawn alone)."""
        served, source = self.served.draw(max_tokens), self.general
        if not self.general.entries and served and self.share:
            source = self.rehearsal
        general = source.draw(max_tokens)
        # What is left in a buffer whose draw is used up is too long for this batch; the next one starts with it.
        more = len(source) > len(general), len(self.served) > len(served)
        batch, tokens = [], 0
        while general or served:
            if self._short_of_general():
                first, second, first_has_more = general, served, more[0]
            else:
                first, second, first_has_more = served, general, more[1]
            if not first and first_has_more:
                break
            entry = (first or second).pop(0)
            if batch and tokens + entry.tokens > max_tokens:
                break
            batch.append(entry)
            tokens += entry.tokens
            self.tokens += entry.tokens
            self.general_tokens += entry.tokens * (entry.sample.purpose != "traffic")
        return batch

    def count_general_pass(self, entries: list[Entry]) -> list[Entry]:
        """Note the general ones of a step's entries; returns those that have had all their passes. They are rehearsed from then on."""
        self.rehearsal.count_pass([entry for entry in entries if entry.sample.id in self.rehearsal.entries])
        done = self.general.count_pass([entry for entry in entries if entry.sample.id in self.general.entries])
        for entry in done:
            if self.rehearsal.has_room():
                self.rehearsal.add(entry)
        return done

    def _short_of_general(self) -> bool:
        return self.share > 0 and self.general_tokens <= self.share * self.tokens
