"""Hostile chat templates are stopped at limits of time and size, and stay in the sandbox."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from support.byte_tokenizer import byte_tokenizer
from twostroke.core.errors import ModelFormatError, RequestError, TwostrokeError
from twostroke.engine.chat.sandbox import BudgetError, RenderBudget
from twostroke.engine.chat.template import ChatTemplate

HI = [{"role": "user", "content": "Hi"}]
TIGHT = RenderBudget(max_chars=200_000, max_cpu_s=0.1)
LOOP = "{% for i in range(99999) %}"
END = "{% endfor %}"
GROW = "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(200) %}"

TOO_LONG = {
    "nested loops": LOOP * 3 + END * 3,
    "nested loops that filter all": LOOP + "{% for j in range(99999) if false %}{% endfor %}" + END,
    "nested loops that write": LOOP * 2 + "aaaaaaaaaaaaaaaaaaaaaa" + END * 2,
    "calls of calls": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}"
    "{{ m(99) }}",
    "nested calls": "{% macro m() %}" + LOOP + "{{ caller() }}" + END + "{% endmacro %}"
    "{% call m() %}{% call m() %}x{% endcall %}{% endcall %}",
    "lazy filters in a chain": "{% set ns = namespace(x=range(9999)) %}"
    + LOOP
    + "{% set ns.x = ns.x | map('string') %}"
    + END,
    "sorting in a loop": "{% set x = range(9999) | list %}"
    + LOOP
    + "{% set y = x | sort | reverse | list %}"
    + END,
    "searching in a loop": "{% set x = 'ab' * 99999 %}"
    + LOOP
    + "{% set y = 'ba' * 30 + 'c' in x %}"
    + END,
    "searching a range": LOOP + "{% set y = 'x' in range(99999) %}" + END,
    "slicing in a loop": "{% set x = 'ab' * 99999 %}" + LOOP + "{% set y = x[1:] %}" * 50 + END,
    "splitting in a loop": "{% set x = 'a ' * 99999 %}" + LOOP + "{% set y = x.split() %}" + END,
    "strings in a loop": "{% set x = 'a ' * 99999 %}"
    + LOOP
    + "{% set y = x | title | trim %}"
    + END,
    "lists that grow by one": "{% set ns = namespace(x=[]) %}"
    + LOOP
    + "{% set ns.x = ns.x + [i] %}"
    + END,
    "a list that its loop adds to": "{% set x = [1] %}{% for i in x %}{% do x.append(i) %}" + END,
    "a list that grows at its start": "{% set x = [] %}"
    + LOOP
    + "{% do x.insert(0, i) %}" * 9
    + END,
    "a number that doubles": "{% set ns = namespace(x=1) %}"
    + LOOP * 2
    + "{% set ns.x = ns.x + ns.x %}"
    + END * 2,
}
TOO_BIG = {
    "product": "{{ 'a' * 10**10 }}",
    "product turned round": "{{ 10**10 * 'a' }}",
    "product of lists": "{{ [0] * 10**9 }}",
    "sums that double": GROW + "{% set ns.x = ns.x + ns.x %}" + END,
    "glue that doubles": GROW + "{% set ns.x = ns.x ~ ns.x %}" + END,
    "blocks that double": GROW
    + "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"
    + END,
    "lists that double": GROW + "{% set ns.x = [ns.x, ns.x] %}" + END + "{{ ns.x }}",
    "lists that double in place": "{% set x = ['a'] %}{% for i in range(99) %}"
    "{% do x.extend(x) %}" + END,
    "a list inside that grows later": "{% set x = [] %}{% set ns = namespace(y=x) %}"
    "{% for i in range(12) %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
    "{% do x.append('a' * 9999) %}{{ ns.y }}",
    **{
        f"views of {method}": "{% set d = {'a' * 50000: 'a' * 50000} %}"
        f"{{{{ [d.{method}()] * 900 }}}}"
        for method in ("keys", "values", "items")
    },
    "tuples that double": GROW + "{% set ns.x = (ns.x, ns.x) %}" + END + "{{ ns.x }}",
    "dictionaries that double": GROW
    + "{% set ns.x = {'a': ns.x, 'b': ns.x} %}"
    + END
    + "{{ ns.x | tojson }}",
    "dictionaries called": GROW + "{% set ns.x = dict(a=ns.x, b=ns.x) %}" + END + "{{ ns.x }}",
    "arguments that double": "{% set ns = namespace(x='a') %}"
    "{% macro m() %}{% set ns.x = varargs %}{% endmacro %}"
    "{% for i in range(99) %}{{ m(ns.x, ns.x) }}{% endfor %}{{ ns.x }}",
    "comparing what doubles": "{% set ns = namespace(x='a', y='a') %}{% for i in range(99) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
    "join": "{{ ('a' * 9999) | join('b' * 9999) }}",
    "join of strings": "{{ ('a' * 9999).join(['a'] * 9999) }}",
    "replace": "{{ ('a' * 9999).replace('a', 'b' * 9999) }}",
    "replace of nothing": "{{ ('a' * 9999) | replace('', 'b' * 9999) }}",
    "indent": "{{ 'a\nb' | indent(10**9) }}",
    "padding filter": "{{ 'a' | center(10**9) }}",
    "lines": "{{ ('a' * 9999) | wordwrap(1, wrapstring='b' * 9999) }}",
    "links in a long text": "{{ ('(' * 99999) | urlize }}",
    "sums of lists": "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}"
    "{% set ns.x = [ns.x, ns.x] | sum(start=[]) %}{% endfor %}",
    "separators": "{{ ([1] * 9999) | tojson(separators=('a' * 9999, ':')) }}",
    "percent": "{{ ('%(a)s' * 9999) % {'a': 'b' * 9999} }}",
    "braces": "{{ ('{0}' * 9999).format('b' * 9999) }}",
    "a joiner": "{% set j = joiner('x' * 99999) %}{% for i in range(99) %}{{ j() }}{% endfor %}",
}
REFUSED = {
    "range": "{% for i in range(10**9) %}a{% endfor %}",
    "power of squares": "{% set ns = namespace(x=2) %}{% for i in range(99) %}"
    "{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "power": "{{ 10 ** (10 ** 9) }}",
    "width": "{{ '%1000000000d' % 1 }}",
    "width from an argument": "{{ '%*d' % (10**9, 1) }}",
    "precision": "{{ '%.999999999f' % 1.0 }}",
    "width in braces": "{{ '{:1000000000}'.format(1) }}",
    "width in nested braces": "{{ '{:{}}'.format(1, 10**9) }}",
    "width by item": "{{ 'a{0:999999999}'['format'](1) }}",
    "width by filter": "{{ '%1000000000d' | format(1) }}",
    "padding": "{{ 'a'.ljust(10**9) }}",
    "indented JSON": "{{ [1] | tojson(indent=10**9) }}",
    "encoder of JSON": "{{ 'a' | tojson(cls=namespace, encode='x'.join) }}",
    "default of JSON": "{{ namespace() | tojson(default='{}'.format) }}",
    "rounding": "{{ 1.5 | round(10**9) }}",
    "sum of lists and numbers": "{{ [[1], 2] | sum(start=[]) }}",
    "many columns": "{{ [1] | batch(10**7, 'x') | list }}",
    "many slices": "{{ [1] | slice(slices=10**7) | list }}",
    "endless recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "endless loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "date": "{{ strftime_now('%9999999d') }}",
    "classes": "{{ ''.__class__.__mro__ }}",
    "globals of a function": "{{ cycler.__init__.__globals__ }}",
    "globals by format": "{{ '{0.__class__.__init__.__globals__}'.format(cycler) }}",
    "globals by map": "{{ [cycler] | map(attribute='__init__.__globals__') | list }}",
    "changing by the type": "{{ dict.update(messages[0], {'a': 1}) }}",
    "a sort with a key": "{{ [10**6].sort(key='x'.ljust) }}",
    "lists that take themselves": "{% set x = ['a'] %}{% for i in range(99) %}"
    "{% do x.append(x) %}" + END,
    "dictionaries that take themselves": "{% set x = {} %}{% for i in range(99) %}"
    "{% do x.update({i: x}) %}" + END,
    "a list in itself": "{% set x = [] %}{% do x.append(x) %}{{ x | tojson }}",
    "files": "{% include '/etc/passwd' %}",
    "modules": "{% import 'os' as os %}",
    "lorem ipsum": "{{ lipsum(99999) }}",
}
NOT_COMPILED = {
    "long": " " * 70_000,
    "parentheses": "{{ " + "(" * 30_000 + "1" + ")" * 30_000 + " }}",
    "brackets": "{{ " + "[" * 30_000 + "]" * 30_000 + " }}",
    "negations": "{{ " + "not " * 15_000 + "1 }}",
    "sums": "{{ 1" + "+1" * 30_000 + " }}",
    "loops": "{% for i in [1] %}" * 60 + END * 60,
    "filters": "{{ a" + "|upper" * 10_000 + " }}",
    "a number": "{{ " + "9" * 60_000 + " }}",
    "unclosed": "{{" * 30_000,
}


def _render(source: str) -> str:
    return ChatTemplate(source, budget=TIGHT).render(HI).text


def test_endless_work_is_cut_off() -> None:
    for name, source in TOO_LONG.items():
        template = ChatTemplate(source, budget=TIGHT)
        start_s = time.thread_time()
        with pytest.raises(BudgetError, match="RenderBudget"):
            template.render(HI)
        assert time.thread_time() - start_s < 5.0, name  # without an end it would take hours


def test_values_that_would_be_too_big_are_never_built() -> None:
    for name, source in TOO_BIG.items():
        template = ChatTemplate(source, budget=TIGHT)
        tracemalloc.start()
        try:
            with pytest.raises(BudgetError, match="RenderBudget"):
                template.render(HI)
            assert tracemalloc.get_traced_memory()[1] < 32 * 1024**2, name
        finally:
            tracemalloc.stop()


def test_operations_that_no_template_needs_are_refused() -> None:
    for name, source in REFUSED.items():
        start_s = time.thread_time()
        with pytest.raises(RequestError) as caught:
            _render(source)
        assert time.thread_time() - start_s < 1.0, name
        assert len(str(caught.value)) < 500, name


def test_sources_made_to_break_the_compiler_are_format_errors() -> None:
    for source in NOT_COMPILED.values():
        with pytest.raises(ModelFormatError):
            ChatTemplate(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception.__globals__ }}",
        "{{ self._TemplateReference__context }}",
        "{{ ''|attr('__class__') }}",
        "{{ strftime_now.__self__ }}",
        "{{ range.__self__ }}",
        "{{ messages.__class__ }}",
    ],
)
def test_inner_attributes_lead_nowhere(source: str) -> None:
    try:
        text = _render(source)
    except TwostrokeError as error:
        text = str(error).removeprefix("The chat template refuses these messages: access to")
        text = "" if text.endswith("is unsafe.") else str(error)
    assert text == ""


def test_namespaces_do_not_print_what_they_hold() -> None:
    source = "{% set ns = namespace(x='secret') %}{% set ns.y = ns %}{{ ns }}{{ [ns] }}"
    assert _render(source) == "<Namespace>[<Namespace>]"


def test_long_chats_fit_the_default_budget() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% if m.role == 'user' and loop.index0 > 0 %}\n{% endif %}"
        "{{ '<|' + m.role + '|>' + m.content | trim }}{% endfor %}"
    )
    chat = [{"role": "user", "content": "x" * 100}, {"role": "assistant", "content": "y" * 100}]
    assert len(template.render(chat * 2_000).text) > 400_000


def test_one_template_renders_in_many_threads_at_once() -> None:
    from concurrent.futures import ThreadPoolExecutor

    template = ChatTemplate("{% for i in range(100) %}{{ messages[0].content }}{% endfor %}")
    with ThreadPoolExecutor(8) as pool:
        chats = [[{"role": "user", "content": str(i)}] for i in range(64)]
        texts = [prompt.text for prompt in pool.map(template.render, chats)]
    assert texts == [str(i) * 100 for i in range(64)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ [1, 2, 3] | batch(2, 'x') | list }}", "[[1, 2], [3, 'x']]"),
        ("{{ 'a' | center(5) }}|", "  a  |"),
        ("{{ 123456 | filesizeformat }}", "123.5 kB"),
        ("{{ '<a>' | forceescape }}", "&lt;a&gt;"),
        ("{{ {'a': [1]} | pprint }}", "{'a': [1]}"),
        ("{{ [1, 2, 3] | slice(2) | list }}", "[[1, 2], [3]]"),
        ("{{ '<b>a</b>' | striptags }}", "a"),
        ("{{ 'a b' | urlencode }}", "a%20b"),
        (
            "{{ 'http://a.org' | urlize }}",
            '<a href="http://a.org" rel="noopener">http://a.org</a>',
        ),
        ("{{ 'aa bb' | wordwrap(3) }}", "aa\nbb"),
        ("{{ {'a': 1, 'b': none} | xmlattr }}", ' a="1"'),
        ("{{ [[1], [2, 3]] | sum(start=[]) }}", "[1, 2, 3]"),
        ("{{ ['a', 'a'] | random }}", "a"),
        ("{{ dict.fromkeys(['a'], 1) }}", "{'a': 1}"),
        ("{{ {'b': 'é', 'a': '<'} | tojson(sort_keys=true) }}", '{"a": "<", "b": "é"}'),
        ("{{ [1] | tojson(indent=2, separators=(',', ':')) }}", "[\n  1\n]"),
        ("{{ 'é' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
        ("{% set x = [] %}{% do x.count(1) %}{{ x }}", "[]"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{% generation %}a{% endgeneration %}", "a"),
        ("{% filter upper %}a{% endfilter %}{% with b = 1 %}{{ b }}{% endwith %}", "A1"),
    ],
)
def test_filters_and_statements_of_published_templates_work(source: str, expected: str) -> None:
    assert _render(source) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% set x = [2] %}{% set _ = x.append(3) %}{{ x }}{{ x.pop(0) }}{{ x }}", "[2, 3]2[3]"),
        (
            "{% set x = [1] %}{% do x.extend((2, 3)) %}{% do x.insert(0, 0) %}{{ x }}",
            "[0, 1, 2, 3]",
        ),
        ("{% set x = [1, 2] %}{% do x.reverse() %}{% do x.remove(1) %}{{ x }}", "[2]"),
        (
            "{% set x = {'a': 1} %}{% do x.update({'b': 2}, c=3) %}{{ x }}",
            "{'a': 1, 'b': 2, 'c': 3}",
        ),
        ("{% set x = [1] %}{% for i in x %}{% do x.extend(loop) %}{% endfor %}{{ x[0] }}", "1"),
        ("{% set x = {} %}{{ x.setdefault('a', 4) }}{{ x.pop('a') }}{{ x }}", "44{}"),
        (
            (
                "{% set ns = namespace(ids=[]) %}{% for i in [1, 2] %}{% do ns.ids.append(i) %}"
                "{% endfor %}{{ ns.ids }}{% do ns.ids.clear() %}{{ ns.ids }}"
            ),
            "[1, 2][]",
        ),
    ],
)
def test_templates_may_change_their_lists_and_dictionaries(source: str, expected: str) -> None:
    template = ChatTemplate(source, budget=TIGHT)
    assert [template.render(HI).text for _ in range(2)] == [expected] * 2


def test_what_a_template_changes_is_its_own_copy() -> None:
    template = ChatTemplate(
        "{% do messages.append(messages[0]) %}{% do messages[0].update({'content': 'changed'}) %}"
        "{% do tools[0].function.clear() %}{% do listed.append(1) %}{{ messages }}{{ listed }}"
    )
    chat = [{"role": "user", "content": "Hi"}]
    tools, listed = [{"function": {"name": "f"}}], [0]
    texts = [
        template.render(chat, tools=tools, extra_variables={"listed": listed}).text
        for _ in range(2)
    ]
    assert texts[0] == texts[1]
    assert texts[0].count("changed") == 2
    assert (chat, tools, listed) == (HI, [{"function": {"name": "f"}}], [0])


def test_special_tokens_that_a_template_changes_are_its_own_copy() -> None:
    tokenizer = byte_tokenizer(odd=(("<x>", 3),))
    tokenizer.additional_texts = ("<x>",)
    source = "{{ additional_special_tokens | length }}{% do additional_special_tokens.append('') %}"
    template = ChatTemplate(source, tokenizer)
    assert [template.render(HI).text for _ in range(2)] == ["1", "1"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ n | tojson }} {{ n | string }}", "N N"),
        ("{{ n | int }} {{ n | abs }}", "N N"),
        ("{{ [n] | tojson(indent=2) }}", "[\n  N\n]"),
        ("{{ {'a': n} | items | list }}", "[('a', N)]"),
        ("{{ [n, 2] | join(', ') }}", "N, 2"),
        ("{{ [n] | map('string') | join }}", "N"),
        ("{{ ['x'] | map('int', n) | first }}", "N"),
        ("{{ missing | default(n) }}", "N"),
        ("{{ [{'t': n}] | selectattr('t', 'equalto', n) | list | length }}", "1"),
        ("{{ [{'t': n}] | sum(attribute='t') }} {{ [0] | sum(start=n) }}", "N N"),
        ("{{ '%d' | format(n) }} {{ '%s' % n }} {{ '{}'.format(n) }}", "N N N"),
        ("{{ 'at ' ~ n }}", "at N"),
        ("{{ {}.get('a', n) }} {{ [n].index(n) }}", "N 0"),
        ("{{ n * 1 }} {{ n + 0 }} {{ n // 1 }} {{ n * 0.0 }}", "N N N 0.0"),
        ("{% macro m(a) %}{{ a }}{% endmacro %}{{ m(n) }} {{ dict(a=n).a }}", "N N"),
    ],
)
@pytest.mark.parametrize("number", [1_700_000_000, 123_456_789_012_345_678, 10**30])
def test_large_numbers_are_values(source: str, expected: str, number: int) -> None:
    """Arguments of tool calls may have such numbers, for example times and ids."""
    text = ChatTemplate(source, budget=TIGHT).render(HI, extra_variables={"n": number}).text
    assert text == expected.replace("N", str(number))
