"""Durations in a membership, in seconds; in a module of their own, so that tests can change them."""

POLL, BUSY_POLL = 0.1, 0.01  # between two turns of the watcher; while a generation is being formed
FORMING = 5.0  # after which members that have not come to form a generation are reported
CONNECT = 10.0  # for those that have come
RETIRE = 5.0  # that links of the generation before stay open, for ranks that are behind
PROBE = 0.5  # for the answer of a listener
QUERY = 5.0  # between two queries whether the members of a job live
# Between two attempts to reach a job that goes on without this worker, and between two probes of a reported worker.
RETRY = 1.0
ENDED = 2.0  # for a reply in the roster, where the processes of all members seem to have ended
