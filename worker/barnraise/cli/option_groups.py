"""Group the options of a command in frozen dataclasses, which several commands can share."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Any


def expand_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter that is a dataclass by one option for each of its fields.

    Typer reads options from a function's parameters. The fields have defaults and are annotated as
    such parameters would be: `Annotated[str, typer.Option(help="…")]`. The command receives the
    dataclass.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, type[Any]] = {}
    parameters: list[Parameter] = []
    for parameter in signature.parameters.values():
        annotation = parameter.annotation
        if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
            groups[parameter.name] = annotation
            parameters += inspect.signature(annotation, eval_str=True).parameters.values()
        else:
            parameters.append(parameter)
    parameters = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in parameters]

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        for name, group in groups.items():
            options = {f.name: arguments.pop(f.name) for f in dataclasses.fields(group)}
            arguments[name] = group(**options)
        command(**arguments)

    run.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore[reportAttributeAccessIssue]  (typeshed lacks it)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
