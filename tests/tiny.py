"""A random target small enough for any test: a Llama with a byte-level tokenizer and a chat template."""

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CORPUS = """The quick brown fox jumps over the lazy dog. What is the capital of France? The capital of France is Paris.
Write a function that returns the sum of two numbers. def add(first, second): return first + second
Explain why the sky is blue. Light is scattered by the air, and blue light is scattered more than red light.
A train leaves the station at three and travels sixty miles in an hour. How far does it travel in four hours?
system user assistant tool for while if else import class print range length string number list value
Summarize this text in one sentence. Once upon a time there was a small town beside a river and a great forest.
Give me a list of five things to take on a journey: water, bread, a map, a knife and a warm coat for the night.
You are a helpful assistant. Answer the question of the user in a short and friendly way, and say when you do not know.
"""


def make_tiny_target(folder: str | Path, seed: int = 0, layers: int = 4, hidden: int = 64, vocab: int = 512,
                     tie_word_embeddings: bool = False) -> Path:
    """Write a random fp32 Llama and its tokenizer in Hugging Face format; the same arguments give the same bytes.

    Heads have 32 channels (the least that vLLM's CPU attention takes), so `hidden` is a multiple of 32. Weights are
    wide (std 2 / sqrt(inputs)) so that greedy output depends on the prompt instead of repeating itself.
    """
    folder = Path(folder)
    heads = hidden // 32
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=max(1, heads // 2), head_dim=32,
        max_position_embeddings=2048, rms_norm_eps=1e-5, tie_word_embeddings=tie_word_embeddings,
        bos_token_id=None, eos_token_id=2, pad_token_id=0, dtype="float32",
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                std = 1.0 if "embed_tokens" in name else 2.0 * parameter.shape[1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
            else:
                # Norm weights away from one, so that a forgotten or doubled norm shows.
                parameter.copy_(1.0 + 0.3 * torch.randn(parameter.shape, generator=generator))
    model.generation_config.do_sample = False
    model.save_pretrained(folder)
    make_tokenizer(vocab).save_pretrained(folder)
    return folder


def make_tokenizer(vocab: int = 512, chat_template: str = CHATML,
                   special_tokens: tuple[str, ...] = SPECIAL_TOKENS) -> PreTrainedTokenizerFast:
    """Byte-level BPE with exactly `vocab` tokens; `<|im_end|>` (id 2) ends a turn and an answer.

    `special_tokens` start with the three that the template above uses; others may follow.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=list(special_tokens), show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), min_frequency=1,
    )
    tokenizer.train_from_iterator(CORPUS.splitlines(keepends=True), trainer)
    size = tokenizer.get_vocab_size()
    tokenizer.add_tokens([AddedToken(f"<|spare_{index}|>") for index in range(vocab - size)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=2048,
    )
    fast.chat_template = chat_template
    return fast
