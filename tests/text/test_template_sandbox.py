"""Templates that attack: each is refused, and nothing runs on."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from headrace.errors import InvalidRequest
from headrace.text.chat_template import ChatTemplate
from headrace.text.template_sandbox import RenderLimits

LIMITS = RenderLimits(max_steps=2_000, max_characters=100_000, max_number=1_000)
MESSAGES = [{"role": "user", "content": "Hi"}]


def render(source: str, limits: RenderLimits = LIMITS, **options: Any) -> str:
    return ChatTemplate(source, {}, limits=limits, **options).render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ ''.format.__globals__.items() }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ raise_exception.__globals__.items() }}",
        "{{ (''|attr('__class__')).__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ messages[0].__setitem__('role', 'x') }}",
        "{{ dict.update(messages[0], role='x') }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% extends 'x' %}",
    ],
)
def test_python_is_out_of_reach(source: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot render"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(1000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}",
        "{% for i in range(1000) %}{% for j in range(1000) if false %}{% endfor %}{% endfor %}",
        "{% for i in range(1000) %}{% for j in range(1000) %}{% continue %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in range(1000) %}{% set x = messages[0].role|upper|lower|upper %}{% endfor %}",
        "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}"
        "{% for i in range(1000) %}{% call m() %}x{% endcall %}{% endfor %}",
    ],
)
def test_steps_are_bounded(source: str) -> None:
    with pytest.raises(InvalidRequest, match="more than 2000 steps"):
        render(source)


def test_a_loop_of_a_billion_ends_at_the_default_limit() -> None:
    source = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequest, match="more than 1000000 steps"):
        render(source, RenderLimits())


@pytest.mark.parametrize(
    "source",
    [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for x in [1] recursive %}{{ loop([1, 2]) }}{% endfor %}",
        "{% block a %}{{ self.a() }}{% endblock %}",
    ],
)
def test_endless_recursion_is_refused(source: str) -> None:
    with pytest.raises(InvalidRequest, match="recursion"):
        render(source, RenderLimits(max_steps=100_000))


DOUBLE = (
    "{{% set ns = namespace(x={start}) %}}"
    "{{% for i in range(60) %}}{{% set ns.x = {step} %}}{{% endfor %}}"
)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**9 }}",
        "{{ 'a' * 999999 }}",
        "{{ [1] * 999999 }}",
        "{{ 10 ** 999999 }}",
        DOUBLE.format(start="'aa'", step="ns.x ~ ns.x"),
        DOUBLE.format(start="'aa'", step="ns.x + ns.x"),
        DOUBLE.format(start="[1]", step="ns.x + ns.x"),
        DOUBLE.format(start="[1]", step="[ns.x, ns.x]"),
        DOUBLE.format(start="[1]", step="(ns.x, ns.x)"),
        DOUBLE.format(start="{}", step="{'a': ns.x, 'b': ns.x}"),
        DOUBLE.format(start="[1]", step="dict(a=ns.x, b=ns.x)"),
        DOUBLE.format(start="7", step="ns.x * ns.x"),
        "{% set ns = namespace() %}{% set ns.a = [ns] %}",
        "{{ namespace(a=1) }}",
        "{{ 'a'|center(999999) }}",
        "{{ 'a'.ljust(999999) }}",
        "{{ 'a'.zfill(999999) }}",
        "{{ ('\\t' * 1000).expandtabs(1000) }}",
        "{{ ('a\\n' * 1000)|indent(900) }}",
        "{{ '%999999d' % 1 }}",
        "{{ '%*d' % (999999, 1) }}",
        "{{ '%999999d'|format(1) }}",
        "{{ '{:999999d}'.format(1) }}",
        "{{ '{:{}}'.format(1, 999999) }}",
        "{{ ('{0}' * 1000).format('a' * 1000) }}",
        "{{ ('a' * 1000).replace('a', 'a' * 1000) }}",
        "{{ ('a' * 1000)|replace('a', 'a' * 1000) }}",
        "{{ range(1000)|join('a' * 1000) }}",
        "{{ ('a' * 1000).join(range(1000)|map('string')) }}",
        "{{ ['a' * 9000]|batch(999999, 'b')|list }}",
        "{{ messages|tojson(indent=999999) }}",
        "{{ 1.5|round(999999, 'floor') }}",
        "{{ 'a'.translate({97: 'a' * 1000}) }}",
        "{{ (5).to_bytes(999999, 'big') }}",
        "{{ 'a'.encode() }}",
        "{% for i in range(1000) %}{{ 'a' * 1000 }}{% endfor %}",
        "{% set x %}{% for i in range(1000) %}{{ 'a' * 1000 }}{% endfor %}{% endset %}",
        "{% macro m() %}{% for i in range(1000) %}{{ 'a' * 1000 }}{% endfor %}{% endmacro %}{{ m() }}",
        "{{ range(10**9) }}",
    ],
)
def test_sizes_are_bounded(source: str) -> None:
    with pytest.raises(InvalidRequest, match="more than|number of|cannot|Range too big|has no"):
        render(source)


def test_time_is_bounded_by_the_clock_it_was_given() -> None:
    times = iter(range(100))
    source = "{% for i in range(50) %}x{% endfor %}"
    with pytest.raises(InvalidRequest, match="more than 5 s"):
        render(source, RenderLimits(), clock=lambda: float(next(times)))


def test_each_rendering_starts_anew() -> None:
    template = ChatTemplate("{% for i in range(900) %}x{% endfor %}", {}, limits=LIMITS)
    for _ in range(5):
        assert len(template.render(MESSAGES)) == 900


def test_threads_count_their_own_steps() -> None:
    template = ChatTemplate("{% for i in range(900) %}x{% endfor %}", {}, limits=LIMITS)
    lengths: list[int] = []
    threads = [
        threading.Thread(target=lambda: lengths.append(len(template.render(MESSAGES))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lengths == [900] * 4


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'ab'|center(6) }}|{{ 'a'.rjust(3) }}", "  ab  |  a"),
        ("{{ '%s-%d' % ('a', 3) }}{{ '{:>3}'.format(1) }}", "a-3  1"),
        ("{{ ['a', 'b']|join(', ') }}{{ '-'.join(['c', 'd']) }}", "a, bc-d"),
        ("{{ messages|map(attribute='role')|join('/') }}", "user"),
        ("{{ 'a b'.replace(' ', '_')|replace('a', 'c') }}", "c_b"),
        ("{{ 2 ** 10 + 7 % 4 * 2 }}{{ 1 ~ none ~ 2.5 }}", "10301None2.5"),
        ("{{ messages|tojson }}", '[{"role": "user", "content": "Hi"}]'),
        ("{{ {'a': [1, (2,)]}|tojson(indent=1) }}", '{\n "a": [\n  1,\n  [\n   2\n  ]\n ]\n}'),
        ("{{ 'x\\ny'|indent(2) }}{{ 'abc'|truncate(9) }}", "x\n  yabc"),
        ("{% for a, b in [(1, 2), (3, 4)] %}{{ a + b }}{% else %}none{% endfor %}", "37"),
        ("{% for x in [] %}{% else %}none{% endfor %}", "none"),
        ("{% for x in [1, 2, 3, 4] if x % 2 == 0 %}{{ loop.index }}{{ x }}{% endfor %}", "1224"),
        ("{% filter upper %}a{{ 'b' }}{% endfilter %}", "AB"),
        ("{{ undefined_thing }}{{ missing is defined }}", "False"),
        ("{{ dict(a=1).items()|list }}{{ [1, 2, 3][::-1] }}", "[('a', 1)][3, 2, 1]"),
    ],
)
def test_what_templates_do_every_day_still_works(source: str, text: str) -> None:
    assert render(source) == text
