"""Servable directories: what is written is what is read; anything damaged is refused by name."""

import dataclasses
import errno
import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from torchspec_lite.config import DrafterConfigSection
from torchspec_lite.drafter import draft, init_drafter
from torchspec_lite.errors import UserError
from torchspec_lite.export import export, export_speculators, load_drafter, read_manifest, verify, versions
from torchspec_lite.target import FrozenHead, TargetInfo

VOCAB, HIDDEN, LAYERS = 60, 32, (1, 3, 6)


@pytest.fixture(scope="module")
def target():
    info = TargetInfo(
        path="target-folder", name="small", fingerprint="small@0123", hidden_size=HIDDEN, intermediate_size=48,
        num_layers=12, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=VOCAB, rms_norm_eps=1e-5,
        rope_theta=1e5, rope_parameters={"rope_type": "default", "rope_theta": 1e5}, max_position_embeddings=256)
    generator = torch.Generator().manual_seed(1)
    return info, FrozenHead(torch.randn(VOCAB, HIDDEN, generator=generator), torch.rand(HIDDEN, generator=generator),
                            1e-5, torch.randn(VOCAB, HIDDEN, generator=generator))


def make(target, size=20, fc_norm=True, norm_output=True):
    info, head = target
    generator = torch.Generator().manual_seed(2)
    ids = torch.randperm(VOCAB, generator=generator)[:size].sort().values
    options = DrafterConfigSection(fc_norm=fc_norm, norm_output=norm_output, intermediate_size=40)
    drafter = init_drafter(info, head, options, ids, generator, LAYERS, 512)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if name.endswith("norm"):
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    return drafter


def write(drafter, target, folder, version=12, dtype=torch.float32):
    return export(drafter, folder, version, dtype, target[0], step=50, samples=640, parent=11, predicted=1.75)


def assert_same(one, other):
    assert one.config == other.config
    assert torch.equal(one.draft_ids, other.draft_ids)
    for name, value in one.named_parameters():
        assert torch.equal(value, other.get_parameter(name)), name
    assert {n for n, _ in one.named_parameters()} == {n for n, _ in other.named_parameters()}


@pytest.mark.parametrize("size", [20, VOCAB])
@pytest.mark.parametrize("fc_norm, norm_output", [(True, True), (False, False)])
def test_round_trip(target, tmp_path, size, fc_norm, norm_output):
    drafter = make(target, size, fc_norm, norm_output)
    path = write(drafter, target, tmp_path)
    assert path == tmp_path / "v000012" and versions(tmp_path) == {12: path}
    assert sorted(p.name for p in path.iterdir()) == ["README.md", "config.json", "manifest.json", "model.safetensors"]
    assert [p.name for p in tmp_path.iterdir()] == ["v000012"]
    assert_same(drafter, load_drafter(path))
    manifest = verify(path, "small@0123")
    assert (manifest.version, manifest.step, manifest.samples, manifest.parent, manifest.predicted) == (
        12, 50, 640, 11, 1.75)


def test_what_vllm_reads(target, tmp_path):
    """Keys and names as both of vLLM's runners look them up, spelt out by hand."""
    drafter = make(target)
    path = write(drafter, target, tmp_path)
    config = json.loads((path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert config["fc_norm"] is True and config["norm_output"] is True and config["norm_before_residual"] is False
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 6] and config["num_aux_hidden_states"] == 3
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 6]
    assert config["eagle_config"]["layer_ids"] == [1, 3, 6]
    assert config["eagle_config"]["use_aux_hidden_state"] is True
    assert config["rope_theta"] == 1e5 and config["max_position_embeddings"] == 512
    assert config["draft_vocab_size"] == 20 and config["vocab_size"] == VOCAB and config["torch_dtype"] == "float32"
    assert config["num_hidden_layers"] == 1 and config["tie_word_embeddings"] is False
    tensors = load_file(path / "model.safetensors")
    assert {name: list(value.shape) for name, value in tensors.items()} == {
        "fc.weight": [32, 96], "fc_norm.0.weight": [32], "fc_norm.1.weight": [32], "fc_norm.2.weight": [32],
        "midlayer.input_layernorm.weight": [32], "midlayer.hidden_norm.weight": [32],
        "midlayer.self_attn.q_proj.weight": [32, 64], "midlayer.self_attn.k_proj.weight": [16, 64],
        "midlayer.self_attn.v_proj.weight": [16, 64], "midlayer.self_attn.o_proj.weight": [32, 32],
        "midlayer.post_attention_layernorm.weight": [32], "midlayer.mlp.gate_proj.weight": [40, 32],
        "midlayer.mlp.up_proj.weight": [40, 32], "midlayer.mlp.down_proj.weight": [32, 40], "norm.weight": [32],
        "lm_head.weight": [20, 32], "d2t": [20]}
    assert tensors["d2t"].dtype == torch.int64
    assert torch.equal(torch.arange(20) + tensors["d2t"], drafter.draft_ids)
    assert torch.equal(tensors["midlayer.self_attn.k_proj.weight"], drafter.qkv[32:48])
    assert torch.equal(tensors["midlayer.mlp.up_proj.weight"], drafter.gate_up[40:])
    assert torch.equal(tensors["fc_norm.1.weight"], drafter.fc_norm[1])
    card = (path / "README.md").read_text()
    assert "EAGLE 3.1 drafter for small, version 12" in card and "1.750" in card


def test_full_vocabulary_has_no_map(target, tmp_path):
    path = write(make(target, VOCAB), target, tmp_path)
    assert "d2t" not in load_file(path / "model.safetensors")
    assert json.loads((path / "config.json").read_text())["draft_vocab_size"] == VOCAB


def test_bf16_export_drafts_like_the_rounded_drafter(target, tmp_path):
    drafter = make(target)
    path = write(drafter, target, tmp_path, dtype=torch.bfloat16)
    assert load_file(path / "model.safetensors")["fc.weight"].dtype == torch.bfloat16
    loaded = load_drafter(path)
    assert loaded.fc.dtype == torch.float32 and torch.equal(loaded.qkv, drafter.qkv.bfloat16().float())
    aux = torch.randn(29, 3, HIDDEN, generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(30) * 7 % VOCAB
    rounded = make(target).bfloat16().float()
    assert torch.equal(draft(loaded, target[1].embed_tokens, tokens, aux, 3),
                       draft(rounded, target[1].embed_tokens, tokens, aux, 3))


def retouch(path, change):
    """Change the tensors and make the manifest vouch for the change, so that only the content can give it away."""
    tensors = load_file(path / "model.safetensors")
    tensors = {name: value.clone() for name, value in tensors.items()}
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["model.safetensors"] = hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("change, message", [
    (lambda t: t["fc.weight"].view(-1)[3].fill_(float("nan")), "fc.weight holds numbers that are not finite"),
    (lambda t: t["norm.weight"][0].fill_(float("inf")), "norm.weight holds numbers that are not finite"),
    (lambda t: t.update({"lm_head.weight": torch.zeros(21, 32)}),
     r"lm_head.weight is \[21, 32\], the config asks for \[20, 32\]"),
    (lambda t: t.pop("fc_norm.1.weight"), "fc_norm.1.weight is missing"),
    (lambda t: t.pop("d2t"), "d2t is missing"),
    (lambda t: t.update({"input_norm.weight": torch.ones(96)}), "input_norm.weight has no place"),
    (lambda t: t["d2t"].fill_(VOCAB), "does not map"),
    (lambda t: t["d2t"].add_(torch.arange(20)), "absolute"),
])
def test_bad_weights_are_named(target, tmp_path, change, message):
    path = write(make(target), target, tmp_path)
    retouch(path, lambda tensors: None)
    verify(path, None)
    retouch(path, change)
    with pytest.raises(UserError, match=message):
        verify(path, None)


def test_damage_is_found(target, tmp_path):
    path = write(make(target), target, tmp_path)
    weights = path / "model.safetensors"
    whole = weights.read_bytes()
    for damaged in (whole[:-100], whole[:-1] + bytes([whole[-1] ^ 1]), whole[:50], b""):
        weights.write_bytes(damaged)
        with pytest.raises(UserError, match="model.safetensors is not the file that was exported"):
            verify(path, None)
        if len(damaged) < len(whole):
            with pytest.raises(UserError, match="not a readable safetensors file"):
                load_drafter(path)
    weights.unlink()
    with pytest.raises(UserError, match="no file model.safetensors"):
        verify(path, None)
    with pytest.raises(UserError, match=r"no \*.safetensors file"):
        load_drafter(path)
    (path / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        verify(path, None)


def test_wrong_target_and_tampered_manifest(target, tmp_path):
    path = write(make(target), target, tmp_path)
    with pytest.raises(UserError, match="trained against target small@0123, not other@9"):
        verify(path, "other@9")
    original = json.loads((path / "manifest.json").read_text())
    outside = {"../../secret": "0", **original["files"]}
    for change in ({"files": outside}, {"schema": 2}, {"step": "50"}, {"files": {}}, {"extra": 1}, {"parent": "x"}):
        (path / "manifest.json").write_text(json.dumps(original | change))
        with pytest.raises(UserError, match="manifest.json"):
            verify(path, None)
    (path / "manifest.json").write_text(json.dumps(original))
    shutil.move(path / "model.safetensors", tmp_path / "elsewhere")
    (path / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="no file model.safetensors"):
        verify(path, None)


def test_not_finite_is_never_exported(target, tmp_path):
    drafter = make(target)
    with torch.no_grad():
        drafter.o_proj[0, 0] = 1e38
    with pytest.raises(UserError, match="o_proj.weight holds numbers that are not finite"):
        write(drafter, target, tmp_path, dtype=torch.float16)  # finite in fp32, not in fp16
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "manifest.json"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_leaves_nothing(target, tmp_path, monkeypatch, name, code):
    real = Path.write_bytes

    def write_bytes(path, content):
        if path.name == name:
            real(path, content[:len(content) // 2])
            raise OSError(code, os.strerror(code), str(path))
        return real(path, content)

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    with pytest.raises(UserError, match="no space left on the disk while writing v000012.*run_root"):
        write(make(target), target, tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    write(make(target), target, tmp_path)


def test_crash_leaves_no_version_and_the_next_try_succeeds(target, tmp_path, monkeypatch):
    left = tmp_path / ".v000012.partial"
    left.mkdir()
    (left / "model.safetensors").write_text("half")
    (tmp_path / "v000003").mkdir()  # no manifest: not a version
    assert versions(tmp_path) == {}
    path = write(make(target), target, tmp_path)
    assert not left.exists() and list(versions(tmp_path)) == [12]
    before = (path / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="already there"):
        write(make(target, 21), target, tmp_path)
    assert (path / "model.safetensors").read_bytes() == before


def test_vllm_style_folder_of_another_tool(target, tmp_path):
    """`layers.0.`, t2d, rope_theta alone, layer ids left to the target's default, several weight files."""
    info, head = target
    drafter = make(target)
    path = write(drafter, target, tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors = {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}
    tensors["t2d"] = torch.isin(torch.arange(VOCAB), drafter.draft_ids)
    tensors["embed_tokens.weight"] = head.embed_tokens.clone()
    config = json.loads((path / "config.json").read_text())
    for key in ("rope_parameters", "eagle_aux_hidden_state_layer_ids", "eagle_config", "num_aux_hidden_states",
                "head_dim", "norm_before_fc", "norm_before_residual", "target_hidden_size"):
        del config[key]
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:5]}, other / "model-00001-of-00002.safetensors")
    save_file({name: tensors[name] for name in names[5:]}, other / "model-00002-of-00002.safetensors")
    loaded = load_drafter(other, info, head)
    assert loaded.config.layer_ids == (2, 6, 9)
    assert_same(drafter, init_with(loaded, layer_ids=LAYERS))
    with pytest.raises(UserError, match="no eagle_aux_hidden_state_layer_ids"):
        load_drafter(other)
    with pytest.raises(UserError, match="embed_tokens is not the target's"):
        load_drafter(other, info, dataclasses.replace(head, embed_tokens=head.embed_tokens + 1))
    with pytest.raises(UserError, match="vocab_size is 60, target small has 61"):
        load_drafter(other, dataclasses.replace(info, vocab_size=61), head)


def init_with(drafter, **changes):
    drafter.config = dataclasses.replace(drafter.config, **changes)
    return drafter


def test_drafter_without_a_head_takes_the_targets(target, tmp_path):
    info, head = target
    drafter = make(target)
    path = write(drafter, target, tmp_path)
    tensors = load_file(path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, path / "model.safetensors")
    assert torch.equal(load_drafter(path, info, head).lm_head, head.lm_head[drafter.draft_ids])
    with pytest.raises(UserError, match="lm_head.weight is missing"):
        load_drafter(path, info)


@pytest.mark.parametrize("key, value", [
    ("norm_before_residual", True), ("norm_before_fc", True), ("attention_bias", True), ("hidden_act", "gelu"),
    ("num_hidden_layers", 2), ("logit_scale", 0.5), ("target_hidden_size", 64)])
def test_other_kinds_of_drafter_are_named(target, tmp_path, key, value):
    path = write(make(target), target, tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(UserError, match=f"{key}"):
        load_drafter(path)


@pytest.mark.parametrize("size", [20, VOCAB])
def test_speculators_format_round_trip(target, tmp_path, size):
    info, head = target
    drafter = make(target, size)
    path = export_speculators(drafter, tmp_path / "out", torch.float32, info, head, 3)
    assert_same(drafter, load_drafter(path, info, head))
    config = json.loads((path / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3" and config["norm_before_residual"] is False
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert config["transformer_layer_config"]["num_hidden_layers"] == 1
    assert config["transformer_layer_config"]["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == list(LAYERS)
    tensors = load_file(path / "model.safetensors")
    assert "layers.0.self_attn.q_proj.weight" in tensors and ("t2d" in tensors) == (size < VOCAB)
    del config["norm_before_residual"]  # vLLM takes true then
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="norm_before_residual"):
        load_drafter(path, info, head)
    (path / "config.json").write_text(json.dumps(config | {"speculators_model_type": "peagle"}))
    with pytest.raises(UserError, match="only eagle3"):
        load_drafter(path, info, head)


def test_conflicting_layer_ids(target, tmp_path):
    path = write(make(target), target, tmp_path)
    config = json.loads((path / "config.json").read_text())
    config["eagle_config"]["layer_ids"] = [0, 2, 5]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="layer ids disagree"):
        load_drafter(path)


def test_manifest_alone(target, tmp_path):
    path = write(make(target), target, tmp_path)
    assert read_manifest(path).files.keys() == {"config.json", "model.safetensors", "README.md"}
