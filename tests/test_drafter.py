"""The reference forward against golden vectors and against a second drafter, written as serving runs one."""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from torchspec_lite.config import DrafterConfigSection
from torchspec_lite.drafter import (
    Drafter, DrafterConfig, combine, draft, init_drafter, rope_frequencies, rows_inside, unrolled_logits,
    unrolled_steps)
from torchspec_lite.errors import UserError
from torchspec_lite.target import FrozenHead, TargetInfo

HERE = Path(__file__).parent
SHARED = HERE.parent.parent / "shared" / "golden"
GOLDEN = SHARED if SHARED.is_dir() else HERE / "golden"
FILES = ("eagle3_one_document", "eagle31_one_document", "eagle31_packed_documents")


def read_golden(name):
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as reader:
        return {key: reader.get_tensor(key) for key in reader.keys()}, reader.metadata()


def golden_drafter(tensors, meta):
    config = DrafterConfig(
        hidden_size=int(meta["hidden_size"]), intermediate_size=int(meta["intermediate_size"]),
        num_attention_heads=int(meta["num_attention_heads"]), num_key_value_heads=int(meta["num_key_value_heads"]),
        head_dim=int(meta["head_dim"]), rms_norm_eps=float(meta["rms_norm_eps"]),
        rope_parameters={"rope_type": "default", "rope_theta": float(meta["rope_theta"])},
        max_position_embeddings=128, vocab_size=int(meta["vocab_size"]),
        draft_vocab_size=int(meta["draft_vocab_size"]), target_hidden_size=int(meta["hidden_size"]),
        layer_ids=(1, 2, 3), fc_norm=meta["fc_norm"] == "true", norm_output=meta["norm_output"] == "true")
    weight = {key.removeprefix("drafter."): value for key, value in tensors.items() if key.startswith("drafter.")}
    drafter = Drafter(config, torch.arange(config.draft_vocab_size) + weight["d2t"])
    attention, mlp = "midlayer.self_attn.", "midlayer.mlp."
    values = {
        "fc": weight["fc.weight"],
        "input_layernorm": weight["midlayer.input_layernorm.weight"],
        "hidden_norm": weight["midlayer.hidden_norm.weight"],
        "qkv": torch.cat([weight[attention + f"{part}_proj.weight"] for part in "qkv"]),
        "o_proj": weight[attention + "o_proj.weight"],
        "post_attention_layernorm": weight["midlayer.post_attention_layernorm.weight"],
        "gate_up": torch.cat([weight[mlp + "gate_proj.weight"], weight[mlp + "up_proj.weight"]]),
        "down_proj": weight[mlp + "down_proj.weight"],
        "norm": weight["norm.weight"],
        "lm_head": weight["lm_head.weight"],
    }
    if config.fc_norm:
        values["fc_norm"] = torch.stack([weight[f"fc_norm.{i}.weight"] for i in range(3)])
    assert set(values) == {name for name, _ in drafter.named_parameters()}
    with torch.no_grad():
        for name, value in values.items():
            drafter.get_parameter(name).copy_(value)
    return drafter, weight["embed_tokens.weight"]


def documents(tensors):
    count = len({key.split(".")[0] for key in tensors if key.startswith("doc")})
    return [{part: tensors[f"doc{i}.{part}"] for part in ("token_ids", "aux_hidden_states")} | {
        "expected": [tensors[f"doc{i}.expected_draft_logits.step{k}"] for k in range(4)]} for i in range(count)]


@pytest.mark.parametrize("name", FILES)
def test_golden_one_by_one(name):
    tensors, meta = read_golden(name)
    drafter, embed = golden_drafter(tensors, meta)
    for document in documents(tensors):
        logits = unrolled_logits(drafter, embed, document["token_ids"], document["aux_hidden_states"][:-1], 4)
        for k, expected in enumerate(document["expected"]):
            torch.testing.assert_close(logits[k][:len(expected)], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("query_rows", [512, 7])
def test_golden_packed(query_rows, monkeypatch):
    monkeypatch.setattr("torchspec_lite.drafter.QUERY_ROWS", query_rows)
    tensors, meta = read_golden("eagle31_packed_documents")
    drafter, embed = golden_drafter(tensors, meta)
    packed = documents(tensors)
    starts = torch.tensor([0] + [len(d["token_ids"]) for d in packed]).cumsum(0)
    logits = unrolled_logits(
        drafter, embed, torch.cat([d["token_ids"] for d in packed]),
        torch.cat([d["aux_hidden_states"] for d in packed]), 4, starts)
    inside = rows_inside(int(starts[-1]), 4, starts)
    for k in range(4):
        for start, document in zip(starts.tolist(), packed):
            expected = document["expected"][k]
            assert inside[k, start:start + len(document["token_ids"])].sum() == len(expected)
            torch.testing.assert_close(logits[k][start:start + len(expected)], expected, rtol=1e-5, atol=1e-5)


def naive_draft(drafter, embed, token_ids, aux, steps):
    """Drafts for the last row only, token by token with a growing key/value list, written apart from the product."""
    c = drafter.config
    theta = c.rope_parameters["rope_theta"]

    def norm(x, weight):
        return x / (x.pow(2).mean() + c.rms_norm_eps).sqrt() * weight

    def turn(vector, position):
        out = torch.empty_like(vector)
        for i in range(c.head_dim // 2):
            angle = torch.tensor(position * theta ** (-2 * i / c.head_dim))
            a, b = vector[:, i], vector[:, i + c.head_dim // 2]
            out[:, i] = a * angle.cos() - b * angle.sin()
            out[:, i + c.head_dim // 2] = b * angle.cos() + a * angle.sin()
        return out

    past_keys, past_values = [], []

    def layer(token, feature, position):
        x = torch.cat([norm(embed[token], drafter.input_layernorm), norm(feature, drafter.hidden_norm)])
        nq, nk = c.num_attention_heads, c.num_key_value_heads
        q, k, v = (drafter.qkv @ x).split([nq * c.head_dim, nk * c.head_dim, nk * c.head_dim])
        q = turn(q.view(nq, -1), position)
        past_keys.append(turn(k.view(nk, -1), position))
        past_values.append(v.view(nk, -1))
        mixed = []
        for h in range(nq):
            kv = h // (nq // nk)
            scores = torch.stack([q[h] @ key[kv] for key in past_keys]) / c.head_dim ** 0.5
            mixed.append(sum(p * value[kv] for p, value in zip(scores.softmax(0), past_values)))
        u = feature + drafter.o_proj @ torch.cat(mixed)
        inner = norm(u, drafter.post_attention_layernorm)
        gate, up = drafter.gate_up[:c.intermediate_size] @ inner, drafter.gate_up[c.intermediate_size:] @ inner
        y = u + drafter.down_proj @ (gate * gate.sigmoid() * up)
        out = norm(y, drafter.norm)
        return drafter.lm_head @ out, out if c.norm_output else y

    for row in range(len(token_ids) - 1):
        parts = [norm(s, drafter.fc_norm[i]) if c.fc_norm else s for i, s in enumerate(aux[row])]
        logits, feature = layer(token_ids[row + 1], drafter.fc @ torch.cat(parts), row)
    drafted = [int(drafter.draft_ids[logits.argmax()])]
    for k in range(1, steps):
        logits, feature = layer(drafted[-1], feature, len(token_ids) - 2 + k)
        drafted.append(int(drafter.draft_ids[logits.argmax()]))
    return drafted


@pytest.mark.parametrize("name", ["eagle3_one_document", "eagle31_one_document"])
def test_free_running_drafts_equal_serving(name):
    tensors, meta = read_golden(name)
    drafter, embed = golden_drafter(tensors, meta)
    document = documents(tensors)[0]
    tokens, aux = document["token_ids"], document["aux_hidden_states"][:-1]
    drafted = draft(drafter, embed, tokens, aux, 4)
    assert drafted.shape == (23, 4) and drafted.dtype == torch.int64
    assert len(drafted.unique()) > 10  # else agreement would say little
    with torch.no_grad():
        for length in range(2, len(tokens) + 1):
            expected = naive_draft(drafter, embed, tokens[:length], aux[:length - 1], 4)
            assert drafted[length - 2].tolist() == expected


def test_worked_example_of_rows_inside():
    # Six tokens: step 0 reads up to token 5 (rows 0..4), step 1 up to rows 0..3.
    assert rows_inside(6, 2).tolist() == [[True] * 5 + [False], [True] * 4 + [False] * 2]
    assert rows_inside(5, 1, torch.tensor([0, 2, 5])).tolist() == [[True, False, True, True, False]]


def test_attention_masses():
    tensors, meta = read_golden("eagle31_one_document")
    drafter, embed = golden_drafter(tensors, meta)
    with torch.no_grad():
        drafter.qkv[:4 * 16].zero_()  # no query: attention is uniform over what a row sees
        document = documents(tensors)[0]
        steps = list(unrolled_steps(drafter, embed, document["token_ids"], document["aux_hidden_states"][:-1], 3))
    for k, step in enumerate(steps):
        seen = torch.arange(1, 24) + k
        torch.testing.assert_close(step.sink_mass, torch.arange(1, 24).clamp(max=4) / seen)
        torch.testing.assert_close(step.own_mass, k / seen)


def test_llama3_rope_scales_only_long_waves():
    tensors, meta = read_golden("eagle31_one_document")
    drafter, _ = golden_drafter(tensors, meta)
    plain, _ = rope_frequencies(drafter.config)
    scaled, factor = rope_frequencies(dataclasses.replace(drafter.config, rope_parameters={
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}))
    waves = 2 * torch.pi / plain
    assert factor == 1.0
    assert torch.equal(scaled[waves < 16], plain[waves < 16])
    torch.testing.assert_close(scaled[waves > 64], plain[waves > 64] / 8)
    between = (waves > 16) & (waves < 64)
    assert between.any() and (scaled[between] < plain[between]).all() and (scaled[between] > plain[between] / 8).all()


def small_target(vocab=50):
    info = TargetInfo(
        path="", name="small", fingerprint="small@0", hidden_size=16, intermediate_size=32, num_layers=12,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, vocab_size=vocab, rms_norm_eps=1e-5,
        rope_theta=10000.0, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=256)
    table = torch.randn(vocab, 16, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    return info, FrozenHead(table, torch.linspace(1, 2, 16), 1e-5, table)


def test_fresh_drafter_starts_from_the_target_and_repeats_itself():
    info, head = small_target()
    ids = torch.tensor([3, 7, 8, 40])
    drafter, same, other = (
        init_drafter(info, head, DrafterConfigSection(), ids, torch.Generator().manual_seed(seed), layer_ids=(1, 2, 5))
        for seed in (0, 0, 1))
    assert torch.equal(drafter.lm_head, head.lm_head[ids].float())
    # The target's norm up to a factor: logits of streams that point anywhere have a deviation of 1.75 at most.
    streams = torch.randn(4000, 16, generator=torch.Generator().manual_seed(5))
    streams /= streams.square().mean(1, keepdim=True).sqrt()
    logits = (streams * drafter.norm) @ drafter.lm_head.T
    assert torch.allclose(drafter.norm / head.norm_weight, (drafter.norm / head.norm_weight)[:1].expand(16))
    assert 1.6 < logits.square().mean().sqrt() < 1.9
    small = FrozenHead(head.embed_tokens, head.norm_weight / 100, head.norm_eps, head.lm_head)
    modest = init_drafter(info, small, DrafterConfigSection(), ids, torch.Generator().manual_seed(0), layer_ids=(1, 2, 5))
    assert torch.equal(modest.norm, small.norm_weight)
    assert drafter.config.layer_ids == (1, 2, 5)
    for name, value in drafter.named_parameters():
        assert value.dtype == torch.float32 and value.isfinite().all()
        assert torch.equal(value, same.get_parameter(name))
    assert not torch.equal(drafter.qkv, other.qkv)
    # Features of normed states come out about as large as those states.
    aux = torch.randn(200, 3, 16) * torch.tensor([1.0, 10.0, 100.0])[:, None]
    assert 0.5 < combine(drafter, aux).square().mean().sqrt() < 2


def test_full_vocabulary_head_is_never_the_targets_own():
    info, head = small_target()
    drafter = init_drafter(info, head, DrafterConfigSection(), torch.arange(50), torch.Generator().manual_seed(0))
    assert drafter.full_vocabulary
    stored = drafter.lm_head.to(torch.bfloat16)
    assert (stored != head.lm_head).all() and torch.allclose(stored, head.lm_head, rtol=0.02)


def test_wrong_layer_ids_are_named():
    info, head = small_target()
    for ids in ((3, 2, 1), (1, 2, 13), (2, 2, 3)):
        with pytest.raises(UserError, match="layer_ids"):
            init_drafter(info, head, DrafterConfigSection(), torch.arange(5), torch.Generator(), layer_ids=ids)
