"""Run `barnraise sample`: write text with a run's current weights."""

from dataclasses import dataclass
from typing import Annotated

import typer

from barnraise.cli.addresses import RunArgument
from barnraise.cli.console import out
from barnraise.cli.machine_options import HomeOption, open_state_dir
from barnraise.cli.option_groups import option
from barnraise.cli.run_folders import refuse_unknown_run
from barnraise.formats import parse_bytes

MemoryOption = Annotated[
    str, typer.Option(help="RAM for layers that stay loaded, like 4GB (default: half of free).")
]


@dataclass(frozen=True)
class SampleOptions:
    """How text is written."""

    tokens: int = option(100, "New tokens, at most.", min=1, max=100_000)
    temperature: float = option(0.8, "0 always picks the likeliest token.", min=0.0, max=100.0)
    top_p: float = option(0.95, "Probability of the tokens to pick among.", min=0.0, max=1.0)
    seed: int = option(0, "The same seed writes the same text.", min=0)


def sample(
    run: RunArgument,
    prompt: Annotated[str, typer.Option(help="The text to continue.")] = "",
    *,
    options: SampleOptions,
    memory: MemoryOption = "",
    home: HomeOption = None,
) -> None:
    """Write text with the weights that this machine has saved last.

    One layer is unpacked at a time, so a model may be larger than memory.
    """
    resident = parse_bytes(memory) if memory else None
    state_dir = open_state_dir(home)
    # Importing torch takes seconds: what can be refused is refused before.
    refuse_unknown_run(state_dir, run.name)
    from barnraise.swap.sampler import SamplingSettings, TokenRange
    from barnraise.text.prompt_codec import PromptCodec, TextStream
    from barnraise.training.saved_model import open_saved_model

    settings = SamplingSettings(options.tokens, options.temperature, options.top_p, options.seed)
    with open_saved_model(state_dir, run.name) as saved:
        codec = PromptCodec(saved.tokenizer, saved.spec.model.vocabulary)
        sampler = saved.create_sampler(resident)
        stream = TextStream(codec, codec.encode(prompt))
        out.print(stream.next_text(), end="", markup=False, soft_wrap=True)
        vocabulary = TokenRange(codec.count, codec.end)
        for _, token in sampler.generate([stream.tokens], settings, vocabulary):
            stream.add(token)
            out.print(stream.next_text(), end="", markup=False, soft_wrap=True)
        out.print(stream.next_text(is_complete=True), markup=False, soft_wrap=True)
