"""Host. Renders chat templates, in a sandbox: a template is code that came with a download.

Not transformers' renderer, whose import alone takes most of a second; the globals and the `generation` tag are the
ones that published templates rely on.
"""

import json
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxspec.errors import RequestError


def render_chat(template: str, messages: Any, /, **variables: Any) -> str:
    """The prompt text of a conversation.

    Args:
      template: Jinja source.
      messages: a list of {"role", "content", …}; content may be a list of text parts; None values count as absent.
      **variables: whatever else the template reads (add_generation_prompt, bos_token, tools, …).

    Raises:
      RequestError: malformed messages, or the template refuses them or fails on them.
    """
    try:
        return _compile(template).render(messages=_plain_messages(messages), **variables)
    except jinja2.TemplateSyntaxError as error:
        raise RequestError(f"the chat template does not parse: {error}; give another", param="chat_template") from error
    except RequestError:
        raise
    except Exception as error:  # a template may fail in any way on messages it was not written for
        raise RequestError(
            f"the model's chat template cannot render these messages ({type(error).__name__}: {str(error)[:300]}); "
            "check the roles, their order and their contents",
            param="messages",
        ) from error


def _plain_messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise RequestError(
            f"messages must be a list with at least one message, got {messages!r:.100}", param="messages"
        )
    plain = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(
                f"messages[{index}] must be an object with a role, got {message!r:.100}", param=f"messages[{index}]"
            )
        message = {key: value for key, value in message.items() if value is not None}
        content = message.get("content")
        if isinstance(content, list):
            message["content"] = _join_parts(content, f"messages[{index}].content")
        elif content is not None and not isinstance(content, str):
            raise RequestError(
                f"messages[{index}].content must be a string or a list of text parts, got {content!r:.100}",
                param=f"messages[{index}].content",
            )
        plain.append(message)
    return plain


def _join_parts(parts: list[Any], param: str) -> str:
    texts = []
    for index, part in enumerate(parts):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
        if not isinstance(text, str):
            raise RequestError(f"{param}[{index}] must be a text part, got {part!r:.100}", param=f"{param}[{index}]")
        texts.append(text)
    return "\n".join(texts)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}` marks what training learns from; here its body is all that counts."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own form

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Jinja's own filter would escape HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
