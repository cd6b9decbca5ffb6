"""Prompts about code: from functions and tasks written for the demo, and from what Python itself ships.

The standard library's source is read from the disk of the machine at hand and nothing of it is stored in this
project. A file that the machine's Python lacks gives no prompts.
"""

import ast
import hashlib
import random
import re
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics

PROMPTS = Path(__file__).parent / "prompts"
STDLIB_PROMPTS = 680
MAX_CHARACTERS = 900  # of code or documentation in one prompt: about 250 tokens
STDLIB_FILES = """
    argparse ast base64 bdb bisect calendar cgitb cmd code codecs codeop collections/__init__ colorsys compileall
    concurrent/futures/_base configparser contextlib copy copyreg csv dataclasses datetime _pydatetime _pydecimal
    difflib dis doctest email/utils email/message email/header email/base64mime email/quoprimime email/encoders enum
    filecmp fileinput fnmatch fractions ftplib functools genericpath getopt getpass gettext glob gzip heapq hashlib
    hmac html/__init__ html/parser http/client http/cookiejar http/cookies http/server imaplib imghdr
    importlib/util inspect ipaddress json/__init__ json/decoder json/encoder keyword linecache locale
    logging/__init__ logging/handlers lzma mailbox mimetypes modulefinder netrc nntplib ntpath numbers opcode
    operator optparse os pathlib pdb pickle pickletools pkgutil platform plistlib poplib posixpath pprint profile
    pstats pyclbr queue quopri random reprlib rlcompleter runpy sched secrets selectors shelve shlex shutil smtplib
    sndhdr socket socketserver ssl stat statistics string subprocess symtable sysconfig tabnanny tarfile telnetlib
    tempfile textwrap threading timeit tokenize trace traceback tracemalloc turtle types typing unittest/case
    unittest/util unittest/mock unittest/loader urllib/parse urllib/request urllib/robotparser uuid wave weakref
    webbrowser xml/dom/minidom xml/etree/ElementTree xml/sax/saxutils xmlrpc/client zipapp zipfile
    asyncio/base_events asyncio/events asyncio/futures asyncio/locks asyncio/queues asyncio/runners asyncio/streams
    asyncio/tasks wsgiref/util wsgiref/handlers idlelib/textview idlelib/pyparse idlelib/paragraph lib2to3/pytree
""".split()
COMPLETE = (
    "Complete the code I provided.\n\n{head}\n",
    "Complete the code I provided.\n\n{head}\n",
    "Complete the following Python function:\n\n{head}\n",
    "Please write the body of this function.\n\n```python\n{head}\n```",
)
ABOUT_SOURCE = (
    "Explain what this function does.\n\n{bare}",
    "Explain what this function does, line by line.\n\n```python\n{bare}\n```",
    "Write a docstring for this function:\n\n{bare}",
    "How could this Python code be made easier to read?\n\n{bare}",
    "What would be a good test for this function? Write one.\n\n{bare}",
)
TOPIC_REQUESTS = (
    "Explain this to a Python beginner",
    "Give an example for this rule of Python",
    "Summarize this passage on Python",
    "Say this in simpler words",
)
TASKS = (
    "Write a Python function that {task}.",
    "Write a program in {language} that {task}.",
    "Write Python code that {task}, and explain how it works.",
    "I need a Python function that {task}. Add {extra}.",
)
LANGUAGES = ("JavaScript", "Java", "C++", "Go", "Ruby", "C#")
EXTRAS = ("comments", "a docstring", "a short example", "type hints", "two tests")


@dataclass(frozen=True)
class Function:
    """A function as text: `head` ends with its docstring, `bare` is the whole of it without the docstring."""

    name: str
    signature: str
    docstring: str
    head: str
    bare: str
    method: bool


def functions_of(source: str) -> list[Function]:
    """The documented functions and methods of a module, in the order of the source."""
    tree = ast.parse(source)
    found = [("", node) for node in tree.body]
    found += [(f"{outer.name}.", node) for outer in tree.body if isinstance(outer, ast.ClassDef) for node in outer.body]
    lines = source.splitlines()
    functions = []
    for prefix, node in found:
        if not isinstance(node, ast.FunctionDef) or not ast.get_docstring(node) or len(node.body) < 2:
            continue
        head = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.body[0].end_lineno]))
        signature_lines = lines[node.lineno - 1 : node.body[0].lineno - 1]
        bare = textwrap.dedent("\n".join(signature_lines + lines[node.body[0].end_lineno : node.end_lineno]))
        functions.append(
            Function(
                name=prefix + node.name,
                signature=f"{node.name}({ast.unparse(node.args)})",
                docstring=ast.get_docstring(node),
                head=head,
                bare=re.sub(r"\n\s*\n", "\n", bare),
                method=bool(prefix),
            )
        )
    return functions


def first_paragraph(docstring: str) -> str:
    """The first paragraph of a docstring in one line, examples left out."""
    return " ".join(docstring.split(">>>")[0].split("\n\n")[0].split())


def own_function_prompts() -> Iterator[tuple[str, str]]:
    """(id, text) from `prompts/functions_*.py`: complete, write, explain, test."""
    for path in sorted(PROMPTS.glob("functions_*.py")):
        for function in functions_of(path.read_text(encoding="utf-8")):
            text = first_paragraph(function.docstring)
            rng = random.Random(function.name)
            yield f"code-complete-{function.name}", COMPLETE[0].format(head=function.head)
            yield f"code-write-{function.name}", f"Write a Python function `{function.signature}`. {text}"
            yield f"code-explain-{function.name}", rng.choice(ABOUT_SOURCE).format(bare=function.bare)
            yield f"code-test-{function.name}", f"Write three asserts that test this function.\n\n{function.head}\n"


def task_prompts() -> Iterator[tuple[str, str]]:
    """(id, text) of small programming tasks in several wordings."""
    for task in (PROMPTS / "tasks.txt").read_text(encoding="utf-8").splitlines():
        slug = "-".join(re.findall(r"\w+", task.lower())[:7])
        for number, wording in enumerate(TASKS):
            rng = random.Random(f"{slug}-{number}")
            text = wording.format(task=task, language=rng.choice(LANGUAGES), extra=rng.choice(EXTRAS))
            yield f"task-{number}-{slug}", text


def _usable(function: Function) -> bool:
    """Short, documented in words, public."""
    public = not function.name.split(".")[-1].startswith("_")
    return public and 40 <= len(function.docstring) <= MAX_CHARACTERS and len(function.head) <= MAX_CHARACTERS


def _stdlib_prompt(module: str, function: Function) -> tuple[str, str] | None:
    """One prompt made from a function of the standard library; its name decides which kind."""
    identity = f"{module}.{function.name}"
    rng = random.Random(identity)
    lines = function.bare.count("\n")
    about_source = 3 <= lines <= 25 and len(function.bare) <= MAX_CHARACTERS
    if about_source and (function.method or rng.random() < 0.25):
        return f"stdlib-source-{identity}", rng.choice(ABOUT_SOURCE).format(bare=function.bare)
    if function.method:
        return None
    if rng.random() < 0.2:
        text = first_paragraph(function.docstring)
        return f"stdlib-write-{identity}", f"Write a Python function `{function.signature}` for this purpose: {text}"
    return f"stdlib-complete-{identity}", rng.choice(COMPLETE).format(head=function.head)


def stdlib_prompts() -> list[tuple[str, str]]:
    """(id, text) from the standard library of the Python that runs this: at most `STDLIB_PROMPTS`.

    Functions come before methods, since a method alone says less; among each, the order is that of a hash.
    """
    library = Path(sysconfig.get_path("stdlib"))
    ranked = []
    for module in STDLIB_FILES:
        path = library / f"{module}.py"
        if not path.is_file():
            continue
        for function in functions_of(path.read_text(encoding="utf-8")):
            prompt = _stdlib_prompt(module.replace("/", ".").removesuffix(".__init__"), function)
            if prompt and _usable(function):
                ranked.append((function.method, hashlib.sha256(prompt[0].encode()).digest(), prompt))
    return [prompt for _, _, prompt in sorted(ranked)[:STDLIB_PROMPTS]]


def topic_prompts() -> Iterator[tuple[str, str]]:
    """(id, text) from the language reference that `help()` shows: one passage of each topic, to be explained."""
    for name, text in sorted(topics.topics.items()):
        passages = [" ".join(passage.split()) for passage in text.split("\n\n")]
        prose = [passage for passage in passages if 200 <= len(passage) <= MAX_CHARACTERS and "::=" not in passage]
        if prose:
            request = random.Random(name).choice(TOPIC_REQUESTS)
            yield f"topic-{name}", f'{request} (the topic is "{name}"): {prose[0]}'


def code_prompts() -> list[tuple[str, str]]:
    """(id, text) of all prompts about code."""
    return [*own_function_prompts(), *task_prompts(), *stdlib_prompts(), *topic_prompts()]
