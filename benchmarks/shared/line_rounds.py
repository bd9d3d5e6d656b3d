"""How often a line carries a machine's updates in the whole run, in closed form. Pure."""

from barnraise.planning.lines import Line
from barnraise.planning.uplink_budget import alike_uplink


def line_rounds(
    line: Line,
    machines: int,
    tokens_per_second: float,
    tokens_per_parameter: float,
    update_bytes: float,
) -> float:
    """Return how often a line can send a machine's updates in the whole run.

        n = 0.8 · u · P / (b · c · R · r)

        u   bytes per second of the line, its slower way   `line`
        P   tokens of the run for each parameter           `tokens_per_parameter`
        b   bytes of an update for each parameter          `update_bytes`
        c   copies of each update that a line carries      R − 1, see `alike_uplink`
        R   machines, all alike                            `machines`
        r   tokens per second of each                      `tokens_per_second`

    The model's size and the tokens of a step cancel.
    """
    update_rate = alike_uplink(line, machines).update_rate
    return update_rate * tokens_per_parameter / (update_bytes * machines * tokens_per_second)
