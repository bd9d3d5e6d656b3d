"""Define the errors that callers of Barnraise can tell apart.

An expected failure, such as a peer that disappeared, is a return value where possible. Errors are
for the other cases. Bugs of our own are `assert`s.
"""

from collections.abc import Iterator


class BarnraiseError(Exception):
    """Serve as the base of all errors that Barnraise raises on purpose."""


class SpecError(BarnraiseError, ValueError):
    """Report invalid fields of a spec.

    `problems` maps a field's dotted name to a sentence that says what to change.
    """

    def __init__(self, problems: dict[str, str]) -> None:
        self.problems = problems
        super().__init__("; ".join(f"{field}: {sentence}" for field, sentence in problems.items()))


class StateError(BarnraiseError):
    """Report a state folder that cannot be used."""


class UnsupportedModelError(StateError):
    """Report a Hugging Face model that a run would not train exactly. Trying again is useless."""


class MemoryShortageError(StateError):
    """Report that RAM or a device's memory did not suffice for a plan.

    `device` is true if it was the device's.
    """

    def __init__(self, sentence: str, device: bool = False) -> None:
        self.device = device
        super().__init__(sentence)


class DeviceLostError(StateError):
    """Report that a GPU no longer works in this process. A new process may use it again.

    `device` is the one of several that was lost, as torch names it.
    """

    def __init__(self, sentence: str, device: str = "") -> None:
        self.device = device
        super().__init__(sentence)


class RankLostError(DeviceLostError):
    """Report that a process with a part of the state has died or hangs; all must start again."""


class PlanError(BarnraiseError):
    """Report a model that does not fit into what a machine may use."""


class CrewError(BarnraiseError):
    """Report a crew that cannot go on: one of its machines is gone, or sent what is wrong."""


class RoundLostError(CrewError):
    """Report that a crew's machine restarted: all of them begin again at the last saved round."""


class LeadLostError(CrewError):
    """Report a crew whose lead has been gone for too long."""


class DamageError(BarnraiseError):
    """Report data on a disk that differs from the data that was written."""


class TextError(BarnraiseError):
    """Report text that could not be prepared or does not match its digest."""


class TextUnreachableError(TextError):
    """Report a text whose server does not answer now; the same command may work later."""


class MessageError(BarnraiseError):
    """Report a message that this machine must not accept."""


class FloodError(MessageError):
    """Report one message too many: its sender is kept away for a while."""


class TicketError(MessageError):
    """Report a message whose ticket is invalid."""


class UnprovenVerdictError(MessageError):
    """Report a verdict that lacks signatures by the mirror list that is known here.

    A peer with an older or a newer list may rightly have forwarded it.
    """


class MirrorListError(MessageError):
    """Report a mirror list that may not replace the current one.

    `forged` is true if no honest peer that checked the list could have forwarded it. Otherwise the
    list may have been valid earlier or elsewhere.
    """

    def __init__(self, sentence: str, forged: bool = False) -> None:
        self.forged = forged
        super().__init__(sentence)


class ExcludedError(BarnraiseError):
    """Report that a verdict excludes this machine or its owner from the run."""


class CoordinatorError(BarnraiseError):
    """Report that a coordinator refused a request.

    `status` is the HTTP status, or 0 if there was none.
    """

    def __init__(self, sentence: str, status: int = 0) -> None:
        self.status = status
        super().__init__(sentence)


class CoordinatorUnreachableError(CoordinatorError):
    """Report that no coordinator answered."""


class RunEndedError(CoordinatorError):
    """Report a run that is finished or cancelled, so that there is nothing to train."""


def list_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that led to it."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__
