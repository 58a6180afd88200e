"""Chat templates render as transformers renders them."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from moeserve.frontend.prepare.templates import ChatTemplate
from tests.support.tiny_model import TEMPLATE

# The manners that templates on the hub are written in: namespaces, macros, loop controls, slices, filters, tests.
BLOCKS = """
{%- set ns = namespace(first=true, system='') -%}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- set ns.system = message.content | trim %}
        {%- continue %}
    {%- endif %}
    {%- if ns.first %}
        {{- '<s>' + ns.system }}
        {%- set ns.first = false %}
    {%- endif %}
    {{- '[' ~ message['role'] ~ '] ' ~ message.content.strip().split('</think>')[-1].lstrip('\\n') }}
{% endfor %}
{% if add_generation_prompt %}
[assistant]
{% endif %}
"""
MACRO = """{% macro say(m) %}<{{ m.role }}>{{ m.content | tojson(indent=1) }}{% endmacro %}
{% for m in messages[::-1] %}{% if loop.last %}{{ say(m) }}
{% elif m is mapping %}{{ loop.index0 }}{% endif %}{% endfor %}
{% if enable_thinking is defined and enable_thinking is false %}off{% endif %}
{% generation %}{{ messages | map(attribute='role') | join(',') | upper }}{% endgeneration %}
"""
CONVERSATIONS = [
    [{"role": "user", "content": "hi"}],
    [
        {"role": "system", "content": "  Be brief. "},
        {"role": "user", "content": 'é <b> & "q" \'\n'},
        {"role": "assistant", "content": "<think>\nhm</think>\n\nyes"},
        {"role": "user", "content": "{{ 1 }}"},
    ],
]


@pytest.mark.parametrize("source", [TEMPLATE, BLOCKS, MACRO], ids=["plain", "blocks", "macro"])
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["one", "many"])
@pytest.mark.parametrize("prompt", [True, False])
def test_templates_render_as_in_transformers(source: str, messages: list[dict[str, str]], prompt: bool) -> None:
    variables = {"bos_token": "<s>", "enable_thinking": False}
    rendered, _ = render_jinja_template([messages], chat_template=source, add_generation_prompt=prompt, **variables)
    assert ChatTemplate(source).render(messages, add_generation_prompt=prompt, **variables) == rendered[0]
