"""A Jinja environment for templates nobody here has read: they run no Python and cannot run for ever.

Jinja's immutable sandbox keeps a template from Python's internals. It does not keep one from looping
10^9 times or building a string of 10^12 characters, and a thread that does so cannot be interrupted.
So each loop, macro and call counts as a step, a step looks at the clock, and every operation that
makes a value larger than those it was given is measured before it runs. What is left between two steps
is an operation on bounded values.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import Undefined, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

_NODE_WEIGHT = 8
_UNUSED_FILTERS = ("pprint", "urlize", "wordwrap", "xmlattr")
"""Filters no chat template needs and whose output would have to be bounded too."""
_FORBIDDEN_METHODS = frozenset({"encode", "to_bytes", "translate"})
_WIDENING = frozenset({"center", "expandtabs", "indent", "ljust", "rjust", "zfill"})
_COUNTING = frozenset({"batch", "format", "round", "slice", "tojson", "truncate"})
_WEIGHED_FILTERS = frozenset({"bounded_concat", "bounded_literal", "string", "tojson"})


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """What one rendering may use at most."""

    max_steps: int = 1_000_000
    """Iterations of loops, and calls of macros, functions and filters."""
    max_seconds: float = 5.0
    max_characters: int = 16 << 20
    """Of the output and of any value on the way."""
    max_number: int = 100_000
    """An argument such as a width, a count or an exponent."""


class TemplateLimitExceeded(TemplateError):
    """The template uses more than a rendering may."""


class RaisedByTemplate(TemplateError):
    """The template called raise_exception: it refuses these messages."""


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Renders as transformers does, within limits. May be shared by threads."""

    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(
        self,
        limits: RenderLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, loopcontrols],
            finalize=self._finalize,
        )
        self._limits = limits or RenderLimits()
        self._clock = clock
        self._running = threading.local()
        self.filters["tojson"] = _to_json
        self.filters["bounded_concat"] = _concatenate
        self.filters["bounded_literal"] = _same
        for name in _UNUSED_FILTERS:
            del self.filters[name]
        for name, function in list(self.filters.items()):
            self.filters[name] = self._guarded(name, function)
        del self.globals["lipsum"]
        self.globals.update(
            raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_make_dict
        )

    def compile_source(self, source: str) -> Callable[[Mapping[str, Any]], str]:
        """Return a function that renders `source`. TemplateError where it is no valid template."""
        syntax: nodes.Template = _StepCounter().visit(self.parse(source))
        template = self.from_string(syntax)
        names = dict(template.globals)

        def render(variables: Mapping[str, Any]) -> str:
            self._running.steps = 0
            self._running.deadline = self._clock() + self._limits.max_seconds
            context = self.context_class(
                self, {**names, **variables}, template.name, template.blocks
            )
            return self.concat(template.root_render_func(context))

        return render

    def tick(self) -> bool:
        """Count one step of this thread's rendering."""
        running = self._running
        steps = getattr(running, "steps", None)
        if steps is None:
            return True  # the compiler folds a constant; nothing runs
        running.steps = steps + 1
        if steps >= self._limits.max_steps:
            raise TemplateLimitExceeded(
                f"the chat template takes more than {self._limits.max_steps} steps"
            )
        if self._clock() > running.deadline:
            raise TemplateLimitExceeded(
                f"the chat template takes more than {self._limits.max_seconds:g} s"
            )
        return True

    # --- what Jinja calls -------------------------------------------------------

    def concat(self, pieces: Iterable[str]) -> str:
        """Join output; called for the whole template, macros and set blocks."""
        room = self._limits.max_characters
        kept: list[str] = []
        for piece in pieces:
            room -= len(piece)
            if room < 0:
                self._refuse_size()
            kept.append(piece)
        return "".join(kept)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        self = __self
        owner = getattr(__obj, "__self__", None)
        if owner is self:
            return self.tick()
        self.tick()
        if isinstance(owner, str | int):
            args = tuple(self._listed(arg) for arg in args)
            self._measure(str(__obj.__name__), owner, (*args, *kwargs.values()))
        return self._checked(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            self._check_numbers((left, right))
            self._check_room(_bits(left) * abs(right) if isinstance(right, int) else 0)
        elif operator == "*":
            times, value = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(times, int):
                self._check_room(self._weigh(value) * abs(times) if _is_sized(value) else 0)
                self._check_room(_bits(left) + _bits(right))
        elif operator == "+" and _is_sized(left) and _is_sized(right):
            self._check_room(self._weigh(left) + self._weigh(right))
        elif operator == "%" and isinstance(left, str):
            self._check_room(self._percent_size(left, right))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text = str(value.__self__)

        @functools.wraps(wrapped)
        def bounded(*args: Any, **kwargs: Any) -> str:
            self._check_room(self._format_size(text, (args, kwargs)))
            return wrapped(*args, **kwargs)

        return bounded

    def _finalize(self, value: Any) -> Any:
        """Look at what is about to be printed."""
        if not isinstance(value, str | int | float | Undefined):
            self._weigh(value)
        return value

    # --- limits -----------------------------------------------------------------

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the filter with its arguments measured first. Jinja's marks on it are kept."""
        place = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            value = args[place]
            if name == "join":
                value = self._listed(value)
                args = (*args[:place], value, *args[place + 1 :])
            self._measure(name, value, (*args[place + 1 :], *kwargs.values()))
            return self._checked(function(*args, **kwargs))

        return guarded

    def _measure(self, name: str, value: Any, arguments: tuple[Any, ...]) -> None:
        """Refuse a filter or a method of str whose result would be too large."""
        if name in _WIDENING or name in _COUNTING:
            self._check_numbers(arguments)
        first = arguments[0] if arguments else None
        if name in _WEIGHED_FILTERS:
            self._weigh(value)
        elif name == "join":
            separator, items = (value, first) if isinstance(value, str) else (first, value)
            count = len(items) if isinstance(items, str | list | tuple | dict | set) else 0
            self._check_room(self._weigh(items) + count * len(str(separator or "")))
        elif name == "replace" and len(arguments) > 1:
            count = str(value).count(str(first))
            self._check_room(count * len(str(arguments[1])))
        elif name == "format" and isinstance(value, str):
            self._check_room(self._percent_size(value, arguments))
        elif name in _FORBIDDEN_METHODS:
            raise TemplateLimitExceeded(f"chat templates cannot call {name}")
        elif name in _WIDENING:
            text = str(value)
            widest = max((_width(argument) for argument in arguments), default=8)
            self._check_room(len(text) + (1 + text.count("\n") + text.count("\t")) * widest)

    def _checked(self, result: Any) -> Any:
        if _is_sized(result):
            self._weigh(result)
        return result

    def _listed(self, value: Any) -> Any:
        """A generator as a list of bounded length, so that it can be measured; others unchanged."""
        if not isinstance(value, Iterator):
            return value
        room = self._limits.max_characters // _NODE_WEIGHT
        items = list(itertools.islice(value, room + 1))
        self._check_room(len(items) * _NODE_WEIGHT)
        return items

    def _weigh(self, value: Any) -> int:
        """Return about how many characters `value` has when written out, shared parts each time."""
        if isinstance(value, str):
            return len(value)
        weight = 0
        pending = [value]
        while pending:
            part = pending.pop()
            weight += len(part) if isinstance(part, str) else _NODE_WEIGHT
            if isinstance(part, Mapping):
                pending.extend(part)
                pending.extend(part.values())
            elif isinstance(part, list | tuple | set | frozenset):
                pending.extend(part)
            elif isinstance(part, Namespace):
                raise TemplateLimitExceeded("chat templates cannot nest or print a namespace")
            self._check_room(weight)
        return weight

    def _percent_size(self, text: str, values: Any) -> int:
        if "*" in text and isinstance(values, tuple):
            self._check_numbers(values)
            return self._format_size(text, values) + text.count("*") * self._limits.max_number
        return self._format_size(text, values)

    def _format_size(self, text: str, values: Any) -> int:
        fields = text.count("%") + text.count("{")
        widths = sum(int(digits[:12]) for digits in re.findall(r"\d+", text))
        nested = text.count("{") * self._limits.max_number if re.search(r":[^}]*\{", text) else 0
        return len(text) + widths + nested + fields * self._weigh(values)

    def _check_numbers(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, int) and abs(value) > self._limits.max_number:
                raise TemplateLimitExceeded(
                    f"the chat template passes a number of {_bits(value)} bits as an argument; "
                    f"the largest allowed is {self._limits.max_number}"
                )

    def _check_room(self, size: int) -> None:
        if size > self._limits.max_characters:
            self._refuse_size()

    def _refuse_size(self) -> None:
        raise TemplateLimitExceeded(
            f"the chat template makes more than {self._limits.max_characters} characters"
        )


class _StepCounter(NodeTransformer):
    """Puts a step into every loop and macro, and a measure around what joins or nests values."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _step(node))
        if node.test is not None:
            node.test = nodes.And(_step_call(node), node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _step(node))
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _step(node))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        items = nodes.List(node.nodes, lineno=node.lineno)
        return _filter("bounded_concat", items)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return self._literal(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return self._literal(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._literal(node) if node.ctx == "load" else node

    def _literal(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        is_plain = all(isinstance(part, nodes.Const) for part in node.iter_child_nodes())
        return node if is_plain else _filter("bounded_literal", node)


class _GenerationTag(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here only its body counts."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _step_call(node: nodes.Node) -> nodes.Call:
    tick = nodes.EnvironmentAttribute("tick", lineno=node.lineno)
    return nodes.Call(tick, [], [], None, None, lineno=node.lineno)


def _step(node: nodes.Node) -> nodes.Node:
    return nodes.ExprStmt(_step_call(node), lineno=node.lineno)


def _filter(name: str, value: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


def _concatenate(items: Iterable[Any]) -> str:
    return "".join(map(str, items))


def _same(value: Any) -> Any:
    return value


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> None:
    raise RaisedByTemplate(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """A function in place of the type, whose methods would change the caller's messages."""
    return dict(*args, **kwargs)


def _is_sized(value: Any) -> bool:
    return isinstance(value, str | list | tuple | dict | set)


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _width(argument: Any) -> int:
    return abs(argument) if isinstance(argument, int) else len(str(argument))
