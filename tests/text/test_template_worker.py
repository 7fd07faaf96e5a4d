"""Templates that attack, in the process made for them; and good ones, which must not suffer."""

from __future__ import annotations

import pytest

from octavo.errors import InvalidRequestError
from octavo.text.chat_template import ChatTemplate
from octavo.text.template_worker import TemplateWorker

MESSAGES = [{"role": "user", "content": "Hi 😀\n"}]
GOOD = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m['content'] }}{{ extra }}{% endfor %}"

ATTACKS = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "long text": "{{ 'a' * 10**10 }}",
    "long list": "{{ ([1] * 10**10) | length }}",
    "large power": "{{ 10 ** (10 ** 10) }}",
    "doubling": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "laughs": "{% set ns = namespace(x=['ab']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "width": "{{ 'a'.ljust(10000000000) }}",
    "format": "{{ '%10000000000d' | format(1) }}",
    "much output": "{% for i in range(99999) %}{{ 'a' * 100000 }}{% endfor %}",
    "recursion": "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "attributes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
}


def test_it_renders_as_in_this_process() -> None:
    template = ChatTemplate(GOOD, "<s>", "</s>")
    worker = TemplateWorker(template)
    try:
        for extra in ("", "é\u2028", "\n{{ no }}"):
            assert worker.render(MESSAGES, extra=extra) == template.render(MESSAGES, extra=extra)
        with pytest.raises(InvalidRequestError, match="role"):
            worker.render([{"content": "x"}])
    finally:
        worker.close()


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_costs_an_error_and_the_next_one_is_answered(name: str) -> None:
    source = f"{{% if messages[0].content == 'attack' %}}{ATTACKS[name]}{{% else %}}fine{{% endif %}}"
    worker = TemplateWorker(ChatTemplate(source), timeout=0.7)
    try:
        worker.start()
        with pytest.raises(InvalidRequestError, match="template"):
            worker.render([{"role": "user", "content": "attack"}])
        assert worker.render(MESSAGES) == "fine"
    finally:
        worker.close()
