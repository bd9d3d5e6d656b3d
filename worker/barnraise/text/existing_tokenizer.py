"""Load an existing tokenizer from a folder or from the Hugging Face hub, with its chat template."""

import json
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from blake3 import blake3

from barnraise.errors import TextError
from barnraise.spec import MAX_VOCABULARY
from barnraise.text.extra import needs_extra
from barnraise.text.hub_files import hub_errors, prepare_hub
from barnraise.text.places import HUB_PREFIXES
from barnraise.text.rows import RenderChat
from barnraise.text.tokenizer import MARK_BEGIN, MARK_END, load_tokenizer
from barnraise.text.tokenizer_file import read_tokenizer_file

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
# What a template raises besides jinja2's own errors.
_TEMPLATE_ERRORS = (
    *(TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError),
)
# Stand for the contents of messages while a template is rendered.
_CONTENT_BEGIN = "\ufdd2"
_CONTENT_END = "\ufdd3"
_CONTENT = re.compile(f"{_CONTENT_BEGIN}\\d+{_CONTENT_END}")


@dataclass(frozen=True)
class ExistingTokenizer:
    """The files of a tokenizer.

    Attributes:
        file: the content of tokenizer.json.
        chat_template: a template of chats, in Jinja; "" if there is none.
        special_tokens: names like "bos_token" with their spelling, for the template.
    """

    file: bytes
    chat_template: str = ""
    special_tokens: tuple[tuple[str, str], ...] = ()

    @property
    def render_chat(self) -> RenderChat | None:
        """Return what turns a chat into text, or None without a template."""
        return _ChatRenderer(self) if self.chat_template else None

    @property
    def digest(self) -> str:
        """Return a digest of all that decides how a chat is rendered."""
        parts = [self.file.hex(), self.chat_template, *map(list, self.special_tokens)]
        return blake3(json.dumps(parts).encode()).hexdigest()


def load_existing_tokenizer(place: str) -> ExistingTokenizer:
    """Load a tokenizer from a folder, a tokenizer.json, or hf:owner/name@revision.

    Raises:
        TextError: there is no tokenizer.json, or it cannot be read.
    """
    for prefix in HUB_PREFIXES:
        if place.startswith(prefix):
            return _load_from_hub(place.removeprefix(prefix))
    path = Path(place)
    folder = path if path.is_dir() else path.parent
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if not file.is_file():
        raise TextError(f"there is no {file}: name a folder with a {TOKENIZER_FILE}")
    try:
        return _combine(
            file.read_bytes(),
            *(
                (folder / name).read_text("utf-8") if (folder / name).is_file() else ""
                for name in (CONFIG_FILE, TEMPLATE_FILE)
            ),
        )
    except (OSError, ValueError) as error:
        raise TextError(f"the tokenizer in {folder} cannot be read: {error}") from None


def _load_from_hub(place: str) -> ExistingTokenizer:
    with needs_extra("this machine cannot read from the hub"):
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError
    prepare_hub()
    repository, _, revision = place.partition("@")

    def download(name: str) -> bytes | None:
        try:
            path = hf_hub_download(repository, name, revision=revision or None)
        except EntryNotFoundError as error:
            if isinstance(error, FileNotFoundError):  # the hub could not be asked
                raise
            return None
        return Path(path).read_bytes()

    with hub_errors(repository):
        file = download(TOKENIZER_FILE)
        if file is None:
            raise TextError(f"hf:{repository} has no {TOKENIZER_FILE}")
        config = (download(CONFIG_FILE) or b"").decode()
        template = (download(TEMPLATE_FILE) or b"").decode()
        return _combine(file, config, template)


def _combine(file: bytes, config_text: str, template: str) -> ExistingTokenizer:
    """Return a tokenizer of the contents of its files; raise ValueError for wrong ones."""
    config: Any = json.loads(config_text) if config_text else {}
    if not isinstance(config, dict):
        raise ValueError(f"{CONFIG_FILE} is no JSON object")
    chosen = template or config.get("chat_template") or ""
    if isinstance(chosen, list):  # several, with names
        entries = [entry for entry in chosen if isinstance(entry, dict)]
        by_name = {str(entry.get("name")): entry.get("template") or "" for entry in entries}
        chosen = by_name.get("default") or next(iter(by_name.values()), "")
    special: dict[str, str] = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            special[name] = content
    return ExistingTokenizer(
        read_tokenizer_file(file, "the tokenizer"), str(chosen), tuple(sorted(special.items()))
    )


class _ChatRenderer:
    """Render chats by a template, as transformers does, and mark its special tokens.

    The contents of the messages are set in afterwards, so that words in them that spell a special
    token are not mistaken for it.
    """

    def __init__(self, tokenizer: ExistingTokenizer) -> None:
        with needs_extra("this machine cannot render chats"):
            from jinja2.exceptions import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime(2000, 1, 1).strftime(form)
        self._error = TemplateError
        try:
            self._template = environment.from_string(tokenizer.chat_template)
            loaded = load_tokenizer(tokenizer.file, MAX_VOCABULARY, "it")
        except Exception as error:  # jinja2 has no common base with ours
            raise TextError(f"the tokenizer's chat template cannot be used: {error}") from None
        self._variables = dict(tokenizer.special_tokens)
        self._marks = sorted(
            (
                (token.content, f"{MARK_BEGIN}{number}{MARK_END}")
                for number, token in loaded.get_added_tokens_decoder().items()
                if token.special
            ),
            key=lambda mark: -len(mark[0]),
        )

    def __call__(self, messages: list[dict[str, Any]]) -> str:
        contents: dict[str, str] = {}
        hidden: list[dict[str, Any]] = []
        for message in messages:
            content = message["content"]
            if isinstance(content, list):
                content = "".join(
                    str(part.get("text", "")) for part in content if isinstance(part, dict)
                )
            if isinstance(content, str):
                place = f"{_CONTENT_BEGIN}{len(contents)}{_CONTENT_END}"
                contents[place] = content.replace(MARK_BEGIN, "\ufffd")
                content = place
            # Names and roles come from the data too, and must not spell the number of a token.
            plain = {
                name: value.replace(MARK_BEGIN, "\ufffd") if isinstance(value, str) else value
                for name, value in message.items()
            }
            hidden.append({**plain, "content": content})
        try:
            rendered = self._template.render(
                messages=hidden, add_generation_prompt=False, **self._variables
            )
        except (self._error, *_TEMPLATE_ERRORS) as error:
            raise TextError(f"the chat template refuses a chat: {error}") from None
        for spelled, mark in self._marks:
            rendered = rendered.replace(spelled, mark)
        return _CONTENT.sub(lambda place: contents.get(place[0], ""), rendered)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    from jinja2.exceptions import TemplateError

    raise TemplateError(message)
