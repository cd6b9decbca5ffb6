"""Batches mixed from two buffers: a least share of general samples, the rest from served traffic."""

from torchspec_lite.reuse import Entry, ReuseBuffer


class Mixture:
    """Draws from `general` and `served` so that, over time, at least `share` of all tokens are general ones while there
    are any; what one buffer does not have the other gives."""

    def __init__(self, general: ReuseBuffer, served: ReuseBuffer, share: float):
        self.general, self.served, self.share = general, served, share
        self.general_tokens = self.tokens = 0

    def draw(self, max_tokens: int) -> list[Entry]:
        """Entries for one optimizer step, at most `max_tokens` together (one longer sample is drawn alone)."""
        general, served = self.general.draw(max_tokens), self.served.draw(max_tokens)
        # What is left in a buffer whose draw is used up is too long for this batch; the next one starts with it.
        more = len(self.general) > len(general), len(self.served) > len(served)
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

    def _short_of_general(self) -> bool:
        return self.share > 0 and self.general_tokens <= self.share * self.tokens
