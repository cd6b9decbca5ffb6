"""Small functions on text, written for the demo prompts: the tests run every example."""


def initials(name: str) -> str:
    """Return the initials of a full name, each followed by a dot.
    >>> initials("ada king lovelace")
    'A.K.L.'
    """
    return "".join(w[0].upper() + "." for w in name.split())


def longest_word(sentence):
    """
    Return the longest word of a sentence. If there are several, return the first of them.
    >>> longest_word("the quick brown fox")
    'quick'
    """
    return max(sentence.split(), key=len)


def mirror_pairs(text: str) -> int:
    """Count the positions i in the first half of the text whose letter equals the letter at the mirrored position.
    >>> mirror_pairs("abca")
    1
    >>> mirror_pairs("level")
    2
    """
    return sum(text[i] == text[-1 - i] for i in range(len(text) // 2))


def squeeze(text: str) -> str:
    """Replace every run of the same letter by a single letter.
    >>> squeeze("boookkeeper")
    'bokeper'
    """
    return "".join(c for i, c in enumerate(text) if i == 0 or c != text[i - 1])


def title_case(words: list) -> list:
    """Capitalise every word of the list, but leave words of one or two letters as they are.
    >>> title_case(["lord", "of", "the", "rings"])
    ['Lord', 'of', 'The', 'Rings']
    """
    return [w if len(w) <= 2 else w.capitalize() for w in words]


def count_vowel_groups(word: str) -> int:
    """Count the groups of vowels that stand next to each other.
    >>> count_vowel_groups("beautiful")
    3
    """
    return sum(c in "aeiou" and (i == 0 or word[i - 1] not in "aeiou") for i, c in enumerate(word))


def seconds_to_text(seconds: int) -> str:
    """Turn a number of seconds into text of the form 'h:mm:ss'.
    >>> seconds_to_text(3725)
    '1:02:05'
    """
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def valid_pin(pin: str) -> bool:
    """A PIN is valid if it has four or six characters, and all of them are digits.
    >>> valid_pin("1234")
    True
    >>> valid_pin("12a4")
    False
    """
    return len(pin) in (4, 6) and pin.isdigit()


def triangle_kind(a: int, b: int, c: int) -> str:
    """Return 'equilateral', 'isosceles', 'scalene', or 'none' if the sides do not form a triangle.
    >>> triangle_kind(3, 4, 5)
    'scalene'
    >>> triangle_kind(1, 1, 5)
    'none'
    """
    x, y, z = sorted((a, b, c))
    if x + y <= z:
        return "none"
    return {1: "equilateral", 2: "isosceles", 3: "scalene"}[len({a, b, c})]


def word_lengths(text: str) -> dict:
    """Map every word of the text to its length.
    >>> word_lengths("red apple")
    {'red': 3, 'apple': 5}
    """
    return {w: len(w) for w in text.split()}


def caesar(text: str, shift: int) -> str:
    """Shift every lower-case letter by the given number of places in the alphabet; leave other characters alone.
    >>> caesar("abc xyz", 2)
    'cde zab'
    """
    return "".join(chr((ord(c) - 97 + shift) % 26 + 97) if "a" <= c <= "z" else c for c in text)


def is_sorted_by_length(words: list) -> bool:
    """Return True if no word is shorter than the word before it.
    >>> is_sorted_by_length(["a", "to", "the"])
    True
    >>> is_sorted_by_length(["the", "a"])
    False
    """
    return all(len(a) <= len(b) for a, b in zip(words, words[1:]))


def compress(text: str) -> str:
    """Write each run of equal letters as the letter and the length of the run.
    >>> compress("aaabcc")
    'a3b1c2'
    """
    from itertools import groupby
    return "".join(k + str(len(list(g))) for k, g in groupby(text))


def hide_email(address: str) -> str:
    """Replace all characters before the @ by stars, but keep the first one.
    >>> hide_email("maria@example.org")
    'm****@example.org'
    """
    n, d = address.split("@")
    return n[0] + "*" * (len(n) - 1) + "@" + d


def middle(text: str) -> str:
    """Return the middle letter of the text, or the two middle letters if its length is even.
    >>> middle("river")
    'v'
    >>> middle("lake")
    'ak'
    """
    n = len(text)
    return text[(n - 1) // 2:n // 2 + 1]


def group_by_first_letter(words: list) -> dict:
    """Group the words by their first letter, keeping their order.
    >>> group_by_first_letter(["ant", "bee", "ape"])
    {'a': ['ant', 'ape'], 'b': ['bee']}
    """
    out = {}
    for w in words:
        out.setdefault(w[0], []).append(w)
    return out


def can_spell(word: str, letters: str) -> bool:
    """Check whether the word can be spelled with the letters, using each of them at most once.
    >>> can_spell("tea", "eating")
    True
    >>> can_spell("teat", "eating")
    False
    """
    return all(word.count(c) <= letters.count(c) for c in word)


def snake_to_camel(name: str) -> str:
    """Turn a name like 'total_item_count' into 'totalItemCount'.
    >>> snake_to_camel("total_item_count")
    'totalItemCount'
    """
    f, *r = name.split("_")
    return f + "".join(w.capitalize() for w in r)


def cheapest(prices: dict) -> str:
    """Return the name of the cheapest item. In a tie return the one that comes first in the alphabet.
    >>> cheapest({"pen": 2, "cup": 2, "bag": 9})
    'cup'
    """
    return min(prices, key=lambda n: (prices[n], n))


def first_repeated(text: str):
    """Return the first letter that occurs for the second time, or None.
    >>> first_repeated("abcdb")
    'b'
    >>> first_repeated("abc")
    """
    seen = set()
    for c in text:
        if c in seen:
            return c
        seen.add(c)


def reading_time(text: str, words_per_minute: int = 200) -> int:
    """Return the reading time of a text in minutes, rounded up.
    >>> reading_time("one two three four five", 2)
    3
    """
    return -(-len(text.split()) // words_per_minute)


def queue_position(arrivals: list, name: str) -> int:
    """Return the place of the name in the queue, starting from one, or -1 if it is not there.
    >>> queue_position(["Ida", "Max"], "Max")
    2
    """
    return arrivals.index(name) + 1 if name in arrivals else -1


def censor(text: str, banned: list) -> str:
    """Replace each banned word in the text by as many stars as it has letters.
    >>> censor("what the heck", ["heck"])
    'what the ****'
    """
    return " ".join("*" * len(w) if w in banned else w for w in text.split())


def shared_ending(first: str, second: str) -> str:
    """Return the longest ending that both words share.
    >>> shared_ending("reading", "singing")
    'ing'
    >>> shared_ending("cat", "dog")
    ''
    """
    length = 0
    while length < min(len(first), len(second)) and first[-1 - length] == second[-1 - length]:
        length += 1
    return first[len(first) - length:]


def to_ordinal(n: int) -> str:
    """Write a positive number with its English ordinal ending as a string.
    >>> to_ordinal(22)
    '22nd'
    >>> to_ordinal(13)
    '13th'
    """
    if n % 100 in (11, 12, 13):
        return f"{n}th"
    return f"{n}" + {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
