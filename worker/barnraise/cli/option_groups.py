"""Group the options of a command in frozen dataclasses, which several commands can share."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Annotated, Any

import typer


def option(default: Any, help_text: str, *names: str, **settings: Any) -> Any:
    """Return a field of such a dataclass: its default, and what `typer.Option` takes."""
    info = typer.Option(*names, help=help_text, **settings)
    return dataclasses.field(default=default, metadata={"option": info})


def expand_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter that is a dataclass by one option for each of its fields.

    Typer reads options from a function's parameters. The fields come from `option`, or are
    annotated as such parameters would be. The command receives the dataclass.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, type[Any]] = {}
    parameters: list[Parameter] = []
    for parameter in signature.parameters.values():
        annotation = parameter.annotation
        if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
            groups[parameter.name] = annotation
            parameters += _list_options(annotation)
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


def _list_options(group: type[Any]) -> list[Parameter]:
    """Return the fields of a dataclass as the parameters of a command."""
    parameters = inspect.signature(group, eval_str=True).parameters
    infos = {f.name: f.metadata.get("option") for f in dataclasses.fields(group)}
    return [
        parameter.replace(annotation=Annotated[parameter.annotation, infos[name]])
        if infos[name]
        else parameter
        for name, parameter in parameters.items()
    ]
