"""Chat templates, rendered as the server renders them, and how much they add to a conversation.

Owns: the Jinja sandbox, the detection of the content format, the measured overhead.
Promises: templates run in an immutable sandbox without I/O; a template that cannot be compiled raises
`TemplateUnusable`; `overhead` is given only for templates seen to print each content at most once and unchanged.
Talks to: jinja2. The environment is set up as Hugging Face's is (trim and lstrip blocks, loop controls, `tojson` without
HTML escapes, raise_exception, strftime_now, the generation block), for the ids must be the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Literal, NamedTuple

import jinja2
import jinja2.ext
import jinja2.parser
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.errors import PlimsollError

ContentFormat = Literal["string", "openai"]
Message = dict[str, Any]
MAX_TEMPLATE_CHARS = 1_000_000


class TemplateUnusable(PlimsollError):
    """The attested chat template cannot be used to render."""


class TemplateRefused(Exception):
    """The template itself, or the conversation given to it, makes rendering fail."""


class Overhead(NamedTuple):
    """Bytes of fixed text: rendered bytes <= base + per_message × messages + bytes of content."""

    base: int
    per_message: int


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks what the assistant wrote; when rendering it is only its inside."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


class ChatTemplate:
    """One compiled template with the special tokens it may name. Rendering is CPU work: run it in a thread."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise TemplateUnusable(f"the chat template is larger than {MAX_TEMPLATE_CHARS} characters")
        environment = _environment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
            raise TemplateUnusable(f"the chat template does not compile: {error}") from error
        self._special_tokens = special_tokens
        self.content_format: ContentFormat = "openai" if _loops_over_content(tree) else "string"
        self.knows_developer = '"developer"' in source or "'developer'" in source
        self.overhead = _measure(self)

    def render(self, messages: list[Message], tools: list[Message] | None = None, **kwargs: Any) -> str:
        """The prompt. Raises TemplateRefused with the template's own words."""
        given = {**self._special_tokens, "documents": None, "add_generation_prompt": True, **kwargs}
        try:
            return self._template.render(**{**given, "messages": messages, "tools": tools})
        except jinja2.TemplateError as error:
            raise TemplateRefused(str(error.message or "the template refused the conversation")[:500]) from error
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError) as error:
            raise TemplateRefused("the chat template cannot render this conversation") from error


def _loops_over_content(tree: nodes.Template) -> bool:
    """Whether the template walks through the parts of a message's content, and so wants parts instead of one string."""
    messages = _names_derived_from(tree, "messages")
    loops = list(tree.find_all(nodes.For))
    items = {loop.target.name for loop in loops if isinstance(loop.target, nodes.Name) and _root(loop.iter) in messages}
    if any(_reads_content(loop.iter, items) for loop in loops):
        return True
    inside: set[int] = set()
    for macro in tree.find_all(nodes.Macro):
        own = list(macro.find_all(nodes.For))
        inside.update(map(id, own))
        given = _content_parameters(tree, macro, items)
        if any(isinstance(loop.iter, nodes.Name) and loop.iter.name in given for loop in own):
            return True
    free = [loop for loop in loops if id(loop) not in inside]
    return any(isinstance(loop.iter, nodes.Name) and loop.iter.name == "content" for loop in free)


def _names_derived_from(tree: nodes.Template, name: str) -> set[str]:
    """`name` and the names that are set from it, slices and filters included."""
    names = {name}
    while True:
        found = {
            node.target.name
            for node in tree.find_all(nodes.Assign)
            if isinstance(node.target, nodes.Name) and _root(node.node) in names
        }
        if found <= names:
            return names
        names |= found


def _root(node: nodes.Node | None) -> str | None:
    """The variable beneath filters, tests and slices; None when there is something else."""
    while isinstance(node, nodes.Filter | nodes.Test) or (isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)):
        node = node.node
    return node.name if isinstance(node, nodes.Name) else None


def _reads_content(node: nodes.Node | None, items: set[str]) -> bool:
    """Whether an expression is `message.content` of one of the loop variables `items`."""
    while isinstance(node, nodes.Filter | nodes.Test) or (isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)):
        node = node.node
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content" and _root(node.node) in items
    return isinstance(node, nodes.Getattr) and node.attr == "content" and _root(node.node) in items


def _content_parameters(tree: nodes.Template, macro: nodes.Macro, items: set[str]) -> set[str]:
    """The parameters of a macro that some call fills with a message's content."""
    given: set[str] = set()
    for call in tree.find_all(nodes.Call):
        if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
            continue
        given.update(name.name for name, value in zip(macro.args, call.args, strict=False) if _reads_content(value, items))
        given.update(keyword.key for keyword in call.kwargs if _reads_content(keyword.value, items))
    return given


_MARK = "Zq7x"  # told from anything a template says
_ODD = ' “é” <b>&amp;</b> "x" \\ \t{y} end'  # what a filter would escape or change
_SLACK = 16  # bytes a date or another value of the moment may vary by
_PATTERNS = (
    "u", "uu", "ua", "uau", "uaua", "uauau", "uauauau", "us", "usu", "su", "suu", "sus", "susu", "sua", "suau", "suauau",
)  # fmt: skip
_ROLES = {"s": "system", "u": "user", "a": "assistant"}


def _measure(template: ChatTemplate) -> Overhead | None:
    """The fixed text a template adds, from rendering small conversations of every order of roles.

    None when nothing renders, when a content is printed twice or changed (dropped is fine), or when longer content grows
    the prompt by more than its own bytes: then only an exact count can tell.
    """
    found = list(_overheads(template))
    sizes = {pattern: size for pattern, size in found if size is not None}
    if not sizes or len(sizes) != len(found):
        return None
    steps = [
        math.ceil((sizes[longer] - sizes[shorter]) / (len(longer) - len(shorter)))
        for longer in sizes
        for shorter in sizes
        if longer != shorter and longer.startswith(shorter)
    ]
    if not steps:
        return None
    per_message = max(0, *steps)
    base = max(0, *(size - per_message * len(pattern) for pattern, size in sizes.items()))
    return Overhead(base + _SLACK, per_message)


def _overheads(template: ChatTemplate) -> Iterator[tuple[str, int | None]]:
    """(pattern, fixed bytes) of each pattern that renders; None for one that breaks the rules."""
    for pattern in _PATTERNS:
        marks = [f"{_MARK}{index}." for index in range(len(pattern))]
        texts = [mark + _ODD for mark in marks]
        short = _sized(template, pattern, texts)
        long = _sized(template, pattern, [text + (" abc" + _ODD) * 32 for text in texts])
        if short is None or long is None:
            continue
        seen = [short[1].count(mark) for mark in marks]
        once = max(seen) <= 1 and seen == [short[1].count(text) for text in texts]
        yield pattern, short[0] if once and long[0] <= short[0] else None


def _sized(template: ChatTemplate, pattern: str, texts: list[str]) -> tuple[int, str] | None:
    roles = [_ROLES[letter] for letter in pattern]
    wrap = template.content_format == "openai"
    contents = [[{"type": "text", "text": text}] if wrap else text for text in texts]
    try:
        prompt = template.render([{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)])
    except TemplateRefused:
        return None
    return len(prompt.encode()) - sum(len(text.encode()) for text in texts), prompt
