"""Host. One tokenizer for the engine, whether it came with a GGUF file or a Hugging Face folder."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from jaxspec.config.fields import read_json
from jaxspec.config.gguf_header import read_gguf_header
from jaxspec.errors import ConfigError, RequestError
from jaxspec.text.chat import render_chat
from jaxspec.text.gguf_vocabulary import LLAMA3_STYLE, build_gguf_tokenizer

_SLOW_FILES = ("tokenizer.model", "vocab.json", "tekken.json")


class Tokenizer:
    """Text to ids and back. `special_ids` are the ids that `skip_special_tokens` leaves out."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        pad_token: str | None = None,
        unk_token: str | None = None,
        chat_template: str | None = None,
        vocab_size: int | None = None,
        frame: tuple[bool, bool] | None = None,
    ):
        """Wraps a backend.

        Args:
          backend: does the work; padding and truncation are switched off.
          vocab_size: tokens with an id (default: as many as the backend knows).
          frame: (BOS before, EOS after) where special tokens are asked for; None leaves it to the backend.
        """
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.bos_token, self.eos_token, self.pad_token = bos_token, eos_token, pad_token
        self.bos_token_id = backend.token_to_id(bos_token) if bos_token else None
        self.eos_token_id = backend.token_to_id(eos_token) if eos_token else None
        self.pad_token_id = backend.token_to_id(pad_token) if pad_token else None
        unk_token = unk_token or getattr(backend.model, "unk_token", None)  # not every kind of model has one
        self.unk_token_id = backend.token_to_id(unk_token) if unk_token else None
        self.chat_template = chat_template
        self.vocab_size = vocab_size or backend.get_vocab_size(with_added_tokens=True)
        self.special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._frame: tuple[list[int], list[int]] | None = None
        if frame is not None:
            before = [self.bos_token_id] if frame[0] and self.bos_token_id is not None else []
            after = [self.eos_token_id] if frame[1] and self.eos_token_id is not None else []
            self._frame = (before, after)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. Special tokens written out in it ("<|im_start|>") become their ids.

        Raises:
          RequestError: the text is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"a prompt must be valid Unicode, got a lone surrogate at character {error.start}; remove it",
                param="prompt",
            ) from error
        if self._frame is None:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        ids = self.backend.encode(text, add_special_tokens=False).ids
        return [*self._frame[0], *ids, *self._frame[1]] if add_special_tokens else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; an id past the vocabulary (a padded row of the model) has no text."""
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    @property
    def vocabulary(self) -> dict[str, int]:
        """Every token's id, in the vocabulary's own spelling."""
        return self.backend.get_vocab(with_added_tokens=True)

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of an id, or None past its end."""
        return self.backend.id_to_token(token_id)

    def apply_chat_template(
        self, messages: Any, /, add_generation_prompt: bool = True, chat_template: str | None = None, **variables: Any
    ) -> str:
        """The prompt text of a conversation; it holds its own special tokens, so encode it without adding more.

        Args:
          messages: a list of {"role", "content"}.
          chat_template: Jinja source to use in place of the model's own.
          **variables: more for the template to read (tools, documents, enable_thinking, …).

        Raises:
          RequestError: no template, or messages it cannot render.
        """
        template = chat_template or self.chat_template
        if template is None:
            raise RequestError(
                "this model has no chat template; send a plain prompt instead or give chat_template", param="messages"
            )
        tokens = {"bos_token": self.bos_token, "eos_token": self.eos_token, "pad_token": self.pad_token}
        given = {key: value for key, value in tokens.items() if value is not None} | variables
        return render_chat(template, messages, add_generation_prompt=add_generation_prompt, **given)


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a .gguf file or of a folder with tokenizer.json.

    Raises:
      ConfigError, WeightsError: none there, or what is there is corrupt or unsupported.
    """
    path = Path(path)
    return _load_gguf(path) if path.is_file() else _load_folder(path)


def _load_gguf(path: Path) -> Tokenizer:
    metadata = read_gguf_header(path).metadata
    backend = build_gguf_tokenizer(metadata)
    tokens = metadata["tokenizer.ggml.tokens"]

    def token_of(key: str) -> str | None:
        token_id = metadata.get(f"tokenizer.ggml.{key}")
        if token_id is None:
            return None
        if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
            raise ConfigError(f"{path}: {key} {token_id!r} is not one of {len(tokens)} tokens; fetch the file again")
        return tokens[token_id]

    # Files that do not say: sentencepiece and Llama 3 models begin with BOS, other byte-level ones do not.
    starts = metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in LLAMA3_STYLE
    return Tokenizer(
        backend,
        bos_token=token_of("bos_token_id"),
        eos_token=token_of("eos_token_id"),
        pad_token=token_of("padding_token_id"),
        unk_token=token_of("unknown_token_id"),
        chat_template=metadata.get("tokenizer.chat_template"),
        vocab_size=len(tokens),
        frame=(
            bool(metadata.get("tokenizer.ggml.add_bos_token", starts)),
            bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        ),
    )


def _load_folder(path: Path) -> Tokenizer:
    config_file, file = path / "tokenizer_config.json", path / "tokenizer.json"
    config = read_json(config_file) if config_file.is_file() else {}
    try:
        backend = tokenizers.Tokenizer.from_file(str(file)) if file.is_file() else _convert_slow(path)
    except ConfigError:
        raise
    except Exception as error:  # the library raises bare Exceptions
        raise ConfigError(f"{file} is not a readable tokenizer ({str(error)[:200]}); fetch it again") from error
    explicit = "add_bos_token" in config or "add_eos_token" in config
    return Tokenizer(
        backend,
        bos_token=_content(config.get("bos_token")),
        eos_token=_content(config.get("eos_token")),
        pad_token=_content(config.get("pad_token")),
        unk_token=_content(config.get("unk_token")),
        chat_template=_folder_template(path, config),
        frame=(bool(config.get("add_bos_token")), bool(config.get("add_eos_token"))) if explicit else None,
    )


def _convert_slow(path: Path) -> tokenizers.Tokenizer:
    """Folders without tokenizer.json: transformers converts what is there (slow to import, hence only here)."""
    if not any((path / name).is_file() for name in _SLOW_FILES):
        raise ConfigError(f"{path} holds no tokenizer.json; add the model's tokenizer files to the folder")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path), local_files_only=True).backend_tokenizer


def _folder_template(path: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja wins over the key; a list of named templates means its "default"."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _content(token: Any) -> str | None:
    """Token entries are strings or {"content": …}."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) and token else None
