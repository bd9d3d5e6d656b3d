"""Check whether a manifest fits its run."""

from barnraise.errors import MessageError
from barnraise.protocol import coordinator_messages, messages
from barnraise.protocol.signing import open_signed
from barnraise.spec import ModelSpec, RunSpec, adopt_model
from barnraise.spec import problems as spec_problems
from coordinator.accounts.models import Machine
from coordinator.api.authentication import ApiError
from coordinator.runs.models import Run

VOCABULARY_MULTIPLE = 64  # to which a text's vocabulary is rounded up
MIN_VOCABULARY = 300  # of a learned tokenizer


def check_manifest(
    run: Run, machine: Machine, signed: messages.Signed
) -> coordinator_messages.TextManifest:
    """Return the manifest that a machine signed for a run.

    Raises:
        ApiError: The signature is wrong, or a field does not fit the run; with a sentence for each.
    """
    try:
        manifest = open_signed(
            signed, "manifest", coordinator_messages.TextManifest, key=machine.key
        )
    except MessageError as error:
        raise ApiError(422, str(error), {"signature": str(error)}) from None
    spec = run.spec
    problems = _start_problems(spec, manifest)
    if spec.start.model and manifest.model:
        spec = adopt_model(spec, ModelSpec(**manifest.model.model_dump()))
        problems |= spec_problems(spec)
    if manifest.run != str(run.pk):
        problems["run"] = f"this manifest is for run {manifest.run}"
    if not _fits_vocabulary(spec, manifest):
        problems["vocabulary"] = (
            f"must be the run's, {spec.model.vocabulary}, or of a learned tokenizer a smaller "
            f"multiple of {VOCABULARY_MULTIPLE}; this is {manifest.vocabulary}"
        )
    if (manifest.tokenizer is None) != (spec.text.tokenizer == "bytes"):
        problems["tokenizer"] = "must name the tokenizer's file, except for bytes, which have none"
    if len(manifest.start) != (spec.model.layers + 2 if spec.start.has_weights else 0):
        problems["start"] = (
            "must name each fragment of the initial weights, and none if the seed determines them"
        )
    if len(manifest.prompts) != len(spec.prompts) or any(
        token >= manifest.vocabulary for prompt in manifest.prompts for token in prompt
    ):
        problems["prompts"] = (
            "must hold the tokens of each of the run's prompts, below the vocabulary"
        )
    least = spec.model.context + 1
    for name in ("train", "held_out"):
        tokens = sum(shard.tokens for shard in getattr(manifest, name))
        if tokens < least:
            problems[name] = (
                f"must hold at least {least} tokens, one context and the next; these hold {tokens}"
            )
    if problems:
        details = "; ".join(f"{field}: {sentence}" for field, sentence in problems.items())
        raise ApiError(422, f"the manifest does not fit the run: {details}", problems)
    return manifest


def _start_problems(spec: RunSpec, manifest: coordinator_messages.TextManifest) -> dict[str, str]:
    """Return a sentence for each field that does not fit what the run begins with."""
    problems: dict[str, str] = {}
    if spec.start.run and manifest.tokenizer != (spec.start.tokenizer or None):
        problems["tokenizer"] = "must be that of the run whose weights this one starts from"
    if bool(manifest.model) != bool(spec.start.model):
        problems["model"] = (
            "must describe the Hugging Face model that the run begins with, and nothing otherwise"
        )
    return problems


def _fits_vocabulary(spec: RunSpec, manifest: coordinator_messages.TextManifest) -> bool:
    """Return whether a text's vocabulary can be the run's.

    A text may have fewer tokens than the run asks for: then they are the vocabulary of the run,
    unless its weights are given.
    """
    asked = spec.model.vocabulary
    if manifest.vocabulary == asked:
        return True
    if spec.start.has_weights or spec.text.tokenizer == "bytes":
        return False
    is_multiple = manifest.vocabulary % VOCABULARY_MULTIPLE == 0
    return is_multiple and MIN_VOCABULARY <= manifest.vocabulary < asked
