"""Conversations become ids and masks by the template alone; what cannot be masked for sure is rejected."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny import CHATML, SPECIAL_TOKENS, make_tiny_target, make_tokenizer
from torchspec_lite.chat import (
    Reject, load_tokenizer, mask_from_runs, mask_runs, render_prompt, render_replay)
from torchspec_lite.conversations import Conversation
from torchspec_lite.errors import UserError

LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA3_TOKENS = SPECIAL_TOKENS + ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
GENERATION = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRICT = (
    "{% for message in messages %}{% if message['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('Only the first message may be a system message') }}{% endif %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('Unknown role ' + message['role']) }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRIPS_REASONING = (
    "{% for message in messages %}{% set content = message['content'] %}"
    "{% if message['role'] == 'assistant' and not loop.last and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip() %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FORCES_REASONING = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\nTools: ' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] %}{{ message['content'] }}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}{{ '<call>' + call['function']['name'] + ' ' + "
    "call['function']['arguments'] | tojson + '</call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ 'Q:' + message['content'] + ' A:' }}"
    "{% else %}{{ message['content'] + '\n' }}{% endif %}{% endfor %}"
)
DROPS_ANSWERS = CHATML.replace("in messages %}", "in messages if message.role != 'assistant' %}")

TWO_TURNS = [("user", "What is the capital of France?"), ("assistant", "Paris."),
             ("user", "And what is a knife for?\n"), ("assistant", " To cut bread\n")]


def talk(*turns):
    return Conversation("c", tuple({"role": role, "content": content} for role, content in turns), None)


def supervised_text(tokenizer, rendered):
    """The text of each run of the mask."""
    return [tokenizer.decode(rendered.token_ids[start:end], clean_up_tokenization_spaces=False)
            for start, end in mask_runs(rendered.mask)]


@pytest.fixture(scope="module")
def chatml():
    return make_tokenizer()


def test_chatml_supervises_answers_and_their_end_of_turn(chatml):
    rendered = render_replay(chatml, talk(("system", "Be short."), *TWO_TURNS), 500)
    assert supervised_text(chatml, rendered) == ["Paris.<|im_end|>", " To cut bread\n<|im_end|>"]
    turns = [("system", "Be short."), *TWO_TURNS]
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    assert rendered.token_ids == chatml(text)["input_ids"]
    assert len(rendered.mask) == len(rendered.token_ids)


def test_llama3_style_header_is_prompt_and_eot_is_answer():
    tokenizer = make_tokenizer(chat_template=LLAMA3, special_tokens=LLAMA3_TOKENS)
    rendered = render_replay(tokenizer, talk(*TWO_TURNS), 500)
    assert supervised_text(tokenizer, rendered) == ["Paris.<|eot_id|>", "To cut bread<|eot_id|>"]
    assert rendered.token_ids.count(tokenizer.convert_tokens_to_ids("<|begin_of_text|>")) == 1


@pytest.mark.parametrize("turns", [
    TWO_TURNS,
    [("user", "a"), ("assistant", "Number <|im_end|> inside, and white space \n\n")],
    [("system", "S"), ("user", "Hé 你好 👋🏽"), ("assistant", "Grüße 你好 👋🏽 …"), ("user", ""), ("assistant", "x y")],
])
def test_the_mask_is_what_the_templates_own_generation_marks_say(turns):
    tokenizer = make_tokenizer(chat_template=GENERATION)
    messages = [{"role": role, "content": content} for role, content in turns]
    said = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    rendered = render_replay(tokenizer, talk(*turns), 500)
    assert rendered.token_ids == said["input_ids"]
    assert rendered.mask == said["assistant_masks"]


@pytest.mark.parametrize("template, turns, reason, words", [
    (CHATML, [], "no_messages", "empty"),
    (CHATML, [("user", "hi")], "no_answer", "assistant"),
    (CHATML, [("user", "hi"), ("assistant", "")], "no_answer", "assistant"),
    (CHATML, [("assistant", "I speak first")], "no_answer", "assistant"),
    (STRICT, [("user", "hi"), ("critic", "no"), ("assistant", "yes")], "template_refused", "Unknown role critic"),
    (STRICT, [("system", "a"), ("system", "b"), ("user", "c"), ("assistant", "d")], "template_refused", "system"),
    (STRIPS_REASONING, [("user", "a"), ("assistant", "<think>so</think> b"), ("user", "c"), ("assistant", "d")],
     "unstable_prefix", "turn 2"),
    (FORCES_REASONING, [("user", "a"), ("assistant", "no thought")], "unstable_prefix", "generation prompt"),
    (CHATML.replace("message['content']", "missing.name"), TWO_TURNS, "template_refused", "missing"),
    (DROPS_ANSWERS, TWO_TURNS, "unstable_prefix", "generation prompt"),
    (CHATML, [("user", "a"), ("assistant", "lone \ud800 surrogate")], "bad_text", "Unicode"),
])
def test_what_cannot_be_masked_is_rejected_with_its_reason(template, turns, reason, words):
    tokenizer = make_tokenizer(chat_template=template)
    with pytest.raises(Reject) as caught:
        render_replay(tokenizer, talk(*turns), 500)
    assert caught.value.reason == reason
    assert words in caught.value.detail


def test_reasoning_in_the_last_answer_alone_is_stable():
    tokenizer = make_tokenizer(chat_template=STRIPS_REASONING)
    rendered = render_replay(tokenizer, talk(("user", "a"), ("assistant", "<think>so</think> b")), 500)
    assert supervised_text(tokenizer, rendered) == ["<think>so</think> b<|im_end|>"]
    forced = make_tokenizer(chat_template=FORCES_REASONING)
    rendered = render_replay(forced, talk(("user", "a"), ("assistant", "<think>\nso</think> b")), 500)
    assert supervised_text(forced, rendered) == ["so</think> b<|im_end|>"]


def test_tool_calls_are_supervised_and_tool_results_are_not():
    tokenizer = make_tokenizer(chat_template=TOOLS)
    call = {"type": "function", "function": {"name": "weather", "arguments": {"town": "Paris"}}}
    messages = ({"role": "user", "content": "Rain?"}, {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "dry"}, {"role": "assistant", "content": "No."})
    conversation = Conversation("t", messages, [{"name": "weather"}])
    rendered = render_replay(tokenizer, conversation, 500)
    assert supervised_text(tokenizer, rendered) == [
        '<call>weather {"town": "Paris"}</call><|im_end|>', "No.<|im_end|>"]
    assert 'Tools: [{"name": "weather"}]' in tokenizer.decode(rendered.token_ids)
    prompt = tokenizer.decode(render_prompt(tokenizer, conversation))
    assert prompt.endswith("<|im_start|>tool\ndry<|im_end|>\n<|im_start|>assistant\n")


def test_empty_answers_and_an_opening_answer_are_not_supervised(chatml):
    turns = [("assistant", "Hello, I am here."), ("user", "a"), ("assistant", ""), ("user", "b"), ("assistant", "Good")]
    rendered = render_replay(chatml, talk(*turns), 500)
    assert supervised_text(chatml, rendered) == ["Good<|im_end|>"]


def merging_tokenizer(merges):
    """Characters of a small alphabet and the given merges, with nothing that keeps words apart."""
    tokens = ["<|end|>", *"QA:abcxy \n"] + ["".join(merge) for merge in merges]
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    tokenizer.chat_template = PLAIN
    return tokenizer


def test_a_token_never_crosses_from_prompt_to_answer():
    tokenizer = merging_tokenizer([(":", "a"), ("b", "c")])
    rendered = render_replay(tokenizer, talk(("user", "x"), ("assistant", "abc")), 500)
    assert tokenizer.convert_ids_to_tokens(tokenizer("Q:x A:abc\n")["input_ids"])[5:7] == [":a", "bc"]
    assert tokenizer.convert_ids_to_tokens(rendered.token_ids) == [*"Q:x A:", "a", "bc", "\n"]
    # No special token ends this template's turn: all that the turn adds is the answer.
    assert rendered.mask == [0] * 6 + [1] * 3
    prompt = render_prompt(tokenizer, talk(("user", "x")))
    assert rendered.token_ids[:len(prompt)] == prompt


def test_a_prompt_that_tokenizes_otherwise_alone_is_tokenized_alone():
    # Two line ends are one token alone and two before a word, by GPT-2's white space rule; no token lies across.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, "ĊĊ"])}
    backend = Tokenizer(models.BPE(vocabulary, [("Ċ", "Ċ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'user' %}{{ '\n\n' }}{% endif %}{% endfor %}")
    assert len(tokenizer("to\n\nit")["input_ids"]) == 6 and len(tokenizer("to\n\n")["input_ids"]) == 3
    rendered = render_replay(tokenizer, talk(("user", "to"), ("assistant", "it")), 500)
    assert tokenizer.convert_ids_to_tokens(rendered.token_ids) == ["t", "o", "ĊĊ", "i", "t"]
    assert rendered.mask == [0, 0, 0, 1, 1]
    assert rendered.token_ids[:3] == render_prompt(tokenizer, talk(("user", "to")))


def test_a_tokenizer_that_adds_to_every_piece_is_rejected_where_pieces_are_needed():
    tokenizer = merging_tokenizer([(":", "a"), ("x", "x")])
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="x", prepend_scheme="always")
    with pytest.raises(Reject) as caught:
        render_replay(tokenizer, talk(("user", "b"), ("assistant", "abc")), 500)
    assert caught.value.reason == "border_merge"


def test_truncation_cuts_ids_and_mask_alike(chatml):
    conversation = talk(*TWO_TURNS)
    whole = render_replay(chatml, conversation, 500)
    first = whole.mask.index(1)
    for length in range(1, len(whole.mask) + 2):
        if length < first + 2:
            with pytest.raises(Reject) as caught:
                render_replay(chatml, conversation, length)
            assert caught.value.reason == "too_long"
        else:
            cut = render_replay(chatml, conversation, length)
            assert cut.token_ids == whole.token_ids[:length] and cut.mask == whole.mask[:length]
            assert len(cut.mask) == min(length, len(whole.mask))


def test_one_token_of_answer_is_no_supervision():
    tokenizer = merging_tokenizer([("a", "\n")])
    for turns in ([("user", "x"), ("assistant", "a")], [("user", "x"), ("assistant", "a"), ("user", "y")]):
        with pytest.raises(Reject) as caught:
            render_replay(tokenizer, talk(*turns), 500)
        assert caught.value.reason == "empty_mask"


def test_the_prompt_stops_after_the_last_user_turn(chatml):
    full = talk(("system", "S"), *TWO_TURNS)
    prompt = chatml.decode(render_prompt(chatml, full))
    assert prompt.endswith("<|im_start|>user\nAnd what is a knife for?\n<|im_end|>\n<|im_start|>assistant\n")
    assert render_prompt(chatml, full) == render_prompt(chatml, talk(("system", "S"), *TWO_TURNS[:3]))
    replay = render_replay(chatml, full, 500)
    ids = render_prompt(chatml, full)
    assert replay.token_ids[:len(ids)] == ids and mask_runs(replay.mask)[-1][0] == len(ids)


@pytest.mark.parametrize("template, turns, reason", [
    (CHATML, [], "no_messages"),
    (CHATML, [("system", "only")], "no_prompt"),
    (CHATML, [("assistant", "only")], "no_prompt"),
    (STRICT, [("critic", "hi")], "template_refused"),
    ("", [("user", "hi")], "no_prompt"),
    (CHATML, [("user", "lone \ud800")], "bad_text"),
])
def test_prompts_that_cannot_be_asked_are_rejected(template, turns, reason):
    tokenizer = make_tokenizer(chat_template=template)
    with pytest.raises(Reject) as caught:
        render_prompt(tokenizer, talk(*turns))
    assert caught.value.reason == reason


def test_a_prompt_leaves_room_for_two_tokens_of_answer(chatml):
    conversation = talk(("user", "What is the capital of France?"))
    length = len(render_prompt(chatml, conversation))
    assert len(render_prompt(chatml, conversation, length + 2)) == length
    with pytest.raises(Reject, match="too_long"):
        render_prompt(chatml, conversation, length + 1)


def test_mask_runs_there_and_back():
    assert mask_runs([0, 1, 1, 0, 1]) == [[1, 3], [4, 5]]
    assert mask_runs([]) == mask_runs([0, 0]) == []
    for mask in ([1], [1, 0, 1, 1], [0, 1, 1, 0, 0, 1]):
        assert mask_from_runs(mask_runs(mask), len(mask)) == mask
    assert mask_from_runs([[1, 9]], 3) == [0, 1, 1]
    assert mask_from_runs([[5, 9]], 3) == [0, 0, 0]


def test_a_targets_tokenizer_is_loaded_or_refused(tmp_path):
    folder = make_tiny_target(tmp_path / "t", layers=1)
    assert load_tokenizer(folder).eos_token == "<|im_end|>"
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="no chat template"):
        load_tokenizer(folder)
    with pytest.raises(UserError, match="cannot be read"):
        load_tokenizer(tmp_path)
