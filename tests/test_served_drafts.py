"""Train/serve parity with a real vLLM: an export drafts, and is accepted, exactly as predicted (fp32, tiny target)."""

import multiprocessing
import os

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from tests.tiny import make_tiny_target
from torchspec_lite.acceptance import Counts, predict
from torchspec_lite.batch import supervised_places
from torchspec_lite.config import DrafterConfigSection
from torchspec_lite.drafter import draft, init_drafter, unrolled_logits
from torchspec_lite.export import export, export_speculators, load_drafter
from torchspec_lite.sample import Sample
from torchspec_lite.target import describe, load_head
from torchspec_lite.vocab import choose_draft_vocab

STEPS, LAYERS, ANSWER = 3, (1, 3, 5), 40


def samples_of(folder, info):
    """Greedy answers of the target and its states, by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    last = []
    model.model.norm.register_forward_pre_hook(lambda module, arguments: last.append(arguments[0][0]))
    generator = torch.Generator().manual_seed(0)
    samples = []
    for i in range(6):
        length = int(torch.randint(5, 40, (1,), generator=generator))
        prompt = torch.randint(300, (1, length), generator=generator)
        text = model.generate(prompt, max_new_tokens=ANSWER, do_sample=False, eos_token_id=None, pad_token_id=0)[0]
        with torch.no_grad():
            states = model.model(text[None, :-1], output_hidden_states=True).hidden_states
        samples.append(Sample(
            str(i), 0, i, "held_out", info.fingerprint, LAYERS, text.int(), (torch.arange(len(text)) >= length).byte(),
            torch.stack([states[layer][0] for layer in LAYERS], 1), last[-1]))
    return samples


def trained(info, head, samples, size, flags):
    """A drafter that has learnt the first answers by heart: some rounds accept all, some nothing."""
    written = torch.cat([s.token_ids[s.mask.bool()] for s in samples]).long().bincount(minlength=info.vocab_size)
    ids = choose_draft_vocab(written, torch.zeros_like(written), size)
    options = DrafterConfigSection(fc_norm=flags, norm_output=flags)
    drafter = init_drafter(info, head, options, ids, torch.Generator().manual_seed(0), LAYERS, 512)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=2e-3)
    for _ in range(40):
        loss = 0.0
        for sample in samples[:4]:
            tokens = sample.token_ids.long()
            places = supervised_places(sample.mask, torch.tensor([0, len(tokens)]), STEPS)
            for k, logits in enumerate(unrolled_logits(drafter, head.embed_tokens, tokens, sample.aux, STEPS)):
                rows = places[k].nonzero()[:, 0]
                rows = rows[torch.isin(tokens[rows + 2 + k], ids)]
                loss = loss + F.cross_entropy(logits[rows], torch.searchsorted(ids, tokens[rows + 2 + k]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter


def serve(target, drafter, prompts):
    """In a process of its own: vLLM's answers, draft rounds [(row, drafted ids)] and counters, prompt by prompt."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", OMP_NUM_THREADS="1")
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    from vllm import LLM, SamplingParams
    engine = LLM(
        model=target, enforce_eager=True, dtype="float32", max_model_len=256, kv_cache_memory_bytes=64 << 20,
        disable_log_stats=False, enable_prefix_caching=False,
        speculative_config={"model": drafter, "method": "eagle3", "num_speculative_tokens": STEPS})
    runner = engine.llm_engine.model_executor.driver_worker.worker.model_runner
    assert runner.drafter.model.lm_head is not runner.model.lm_head
    propose, rounds = runner.drafter.propose, []

    def logged(**inputs):
        rows = inputs["token_indices_to_sample"]
        if rows is None:
            rows = inputs["common_attn_metadata"].query_start_loc[1:] - 1
        drafted = propose(**inputs)
        rounds.extend(zip(inputs["target_positions"][rows].tolist(), drafted.tolist()))
        return drafted

    runner.drafter.propose = logged
    answers = []
    for prompt in prompts:
        rounds.clear()
        out = engine.generate([{"prompt_token_ids": prompt}], SamplingParams(
            temperature=0, max_tokens=ANSWER, ignore_eos=True), use_tqdm=False)
        answers.append((list(out[0].outputs[0].token_ids), list(rounds)))
    counters = {metric.name: metric for metric in engine.get_metrics()}
    return (answers, int(counters["vllm:spec_decode_num_drafts"].value),
            [int(n) for n in counters["vllm:spec_decode_num_accepted_tokens_per_pos"].values])


@pytest.mark.engine
@pytest.mark.timeout(500)
@pytest.mark.parametrize("size, flags, form", [
    (150, True, "ours"), (None, False, "speculators")])
def test_vllm_drafts_and_accepts_as_predicted(tmp_path, size, flags, form):
    target = make_tiny_target(tmp_path / "target", seed=3, layers=6)
    info = describe(target)
    head = load_head(info, torch.float32)
    samples = samples_of(target, info)
    drafter = trained(info, head, samples, size, flags)
    if form == "ours":
        path = export(drafter, tmp_path, 1, torch.float32, info, 20, 4, None, None)
    else:
        path = export_speculators(drafter, tmp_path / "speculators", torch.float32, info, head, STEPS)
    prompts = [s.token_ids[~s.mask.bool()].tolist() for s in samples]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        # A limit: a pool waits for ever for a worker that was killed.
        answers, rounds, accepted = pool.apply_async(serve, (str(target), str(path), prompts)).get(timeout=400)
    loaded, compared = load_drafter(path, info, head), 0
    for sample, prompt, (answer, drafts) in zip(samples, prompts, answers):
        assert answer == sample.token_ids[len(prompt):].tolist()
        ours = draft(loaded, head.embed_tokens, sample.token_ids.long(), sample.aux, STEPS).tolist()
        for row, drafted in drafts:
            if row < len(ours):
                assert drafted == ours[row]
                compared += 1
    assert compared > 50
    served = Counts(rounds, tuple(accepted))
    assert served.accepted > 20  # else equality would say little
    assert predict(drafter, head, samples, STEPS).walk == served
