"""What the serving tests share: the tiny target's own answers, drafters for it, a replica that runs beside the test."""

import asyncio
import json
import os
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from tests.tiny import make_tiny_target
from torchspec_lite.atomic import sha256
from torchspec_lite.config import Config, DrafterConfigSection, build
from torchspec_lite.drafter import Drafter, draft, init_drafter, unrolled_logits
from torchspec_lite.export import export
from torchspec_lite.target import describe, load_head
from workers.engine import engine_env

LAYER_IDS = (1, 2, 3)
PROMPT_LENGTHS = (5, 9, 17, 40, 64, 130)
ANSWER = 32
WAIT_S = 180


class TinyTarget:
    """The tiny fp32 target: its folder, six prompts and what plain Hugging Face greedy decoding answers to them."""

    def __init__(self, folder: Path):
        self.path = make_tiny_target(folder)
        self.info = describe(self.path)
        self.head = load_head(self.info, torch.float32)
        self.model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)
        generator = torch.Generator().manual_seed(5)
        self.prompts = [torch.randint(3, 300, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]
        self.texts = [self.continued(prompt) for prompt in self.prompts]

    @torch.no_grad()
    def continued(self, prompt: list[int]) -> list[int]:
        """The prompt and the target's greedy answer, through its end of turn or ANSWER tokens."""
        return self.model.generate(torch.tensor([prompt]), max_new_tokens=ANSWER, do_sample=False)[0].tolist()

    @torch.no_grad()
    def states(self, token_ids: list[int]) -> torch.Tensor:
        """Streams entering layers 1, 2 and 3 of every token but the last: [n-1, 3, H]."""
        hidden = self.model(torch.tensor([token_ids[:-1]]), output_hidden_states=True).hidden_states
        return torch.stack([hidden[layer][0] for layer in LAYER_IDS], dim=1)

    def fresh_drafter(self, seed: int, *, fc_norm: bool = True, norm_output: bool = True,
                      draft_vocab_size: int = 256) -> Drafter:
        """An untrained drafter; its draft vocabulary holds all that the target answers, with gaps between the ids."""
        written = torch.tensor(sorted({token for text in self.texts for token in text}))
        others = [token for token in range(self.info.vocab_size - 1, -1, -1) if token not in set(written.tolist())]
        ids = torch.cat([written, torch.tensor(others[:draft_vocab_size - len(written)])]).sort().values
        options = DrafterConfigSection(fc_norm=fc_norm, norm_output=norm_output, draft_vocab_size=draft_vocab_size)
        return init_drafter(self.info, self.head, options, ids, torch.Generator().manual_seed(seed), LAYER_IDS)

    def teach(self, drafter: Drafter, steps: int = 120) -> Drafter:
        """Learn the six answers by heart: plain teacher-forced cross entropy over three unrolled steps."""
        position = torch.full((self.info.vocab_size,), -100)
        position[drafter.draft_ids] = torch.arange(len(drafter.draft_ids))
        lessons = [(torch.tensor(text), self.states(text)) for text in self.texts]
        optimizer = torch.optim.Adam(drafter.parameters(), lr=3e-3)
        for _ in range(steps):
            loss = 0.0
            for token_ids, aux in lessons:
                for k, logits in enumerate(unrolled_logits(drafter, self.head.embed_tokens, token_ids, aux, 3)):
                    loss = loss + F.cross_entropy(logits[:len(token_ids) - 2 - k], position[token_ids[2 + k:]])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return drafter

    def drafts(self, drafter: Drafter, token_ids: list[int]) -> torch.Tensor:
        """What the trainer's drafter drafts along a text: [n-1, 3] target ids."""
        return draft(drafter, self.head.embed_tokens, torch.tensor(token_ids), self.states(token_ids), 3)

    def export(self, drafter: Drafter, folder: Path, version: int) -> str:
        return str(export(drafter, folder, version, torch.float32, self.info, version, 10 * version, None, None))

    def config(self, **serve) -> Config:
        return build({"target": {"model": str(self.path), "dtype": "float32", "max_model_len": 512},
                      "serve": {"max_num_seqs": 8, "kv_cache_mib": 64, "port": 0, "model_name": "tiny"} | serve},
                     "test")


class LiveReplica:
    """A `workers.server.Replica` on an event loop of its own; `run` waits for a coroutine made on it."""

    def __init__(self, config: Config, target: Path, version_dir: str, api_key: str | None = None):
        os.environ.update(engine_env(1, 0, config.target.tensor_parallel_size))
        from workers.server import Replica
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.replica = self.run(Replica.start(config, str(target), version_dir, "replica-0", api_key,
                                              config.traffic.opt_out_key))

    def run(self, coroutine: Coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(WAIT_S)

    def rpc(self, method: str, *args) -> list:
        return self.run(self.replica.engine.collective_rpc(method, args=args))

    def acceptance(self, work: Callable[[], object]) -> tuple[float, int]:
        """Acceptance length (1 without a round) and draft rounds of what `work` makes the replica do, as counted."""
        before = self._counts()
        work()
        drafts, accepted = (now - then for now, then in zip(self._counts(), before, strict=True))
        return 1 + accepted / max(1, drafts), drafts

    def _counts(self) -> tuple[int, int]:
        versions = self.replica.stats()["versions"]
        return sum(version["drafts"] for version in versions), sum(version["accepted"] for version in versions)

    def close(self) -> None:
        async def stop():
            self.replica.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self.run(stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(WAIT_S)
        self.loop.close()


def rewrite(version_dir: str, change: Callable[[dict], None]) -> None:
    """Change a version's tensors and make its manifest agree, as a faulty exporter would."""
    from safetensors.torch import load_file, save_file
    folder = Path(version_dir)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    sign(folder)


def sign(folder: Path) -> None:
    """Write the files' present hashes into the manifest."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = {name: sha256(folder / name) for name in manifest["files"]}
    (folder / "manifest.json").write_text(json.dumps(manifest))
