"""Specify a run: the model, its text and its recipe. Pure.

A spec is immutable once launched and named by its digest. The site checks forms with this file, the
planner sizes machines with it, and every peer lays out its parameter vector by it. Standard library
only.
"""

import dataclasses
import ipaddress
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast
from urllib.parse import SplitResult, urlsplit

import idna

from barnraise.errors import SpecError
from barnraise.spec.architectures import ARCHITECTURES, architecture_of
from barnraise.spec.model_dimensions import (
    LATER_FIELDS,
    ModelDimensions,
    TensorShape,
    field_metadata,
)
from barnraise.spec.model_dimensions import (
    UNIT_BITS as UNIT_BITS,  # which most files know from here
)
from barnraise.spec.presets import FAMILIES

FORMAT = 1  # of the spec and of every update; a new format is a new run
# Fragments are multiples of so many elements: fused AdamW differs in the last bits on odd tails.
ALIGN = 64
TENSOR_ALIGN = 16  # elements: every tensor starts on a 64-byte boundary
MAX_UPDATE_UNITS = 1 << 26  # an update moves no weight by more than 1.0
DIVERGENCE_LIMIT = 1 << 30  # |weight| in units (16.0) that means that training has diverged
SOURCES = ("stdlib", "huggingface", "urls", "files")
TOKENIZERS = ("bytes", "bpe")
SCHEDULES = ("cosine", "constant")
UPDATES, DECENTRALIZED_ADAM = "updates", "decentralized-adam"
# Machines exchange signed updates of whole rounds, and nobody waits. Rounds end together by the
# clock, published one fragment after another ("streams", which "updates" stands for) or all at once
# ("windows"); or each round ends in its own time ("async").
ROUND_STRATEGIES = ("streams", "windows", "async", UPDATES)
# With "decentralized-adam" machines average their weights with a few neighbours in every step.
STRATEGIES = (*ROUND_STRATEGIES, DECENTRALIZED_ADAM)
# Strategies of earlier versions, each with a sentence that says what to use instead.
REMOVED_STRATEGIES = {
    "all-reduce": (
        "the strategy all-reduce was removed: use updates, or decentralized-adam for machines in "
        "one network; one owner's machines can train as one with torchrun and --engine sharded"
    ),
}
# Who averages with whom in a step; `planning/mixing_topology.py` defines the groups.
MIXING_TOPOLOGIES = ("ring", "exponential", "alternating-exponential-ring", "complete")
MIXING_BITS = (32, 16, 8)  # of a weight as neighbours receive it
# The optimizers of a machine's steps: AdamW for all parameters, or Muon for the blocks' matrices.
ADAMW, MUON = "adamw", "muon"
OPTIMIZERS = (ADAMW, MUON)
MATRIX_RATE_RATIO = 2.5  # the default peak rate of Muon's matrices, in learning rates
# An update holds all values, or the largest so many of each chunk of 4,096, in 2, 4 or 8 bits.
_LARGEST = r"[1-9]\d{0,2}|[1-3]\d{3}|40[0-8]\d|409[0-5]"  # from 1 to 4,095
MAX_PROMPTS, PROMPT_LENGTH = 5, 160  # for samples; a spec stays short
MAX_PROMPT_TOKENS = 192  # of a prompt; of a longer one the last
MAX_SHARD_TOKENS = 1 << 28
MAX_VOCABULARY = 1 << 18
MAX_CONTEXT = 16_384  # tokens
MAX_TOKENIZER_BYTES = 24 << 20  # of a tokenizer.json; one of 151,936 tokens has 7 to 12 MB
AUTO = "auto"  # each author chooses compression and round length by its uplink
CODEC = re.compile(rf"dense(?P<dense>[248])|top(?P<kept>{_LARGEST})x(?P<bits>[248])", re.ASCII)

Value = TypeVar("Value")


def _shown(default: Value, label: str, note: str = "") -> Value:
    """Return a dataclass field with a default, and with a label and help text for forms."""
    return cast(Value, field(default=default, metadata=field_metadata(label, note)))


@dataclass(frozen=True)
class Slot(TensorShape):
    """A tensor, and where it lies in its fragment.

    Attributes:
        offset: elements from the fragment's start.
    """

    offset: int = 0


@dataclass(frozen=True)
class Fragment:
    """One layer: the unit of swapping, compression, transfer and digest.

    Attributes:
        index: its place in the parameter vector.
        name: the layer's name.
        slots: its tensors.
        size: elements, padding included.
    """

    index: int
    name: str
    slots: tuple[Slot, ...]
    size: int


@dataclass(frozen=True)
class ModelSpec(ModelDimensions):
    """A model: the numbers that its architecture needs."""

    @property
    def parameters(self) -> int:
        """Return the number of trained weights, without padding; a tied head counts once."""
        architecture = architecture_of(self)
        ends = (*architecture.embedding_tensors(self), *architecture.final_tensors(self))
        in_blocks = self.layers * architecture.block_parameters(self)
        return in_blocks + sum(tensor.size for tensor in ends)

    @property
    def architecture_title(self) -> str:
        """Return the architecture's name as people have it."""
        return architecture_of(self).title

    def fragments(self) -> tuple[Fragment, ...]:
        """Return the parameter vector's layout: embedding, one fragment a block, final norm."""
        architecture = architecture_of(self)
        block = architecture.block_tensors(self)
        named = [
            ("embedding", architecture.embedding_tensors(self)),
            *((f"block.{i}", block) for i in range(self.layers)),
            ("final", architecture.final_tensors(self)),
        ]
        return tuple(_lay_out(index, name, tensors) for index, (name, tensors) in enumerate(named))


def _lay_out(index: int, name: str, tensors: Sequence[TensorShape]) -> Fragment:
    """Lay out the tensors of one fragment."""
    slots: list[Slot] = []
    offset = 0
    for tensor in tensors:
        slots.append(Slot(**vars(tensor), offset=offset))
        offset = -(-(offset + tensor.size) // TENSOR_ALIGN) * TENSOR_ALIGN
    return Fragment(index, name, tuple(slots), -(-offset // ALIGN) * ALIGN)


_PRESETS = {name: fields for family in FAMILIES.values() for name, fields in family.items()}
PRESETS = tuple(_PRESETS)


def token_bytes(vocabulary: int) -> int:
    """Return the bytes in which each token of a text is stored."""
    return 2 if vocabulary <= 1 << 16 else 4


def preset(name: str, vocabulary: int | None = None) -> ModelSpec:
    """Return the model of a preset.

    Raises:
        SpecError: There is no such preset.
    """
    if name not in _PRESETS:
        raise SpecError(
            {"model": f"there is no preset '{name}'; the presets are {', '.join(PRESETS)}"}
        )
    model = ModelSpec(**_PRESETS[name])
    return dataclasses.replace(model, vocabulary=vocabulary) if vocabulary else model


@dataclass(frozen=True)
class TextSpec:
    """Where the text comes from and how it becomes tokens. The manifest names the tokens.

    Attributes:
        source: one of `SOURCES`.
        places: of the source: a dataset's id, or addresses.
        tokenizer: "bytes" or "bpe".
        held_out: share of the tokens reserved for validation.
        shard_tokens: tokens of a shard.
    """

    source: str = _shown("stdlib", "Text")
    places: tuple[str, ...] = _shown((), "Dataset or addresses")
    tokenizer: str = _shown("bpe", "Tokenizer")
    held_out: float = _shown(0.02, "Validation split", "Share of the text held out for validation.")
    shard_tokens: int = _shown(1 << 20, "Tokens per shard")


@dataclass(frozen=True)
class Recipe:
    """How the run learns. Token counts refer to the whole run's ledger."""

    token_budget: int = _shown(
        10_000_000,
        "Token budget",
        "Training ends after this many tokens, all machines together. 500M, 0.5B and 20x "
        "(tokens for each parameter) work too.",
    )
    learning_rate: float = _shown(
        1e-3, "Learning rate", "Peak value; empty: 0.001, with Muon 0.004."
    )
    # A spec's text holds the optimizer and its rate only where they are not the default.
    optimizer: str = _shown(
        ADAMW,
        "Optimizer",
        "Muon trains the matrices of the blocks, and AdamW all else. It needs fewer steps and less "
        "memory, and computes more in each step.",
    )
    matrix_rate: float | None = _shown(
        None,
        "Matrix learning rate",
        "Peak value for the matrices that Muon trains; empty: 2.5 times the learning rate, or "
        "0.005 where that is empty, too.",
    )
    schedule: str = _shown("cosine", "Learning rate schedule")
    warmup_tokens: int = _shown(
        20_000, "Warm-up", "Tokens until the learning rate reaches its peak."
    )
    weight_decay: float = _shown(0.1, "Weight decay")
    clip: float = _shown(1.0, "Gradient clipping", "Maximum gradient norm.")
    step_sequences: int = _shown(8, "Sequences per step", "On each machine.")
    round_steps: int = _shown(  # H
        10,
        "Steps per round",
        "Between two updates of a machine; automatic compression decides it too.",
    )
    strategy: str = _shown("streams", "Strategy")
    codec: str = _shown("dense2", "Compression", "Slower uplinks send smaller updates.")
    outer_rate: float = _shown(  # η
        0.6, "Outer learning rate", "Share of a round that goes into its update."
    )
    outer_momentum: float = _shown(0.7, "Outer momentum")  # μ
    feedback_decay: float = _shown(  # β
        1.0, "Error feedback", "Share of the compression error that is carried over."
    )
    delay_compensation: float = _shown(
        1.0, "Delay compensation", "Weight of the prediction for updates in flight; 0 disables it."
    )
    evaluate_every: int = _shown(20_000, "Validation interval", "Tokens of the whole run.")
    # Of "decentralized-adam". A spec's text holds only those that are not the default.
    mixing_topology: str = _shown(
        "exponential",
        "Topology",
        "Who averages with whom, in decentralized Adam. Counts other than powers of two idle a "
        "machine now and then.",
    )
    mixing_bits: int = _shown(32, "Bits per weight", "That neighbours send, in decentralized Adam.")
    mixing_interval: int = _shown(
        1, "Steps between averagings", "In decentralized Adam; 1 averages in every step."
    )
    # See Wang et al., 2410.11998.
    mixing_accumulation: int = _shown(
        1,
        "Gradient accumulation of the moments",
        "In decentralized Adam: steps whose mean gradient Adam's moments absorb at once. More "
        "machines allow more; 1 is plain AdamW.",
    )

    @property
    def peak_matrix_rate(self) -> float:
        """Return the peak learning rate of the matrices that Muon trains."""
        if self.matrix_rate is None:
            return MATRIX_RATE_RATIO * self.learning_rate
        return self.matrix_rate

    @property
    def mixes_weights(self) -> bool:
        """Whether machines average weights in steps, and the anchor follows their replicas."""
        return self.strategy == DECENTRALIZED_ADAM

    @property
    def has_removed_strategy(self) -> bool:
        """Whether the run is of an earlier version, and no machine can train it with this one."""
        return self.strategy in REMOVED_STRATEGIES


MIXING_FIELDS = ("mixing_topology", "mixing_bits", "mixing_interval", "mixing_accumulation")
# Fields of later versions: runs that do not use them have the digest that they always had.
OPTIONAL_FIELDS = (*MIXING_FIELDS, "optimizer", "matrix_rate")


@dataclass(frozen=True)
class Start:
    """The weights that a run begins with: those of another run, or of a Hugging Face model.

    Without any, the run's seed determines them.

    Attributes:
        run: the other run's id; "" for none.
        digest: BLAKE3 of the other run's weights as one checkpoint.
        tokens: tokens that they were trained on there.
        tokenizer: the digest of the other run's tokenizer; "" for bytes.
        fragments: the digest of each fragment, pinned at launch.
        model: owner/name@revision of a model on the Hugging Face hub, or `MODEL_FOLDER` for one in
            a folder of the owner's machine; "" for none.
    """

    run: str = ""
    digest: str = ""
    tokens: int = 0
    tokenizer: str = ""
    fragments: tuple[str, ...] = ()
    model: str = ""

    @property
    def has_weights(self) -> bool:
        """Whether the run begins with given weights, and not with those of its seed."""
        return bool(self.run or self.model)


@dataclass(frozen=True)
class Assumptions:
    """The machines and lines that a run's owner expects, for which "auto" chooses the strategy.

    Attributes:
        machines: how many.
        line: of each, as Mb/s up / Mb/s down / round trip in ms; the default is the global median
            of fixed lines.
        machine: name of one of the site's typical machines.
        reason: why the launched run has its strategy; "" if its owner chose it.
    """

    machines: int = 10
    line: str = _shown(
        "15/112/23", "Expected lines", "Of each machine; auto chooses the strategy for them."
    )
    machine: str = _shown("12 GB GPU", "Expected machines", "Auto chooses the strategy for them.")
    reason: str = ""


@dataclass(frozen=True)
class RunSpec:
    """What a peer must know to train in a run and validate updates. Keys are hex Ed25519 keys."""

    model: ModelSpec
    text: TextSpec = field(default_factory=TextSpec)
    recipe: Recipe = field(default_factory=Recipe)
    seed: int = _shown(0, "Seed", "Random if left empty.")
    owner: str = ""  # the key that signed the manifest
    roots: tuple[str, ...] = ()  # the mirrors' root keys
    threshold: int = 1  # how many root keys must sign
    manifest: str = ""  # BLAKE3 of the signed manifest's body; pinned at launch
    max_tokens_per_update: int = 1 << 26
    verdict_horizon: int = 20  # rounds of ledger tokens for which an archive peer stores updates
    start: Start = field(default_factory=Start)
    prompts: tuple[str, ...] = _shown(
        (),
        "Sample prompts",
        f"Up to {MAX_PROMPTS}, one per line. At each checkpoint a machine continues them, and "
        "the run's page shows the text.",
    )
    assumed: Assumptions = field(default_factory=Assumptions)
    format: int = FORMAT

    @property
    def step_tokens(self) -> int:
        """Return the tokens of a machine's training step."""
        return self.recipe.step_sequences * self.model.context

    @property
    def max_round_steps(self) -> int:
        """Return the steps of the longest round: an update may state only so many tokens."""
        return max(1, self.max_tokens_per_update // self.step_tokens)

    def to_json(self) -> str:
        """Return the spec's canonical text; the digest of these bytes names the run's rules."""
        raw = dataclasses.asdict(self)
        if not self.start.has_weights:
            del raw["start"]
        if not self.prompts:
            del raw["prompts"]
        if self.assumed == Assumptions():
            del raw["assumed"]
        for name in LATER_FIELDS:
            if raw["model"][name] == getattr(ModelSpec, name):
                del raw["model"][name]
        for name in OPTIONAL_FIELDS:
            if raw["recipe"][name] == getattr(Recipe, name):
                del raw["recipe"][name]
        return json.dumps(raw, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, is_stored: bool = False) -> "RunSpec":
        """Return the spec of a text.

        Args:
            text: of the spec, as `to_json` returns it.
            is_stored: whether the run exists already: its strategy may have been removed since.

        Raises:
            SpecError: The text is not a valid spec; unknown names are refused too.
        """
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SpecError({"spec": f"is not JSON: {error}"}) from None
        spec = _build(cls, raw, "")
        spec_problems = problems(spec)
        if is_stored and spec.recipe.has_removed_strategy:
            del spec_problems["recipe.strategy"]
        if spec_problems:
            raise SpecError(spec_problems)
        return spec


def adopt_model(spec: RunSpec, model: ModelSpec) -> RunSpec:
    """Return a spec with the architecture of the model that it begins with.

    An update may hold as many rounds as before, whose tokens grow with the context.
    """
    longer = max(1, -(-model.context // spec.model.context))
    return dataclasses.replace(
        spec,
        model=model,
        max_tokens_per_update=min(
            RunSpec.max_tokens_per_update, spec.max_tokens_per_update * longer
        ),
    )


def _build(cls: Any, raw: Any, where: str) -> Any:
    """Build a dataclass from plain JSON, strict about names and types."""
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
        values[name] = _convert_value(f.type, raw[name], where + name)
    return cls(**values)


def _convert_value(kind: Any, value: Any, where: str) -> Any:
    """Return a JSON value as a field of this type."""
    if dataclasses.is_dataclass(kind):
        return _build(kind, value, where + ".")
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if abs(value) < 1e300 else math.inf
    if kind == float | None:
        return None if value is None else _convert_value(float, value, where)
    if kind is str and isinstance(value, str):
        return value
    if (
        kind == tuple[str, ...]
        and isinstance(value, list)
        and all(isinstance(v, str) for v in value)
    ):
        return tuple(value)
    wanted = {int: "a number", float: "a number", bool: "true or false"}.get(kind, "text")
    raise SpecError({where: f"must be {wanted}, not {json.dumps(value)[:40]}"})


class _Problems(dict[str, str]):
    """Dotted field → a sentence that says what to change."""

    def check_range(self, name: str, value: float, low: float, high: float, label: str) -> None:
        """Add a problem unless low ≤ value ≤ high; NaN is outside."""
        if not low <= value <= high:
            self[name] = f"{label} must be between {low:,} and {high:,}; this is {value:,}"

    def check_choice(self, name: str, value: str, choices: tuple[str, ...], label: str) -> None:
        """Add a problem unless the value is one of the choices."""
        if value not in choices:
            self[name] = f"{label} must be one of {', '.join(choices)}; '{value[:40]}' is not"


def problems(spec: RunSpec) -> dict[str, str]:
    """Return what prevents a spec from being trained, or nothing if it is valid.

    Returns:
        Dotted field → a sentence that says what to change.
    """
    problems_found = _Problems()
    _check_model(spec.model, problems_found)
    _check_text(spec.text, spec.model, problems_found)
    _check_recipe(spec.recipe, problems_found)
    _check_optimizer(spec.recipe, problems_found)
    _check_strategy(spec, problems_found)
    _check_assumptions(spec.assumed, problems_found)
    problems_found.check_range("seed", spec.seed, 0, 2**63 - 1, "the seed")
    most = spec.max_tokens_per_update
    problems_found.check_range("max_tokens_per_update", most, 1, 1 << 40, "the tokens an update")
    horizon = spec.verdict_horizon
    problems_found.check_range(
        "verdict_horizon", horizon, 1, 100_000, "the verdict horizon, in rounds,"
    )
    tokens = spec.step_tokens * spec.recipe.round_steps
    if tokens > most and "recipe.round_steps" not in problems_found:
        problems_found["recipe.round_steps"] = (
            f"a round of {tokens:,} tokens is over the {most:,} an update may hold; "
            "take fewer steps"
        )
    if wrong := _start(spec):
        problems_found["start"] = wrong
    if wrong := _find_prompt_problem(spec.prompts):
        problems_found["prompts"] = wrong
    if spec.format != FORMAT:
        problems_found["format"] = f"this version trains format {FORMAT}, not {spec.format}"
    if not 1 <= spec.threshold <= max(1, len(spec.roots)):
        problems_found["threshold"] = "must be at least 1 and at most the number of root keys"
    return problems_found


def model_problems(model: ModelSpec) -> dict[str, str]:
    """Return what prevents an architecture from being trained; see `problems`."""
    problems_found = _Problems()
    _check_model(model, problems_found)
    return problems_found


def _check_model(model: ModelSpec, problems_found: _Problems) -> None:
    ranges = (
        ("layers", 1, 256, "the number of layers"),
        ("width", 16, 65_536, "the width"),
        ("heads", 1, 512, "the number of heads"),
        ("context", 8, MAX_CONTEXT, "the context, in tokens,"),
        ("vocabulary", 256, MAX_VOCABULARY, "the vocabulary"),
        ("key_value_heads", 0, 512, "the number of key-value heads"),
        ("head_size", 0, 1_024, "the size of a head"),
        ("hidden", 0, 1 << 20, "the feed-forward width"),
        ("rope_theta", 1.0, 1e9, "the rotary base"),
        ("norm_epsilon", 1e-12, 1e-2, "the norm epsilon"),
    )
    for name, low, high, label in ranges:
        problems_found.check_range(f"model.{name}", getattr(model, name), low, high, label)
    names = tuple(ARCHITECTURES)
    problems_found.check_choice("model.architecture", model.architecture, names, "the architecture")
    sizes = {"model.heads", "model.width", "model.head_size"}
    if not (sizes & set(problems_found) or model.head_size) and model.width % model.heads:
        divisors = [h for h in range(1, model.width + 1) if model.width % h == 0]
        best = min(divisors, key=lambda h: abs(h - model.heads))
        problems_found["model.heads"] = (
            f"the width ({model.width}) must be divisible by the heads ({model.heads}); try {best}"
        )
    if problems_found:
        return
    for name, sentence in architecture_of(model).problems(model).items():
        problems_found[f"model.{name}"] = sentence


def _check_text(text: TextSpec, model: ModelSpec, problems_found: _Problems) -> None:
    problems_found.check_choice("text.source", text.source, SOURCES, "the source")
    if "text.source" not in problems_found and (wrong := _find_place_problem(text)):
        problems_found["text.places"] = wrong
    problems_found.check_choice("text.tokenizer", text.tokenizer, TOKENIZERS, "the tokenizer")
    if "model.vocabulary" not in problems_found:
        if text.tokenizer == "bytes" and model.vocabulary != 256:
            problems_found["model.vocabulary"] = (
                "the bytes tokenizer has 256 tokens; set the vocabulary to 256 or choose bpe"
            )
        if text.tokenizer == "bpe" and model.vocabulary < 300:
            problems_found["model.vocabulary"] = (
                "bpe starts from the 256 bytes; give it a vocabulary of 300 or more"
            )
    problems_found.check_range("text.held_out", text.held_out, 0.001, 0.5, "the held-out share")
    problems_found.check_range(
        "text.shard_tokens", text.shard_tokens, 1 << 16, MAX_SHARD_TOKENS, "the tokens a shard"
    )


def _check_recipe(recipe: Recipe, problems_found: _Problems) -> None:
    ranges = (
        ("token_budget", 1_000, 10**15, "the token budget"),
        ("learning_rate", 1e-8, 1.0, "the learning rate"),
        ("warmup_tokens", 0, 10**15, "the warm-up, in tokens,"),
        ("weight_decay", 0.0, 1.0, "the weight decay"),
        ("clip", 1e-3, 1e6, "the gradient norm to clip at"),
        ("step_sequences", 1, 65_536, "the sequences a step"),
        ("round_steps", 1, 10_000, "the steps a round"),
        ("outer_rate", 1e-3, 10.0, "the outer rate"),
        ("outer_momentum", 0.0, 0.99, "the outer momentum"),
        ("feedback_decay", 0.0, 1.0, "the decay of the error feedback"),
        ("delay_compensation", 0.0, 1.0, "the weight of predicted updates in flight"),
        ("evaluate_every", 1_000, 10**15, "the tokens between two validations"),
    )
    for name, low, high, label in ranges:
        problems_found.check_range(f"recipe.{name}", getattr(recipe, name), low, high, label)
    problems_found.check_choice("recipe.schedule", recipe.schedule, SCHEDULES, "the schedule")
    if recipe.codec != AUTO and not CODEC.fullmatch(recipe.codec):
        problems_found["recipe.codec"] = (
            "the codec must be auto, dense8, dense4, dense2, or one like top64x2; "
            f"'{recipe.codec[:40]}' is not"
        )


def _check_optimizer(recipe: Recipe, problems_found: _Problems) -> None:
    problems_found.check_choice("recipe.optimizer", recipe.optimizer, OPTIMIZERS, "the optimizer")
    if recipe.optimizer != MUON:
        if recipe.matrix_rate is not None:
            problems_found["recipe.matrix_rate"] = (
                "only Muon has a learning rate of its own for matrices: leave it empty, or choose "
                "the optimizer muon"
            )
        return
    if not 0 < recipe.peak_matrix_rate <= 1:
        problems_found["recipe.matrix_rate"] = (
            "the matrix learning rate must be above 0 and at most 1; this is "
            f"{recipe.peak_matrix_rate:,}"
        )
    if recipe.mixes_weights:
        problems_found["recipe.optimizer"] = (
            "decentralized-adam averages what AdamW has trained: choose the strategy updates for "
            "Muon, or the optimizer adamw"
        )


def _check_strategy(spec: RunSpec, problems_found: _Problems) -> None:
    recipe = spec.recipe
    if recipe.strategy == AUTO and spec.manifest:
        problems_found["recipe.strategy"] = (
            "auto stands for a strategy that is chosen at launch; a launched run names it"
        )
    elif recipe.has_removed_strategy:
        problems_found["recipe.strategy"] = REMOVED_STRATEGIES[recipe.strategy]
    else:
        choices = (*STRATEGIES, AUTO)
        problems_found.check_choice("recipe.strategy", recipe.strategy, choices, "the strategy")
    problems_found.check_choice(
        "recipe.mixing_topology", recipe.mixing_topology, MIXING_TOPOLOGIES, "the topology"
    )
    if recipe.mixing_bits not in MIXING_BITS:
        problems_found["recipe.mixing_bits"] = (
            f"weights are sent in 32, 16 or 8 bits, not in {recipe.mixing_bits}"
        )
    problems_found.check_range(
        "recipe.mixing_interval", recipe.mixing_interval, 1, 1_000, "the steps between averagings"
    )
    problems_found.check_range(
        "recipe.mixing_accumulation",
        recipe.mixing_accumulation,
        1,
        1_000,
        "the steps whose mean gradient the moments absorb",
    )


def _check_assumptions(assumed: Assumptions, problems_found: _Problems) -> None:
    problems_found.check_range(
        "assumed.machines", assumed.machines, 1, 10_000, "the expected machines"
    )
    parts = LINE.fullmatch(assumed.line)
    if parts is None:
        problems_found["assumed.line"] = (
            "the expected lines must be Mb/s up, Mb/s down and milliseconds, as in 15/112/23; "
            f"'{assumed.line[:40]}' is not"
        )
    elif not (float(parts[1]) > 0 and float(parts[2] or parts[1]) > 0):
        problems_found["assumed.line"] = (
            "no machine can exchange over a line of 0 Mb/s: state a rate above zero"
        )
    if max(len(assumed.machine), len(assumed.reason)) > ASSUMPTION_LENGTH:
        problems_found["assumed.machine"] = (
            f"names and reasons have at most {ASSUMPTION_LENGTH} characters"
        )


def _start(spec: RunSpec) -> str:
    """Return what is wrong with the weights that a run begins with, or ""."""
    start = spec.start
    if not start.has_weights:
        return "" if start == Start() else "names weights, but no run or model that they are of"
    if not all(DIGEST.fullmatch(name) for name in start.fragments):
        return "must name weights by their digests"
    if wrong := _start_model(start) if start.model else _start_run(spec):
        return wrong
    if spec.model.layers > START_LAYERS:
        return f"a model of more than {START_LAYERS} layers cannot begin with another's weights yet"
    if start.fragments and len(start.fragments) != spec.model.layers + 2:
        wanted, given = spec.model.layers + 2, len(start.fragments)
        return f"must name {wanted} fragments, as the model has; these are {given}"
    return ""


def _start_run(spec: RunSpec) -> str:
    start = spec.start
    names = (start.digest, start.tokenizer or "0" * 64)
    if (
        not RUN_ID.fullmatch(start.run)
        or not all(DIGEST.fullmatch(name) for name in names)
        or start.tokens < 0
    ):
        return "must name a run by its id, and weights by their digests"
    if bool(start.tokenizer) != (spec.text.tokenizer != "bytes"):
        return "has another kind of tokenizer"
    return ""


def _start_model(start: Start) -> str:
    if start != Start(model=start.model, fragments=start.fragments):
        return "must name either a run or a model, not both"
    if start.model == MODEL_FOLDER or MODEL_ID.fullmatch(start.model):
        return ""
    return (
        "must name a model of the Hugging Face hub as owner/name, where need be with @revision, "
        f"or say {MODEL_FOLDER}; '{start.model[:60]}' is neither"
    )


def _find_prompt_problem(prompts: tuple[str, ...]) -> str:
    """Return what is wrong with the prompts for samples, or ""."""
    if len(prompts) > MAX_PROMPTS:
        return f"there are at most {MAX_PROMPTS} prompts; these are {len(prompts)}"
    for prompt in prompts:
        if not 1 <= len(prompt) <= PROMPT_LENGTH:
            return f"a prompt has 1 to {PROMPT_LENGTH} characters; one has {len(prompt)}"
        if not prompt.isprintable():
            return "a prompt holds characters that cannot be shown"
    return ""


_RATE = r"(\d{1,6}(?:\.\d{1,3})?)"
LINE = re.compile(rf"{_RATE}(?:/{_RATE}(?:/{_RATE})?)?", re.ASCII)
ASSUMPTION_LENGTH = 400  # characters
RUN_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)
DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
MODEL_FOLDER = "folder"  # a start from a model that lies in a folder of the owner's machine
START_LAYERS = 100  # their digests lie in the spec, which stays short
_PART = r"[\w-][\w.-]{0,95}"
# owner/name, then /config, :split, @revision and #column if needed.
DATASET = re.compile(
    rf"{_PART}(/{_PART}){{1,5}}(:[\w.-]{{1,100}})?(@[\w./-]{{1,100}})?(#[\w.-]{{1,100}})?", re.ASCII
)
# owner/name, then @revision if needed; a few old models have no owner.
MODEL_ID = re.compile(rf"{_PART}(/{_PART})?(@[\w./-]{{1,100}})?", re.ASCII)
# In an address: a part of the query that lets its holder read what others cannot.
_SECRET_IN_QUERY = re.compile(
    r"[?&](access_token|auth_token|token|api_?key|(x-(amz|goog)-)?signature|sig)=", re.I
)
ADDRESSES, ADDRESS_LENGTH, PLACES_LENGTH = 50, 500, 8_000  # a spec stays short
HOST_LENGTH = 253  # of a name in the DNS, without the dot at its end
_PLACE = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^][]*)(:[0-9]*)?")  # of an address: host and port


def _find_place_problem(text: TextSpec) -> str:
    """Return what is wrong with the places of a text, or "".

    Whether an address leads to a text, and not into a private network, is verified by the download.
    """
    places = text.places
    if text.source in ("stdlib", "files"):
        return f"the source {text.source} takes no addresses" if places else ""
    if text.source == "huggingface":
        if len(places) == 1 and DATASET.fullmatch(places[0]):
            return ""
        return (
            "name one dataset as owner/name, where need be with /config, :split, @revision or "
            f"#column after it; '{' '.join(places)[:60]}' is not one"
        )
    if not 1 <= len(places) <= ADDRESSES or sum(map(len, places)) > PLACES_LENGTH:
        return f"give 1 to {ADDRESSES} addresses, of {PLACES_LENGTH:,} characters together at most"
    for place in places:
        if problem := address_problem(place):
            return f"'{place[:60]}' {problem}"
        if _SECRET_IN_QUERY.search(place):
            return (
                f"'{place.partition('?')[0][:60]}' has a token or signature after it, which "
                "everybody would see: choose files as the source, and name the address to "
                "`barnraise prepare`"
            )
    return ""


def split_address(address: str) -> SplitResult:
    """Return the parts of an address, whose port and name of a host are spelled right.

    Raises:
        ValueError: they are not; a part of a name can be empty or too long.
    """
    parts = urlsplit(address)
    host = (parts.hostname or "").encode("idna").decode()  # UnicodeError is a ValueError
    if host.startswith("xn--"):
        idna.decode(host)  # httpx does, and raises what it has for no other bad address
    is_host = len(host) <= HOST_LENGTH and not re.search(r"[^0-9A-Za-z._:-]", host)
    is_whole = address.isprintable() and _PLACE.fullmatch(parts.netloc.rpartition("@")[2])
    if parts.port == 0 or not is_host or not is_whole:  # reading the port raises when it is none
        raise ValueError(f"'{host}' is not the name of a host")
    return parts


def address_problem(address: str) -> str:
    """Return why a text cannot be fetched from an address, by its spelling alone, or ""."""
    try:
        parts = split_address(address)
        host = parts.hostname or ""
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
    if " " in address:
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
