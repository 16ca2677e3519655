"""Chat templates, judged by transformers' own renderer on the same folder."""

import pytest
import transformers
from made_tokenizers import TEMPLATE, add_bos, byte_level, save

from tinymoe.core.model_config import ConfigError
from tinymoe.text import Tokenizer

CHATS = {
    "one": [{"role": "user", "content": "Hi"}],
    "three": [
        {"role": "system", "content": "Be <brief> & 'kind'."},
        {"role": "user", "content": "你好 👋\n  "},
        {"role": "assistant", "content": "  Hello there "},
    ],
}
CHATML = """
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
BLOCKS = """{{ bos_token }}
{% for message in messages %}
    {% if message['role'] == 'system' %}
    [{{ message['content'] }}]
        {% continue %}
    {% endif %}
    {% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}

    {% if loop.index > 5 %}{% break %}{% endif %}
{% endfor %}
{{ strftime_now('%Y') }}|{{ custom | default('none') }}|{{ pad_token }}
"""
TOOLS = """{% if tools is not none %}{{ tools | tojson(indent=2) }}{{ tools | tojson }}{% endif %}
{%- if documents %}{% for d in documents %}{{ d.title }}{% endfor %}{% endif %}
{%- set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}:{{ m.content }}{% endfor %}"""
ALTERNATE = """{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate: ' + m.role) }}{% endif %}{{ m.content }}{% endfor %}"""


def both(folder):
    return Tokenizer(folder), transformers.PreTrainedTokenizerFast.from_pretrained(folder)


def theirs(judge, messages, **kw):
    return judge.apply_chat_template(messages, tokenize=False, **kw)


@pytest.mark.parametrize("generation", [True, False])
@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize(
    "template", [TEMPLATE, CHATML, BLOCKS, TOOLS], ids=["minimal", "chatml", "blocks", "tools"]
)
def test_renders_like_transformers(tmp_path, template, chat, generation):
    ours, judge = both(save(byte_level(), tmp_path, chat_template=template))
    for extra in ({}, {"custom": "x", "documents": [{"title": "T", "text": "..."}]}):
        want = theirs(judge, chat, add_generation_prompt=generation, **extra)
        assert ours.apply_chat_template(chat, add_generation_prompt=generation, **extra) == want


def test_tools_are_json_and_not_html(tmp_path):
    tools = [
        {"type": "function", "function": {"name": "add", "description": "a < b & 'c' ü", "parameters": {}}}
    ]
    ours, judge = both(save(byte_level(), tmp_path, chat_template=TOOLS))
    text = ours.apply_chat_template(CHATS["one"], tools=tools)
    assert text == theirs(judge, CHATS["one"], tools=tools, add_generation_prompt=True)
    assert "a < b & 'c' ü" in text


def test_generation_prompt_is_the_default(tmp_path):
    ours, _ = both(save(byte_level(), tmp_path))
    assert ours.apply_chat_template(CHATS["one"]) == "<|bos|><|user|>Hi<|eos|><|assistant|>"


def test_no_second_bos(tmp_path):
    """The template writes <|bos|>, and encode() would add another."""
    ours, judge = both(save(add_bos(byte_level()), tmp_path))
    ids = ours.encode_chat(CHATS["one"])
    assert ids == judge.apply_chat_template(CHATS["one"], add_generation_prompt=True, return_dict=False)
    assert ids.count(ours.bos_token_id) == 1
    assert ours.encode(ours.apply_chat_template(CHATS["one"])).count(ours.bos_token_id) == 2


# Where templates are kept


def test_file_goes_before_config(tmp_path):
    folder = save(byte_level(), tmp_path, chat_template="from config")
    (folder / "chat_template.jinja").write_text("from file {{ messages[0].content }}")
    ours, judge = both(folder)
    assert ours.apply_chat_template(CHATS["one"]) == "from file Hi" == theirs(judge, CHATS["one"])


@pytest.mark.parametrize("listed", [True, False])
def test_named_templates(tmp_path, listed):
    named = {"default": "D{{ messages[0].content }}", "tool_use": "T{{ tools | length }}", "rag": "R"}
    folder = save(
        byte_level(),
        tmp_path,
        chat_template=[{"name": n, "template": t} for n, t in named.items()] if listed else None,
    )
    if not listed:
        (folder / "additional_chat_templates").mkdir()
        for name, text in named.items():
            path = folder / (
                "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
            )
            path.write_text(text)
    ours, judge = both(folder)
    for options in (
        {},
        {"tools": [{"name": "f"}]},
        {"chat_template": "rag"},
        {"chat_template": "given {{ bos_token }}"},
    ):
        assert ours.apply_chat_template(CHATS["one"], **options) == theirs(judge, CHATS["one"], **options)


def test_no_default_template(tmp_path):
    ours, _ = both(save(byte_level(), tmp_path, chat_template=[{"name": "rag", "template": "R"}]))
    with pytest.raises(
        ConfigError, match=r"no default chat template: pick one of \['rag'\] as chat_template="
    ):
        ours.apply_chat_template(CHATS["one"])


def test_no_template_at_all(tmp_path):
    ours, _ = both(save(byte_level(), tmp_path, chat_template=None))
    said = r"this tokenizer has no chat template: give one as chat_template=\.\.\., add chat_template.jinja to the folder, or use generate\(\)"
    with pytest.raises(ConfigError, match=said):
        ours.encode_chat(CHATS["one"])
    assert ours.apply_chat_template(CHATS["one"], chat_template="ok") == "ok"


# Continuing a message


@pytest.mark.parametrize("content", ["  Hello there ", "Hello there", "", "two\nlines\n"])
@pytest.mark.parametrize("template", [TEMPLATE, CHATML], ids=["as it is", "trimmed"])
def test_continue_final_message(tmp_path, template, content):
    ours, judge = both(save(byte_level(), tmp_path, chat_template=template))
    chat = [*CHATS["one"], {"role": "assistant", "content": content}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    got = ours.apply_chat_template(chat, **options)
    assert got == theirs(judge, chat, **options)
    assert got.endswith(content.strip() if template is CHATML else content)
    assert chat[-1]["content"] == content  # the caller's messages are left alone


def test_continue_a_list_of_blocks(tmp_path):
    template = "{% for m in messages %}{% for b in m.content %}{{ b.text }};{% endfor %}{% endfor %}"
    ours, judge = both(save(byte_level(), tmp_path, chat_template=template))
    chat = [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}]}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert ours.apply_chat_template(chat, **options) == "a;b " == theirs(judge, chat, **options)


# Errors


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(save(byte_level(), tmp_path_factory.mktemp("chat")))


@pytest.mark.parametrize(("messages", "options", "said"), [
    ([], {}, r"messages must be a list of at least one \{'role': ..., 'content': ...\}, got \[\]"),
    ("Hi", {}, r"messages must be a list .* got 'Hi'"),
    (["Hi"], {}, r"each message must be a dict with a 'role', got 'Hi'"),
    ([{"content": "Hi"}], {}, r"each message must be a dict with a 'role'"),
    (CHATS["one"], {"tools": [print]}, r"tools must be JSON schemas \(dicts\); turn a function into one first"),
    (CHATS["one"], {"continue_final_message": True}, r"pass add_generation_prompt=False to continue"),
    (CHATS["one"], {"chat_template": "{% if %}"}, r"the chat template is not valid jinja2 \(line 1\): "),
    (CHATS["one"], {"chat_template": "{{ 1 + 'a' }}"}, r"the chat template refused these messages: unsupported operand"),
    (CHATS["one"], {"chat_template": "{{ missing.field }}"}, r"the chat template refused these messages: 'missing' is undefined"),
    (CHATS["three"], {"chat_template": ALTERNATE}, r"the chat template refused these messages: Roles must alternate: system"),
    ([{"role": "user"}], {}, r"each message needs a 'content', text or a list of blocks \(dicts\), got \{'role': 'user'\}"),
    ([{"role": "user", "content": 5}], {}, r"each message needs a 'content', .* got \{'role': 'user', 'content': 5\}"),
    ([{"role": "user", "content": None}], {}, r"each message needs a 'content'"),
    ([{"role": "user", "content": ["a"]}], {}, r"each message needs a 'content'"),
    ([{"role": "assistant", "tool_calls": [{"type": "function"}]}], {"continue_final_message": True, "add_generation_prompt": False},
     r"continue_final_message: the last message has no text to continue: None"),
    (CHATS["one"], {"continue_final_message": True, "add_generation_prompt": False, "chat_template": "fixed"},
     r"continue_final_message: the chat template leaves the last message out"),
])  # fmt: skip
def test_errors(tokenizer, messages, options, said):
    with pytest.raises(ConfigError, match=said):
        tokenizer.apply_chat_template(messages, **options)


@pytest.mark.parametrize("attack", [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ raise_exception.__globals__.json }}",
    "{{ messages.append(1) }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{% set x = messages.clear() %}",
])  # fmt: skip
def test_templates_run_in_a_sandbox(tokenizer, attack):
    with pytest.raises(ConfigError, match="refused these messages"):
        tokenizer.apply_chat_template(CHATS["one"], chat_template=attack)
    assert CHATS["one"] == [{"role": "user", "content": "Hi"}]
