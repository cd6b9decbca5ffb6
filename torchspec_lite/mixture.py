"""Batches mixed from two buffers: a least share of general samples, the rest from served traffic."""

from torchspec_lite.reuse import Entry, ReuseBuffer


class Mixture:
    """Draws from `general` and `served` so that, over time, at least `share` of all tokens are general ones while there
    are any; where one buffer is empty the other fills the batch."""

    def __init__(self, general: ReuseBuffer, served: ReuseBuffer, share: float):
        self.general, self.served, self.share = general, served, share
        self.drawn = {"general": 0, "served": 0}

    def draw(self, max_tokens: int) -> list[Entry]:
        """Entries for one optimizer step, at most `max_tokens` together (one longer sample is drawn alone)."""
        waiting = {"general": self.general.draw(max_tokens), "served": self.served.draw(max_tokens)}
        batch, tokens = [], 0
        while any(waiting.values()):
            kind = "general" if waiting["general"] and (not waiting["served"] or self._short_of_general()) else "served"
            entry = waiting[kind].pop(0)
            if batch and tokens + entry.tokens > max_tokens:
                break
            batch.append(entry)
            tokens += entry.tokens
            self.drawn[kind] += entry.tokens
        return batch

    def _short_of_general(self) -> bool:
        return self.share > 0 and self.drawn["general"] <= self.share * sum(self.drawn.values())
