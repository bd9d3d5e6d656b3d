"""Read a model of the transformers library as the initial weights of a run.

Everything that the weights need to compute the same function is checked by name. What a run would
train differently is refused, and never approximated.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from barnraise.errors import StateError, TextError
from barnraise.ledger.anchor import fragment_to_bytes
from barnraise.spec import MAX_TOKENIZER_BYTES, MAX_VOCABULARY, UNIT_BITS, Fragment, ModelSpec
from barnraise.text.hub_files import prepare_hub
from barnraise.text.tokenizer import count_tokens, load_tokenizer
from barnraise.training.join import InitialWeights
from barnraise.training.model_files.hugging_face_export import INDEX_FILE, SINGLE_FILE
from barnraise.training.model_files.tokenizer_files import TOKENIZER_FILE, byte_tokenizer
from barnraise.training.model_files.transformers_config import CONFIG_FILE, read_model
from barnraise.training.model_files.transformers_formats import format_of
from barnraise.training.model_files.transformers_names import TransformersTensor

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEAD = "lm_head.weight"  # a copy of the token table, in some files
MAX_WEIGHT = 30.0  # the anchor's fixed point ends at 32
# What is downloaded of a model on the hub.
HUB_FILES = [CONFIG_FILE, "model*.safetensors", INDEX_FILE, TOKENIZER_FILE]


def import_hugging_face(
    folder: Path, store_blob: Callable[[bytes | memoryview], str]
) -> InitialWeights:
    """Convert the model in a folder to a run's fixed point, one fragment at a time.

    Raises:
        StateError: The folder holds no model that a run trains exactly. The message names the
            setting, tensor or file.
    """
    model = read_model(_read_json(folder / CONFIG_FILE))
    tokenizer = _read_tokenizer(folder, model)
    with _WeightFiles(folder, model) as files:
        files.check_names()
        fragments = [
            store_blob(fragment_to_bytes(_read_fragment(files, fragment)))
            for fragment in model.fragments()
        ]
    return InitialWeights(fragments, tokenizer, model)


def download_model(name: str) -> Path:
    """Download a model owner/name or owner/name@revision of the Hugging Face hub into its cache.

    Tokens, proxies, retries and the place of the cache follow the rules of `huggingface_hub`.

    Returns:
        The folder of its files.

    Raises:
        StateError: It cannot be downloaded; the text says why.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise StateError(
            "a model of the Hugging Face hub needs one more package: pip install huggingface_hub"
        ) from None
    try:
        prepare_hub()
    except TextError as error:
        raise StateError(str(error)) from None
    repository, _, revision = name.partition("@")
    try:
        folder = snapshot_download(repository, revision=revision or None, allow_patterns=HUB_FILES)
    except Exception as error:  # the library raises errors of several other libraries as well
        lines = str(error).strip().splitlines()
        reason = lines[0][:300] if lines else type(error).__name__
        raise StateError(f"the model {name} could not be downloaded: {reason}") from None
    return Path(folder)


class _WeightFiles:
    """The tensors of one or several safetensors files, by their names without the prefix."""

    def __init__(self, folder: Path, model: ModelSpec) -> None:
        self._folder = folder
        self._model = model
        self._names = format_of(model).names
        self._open_files = contextlib.ExitStack()
        self._tensors: dict[str, tuple[Any, str]] = {}  # name → open file, name in it

    def __enter__(self) -> "_WeightFiles":
        for path in _weight_paths(self._folder):
            if not path.is_file():
                raise StateError(f"{INDEX_FILE} names {path.name}, which is not in {self._folder}")
            try:
                file = self._open_files.enter_context(safe_open(path, "pt"))
            except (OSError, SafetensorError) as error:
                raise StateError(f"{path} is not a complete safetensors file: {error}") from None
            for name in file.keys():  # noqa: SIM118 -- the file is not a mapping
                self._tensors[name.removeprefix(self._names.prefix)] = file, name
        return self

    def __exit__(self, *exception: object) -> None:
        self._open_files.close()

    def check_names(self) -> None:
        """Refuse weights that lack a tensor of the model, or have one that it does not."""
        expected = {
            tensor.name.removeprefix(self._names.prefix)
            for fragment in self._model.fragments()
            for tensor in self._names.tensors(fragment)
        }
        found = {name for name in self._tensors if not name.endswith(self._names.ignored)}
        if self._model.tied_head:
            found -= {HEAD}
        for missing in sorted(expected - found):
            raise StateError(f"the weights in {self._folder} have no tensor {missing}")
        for unknown in sorted(found - expected):
            raise StateError(
                f"the weights in {self._folder} have a tensor {unknown}, which a run does not train"
            )
        table = self._names.ends["token"].removeprefix(self._names.prefix)
        has_copy = self._model.tied_head and HEAD in self._tensors
        if has_copy and not torch.equal(self._read(HEAD), self._read(table)):
            raise StateError(
                f"the tensor {HEAD} is not the token table {table}: a run trains a tied head "
                "(tie_word_embeddings)"
            )

    def tensors(self, fragment: Fragment) -> list[TransformersTensor]:
        """List a fragment's tensors under their names in transformers."""
        return self._names.tensors(fragment)

    def read(self, tensor: TransformersTensor) -> Tensor:
        """Read a tensor as fp32 in our orientation.

        Raises:
            StateError: It has another shape or type, or numbers that a run cannot represent.
        """
        values = self._read(tensor.name.removeprefix(self._names.prefix))
        if list(values.shape) != tensor.shape:
            raise StateError(
                f"the tensor {tensor.name} has the shape {list(values.shape)}, "
                f"and {CONFIG_FILE} states {tensor.shape}"
            )
        if values.dtype not in FLOAT_DTYPES:
            raise StateError(
                f"the tensor {tensor.name} holds {values.dtype}: fp32, bf16 and fp16 are read"
            )
        values = values.float()
        largest = float(values.abs().max())
        if not largest < MAX_WEIGHT:  # also true of NaN
            raise StateError(
                f"the tensor {tensor.name} holds {largest:g}: the weights of a run stay below "
                f"{MAX_WEIGHT:g}"
            )
        return values.t() if tensor.is_transposed else values

    def _read(self, name: str) -> Tensor:
        file, name_there = self._tensors[name]
        try:
            return file.get_tensor(name_there)
        except (OSError, SafetensorError) as error:
            raise StateError(f"the tensor {name} cannot be read: {error}") from None


def _weight_paths(folder: Path) -> Iterator[Path]:
    """Yield the files that hold the weights. An index may name files of the same folder only."""
    if (folder / SINGLE_FILE).exists():
        yield folder / SINGLE_FILE
        return
    if not (folder / INDEX_FILE).exists():
        raise StateError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}: only safetensors are read. "
            "Pickled weights (.bin) can run any program: convert them with transformers' "
            "save_pretrained"
        )
    weight_map = _read_json(folder / INDEX_FILE).get("weight_map")
    names = set(weight_map.values()) if isinstance(weight_map, dict) else set()
    for name in sorted(map(str, names)):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise StateError(f"{INDEX_FILE} names {name[:60]!r}, which is no file of its folder")
        yield folder / name


def _read_fragment(files: _WeightFiles, fragment: Fragment) -> Tensor:
    """Return a fragment as int32 [n] units; padding is zero."""
    units = torch.zeros(fragment.size, dtype=torch.int32)
    for tensor in files.tensors(fragment):
        values = files.read(tensor).reshape(-1).double().mul_(1 << UNIT_BITS).round_()
        units[tensor.offset : tensor.offset + values.numel()] = values.int()
    return units


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(_read_bounded(path))
    except FileNotFoundError:
        raise StateError(f"{path.parent} has no {path.name}") from None
    except (ValueError, RecursionError):
        raise StateError(f"{path} is not valid JSON") from None
    if not isinstance(content, dict):
        raise StateError(f"{path} is no JSON object")
    return content


def _read_tokenizer(folder: Path, model: ModelSpec) -> bytes | None:
    """Return the content of the model's tokenizer file; None for our own one of plain bytes."""
    if not (folder / TOKENIZER_FILE).exists():
        raise StateError(
            f"{folder} has no {TOKENIZER_FILE}: transformers writes one from older files, by "
            "AutoTokenizer.from_pretrained and save_pretrained"
        )
    content = _read_bounded(folder / TOKENIZER_FILE)
    if model.vocabulary == 256 and _is_byte_tokenizer(content):
        return None
    _check_tokenizer(content, folder, model)
    return content


def _read_bounded(path: Path) -> bytes:
    """Return a file of a tokenizer; raise StateError if it is larger than one can be."""
    with path.open("rb") as file:
        content = file.read(MAX_TOKENIZER_BYTES + 1)
    if len(content) > MAX_TOKENIZER_BYTES:
        raise StateError(f"{path} is too large to be what its name says")
    return content


def _check_tokenizer(content: bytes, folder: Path, model: ModelSpec) -> None:
    """Refuse a tokenizer that the model cannot be trained with.

    Raises:
        StateError: it cannot be read, has more tokens than the model, or none that ends a text.
    """
    shown = f"the tokenizer in {folder}"
    try:
        tokenizer = load_tokenizer(content, MAX_VOCABULARY, shown)
    except TextError as error:
        raise StateError(str(error)) from None
    if count_tokens(tokenizer) > model.vocabulary:
        raise StateError(
            f"{shown} has {count_tokens(tokenizer):,} tokens, and the setting vocab_size of "
            f"{CONFIG_FILE} is {model.vocabulary:,}: they do not belong together"
        )


def _is_byte_tokenizer(content: bytes) -> bool:
    try:
        return json.loads(content) == json.loads(byte_tokenizer().to_str())
    except (ValueError, RecursionError):
        return False
