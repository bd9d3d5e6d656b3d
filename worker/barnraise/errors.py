"""What can go wrong, for callers who want to tell cases apart.

BarnraiseError
├── SpecError          a run's spec, or one field of it, makes no sense (also a ValueError)
├── StateError         a state folder that is another run's, another version's, damaged, or in use
├── PlanError          a model does not fit into what a machine may use, with what would
├── DamageError        what was read back from a disk is not what was written
├── TextError          text could not be prepared, or a shard is not what its digest says
├── MessageError       a message from another machine is malformed, unsigned, altered, or not for us
│   ├── TicketError    …and the reason is its ticket
│   └── MirrorListError      …and it is a mirror list that does not take the place of the one held
└── CoordinatorError   a coordinator refused, with a sentence
    └── CoordinatorUnreachableError  …or did not answer at all; nothing is lost, try again later

An expected failure (a peer vanished, nobody answered) is a value where it can be one; these are for the rest. Our own
bugs are `assert`s.
"""


class BarnraiseError(Exception):
    pass


class SpecError(BarnraiseError, ValueError):
    """`problems` maps a field's dotted name to a sentence that says what to change."""

    def __init__(self, problems: dict[str, str]):
        self.problems = problems
        super().__init__("; ".join(f"{field}: {sentence}" for field, sentence in problems.items()))


class StateError(BarnraiseError):
    pass


class PlanError(BarnraiseError):
    pass


class DamageError(BarnraiseError):
    pass


class TextError(BarnraiseError):
    pass


class MessageError(BarnraiseError):
    pass


class TicketError(MessageError):
    pass


class MirrorListError(MessageError):
    """`forged`: nobody who looked at it should have passed it on; else it may have been right once, or elsewhere."""

    def __init__(self, sentence: str, forged: bool = False):
        self.forged = forged
        super().__init__(sentence)


class CoordinatorError(BarnraiseError):
    """`status` is the HTTP status, 0 where there was none."""

    def __init__(self, sentence: str, status: int = 0):
        self.status = status
        super().__init__(sentence)


class CoordinatorUnreachableError(CoordinatorError):
    pass
