"""Which part of a machine's uplink is for what; the first three add up to the whole line.

The rest is for requests, tickets, headers that are requested, and errors in the line's estimate.
"""

UPDATE_SHARE = 0.8  # of the uplink, for the payloads of updates
STATE_SHARE = 0.1  # of the uplink, for what peers send each other about their ledgers
REST_SHARE = 0.1
HEADER_SHARE = 0.1  # of the updates' share, for the headers of a round's parts
# Of the uplink that updates have at least, however many messages there are: where States, headers
# and requests fill the rest of the line, rounds get longer, but they do not stop.
MIN_UPDATE_SHARE = 0.1
