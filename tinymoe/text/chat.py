"""Chat templates: messages to the text that the model was trained on, by the jinja2 template of its folder.

Templates come with downloaded models, so they run in jinja2's immutable sandbox. They get what Hugging Face's own
renderer gives them (transformers, utils/chat_template_utils.py); transformers is the judge in the tests.
"""

import copy
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tinymoe.core.model_config import ConfigError, brief, require

END_MARK = "<<end of the message to continue>>"
HINT = (
    "give one as chat_template=..., add chat_template.jinja to the folder, or use generate() with plain text"
)


class GenerationTag(Extension):
    """{% generation %}...{% endgeneration %} marks the assistant's text for training masks; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own contract)

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """jinja2's own tojson escapes for HTML, which would reach the model."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str):
    raise jinja2.TemplateError(message)


def _environment() -> ImmutableSandboxedEnvironment:
    extensions = [GenerationTag, "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class ChatTemplates:
    """The templates of one model folder by name (usually just "default"), and the names of its special tokens."""

    def __init__(self, templates: dict[str, str], special_tokens: dict[str, str]):
        self.templates = templates
        self._variables = special_tokens
        self._environment = _environment()
        self._compiled: dict[str, jinja2.Template] = {}

    @classmethod
    def load(cls, folder: Path, config: dict, special_tokens: dict[str, str]) -> "ChatTemplates":
        """chat_template.jinja (and additional_chat_templates/*.jinja), else "chat_template" of tokenizer_config.json."""
        files = {"default": folder / "chat_template.jinja"}
        files |= {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
        templates = {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()}
        if not templates:
            given = config.get("chat_template") or {}
            if isinstance(given, list):
                given = {item["name"]: item["template"] for item in given}
            templates = {"default": given} if isinstance(given, str) else dict(given)
        return cls(templates, special_tokens)

    def select(self, chat_template: str | None, *, tools: bool = False) -> str:
        """The template's text: by name, given as it is, or the model's own. Raises ConfigError if there is none."""
        if chat_template is not None:
            return self.templates.get(chat_template, chat_template)
        for name in ("tool_use", "default") if tools else ("default",):
            if name in self.templates:
                return self.templates[name]
        if self.templates:
            raise ConfigError(
                f"no default chat template: pick one of {sorted(self.templates)} as chat_template=..."
            )
        raise ConfigError(f"this tokenizer has no chat template: {HINT}")

    def render(
        self,
        messages: list[dict],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: list[dict] | None = None,
        documents: list[dict] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt's text. It holds its own special tokens: encode it with add_special_tokens=False.

        add_generation_prompt: end with the header of an assistant message. continue_final_message: leave the last
        message open, so that the model goes on with it. kwargs: further variables of the template.
        Raises ConfigError: no template, unusable messages, or the template's own complaint.
        """
        _check(messages, tools)
        require(
            not (add_generation_prompt and continue_final_message),
            "add_generation_prompt starts a new message, continue_final_message goes on with the last one: "
            "pass add_generation_prompt=False to continue",
        )
        source = self.select(chat_template, tools=tools is not None)
        if continue_final_message:
            messages = _mark_end(messages)
        variables = {
            **self._variables,
            **kwargs,
            "messages": messages,
            "tools": tools,
            "documents": documents,
        }
        try:
            text = self._compile(source).render(add_generation_prompt=add_generation_prompt, **variables)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template is not valid jinja2 (line {error.lineno}): {error.message}"
            ) from error
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
        ) as error:
            raise ConfigError(f"the chat template refused these messages: {str(error)[:500]}") from error
        return _cut_at_mark(text) if continue_final_message else text

    def _compile(self, source: str) -> jinja2.Template:
        if source not in self.templates.values():
            return self._environment.from_string(source)
        if source not in self._compiled:
            self._compiled[source] = self._environment.from_string(source)
        return self._compiled[source]


def conversations(messages: Any) -> list[Any]:
    """The conversations of one call, which brings one conversation or a list of them; `render` checks each."""
    require(
        hasattr(messages, "__iter__") and not isinstance(messages, (str, bytes, dict, set, frozenset)),
        f"messages must be a list of {{'role': ..., 'content': ...}}, or a list of such lists, got {brief(messages)}",
    )
    items = list(messages)
    return [items] if items and isinstance(items[0], dict) else items


def _check(messages: Any, tools: Any) -> None:
    ok = isinstance(messages, (list, tuple)) and len(messages) > 0
    require(
        ok, f"messages must be a list of at least one {{'role': ..., 'content': ...}}, got {brief(messages)}"
    )
    for message in messages:
        ok = isinstance(message, dict) and isinstance(message.get("role"), str)
        require(ok, f"each message must be a dict with a 'role', got {brief(message)}")
        content, called = message.get("content"), message.get("tool_calls")
        blocks = isinstance(content, (list, tuple)) and all(isinstance(block, dict) for block in content)
        require(
            isinstance(content, str) or blocks or (content is None and bool(called)),
            f"each message needs a 'content', text or a list of blocks (dicts), got {brief(message)}",
        )
    ok = tools is None or all(isinstance(tool, dict) for tool in tools)
    require(ok, "tools must be JSON schemas (dicts); turn a function into one first")


def _mark_end(messages: list[dict]) -> list[dict]:
    """A copy whose last message ends with END_MARK and a space; the space shows whether the template trims."""
    messages = copy.deepcopy(list(messages))
    content = messages[-1].get("content")
    if isinstance(content, str):
        messages[-1]["content"] = f"{content}{END_MARK} "
        return messages
    blocks = [
        block for block in content or [] if isinstance(block, dict) and isinstance(block.get("text"), str)
    ]
    require(
        bool(blocks), f"continue_final_message: the last message has no text to continue: {brief(content)}"
    )
    blocks[-1]["text"] += f"{END_MARK} "
    return messages


def _cut_at_mark(text: str) -> str:
    end = text.rfind(END_MARK)
    require(
        end >= 0, "continue_final_message: the chat template leaves the last message out, so it cannot go on"
    )
    trimmed = not text.startswith(f"{END_MARK} ", end)
    return text[:end].rstrip() if trimmed else text[:end]
