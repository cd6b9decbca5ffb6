"""Prompts widened by templates: school maths, writing and questions, and tasks on short texts.

Every prompt is a function of its id (the id seeds the choices), so adding a template leaves the others as they are.
Templates are data: `prompts/*.json`. In a template, `[a|b]` is a choice of wordings and `{slot}` is filled from a list
of the same name (a digit at the end asks for another word of that list, a capital letter for a capital letter).
"""

import json
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path

PROMPTS = Path(__file__).parent / "prompts"
MATHS_PER_TEMPLATE = 24
PRONOUNS = {
    "he": {"he": "he", "He": "He", "his": "his", "His": "His", "him": "him"},
    "she": {"he": "she", "He": "She", "his": "her", "His": "Her", "him": "her"},
}


def _choose_wording(text: str, rng: random.Random) -> str:
    """Replace every `[a|b|…]` by one of its parts."""
    return re.sub(r"\[([^\[\]]*)\]", lambda match: rng.choice(match.group(1).split("|")), text)


def _mend_articles(text: str) -> str:
    """Write `an` before a vowel: the templates say `a` before a slot."""
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)


def _fill_lists(text: str, lists: dict[str, list[str]], rng: random.Random) -> dict[str, str]:
    """Values for the slots of `text` that `lists` knows; slots of one list get different values."""
    values: dict[str, str] = {}
    for slot in dict.fromkeys(re.findall(r"\{(\w+)\}", text)):
        name = slot.rstrip("0123456789")
        key = slot if slot in lists else name[:1].lower() + name[1:]
        if key not in lists:
            continue
        taken = {value.lower() for value in values.values()}
        value = rng.choice([word for word in lists[key] if word.lower() not in taken])
        values[slot] = value[:1].upper() + value[1:] if slot[0].isupper() else value
    return values


def maths_numbers(template: dict, rng: random.Random) -> dict[str, int | str]:
    """Numbers for a maths template: drawn, then products and sums of those, so that divisions come out even."""
    values: dict[str, int | str] = dict(template.get("constants", {}))
    for name, (low, high) in template.get("numbers", {}).items():
        values[name] = rng.randint(low, high)
    for name, options in template.get("choices", {}).items():
        values[name] = rng.choice(options)
    for name, factors in template.get("products", {}).items():
        values[name] = math.prod(values[factor] for factor in factors)
    for name, terms in template.get("sums", {}).items():
        values[name] = sum(values[term] for term in terms)
    return values


def maths_prompts() -> Iterator[tuple[str, str]]:
    """(id, text) of word problems of several steps."""
    table = json.loads((PROMPTS / "maths.json").read_text(encoding="utf-8"))
    for template in table["templates"]:
        for index in range(MATHS_PER_TEMPLATE):
            identity = f"maths-{template['name']}-{index:03d}"
            rng = random.Random(identity)
            (name, pronoun), (friend, _), (other, _) = rng.sample(table["people"], 3)
            text = _choose_wording(template["text"], rng)
            values = {"name": name, "friend": friend, "other": other, **PRONOUNS[pronoun]}
            values |= maths_numbers(template, rng)
            values |= _fill_lists(text, table["lists"] | template.get("lists", {}), rng)
            yield identity, _mend_articles(text.format_map(values))


def writing_prompts() -> Iterator[tuple[str, str]]:
    """(id, text) of instructions: writing, explanations, comparisons, advice, role play, opinions."""
    table = json.loads((PROMPTS / "templates.json").read_text(encoding="utf-8"))
    for template in table["templates"]:
        for index in range(template["times"]):
            identity = f"write-{template['name']}-{index:03d}"
            rng = random.Random(identity)
            text = _choose_wording(template["text"], rng)
            yield identity, _mend_articles(text.format_map(_fill_lists(text, table["lists"], rng)))


def paragraph_prompts() -> Iterator[tuple[str, str]]:
    """(id, text) of tasks on short texts: summaries, facts, titles, simpler wording."""
    table = json.loads((PROMPTS / "paragraphs.json").read_text(encoding="utf-8"))
    for name, paragraph in table["paragraphs"].items():
        for task, wording in table["tasks"].items():
            yield f"text-{task}-{name}", wording.format(text=paragraph)
