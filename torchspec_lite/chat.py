"""Conversation → token ids and supervised mask, by the target's own chat template.

The template alone says where a turn begins and ends: a conversation is rendered with and without each assistant turn,
and what is added is the turn. No pattern of a template's text is known here, so any template works, and one whose
earlier text changes when a turn is added (it strips reasoning, moves tools) is found out and the sample rejected.
"""

from dataclasses import dataclass
from pathlib import Path

from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from torchspec_lite.conversations import Conversation
from torchspec_lite.errors import UserError

# What a template raises over messages it was not written for: its own `raise_exception`, an undefined name, or plain
# Python faults from adding None to text and the like.
TEMPLATE_FAULTS = (TemplateError, TypeError, ValueError, LookupError, AttributeError)


class Reject(Exception):
    """This sample cannot be used. `reason` is one of a few stable words for the ledger, `detail` is for people."""

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Rendered:
    """Token ids [n] and mask [n]; 1 marks what the assistant wrote, its end-of-turn token included."""

    token_ids: list[int]
    mask: list[int]


def load_tokenizer(path: str | Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The target's tokenizer. Raises UserError when it cannot be read, has no chat template or gives no offsets."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"target {path}: its tokenizer cannot be read: {error}") from error
    if tokenizer.chat_template is None:
        raise UserError(f"target {path}: its tokenizer has no chat template; add chat_template.jinja to the folder")
    if not tokenizer.is_fast:
        raise UserError(f"target {path}: no tokenizer.json; convert the tokenizer to the fast format")
    return tokenizer


def render_replay(tokenizer: PreTrainedTokenizerBase, conversation: Conversation, max_length: int) -> Rendered:
    """The whole conversation, answers included, cut to `max_length` tokens.

    Every assistant turn that answers something is supervised, except empty ones.
    Raises Reject: no_messages, no_answer, template_refused, unstable_prefix, border_merge, empty_mask, too_long.
    """
    messages = conversation.messages
    if not messages:
        raise Reject("no_messages", "the conversation is empty")
    answers = [place for place, message in enumerate(messages) if place and _is_answer(message)]
    if not answers:
        raise Reject("no_answer", "no assistant turn that answers something; `generate` mode needs none")
    text = _render(tokenizer, conversation, len(messages), False)
    borders = [0]
    for place in answers:
        before = _render(tokenizer, conversation, place, True)
        after = _render(tokenizer, conversation, place + 1, False)
        if not after.startswith(before):
            raise Reject("unstable_prefix", f"turn {place + 1} does not begin with the template's generation prompt")
        if not text.startswith(after):
            raise Reject("unstable_prefix", f"the template changes turn {place + 1} or an earlier one when later "
                                            "turns follow")
        borders += [len(before), _end_of_turn(tokenizer, text, len(before), len(after))]
    borders.append(len(text))
    ids, mask = [], []
    for index, piece in enumerate(_tokenize(tokenizer, text, borders)):
        ids += piece
        mask += [index % 2] * len(piece)
    if not _supervised(mask):
        raise Reject("empty_mask", "no assistant turn has two tokens")
    if not _supervised(mask[:max_length]):
        raise Reject("too_long", f"{len(ids)} tokens; the first {max_length} hold no two assistant tokens")
    return Rendered(ids[:max_length], mask[:max_length])


def render_prompt(tokenizer: PreTrainedTokenizerBase, conversation: Conversation,
                  max_length: int | None = None) -> list[int]:
    """Token ids [n] the target answers in `generate` mode: up to the last turn that is not the assistant's, and the
    template's generation prompt. `max_length` bounds prompt and answer; two tokens of answer must fit.

    Raises Reject: no_messages, no_prompt, template_refused, too_long.
    """
    end = len(conversation.messages)
    if not end:
        raise Reject("no_messages", "the conversation is empty")
    while end and conversation.messages[end - 1]["role"] == "assistant":
        end -= 1
    if all(message["role"] == "system" for message in conversation.messages[:end]):
        raise Reject("no_prompt", "no user turn to answer")
    ids = _encode(tokenizer, _render(tokenizer, conversation, end, True))
    if not ids:
        raise Reject("no_prompt", "the template renders nothing")
    if max_length is not None and len(ids) + 2 > max_length:
        raise Reject("too_long", f"a prompt of {len(ids)} tokens leaves no room for an answer within {max_length}")
    return ids


def mask_runs(mask: list[int]) -> list[list[int]]:
    """The mask's runs of ones as [start, end) pairs: short to send, and how `mask_from_runs` takes them."""
    runs, start = [], None
    for place, bit in enumerate(list(mask) + [0]):
        if bit and start is None:
            start = place
        elif not bit and start is not None:
            runs.append([start, place])
            start = None
    return runs


def mask_from_runs(runs: list[list[int]], length: int) -> list[int]:
    """Mask [length] from [start, end) pairs; what lies beyond `length` is cut."""
    mask = [0] * length
    for start, end in runs:
        end = min(end, length)
        mask[start:end] = [1] * (end - start)
    return mask


def _is_answer(message: dict) -> bool:
    said = [value for key, value in message.items() if key not in ("role", "name") and value]
    return message["role"] == "assistant" and bool(said)


def _render(tokenizer, conversation, turns, add_generation_prompt) -> str:
    try:
        return tokenizer.apply_chat_template(
            list(conversation.messages[:turns]), tools=conversation.tools, tokenize=False,
            add_generation_prompt=add_generation_prompt)
    except TEMPLATE_FAULTS as error:
        raise Reject("template_refused", f"the chat template refuses the first {turns} turns: {error}") from error


def _end_of_turn(tokenizer, text, start, end) -> int:
    """End of what the assistant itself writes in text[start:end].

    Templates put white space after the end-of-turn token; serving stops at that token, so the rest is not the
    assistant's. Without such a token the turn's whole text is.
    """
    stripped = start + len(text[start:end].rstrip())
    closing = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    return stripped if any(text.endswith(token, start, stripped) for token in closing) else end


def _tokenize(tokenizer, text, borders) -> list[list[int]]:
    """Token ids of each piece between borders, as serving makes them: each prompt is tokenized without its answer.

    Usually the borders fall between tokens and one tokenization of the whole text serves. Where joined text would
    merge across a border, or tokenize the prompt otherwise than alone, the pieces are tokenized apart.
    """
    encoded = _call(tokenizer, text, return_offsets_mapping=True)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    cuts = _cuts(offsets, borders)
    # Borders with odd index end a prompt; a prompt tokenized alone must be how the joined text starts.
    whole = cuts is not None and all(
        _encode(tokenizer, text[:borders[index]]) == ids[:cuts[index]] for index in range(1, len(borders) - 1, 2))
    if whole:
        return [ids[first:last] for first, last in zip(cuts, cuts[1:])]
    pieces = [_encode(tokenizer, text[first:last]) for first, last in zip(borders, borders[1:])]
    joined = [token for piece in pieces for token in piece]
    if _decode(tokenizer, joined) != _decode(tokenizer, ids):
        raise Reject("border_merge", "the tokenizer joins prompt and answer, and apart they read differently")
    return pieces


def _cuts(offsets, borders) -> list[int] | None:
    """Index of the first token at or after each border (a character place), None if a token lies across one."""
    cuts, token = [], 0
    for border in borders:
        while token < len(offsets) and offsets[token][1] <= border:
            token += 1
        if token < len(offsets) and offsets[token][0] < border:
            return None
        cuts.append(token)
    cuts[0], cuts[-1] = 0, len(offsets)
    return cuts


def _supervised(mask) -> bool:
    """Whether a drafter can learn from it: it reads one assistant token and predicts the next (EAGLE31.md)."""
    return any(mask[place] and mask[place + 1] for place in range(1, len(mask) - 1))


def _encode(tokenizer, text) -> list[int]:
    return _call(tokenizer, text)["input_ids"]


def _call(tokenizer, text, **options):
    try:
        return tokenizer(text, add_special_tokens=False, truncation=False, **options)
    except (TypeError, UnicodeError) as error:
        raise Reject("bad_text", f"the text is not valid Unicode: {error}") from error


def _decode(tokenizer, ids) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
