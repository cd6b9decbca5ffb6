"""A worker extension whose next load of weights breaks half way, loudly or silently."""

from workers.hot_swap import ServingExtension


class BreakingExtension(ServingExtension):
    breaking: str | None = None

    def break_next_load(self, how: str) -> None:
        """`raise`: an error after seven tensors. `stale`: one matrix keeps another version's values, and no error."""
        draft = self.get_draft_model()
        load_weights = type(draft).load_weights.__get__(draft)
        self.breaking = how

        def load(weights):
            weights, how, self.breaking = list(weights), self.breaking, None
            if how is None:
                load_weights(iter(weights))
            elif how == "raise":
                load_weights(iter(weights[:7]))
                raise MemoryError("no memory for the eighth tensor")
            else:
                load_weights((name, value * 1.01 if "down_proj" in name else value) for name, value in weights)

        draft.load_weights = load
