"""vLLM worker extension: what the engine's drafter proposes, round by round, and a switch that stops it drafting."""

from collections import deque

import torch

from workers.answer import answered

MAX_ROUNDS = 1 << 16


class DraftLog:
    """Log every draft round, to compare it with the trainer's drafter (contract 5), and stop drafting to measure.

    Mixed into vLLM's worker (`workers.hot_swap.ServingExtension`). On vLLM's model runner V1 the log and the switch
    are tested; the log on runner V2 is written from vLLM 0.32's source and was not run (V2 needs a GPU).
    """

    draft_rounds: deque | None = None
    draft_plain: object | None = None
    drafting_plain: object | None = None

    @answered
    def draft_log_start(self) -> None:
        """Log from the next round on. The newest 65,536 rounds are kept."""
        self.draft_rounds = deque(maxlen=MAX_ROUNDS)
        if self.draft_plain is None:
            proposer, wrap = (self.model_runner.drafter, self._log_v1) if self._is_v1() else (
                self.model_runner.speculator, self._log_v2)
            self.draft_plain = proposer.propose
            proposer.propose = wrap(proposer.propose)

    @answered
    def draft_log_take(self) -> list[tuple[str, int, int, list[int]]]:
        """Stop logging; return the rounds as (request id, known tokens n, the n-th token, drafted ids).

        The drafter knew the request's first n tokens, the n-th just sampled (or, in the middle of a chunked prefill,
        the prompt's), and drafted the ids for the places after it.
        """
        if self.draft_rounds is None:
            raise RuntimeError("draft_log_take without draft_log_start")
        rounds, self.draft_rounds = list(self.draft_rounds), None
        proposer = self.model_runner.drafter if self._is_v1() else self.model_runner.speculator
        proposer.propose = self.draft_plain
        self.draft_plain = None
        return rounds

    def drafting(self, enabled: bool) -> bool:
        """Switch the drafter off, or on again; return whether this engine can.

        While it is off the engine decodes one token a step and the drafter's keys and values get no rows: requests
        running across the switch draft worse until they end, and cached prefixes do too until `reset_prefix_cache`.
        Only runner V1 without asynchronous scheduling can: elsewhere the scheduler has counted on drafts beforehand. A plain
        answer, since nothing in it can fail on one rank and not on another.
        """
        runner = self.model_runner
        if not self._is_v1() or runner.use_async_scheduling:
            return False
        if not enabled and self.drafting_plain is None:
            self.drafting_plain = runner.propose_draft_token_ids
            runner.propose_draft_token_ids = self._nothing_drafted
        elif enabled and self.drafting_plain is not None:
            runner.propose_draft_token_ids = self.drafting_plain
            self.drafting_plain = None
        return True

    def _is_v1(self) -> bool:
        return hasattr(self.model_runner, "drafter")

    def _nothing_drafted(self, scheduler_output, *args) -> torch.Tensor:
        runner = self.model_runner
        return torch.empty(len(runner.input_batch.req_ids), 0, dtype=torch.int64, device=runner.device)

    def _log_v1(self, propose):
        runner = self.model_runner

        def logged(**inputs):
            last_rows = inputs["token_indices_to_sample"]
            if last_rows is None:
                last_rows = inputs["common_attn_metadata"].query_start_loc[1:] - 1
            # Row p is the target's state after token p; the drafter pairs it with token p + 1, so it knows p + 2.
            known = (inputs["target_positions"][last_rows] + 2).tolist()
            newest = inputs["next_token_ids"].tolist()
            drafted = propose(**inputs)
            for row in zip(runner.input_batch.req_ids, known, newest, drafted.tolist()):
                self.draft_rounds.append(row)
            return drafted
        return logged

    def _log_v2(self, propose):
        def logged(input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, num_sampled,
                   num_rejected, last_sampled, next_prefill_tokens, *args, **options):
            drafted = propose(input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states,
                              num_sampled, num_rejected, last_sampled, next_prefill_tokens, *args, **options)
            count = input_batch.num_reqs
            rows = input_batch.idx_mapping[:count]
            known = (input_batch.seq_lens[:count] - num_rejected[:count] + 1).tolist()
            newest = torch.where(num_sampled[:count] > 0, last_sampled[rows].view(-1),
                                 next_prefill_tokens[0, rows]).tolist()  # [lookahead, requests]
            for row in zip(input_batch.req_ids, known, newest, drafted[:count].tolist()):
                self.draft_rounds.append(row)
            return drafted
        return logged
