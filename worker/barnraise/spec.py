"""What a run is: the model, its text and its recipe. Immutable once launched, and named by its digest.

Pure data and closed forms over the standard library: the site checks forms with this file, the planner sizes machines
with it, and every peer lays its parameter vector out by it. No torch, no numpy.
"""

import dataclasses
import ipaddress
import json
import math
import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from barnraise.errors import SpecError

FORMAT = 1  # of the spec and of every update; a new format is a new run
UNIT_BITS = 26  # the anchor's fixed point: one unit is 2**-26
ALIGN = 64  # fragments are multiples of this many elements (fused AdamW differs in the last bits on odd tails)
TENSOR_ALIGN = 16  # elements: every tensor starts on a 64-byte boundary
MAX_UPDATE_UNITS = 1 << 26  # an update moves no weight by more than 1.0
SOURCES = ("stdlib", "huggingface", "urls", "files")
TOKENIZERS = ("bytes", "bpe")
SCHEDULES = ("cosine", "constant")
# Rounds end together by the clock, said in turns or at once; or each ends in its own time. Nobody waits.
STRATEGIES = ("streams", "windows", "async")
# What an author says of an update: all values, or the largest so many of each chunk of 4096, in 2, 4 or 8 bits.
_KEPT = r"[1-9]\d{0,2}|[1-3]\d{3}|40[0-8]\d|409[0-5]"  # 1…4095
AUTO = "auto"  # each author chooses compression and round length by its uplink
CODEC = re.compile(rf"dense(?P<dense>[248])|top(?P<kept>{_KEPT})x(?P<bits>[248])", re.ASCII)


@dataclass(frozen=True)
class Slot:
    """Where one tensor lies in its fragment. `initial` is "normal", "ones" or "zeros"; `deviation` in 2**-26 units."""

    name: str
    shape: tuple[int, ...]
    offset: int  # elements from the fragment's start
    initial: str = "zeros"
    deviation: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Fragment:
    """One layer: the unit of swapping, compression, transfer and digest. `size` in elements, padding included."""

    index: int
    name: str
    slots: tuple[Slot, ...]
    size: int


@dataclass(frozen=True)
class ModelSpec:
    """A GPT as GPT-2 and GPT-3 have it: pre-LayerNorm, learned positions, GELU, head tied to the token embedding."""

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int

    @property
    def parameters(self) -> int:
        """Weights that are trained, without padding; the tied head counts once."""
        return sum(slot.size for fragment in self.fragments() for slot in fragment.slots)

    def fragments(self) -> tuple[Fragment, ...]:
        """The parameter vector's layout: the embedding, one fragment a block, the final norm."""
        narrow = self.deviation(1)
        deep = self.deviation(
            2 * self.layers
        )  # GPT-2: what feeds the residual stream starts smaller with depth
        d = self.width
        embedding = [
            ("token", (self.vocabulary, d), narrow),
            ("position", (self.context, d), narrow // 2),
        ]
        block = [
            ("norm1.weight", (d,), "ones"),
            ("norm1.bias", (d,), "zeros"),
            ("qkv.weight", (3 * d, d), narrow),
            ("qkv.bias", (3 * d,), "zeros"),
            ("out.weight", (d, d), deep),
            ("out.bias", (d,), "zeros"),
            ("norm2.weight", (d,), "ones"),
            ("norm2.bias", (d,), "zeros"),
            ("up.weight", (4 * d, d), narrow),
            ("up.bias", (4 * d,), "zeros"),
            ("down.weight", (d, 4 * d), deep),
            ("down.bias", (d,), "zeros"),
        ]
        final = [("norm.weight", (d,), "ones"), ("norm.bias", (d,), "zeros")]
        named = [
            ("embedding", embedding),
            *((f"block.{i}", block) for i in range(self.layers)),
            ("final", final),
        ]
        return tuple(_lay_out(index, name, tensors) for index, (name, tensors) in enumerate(named))

    @staticmethod
    def deviation(depth: int) -> int:
        """0.02 / √depth in 2**-26 units, by integers alone."""
        return math.isqrt((1 << 2 * UNIT_BITS) // (2500 * depth))


def _lay_out(index: int, name: str, tensors) -> Fragment:
    slots, offset = [], 0
    for tensor, shape, start in tensors:
        kind, deviation = ("normal", start) if isinstance(start, int) else (start, 0)
        slots.append(Slot(tensor, shape, offset, kind, deviation))
        offset = -(-(offset + math.prod(shape)) // TENSOR_ALIGN) * TENSOR_ALIGN
    return Fragment(index, name, tuple(slots), -(-offset // ALIGN) * ALIGN)


# Presets: (layers, width, heads, context); GPT-2 from Radford et al. 2019, GPT-3 from Brown et al. 2020, table 2.1
# (13B there has 5140-wide layers of 40 heads; 5120 is what divides evenly and what everybody trains).
_SHAPES = {
    "gpt-nano": (4, 128, 4, 128),
    "gpt-micro": (6, 256, 8, 256),
    "gpt-mini": (8, 512, 8, 512),
    "gpt2-124m": (12, 768, 12, 1024),
    "gpt2-355m": (24, 1024, 16, 1024),
    "gpt2-774m": (36, 1280, 20, 1024),
    "gpt2-1.5b": (48, 1600, 25, 1024),
    "gpt3-1.3b": (24, 2048, 16, 2048),
    "gpt3-2.7b": (32, 2560, 32, 2048),
    "gpt3-6.7b": (32, 4096, 32, 2048),
    "gpt3-13b": (40, 5120, 40, 2048),
    "gpt3-175b": (96, 12288, 96, 2048),
}


def preset(name: str, vocabulary: int | None = None) -> ModelSpec:
    """The named model; `vocabulary` defaults to 2,048 below GPT-2 and to 50,257 from there on."""
    if name not in _SHAPES:
        raise SpecError(
            {"model": f"there is no preset '{name}'; the presets are {', '.join(_SHAPES)}"}
        )
    return ModelSpec(*_SHAPES[name], vocabulary or (2048 if name.startswith("gpt-") else 50257))


PRESETS = tuple(_SHAPES)


@dataclass(frozen=True)
class TextSpec:
    """Where the text comes from and how it becomes tokens. The tokens themselves are named by the manifest."""

    source: str = "stdlib"
    places: tuple[str, ...] = ()  # of the source: a dataset's id, or addresses
    tokenizer: str = "bpe"
    held_out: float = 0.02  # share of the tokens kept back for validation
    shard_tokens: int = 1 << 20


@dataclass(frozen=True)
class Recipe:
    """How the run learns. Token counts are of the whole run's ledger unless they say otherwise."""

    token_budget: int = 10_000_000
    learning_rate: float = 1e-3
    schedule: str = "cosine"
    warmup_tokens: int = 20_000
    weight_decay: float = 0.1
    clip: float = 1.0  # gradient norm
    step_sequences: int = 8  # sequences a worker trains on in one step
    round_steps: int = 10  # H: local steps between two updates
    strategy: str = "streams"
    codec: str = "dense2"
    outer_rate: float = 0.6  # η
    outer_momentum: float = 0.7  # μ
    feedback_decay: float = 1.0  # β of the error feedback
    speculation: float = (
        1.0  # trust in the guess of updates under way, as the study found best; 0: none is made
    )
    evaluate_every: int = 20_000


@dataclass(frozen=True)
class Start:
    """The weights of another run that this one begins with; without a `run`, those of its own seed. `digest`: BLAKE3 of
    them as one checkpoint; `tokenizer`: of that run's, "" for bytes; `fragments`: of each, pinned at launch."""

    run: str = ""
    digest: str = ""
    tokens: int = 0  # behind them there
    tokenizer: str = ""
    fragments: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunSpec:
    """All that a peer must know to train in a run and to judge the updates of others. Keys are hex Ed25519 keys."""

    model: ModelSpec
    text: TextSpec = field(default_factory=TextSpec)
    recipe: Recipe = field(default_factory=Recipe)
    seed: int = 0
    owner: str = ""  # the key that signed the manifest
    roots: tuple[str, ...] = ()  # the mirrors' root keys
    threshold: int = 1  # how many root keys must sign
    manifest: str = ""  # BLAKE3 of the signed manifest's body; pinned at launch
    max_tokens_per_update: int = 1 << 26
    verdict_horizon: int = 20  # rounds of ledger tokens an archive peer keeps updates for
    start: Start = field(default_factory=Start)
    format: int = FORMAT

    def to_json(self) -> str:
        """One text for one spec: the digest of these exact bytes names the run's rules."""
        raw = dataclasses.asdict(self)
        if not self.start.run:
            del raw["start"]  # the text that runs had before there was such a thing
        return json.dumps(raw, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "RunSpec":
        """Raises SpecError for anything that is not a sensible spec, unknown names included."""
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SpecError({"spec": f"is not JSON: {error}"}) from None
        spec = _build(cls, raw, "")
        if found := problems(spec):
            raise SpecError(found)
        return spec


def _build(cls, raw: Any, where: str):
    """A dataclass from plain JSON, strict about names and types."""
    if not isinstance(raw, dict):
        raise SpecError({where or "spec": "must be an object"})
    known = {f.name: f for f in dataclasses.fields(cls)}
    if unknown := sorted(set(raw) - set(known)):
        raise SpecError(
            {where + str(name): "is not a field this version knows" for name in unknown}
        )
    values = {}
    for name, f in known.items():
        if name not in raw:
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
                raise SpecError({where + name: "is missing"})
            continue
        values[name] = _typed(f.type, raw[name], where + name)
    return cls(**values)


def _typed(kind: Any, value: Any, where: str):
    if dataclasses.is_dataclass(kind):
        return _build(kind, value, where + ".")
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if abs(value) < 1e300 else math.inf
    if kind is str and isinstance(value, str):
        return value
    if (
        kind == tuple[str, ...]
        and isinstance(value, list)
        and all(isinstance(v, str) for v in value)
    ):
        return tuple(value)
    raise SpecError(
        {
            where: f"must be {'a number' if kind in (int, float) else 'text'}, not {json.dumps(value)[:40]}"
        }
    )


def problems(spec: RunSpec) -> dict[str, str]:
    """What keeps a spec from being trained: dotted field → a sentence that says what to change. Empty when sound."""
    model, text, recipe = spec.model, spec.text, spec.recipe
    found: dict[str, str] = {}

    def within(name: str, value: float, low: float, high: float, what: str) -> None:
        if not low <= value <= high:  # nor is NaN
            found[name] = f"{what} must be between {low:,} and {high:,}; this is {value:,}"

    def one_of(name: str, value: str, known: tuple[str, ...], what: str) -> None:
        if value not in known:
            found[name] = f"{what} must be one of {', '.join(known)}; '{value[:40]}' is not"

    within("model.layers", model.layers, 1, 256, "the number of layers")
    within("model.width", model.width, 16, 65_536, "the width")
    within("model.heads", model.heads, 1, 512, "the number of heads")
    within("model.context", model.context, 8, 16_384, "the context, in tokens,")
    within("model.vocabulary", model.vocabulary, 256, 65_536, "the vocabulary")
    if "model.heads" not in found and "model.width" not in found and model.width % model.heads:
        near = [h for h in range(1, model.width + 1) if model.width % h == 0]
        best = min(near, key=lambda h: abs(h - model.heads))
        found["model.heads"] = (
            f"the width ({model.width}) must be divisible by the heads ({model.heads}); try {best}"
        )
    one_of("text.source", text.source, SOURCES, "the source")
    if "text.source" not in found and (wrong := _places(text)):
        found["text.places"] = wrong
    one_of("text.tokenizer", text.tokenizer, TOKENIZERS, "the tokenizer")
    if text.tokenizer == "bytes" and model.vocabulary != 256 and "model.vocabulary" not in found:
        found["model.vocabulary"] = (
            "the bytes tokenizer has 256 tokens; set the vocabulary to 256 or choose bpe"
        )
    if text.tokenizer == "bpe" and model.vocabulary < 300 and "model.vocabulary" not in found:
        found["model.vocabulary"] = (
            "bpe starts from the 256 bytes; give it a vocabulary of 300 or more"
        )
    within("text.held_out", text.held_out, 0.001, 0.5, "the held-out share")
    within("text.shard_tokens", text.shard_tokens, 1 << 16, 1 << 28, "the tokens a shard")
    within("recipe.token_budget", recipe.token_budget, 1_000, 10**15, "the token budget")
    within("recipe.learning_rate", recipe.learning_rate, 1e-8, 1.0, "the learning rate")
    one_of("recipe.schedule", recipe.schedule, SCHEDULES, "the schedule")
    within("recipe.warmup_tokens", recipe.warmup_tokens, 0, 10**15, "the warm-up, in tokens,")
    within("recipe.weight_decay", recipe.weight_decay, 0.0, 1.0, "the weight decay")
    within("recipe.clip", recipe.clip, 1e-3, 1e6, "the gradient norm to clip at")
    within("recipe.step_sequences", recipe.step_sequences, 1, 65_536, "the sequences a step")
    within("recipe.round_steps", recipe.round_steps, 1, 10_000, "the steps a round")
    one_of("recipe.strategy", recipe.strategy, STRATEGIES, "the strategy")
    if recipe.codec != AUTO and not CODEC.fullmatch(recipe.codec):
        found["recipe.codec"] = (
            f"the codec must be auto, dense8, dense4, dense2, or one like top64x2; '{recipe.codec[:40]}' is not"
        )
    within("recipe.outer_rate", recipe.outer_rate, 1e-3, 10.0, "the outer rate")
    within("recipe.outer_momentum", recipe.outer_momentum, 0.0, 0.99, "the outer momentum")
    within(
        "recipe.feedback_decay", recipe.feedback_decay, 0.0, 1.0, "the decay of the error feedback"
    )
    within(
        "recipe.speculation",
        recipe.speculation,
        0.0,
        1.0,
        "the trust in a guess of updates under way",
    )
    within(
        "recipe.evaluate_every",
        recipe.evaluate_every,
        1_000,
        10**15,
        "the tokens between two validations",
    )
    within("seed", spec.seed, 0, 2**63 - 1, "the seed")
    within("max_tokens_per_update", spec.max_tokens_per_update, 1, 1 << 40, "the tokens an update")
    within("verdict_horizon", spec.verdict_horizon, 1, 100_000, "the verdict horizon, in rounds,")
    tokens = recipe.step_sequences * model.context * recipe.round_steps
    if tokens > spec.max_tokens_per_update and "recipe.round_steps" not in found:
        limit = f"{spec.max_tokens_per_update:,}"
        found["recipe.round_steps"] = (
            f"a round of {tokens:,} tokens is over the {limit} an update may hold; take fewer steps"
        )
    if wrong := _start(spec):
        found["start"] = wrong
    if spec.format != FORMAT:
        found["format"] = f"this version trains format {FORMAT}, not {spec.format}"
    if not 1 <= spec.threshold <= max(1, len(spec.roots)):
        found["threshold"] = "must be at least 1 and at most the number of root keys"
    return found


def _start(spec: RunSpec) -> str:
    """What is wrong with the weights it begins with; "" for nothing."""
    start, names = (
        spec.start,
        {spec.start.digest, *spec.start.fragments, spec.start.tokenizer or "0" * 64},
    )
    if not start.run:
        return "" if start == Start() else "names weights, but no run that they are of"
    if (
        not RUN_ID.fullmatch(start.run)
        or not all(DIGEST.fullmatch(name) for name in names)
        or start.tokens < 0
    ):
        return "must name a run by its id, and weights by their digests"
    if spec.model.layers > START_LAYERS:
        return f"a model of more than {START_LAYERS} layers cannot begin with another's weights yet"
    if start.fragments and len(start.fragments) != spec.model.layers + 2:
        return f"must name {spec.model.layers + 2} fragments, as the model has; these are {len(start.fragments)}"
    return (
        ""
        if bool(start.tokenizer) == (spec.text.tokenizer != "bytes")
        else "has another kind of tokenizer"
    )


RUN_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)
DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
START_LAYERS = 100  # their digests lie in the spec, which stays short
_PART = r"[\w-][\w.-]{0,95}"
DATASET = re.compile(
    rf"{_PART}(/{_PART}){{1,5}}(@[\w./-]{{1,100}})?(#[\w.-]{{1,100}})?", re.ASCII
)  # see `_places`
ADDRESSES, ADDRESS_LENGTH, PLACES_LENGTH = 50, 500, 8_000  # a spec stays short


def _places(text: TextSpec) -> str:
    """What is wrong with where the text comes from; "" for nothing. Whether an address leads anywhere, and not into
    somebody's own network, is seen when it is fetched."""
    places = text.places
    if text.source in ("stdlib", "files"):
        return f"the source {text.source} takes no addresses" if places else ""
    if text.source == "huggingface":
        sound = len(places) == 1 and DATASET.fullmatch(places[0])
        said = " ".join(places)[:60]
        return (
            ""
            if sound
            else (
                "name one dataset as owner/name, where need be with /folder, @revision or #column after it; "
                f"'{said}' is not one"
            )
        )
    if not 1 <= len(places) <= ADDRESSES or sum(map(len, places)) > PLACES_LENGTH:
        return f"give 1 to {ADDRESSES} addresses, of {PLACES_LENGTH:,} characters together at most"
    for place in places:
        if problem := address_problem(place):
            return f"'{place[:60]}' {problem}"
    return ""


def address_problem(address: str) -> str:
    """Why a text cannot be fetched from an address, by its spelling alone; "" where it might."""
    try:
        parts = urlsplit(address)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        return "is not an address"
    if (
        parts.scheme not in ("http", "https")
        or not host
        or len(address) > ADDRESS_LENGTH
        or not address.isascii()
    ):
        return "must begin with https:// or http:// and name a host"
    if parts.username is not None:
        return "holds a name or password, which everybody would see"
    if not address.isprintable() or " " in address:
        return "holds characters that an address cannot have"
    try:
        inside = not ipaddress.ip_address(host).is_global
    except ValueError:
        inside = (
            host == "localhost"
            or host.endswith((".localhost", ".local", ".internal"))
            or "." not in host
        )
    return "is inside a private network: give one that everybody can reach" if inside else ""
