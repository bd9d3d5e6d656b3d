"""Begin a run with a Hugging Face model: from the hub, or from a folder of the owner's machine.

This happens once per run, on its owner's machine. All other machines fetch the weights by digest
(`prefetch`).
"""

import logging
from collections.abc import Callable
from pathlib import Path

from barnraise.errors import StateError, UnsupportedModelError
from barnraise.spec import MODEL_FOLDER, RunSpec, adopt_model, problems
from barnraise.training.join import InitialWeights
from barnraise.training.model_files.hugging_face_import import (
    download_model,
    import_hugging_face,
)

log = logging.getLogger("barnraise")


def load_start_model(
    spec: RunSpec, store_blob: Callable[[bytes | memoryview], str], folder: Path | None
) -> InitialWeights:
    """Convert the model that `spec.start` names, or that is in a folder of the owner's machine.

    Raises:
        UnsupportedModelError: A run cannot train this model exactly, or its folder is unknown.
        StateError: It cannot be downloaded now; the text says why.
    """
    name = spec.start.model
    if folder is None and name == MODEL_FOLDER:
        raise UnsupportedModelError(
            "the model that this run begins with is in a folder of its owner's machine: "
            "run `barnraise prepare RUN --model FOLDER` there"
        )
    if folder is None:
        log.info("downloading the model %s that this run begins with", name)
        folder = download_model(name)
    elif name != MODEL_FOLDER:
        raise UnsupportedModelError(f"this run begins with {name}, not with a model in a folder")
    log.info("converting the model in %s", folder)
    try:
        imported = import_hugging_face(folder, store_blob)
        _check(spec, imported)
    except UnsupportedModelError:
        raise
    except StateError as error:
        raise UnsupportedModelError(str(error)) from None
    return imported


def _check(spec: RunSpec, imported: InitialWeights) -> None:
    """Check that the run can train the model with its tokenizer.

    Raises:
        UnsupportedModelError: names what to change.
    """
    if (imported.tokenizer is None) != (spec.text.tokenizer == "bytes"):
        kind = "bytes" if imported.tokenizer is None else "byte-pair encoding"
        raise UnsupportedModelError(
            f"the tokenizer of the model is {kind}: choose this tokenizer in the run's form"
        )
    assert imported.model is not None, "it was imported with its architecture"
    found = problems(adopt_model(spec, imported.model))
    if found:
        name, sentence = next(iter(found.items()))
        raise UnsupportedModelError(f"a run cannot train this model: {name}: {sentence}")
