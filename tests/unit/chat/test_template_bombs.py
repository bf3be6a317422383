"""Templates that ask for more time or memory than any conversation needs: refused, before it is taken."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from penstock.chat.sandbox import compiled
from penstock.errors import ConfigError, DataError
from penstock.templates import JinjaTemplate
from penstock.transforms import FormatChat

CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
NESTED = "{% set a = ['x'] * 1000 %}{% set b = [a] * 1000 %}{% set c = [b] * 1000 %}"

BOMBS = {
    "powers": "{% set x = 10**64 %}" + "{% set x = x**64 %}" * 4,
    "squares": "{% set x = 10**64 %}" + "{% set x = x * x %}" * 40,
    "written": NESTED + "{{ c }}",
    "joined by ~": NESTED + "{{ c ~ '' }}",
    "joined": NESTED + "{{ c|join }}",
    "as JSON": NESTED + "{{ c|tojson|length }}",
    "as text": NESTED + "{{ c|string|length }}",
    "compared": NESTED + "{{ c == [b] * 1000 }}",
    "raised": NESTED + "{{ raise_exception(c) }}",
    "in one expression": "{{ [[['x'] * 1000] * 1000] * 1000 }}",
    "doubled": "{% set ns = namespace(x=['a']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}",
    "doubled mappings": "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = {'a': ns.x, 'b': ns.x} %}"
    "{% endfor %}{{ ns.x|tojson }}",
    "doubled text": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "width from an argument": "{{ '{:{}}'.format(1, 999999999) }}",
    "fields": "{{ ('{0}' * 60000).format('a' * 60000) }}",
    "fields of a mapping": "{{ ('{a}' * 60000).format_map({'a': 'a' * 60000}) }}",
    "fields of %": "{{ ('%(a)s' * 60000) % {'a': 'a' * 60000} }}",
    "fields of a filter": "{{ ('%(a)s' * 60000)|format(a='a' * 60000) }}",
    "widths": "{{ ('{:>9999}' * 60000).format(*([1] * 60000)) }}",
    "escapes": "{{ ('&' * 4000000)|e|forceescape|forceescape|forceescape }}",
    "attributes": "{{ {'a': '&' * 4000000}|xmlattr }}",
    "words": "{{ ('x ' * 30000000).split()|length }}",
    "letters": "{{ ('x' * 60000000)|list|length }}",
    "letters, one by one": "{{ ('x' * 60000000)|map('upper')|list|length }}",
    "replaced": "{{ (['x'] * 1000)|map('replace', 'x', 'y' * 60000)|join|length }}",
    "translated": "{{ ('a' * 60000).translate({97: 'b' * 60000}) }}",
    "variables": "{% set a = 'x' * 4000000 %}" + "".join(f"{{% set b{i} = a ~ {i} %}}" for i in range(60)),
    "called": "{% macro f() %}{{ caller() * 1000 }}{% endmacro %}{% call f() %}{{ 'x' * 60000 }}{% endcall %}",
    "arguments": "{{ cycler(*range(99999)) }}",
    "indented": "{{ ([[1]] * 1000000)|tojson(indent=16)|length }}",
    "a macro in itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a loop in itself": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "range": "{{ range(10**30) }}",
    "include": "{% include 'x' %}",
    "parentheses": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "lists in lists": "{{ " + "[" * 500 + "]" * 500 + " }}",
    "conditions": "{% if 1 %}" * 300 + "{% endif %}" * 300,
    "loops in loops": "{% for i in [1] %}" * 30 + "{% endfor %}" * 30,
    "filters": "{{ 'a'" + "|upper" * 3000 + " }}",
    "digits": "{{ 1" + "0" * 100_000 + " }}",
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(special_tokens=special, initial_alphabet=letters, show_progress=False)
    made.train_from_iterator(["the water"], trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
def test_a_template_that_asks_for_too_much_is_refused(tokenizer: Path, bomb: str) -> None:
    with pytest.raises(ConfigError):
        FormatChat(tokenizer, CHAT + bomb)


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
def test_the_same_for_rows_of_a_table(bomb: str) -> None:
    with pytest.raises((ConfigError, DataError)):
        JinjaTemplate("bomb", "{{ a }}" + bomb).render(pa.table({"a": [1]}))


def test_what_a_template_may_make_grows_with_its_row(tokenizer: Path) -> None:
    text = "a fine day & a long one " * 400_000
    row = {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]}
    source = "{% set all = messages[0].content|replace('fine', 'finer')|e %}{{ all }}{{ messages|tojson }}"
    written = compiled(source).render(**row)
    assert len(written) > 2 * len(text)
    with pytest.raises(Exception, match="much more than its row"):
        compiled("{{ 'a fine day & a long one' * 400000 }}").render(messages=[])


def test_ordinary_forms_and_powers_are_computed() -> None:
    source = "{{ 2**10 }} {{ '{}-{b:>3}'.format(1, b=2) }} {{ '%05.1f|%s' % (2.5, [1]) }} {{ '{{}}'.format() }}"
    source += " {{ 3 * [1] }}"
    assert compiled(source).render() == "1024 1-  2 002.5|[1] {} [1, 1, 1]"
