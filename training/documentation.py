"""Reads Python's own documentation out of the running interpreter.

Both sources ship with CPython under the PSF licence: the language topics in
pydoc_data.topics and the docstrings of the standard library. Their text changes
with the Python version, so the model card names the one that was used.
"""

import importlib
import inspect
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pydoc_data.topics import topics
from types import ModuleType

# Few enough that the model meets every entry some twenty times and knows it by heart.
MODULES = """
    builtins os.path string math cmath random json re itertools functools
    collections datetime pathlib shutil statistics textwrap glob heapq bisect copy
    operator time tempfile pickle csv io threading queue subprocess logging argparse
    inspect contextlib urllib.parse struct hashlib base64 zipfile difflib
    calendar fractions decimal configparser sqlite3 enum dataclasses
    email.message http.client html shlex secrets uuid unittest traceback
    warnings weakref abc array fnmatch gzip numbers selectors zlib
"""
# A docstring of this many characters fits one short training row.
DOCSTRING_CHARS = (50, 900)
CHUNK_CHARS = 700
# torch replaces this function, docstring and all: read it and the corpus would depend
# on what was imported before.
REPLACED_MEMBERS = {"inspect.getfile"}
# These repeat other topics word for word.
REPEATED_TOPICS = {"debugger", "specialnames", "compound"}


@dataclass(frozen=True)
class Entry:
    """A question and the documentation that answers it."""

    question: str
    answer: str


@dataclass(frozen=True)
class Topic:
    """A language topic: its title and its text in chunks of whole paragraphs."""

    title: str
    chunks: tuple[str, ...]

    @property
    def entry(self) -> Entry:
        return Entry(f"Explain the Python topic: {self.title}.", self.chunks[0])


def read_topics() -> list[Topic]:
    found = []
    for key, text in sorted(topics.items()):
        title, *paragraphs = reflow(_ascii(text))
        if key not in REPEATED_TOPICS and paragraphs:
            found.append(Topic(title.strip("."), tuple(_chunks(paragraphs))))
    return found


def read_docstrings() -> list[Entry]:
    """Return "What does module.name do?" entries, sorted, each text only once."""
    seen: set[str] = set()
    found = []
    for module_name in MODULES.split():
        module = importlib.import_module(module_name)
        prefix = "" if module_name == "builtins" else f"{module_name}."
        for name, text in _own_docstrings(module):
            if text not in seen:
                seen.add(text)
                question = f"What does {prefix}{name} do?"
                found.append(Entry(question, "\n\n".join(reflow(text))))
    return found


def reflow(text: str) -> list[str]:
    """Return the paragraphs, prose on one line each and code as it stands."""
    paragraphs = []
    for block in re.split(r"\n\s*\n", text):
        lines = [line.rstrip() for line in block.split("\n") if not _is_rule(line)]
        if lines and _is_code(lines):
            paragraphs.append("\n".join(lines))
        elif lines:
            paragraphs.append(" ".join(" ".join(lines).split()))
    return paragraphs


def _own_docstrings(module: ModuleType) -> Iterator[tuple[str, str]]:
    shortest, longest = DOCSTRING_CHARS
    family = module.__name__.split(".")[0]
    for name in sorted(dir(module)):
        with warnings.catch_warnings(action="ignore"):  # deprecated members
            member = getattr(module, name)
            text = getattr(member, "__doc__", None)
        if name.startswith("_") or f"{module.__name__}.{name}" in REPLACED_MEMBERS:
            continue
        if not callable(member) or not isinstance(text, str):
            continue
        # Skip what the module only imported; C halves are called _name.
        home = (getattr(member, "__module__", None) or family).split(".")[0]
        if home.lstrip("_") not in (family, "posixpath", "posix", "genericpath"):
            continue
        text = _ascii(inspect.cleandoc(text))
        if shortest < len(text) < longest:
            yield name, text


def _chunks(paragraphs: list[str]) -> Iterator[str]:
    chunk: list[str] = []
    for paragraph in paragraphs:
        chunk.append(paragraph)
        if sum(map(len, chunk)) > CHUNK_CHARS:
            yield "\n\n".join(chunk)
            chunk = []
    if chunk:
        yield "\n\n".join(chunk)


def _is_rule(line: str) -> bool:
    return not line.strip() or re.fullmatch(r'\s*[*=\-~^"]{4,}\s*', line) is not None


def _is_code(lines: list[str]) -> bool:
    indent = min(len(line) - len(line.lstrip()) for line in lines)
    is_prompt = any(re.match(r"\s*(>>>|\.\.\.|\$)", line) for line in lines)
    return indent >= 3 or is_prompt or any("::=" in x or "|" in x for x in lines)


def _ascii(text: str) -> str:
    return text.encode("ascii", "ignore").decode()
