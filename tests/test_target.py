"""A target's folder is described as it is, or refused by name."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.tiny import make_tiny_target
from torchspec_lite.errors import UserError
from torchspec_lite.target import describe, load_head


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_tiny_target(tmp_path_factory.mktemp("target") / "tiny", layers=8)


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made, tmp_path / "tiny")


def change(folder, **keys):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def test_the_description_is_what_transformers_builds(folder):
    info, model = describe(folder), AutoModelForCausalLM.from_pretrained(folder)
    attention = model.model.layers[0].self_attn
    assert (info.name, info.num_layers, info.hidden_size) == ("tiny", len(model.model.layers), 64)
    assert info.num_attention_heads * info.head_dim == attention.q_proj.weight.shape[0]
    assert info.num_key_value_heads * info.head_dim == attention.k_proj.weight.shape[0]
    assert info.intermediate_size == model.model.layers[0].mlp.up_proj.weight.shape[0]
    assert info.vocab_size == model.lm_head.weight.shape[0]
    assert info.rms_norm_eps == model.model.norm.variance_epsilon
    assert info.rope_theta == 10000.0 and info.rope_parameters["rope_type"] == "default"
    assert info.default_layer_ids() == (2, 4, 5)


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_gives_the_models_logits(tmp_path, tied):
    folder = make_tiny_target(tmp_path / "t", layers=2, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_pretrained(folder)
    head = load_head(describe(folder), torch.float32)
    ids = torch.tensor([[5, 77, 300]])
    stream = {}
    model.model.norm.register_forward_hook(lambda module, inputs, output: stream.update(before=inputs[0]))
    with torch.no_grad():
        expected = model(ids, output_hidden_states=True)
        x = stream["before"].float()
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + head.norm_eps) * head.norm_weight
        torch.testing.assert_close(normed @ head.lm_head.T, expected.logits)
    assert torch.equal(head.embed_tokens[ids], expected.hidden_states[0])
    assert torch.equal(head.embed_tokens, head.lm_head) == tied
    assert head.norm_weight.dtype == torch.float32


def test_tied_by_config_uses_the_embedding_whatever_the_file_holds(folder):
    change(folder, tie_word_embeddings=True)
    head = load_head(describe(folder), torch.bfloat16)
    assert torch.equal(head.lm_head, head.embed_tokens) and head.lm_head.dtype == torch.bfloat16


def test_old_and_new_ways_to_write_rope(folder):
    change(folder, rope_parameters=..., rope_theta=500000.0, rope_scaling={
        "type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192})
    rope = describe(folder).rope_parameters
    assert rope["rope_type"] == "llama3" and rope["factor"] == 8.0 and rope["rope_theta"] == 500000.0
    change(folder, rope_theta=..., rope_scaling=None)
    assert describe(folder).rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}


def test_the_fingerprint_follows_config_and_weights_and_nothing_else(folder, tmp_path):
    before = describe(folder).fingerprint
    assert before == describe(shutil.copytree(folder, tmp_path / "elsewhere" / "tiny")).fingerprint
    assert before.startswith("tiny@") and len(before) == 5 + 16
    change(folder, transformers_version="9.9")
    assert describe(folder).fingerprint == before
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.3.mlp.down_proj.weight"].mul_(1.01)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    changed = describe(folder).fingerprint
    assert changed != before
    change(folder, rms_norm_eps=1e-4)
    assert describe(folder).fingerprint not in (before, changed)


def test_a_hub_snapshot_is_named_after_its_model(folder, tmp_path):
    place = tmp_path / "hub" / "models--org--Some-Model-1B" / "snapshots" / "0123abcd"
    shutil.copytree(folder, place)
    assert describe(place).name == "Some-Model-1B"
    assert describe(place).fingerprint.startswith("Some-Model-1B@")


@pytest.mark.parametrize("layers, ids", [(4, (1, 2, 3)), (5, (1, 2, 4)), (6, (1, 3, 5)), (7, (2, 3, 4)),
                                         (30, (2, 15, 27))])
def test_default_layer_ids_are_three_and_ascend(folder, layers, ids):
    change(folder, num_hidden_layers=layers)
    assert describe(folder).default_layer_ids() == ids


def test_a_target_too_shallow_for_three_layers_is_refused(folder):
    change(folder, num_hidden_layers=3)
    with pytest.raises(UserError, match="capture.layer_ids"):
        describe(folder).default_layer_ids()


@pytest.mark.parametrize("keys, words", [
    ({"hidden_size": ...}, "no key 'hidden_size'"),
    ({"hidden_size": "wide"}, "hidden_size"),
    ({"num_attention_heads": 0}, "num_attention_heads"),
    ({"num_hidden_layers": None}, "num_hidden_layers"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope"),
    ({"model_type": "gemma2"}, "gemma2"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ({"logits_scaling": 8.0}, "logits_scaling"),
])
def test_what_is_not_supported_is_refused_by_name(folder, keys, words):
    change(folder, **keys)
    with pytest.raises(UserError, match=words):
        describe(folder)


def test_a_broken_folder_is_refused_by_name(folder, tmp_path):
    with pytest.raises(UserError, match="no readable config.json"):
        describe(tmp_path / "nowhere")
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:1000])
    with pytest.raises(UserError, match="model.safetensors: .*whole"):
        describe(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no \*.safetensors"):
        describe(folder)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(UserError, match="config.json"):
        describe(folder)
    (folder / "config.json").write_bytes(b"\xff{")
    with pytest.raises(UserError, match="not valid JSON"):
        describe(folder)


def test_weights_without_a_head_are_refused_by_name(folder):
    save_file({"transformer.wte.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    with pytest.raises(UserError, match="model.embed_tokens.weight"):
        load_head(describe(folder), torch.float32)
