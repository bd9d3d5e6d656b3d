"""Whether a manifest is this run's text."""

from barnraise.errors import MessageError
from barnraise.protocol import coordinator_messages, messages
from barnraise.protocol.signing import open_signed
from coordinator.accounts.models import Machine
from coordinator.api.authentication import ApiError
from coordinator.runs.models import Run


def check_manifest(
    run: Run, machine: Machine, signed: messages.Signed
) -> coordinator_messages.TextManifest:
    """Raises Refusal, with a sentence for each field that does not fit the run."""
    try:
        manifest = open_signed(
            signed, "manifest", coordinator_messages.TextManifest, key=machine.key
        )
    except MessageError as error:
        raise ApiError(422, str(error), {"signature": str(error)}) from None
    spec, found = run.spec, {}
    if manifest.run != str(run.pk):
        found["run"] = f"this manifest is for run {manifest.run}"
    if manifest.vocabulary != spec.model.vocabulary:
        found["vocabulary"] = (
            f"must be the run's, {spec.model.vocabulary}; this is {manifest.vocabulary}"
        )
    if (manifest.tokenizer is None) != (spec.text.tokenizer == "bytes"):
        found["tokenizer"] = "must name the tokenizer's file, except for bytes, which have none"
    if spec.start.run and manifest.tokenizer != (spec.start.tokenizer or None):
        found["tokenizer"] = "must be that of the run whose weights this one begins with"
    if len(manifest.start) != (spec.model.layers + 2 if spec.start.run else 0):
        found["start"] = (
            "must name each fragment that the run begins with, and none where its seed says them"
        )
    least = spec.model.context + 1
    for name in ("train", "held_out"):
        if (tokens := sum(shard.tokens for shard in getattr(manifest, name))) < least:
            found[name] = (
                f"must hold at least {least} tokens, one context and the next; these hold {tokens}"
            )
    if found:
        details = "; ".join(f"{field}: {sentence}" for field, sentence in found.items())
        raise ApiError(422, f"the manifest does not fit the run: {details}", found)
    return manifest
