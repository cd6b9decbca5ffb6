"""The documents say what is so: links lead somewhere, commands parse, keys and metrics exist, configs add up."""

import importlib.util
import json
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cluster.placement import make_plan, render
from torchspec_lite import config as configs
from torchspec_lite.cli import parser
from torchspec_lite.config_reference import reference
from torchspec_lite.drafter import DrafterConfig, rope_frequencies
from torchspec_lite.metrics import METRICS
from torchspec_lite.target import describe

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "SECURITY.md", *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
INLINE = re.compile(r"`([^`\n]+)`")
ROOMS = ("torchspec_lite", "workers", "cluster", "tests", "benchmarks", "configs", "docs", "deploy", "scripts", "requirements")
STAND_INS = {"CONFIG": "configs/demo.yaml", "my.yaml": "configs/demo.yaml", "runs/demo/config.yaml": "configs/demo.yaml"}
OTHER_PROGRAMS = {"source", "curl", "vllm"}


def page_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


pages = pytest.mark.parametrize("page", PAGES, ids=page_name)


def anchors(path: Path) -> set[str]:
    """Anchors of a page's headings as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", path.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def commands(text: str) -> list[str]:
    """Shell commands of a page: the lines of its bash blocks, and inline code that starts with one of our programs.
    Those with an ellipsis are talk."""
    found = []
    for language, body in FENCE.findall(text):
        if language == "bash":
            found += body.replace("\\\n", " ").splitlines()
    found += [code for code in INLINE.findall(FENCE.sub("", text)) if re.match(r"(torchspec-lite|make|python -m|ray) \S", code)]
    return [line for line in found if line.strip() and "…" not in line]


@pages
def test_every_link_leads_somewhere(page):
    text = FENCE.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        assert place.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(place), f"{page.name}: {target}"


@pages
def test_every_path_of_the_repository_exists(page):
    for code in INLINE.findall(FENCE.sub("", page.read_text())):
        first = code.split("/")[0]
        if "/" in code and first in ROOMS and re.fullmatch(r"[\w./-]+", code):
            assert (ROOT / code).exists(), f"{page.name}: {code}"


@pages
def test_every_command_can_be_typed(page):
    for command in commands(page.read_text()):
        check_command(shlex.split(command, comments=True), f"{page.name}: {command}")


def check_command(words: list[str], where: str) -> None:
    if "=" in words[0]:  # a variable for the command behind it
        return check_command(words[1:], where)
    if words[0] == "torchspec-lite":
        # A bare name is a mention of the command: its help exists.
        arguments = [STAND_INS.get(word, word) for word in words[1:]] if len(words) > 2 else [words[1], "--help"]
        try:
            options = vars(parser().parse_args(arguments))
        except SystemExit as ended:
            assert ended.code == 0, where
            return
        if "config" in options:
            configs.load(ROOT / options["config"], options["overrides"])
    elif words[:2] == ["python", "-m"]:
        spec = importlib.util.find_spec(words[2])
        assert spec is not None, where
        source = Path(spec.origin).read_text()
        assert all(f'"{word}"' in source for word in words[3:] if word.startswith("--")), where
    elif words[0] == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
        assert words[1] in targets, where
    elif words[0] == "ray":
        if "--" in words:
            check_command(words[words.index("--") + 1:], where)
    else:
        assert words[0] in OTHER_PROGRAMS, where


def test_commands_are_found_and_wrong_ones_noticed():
    text = "`make demo` and\n```bash\ntorchspec-lite train my.yaml \\\n  trainer.reuse=2   # twice\n```\n`torchspec-lite eval …`"
    found = commands(text)
    assert [shlex.split(line, comments=True) for line in found] == [
        ["torchspec-lite", "train", "my.yaml", "trainer.reuse=2"], ["make", "demo"]]
    for wrong in (["torchspec-lite", "trane", "my.yaml"], ["make", "dinner"], ["python", "-m", "benchmarks.nothing"],
                  ["torchspec-lite", "trane"], ["python", "-m", "benchmarks.stream", "--no-such-flag"], ["rm", "-r", "/"]):
        with pytest.raises(AssertionError):
            check_command(wrong, "here")
    with pytest.raises(configs.UserError, match="did you mean trainer.reuse"):
        check_command(["torchspec-lite", "train", "my.yaml", "trainer.reuze=2"], "here")
    assert sum(len(commands(page.read_text())) for page in PAGES) > 30


@pages
def test_every_config_key_exists(page):
    known = set(configs.known_keys())
    for code in INLINE.findall(FENCE.sub("", page.read_text())):
        key = re.split(r"[=:]", code)[0].strip()
        section, dot, _ = key.partition(".")
        if dot and section in configs.SECTIONS and re.fullmatch(r"[a-z_.]+", key) and not key.endswith(".py"):
            assert key in known, f"{page.name}: {code}"


def test_every_metric_of_the_table_exists():
    table = (ROOT / "docs" / "when-acceptance-does-not-rise.md").read_text().partition("## The metrics")[2]
    names = re.findall(r"^\| `([a-z_]+)` \|", table, re.M)
    assert len(names) > 10 and set(names) <= set(METRICS)


def test_the_config_reference_is_that_of_the_code():
    page = (ROOT / "docs" / "config.md").read_text()
    assert page == reference(), "run: python -m torchspec_lite.config_reference > docs/config.md"
    for key in configs.known_keys():
        assert key in configs.SECTIONS or f"| `{key}` |" in page, key
    assert "| `trainer.ttt_steps` | integer, ≥ 1, ≤ 16 | `4` |" in page
    assert "| `target.model` | text | needed |" in page


@dataclass(frozen=True)
class Machine:
    nodes: int
    gpus: int  # of one node
    gigabytes: int  # of one GPU


# From each model's public config.json, whose address is in the config's head; bytes of its weight files, rounded.
QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "num_attention_heads": 32, "head_dim": 128, "rope_theta": 1000000,
         "rope_scaling": None, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
REAL = {
    "qwen3-8b": (Machine(1, 4, 80), 16_400_000_000, QWEN3 | {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_key_value_heads": 8}),
    "llama-3.1-8b": (Machine(1, 2, 80), 16_100_000_000, {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256,
        "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 500000.0, "max_position_embeddings": 131072,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192}}),
    "qwen3-30b-a3b": (Machine(1, 8, 80), 61_100_000_000, QWEN3 | {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts": 128}),
    "gpt-oss-20b": (Machine(1, 4, 80), 13_800_000_000, {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "head_dim": 64,
        "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 201088, "max_position_embeddings": 131072,
        "rope_theta": 150000, "sliding_window": 128, "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096}}),
    "kimi-k2.6": (Machine(3, 8, 141), 595_000_000_000, {"model_type": "kimi_k25", "text_config": {
        "model_type": "kimi_k2", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
        "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 163840, "max_position_embeddings": 262144,
        "rope_theta": 50000.0, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "rope_scaling": {"type": "yarn", "factor": 64.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
                         "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}}}),
}


def test_every_real_config_is_here():
    assert {path.stem for path in (ROOT / "configs").glob("*.yaml")} == REAL.keys() | {"demo", "closed-loop"}


@pytest.fixture(params=REAL)
def job(request, tmp_path):
    """A real config with its target as its folder would be described."""
    machine, weight_bytes, shape = REAL[request.param]
    (tmp_path / "config.json").write_text(json.dumps(shape))
    save_file({"nothing": torch.zeros(1)}, tmp_path / "model.safetensors")
    path = ROOT / "configs" / f"{request.param}.yaml"
    return path, configs.load(path), replace(describe(tmp_path), weight_bytes=weight_bytes), machine


def test_a_real_config_fits_its_machine(job):
    path, config, info, machine = job
    plan = make_plan(config, info)
    gigabytes = {role.name: role.gpu_memory / 1e9 for role in plan.roles}
    assert plan.gpus == machine.nodes * machine.gpus
    assert all(role.gpus <= machine.gpus for role in plan.roles)
    for name, section in (("target worker", config.capture), ("serving replica", config.serve)):
        # Weights, and a tenth of the GPU at least for keys and values.
        assert gigabytes[name] + 0.1 * machine.gigabytes < section.gpu_memory_utilization * machine.gigabytes
        assert section.gpus in (config.target.tensor_parallel_size, 0.5)
    assert gigabytes["trainer"] < 0.5 * machine.gigabytes * min(1, 2 * config.trainer.gpus)  # the rest: activations
    assert config.data.max_length <= config.target.max_model_len
    most = config.data.max_length * plan.bytes_per_token
    assert most < config.stream.sender_budget_mib << 20 and 8 * most < config.stream.budget_mib << 20
    # The buffer holds enough of the longest samples for a batch.
    assert (config.trainer.reuse_buffer_mib << 20) / plan.bytes_per_token >= config.trainer.batch_tokens
    assert "on each GPU" in render(plan)


def test_the_arithmetic_in_its_head_is_right(job):
    path, config, info, _ = job
    plan, head = make_plan(config, info), path.read_text().partition("\nname:")[0]
    assert f"{plan.bytes_per_token:,} bytes a token" in head
    assert plan.bytes_per_token == 4 * info.hidden_size * 2 + 5
    assert f"{plan.drafter_parameters / 1e6:.0f} M parameters" in head
    assert f"{config.data.max_length:,} tokens × {plan.bytes_per_token:,} bytes = " \
           f"{config.data.max_length * plan.bytes_per_token / 1e6:.0f} MB" in head
    assert f"H {info.hidden_size}, {info.num_layers} layers, {info.num_attention_heads} heads" in head
    assert f"V {info.vocab_size:,}" in head


def test_its_target_has_a_drafter(job):
    """RoPE of every kind used, and the default layers."""
    _, config, info, _ = job
    shape = DrafterConfig(
        info.hidden_size, config.drafter.intermediate_size or info.intermediate_size, info.num_attention_heads,
        info.num_key_value_heads, info.head_dim, info.rms_norm_eps, info.rope_parameters, info.max_position_embeddings,
        info.vocab_size, config.drafter.draft_vocab_size, info.hidden_size, info.default_layer_ids(), True, True)
    frequencies, factor = rope_frequencies(shape)
    assert frequencies.shape == (info.head_dim // 2,) and factor > 0
    count = sum(torch.Size(size).numel() for name, size in shape.parameter_shapes().items() if not name.endswith("norm"))
    assert count == make_plan(config, info).drafter_parameters
