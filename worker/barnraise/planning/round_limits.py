"""How short rounds and their parts are, and for how many rounds a peer counts.

A sender shapes its rounds by these limits, and the receivers bound by the same ones how fast an
author's updates enter their ledgers. So no honest machine has to wait.
"""

from barnraise.planning.compression_ladder import COMPRESSION_LADDER

MAX_PARTS = 8  # updates that one round is published in
MIN_PART_SECONDS = 2.0  # shorter parts save less than their headers and fsyncs cost
PARTS_PER_SECOND = 1 / MIN_PART_SECONDS
MIN_PART_STEPS = 2
# Of what an uplink carries without delay. PACE_MARGIN covers the shorter rounds of sparser levels.
MIN_ROUND_STEPS = COMPRESSION_LADDER[0].min_steps
MAX_STRETCH = 1.5  # times the planned steps that a round ending by the clock may take
# The least such steps: a round by the clock lasts a power of two of seconds, the nearest to the
# recipe's, which is shorter by up to the root of two.
WINDOW_STRETCH = 0.7
# Times what a machine can honestly publish that enters the ledger: clocks and speeds vary.
PACE_MARGIN = 1.5

GRACE_ROUNDS = 8.0  # of this machine, for which a peer counts before its second round
REMEMBERED_ROUNDS = 8  # of a peer, over which its rate is measured
MAX_MISSED_ROUNDS = 4.0  # that a peer may be late before it counts as gone
MAX_SILENT_ROUNDS = MAX_MISSED_ROUNDS  # after which the content of its updates is forgotten, too
RAMP_ROUNDS = 4  # after which a machine that joined late has its full weight
OPINION_ROUNDS = 3  # in a row, after which a machine states a doubt, or that it agrees
WEAK_ROUNDS = 12  # the same of little agreement, after which a machine attests a volunteer
TRIAL_ROUNDS = 16  # of a machine for which it compares a newcomer's rounds before others' turn
TRIAL_SEATS = 4  # newcomers that a machine compares at a time
LATE_ROUNDS = 4  # of agreement before the last one, in which harm may have begun
PLAIN_ROUNDS = 4  # of a machine, from its start on, without momentum if they are long
