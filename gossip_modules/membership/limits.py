"""How long things may take in a membership, in seconds; apart, so that tests can change them."""

POLL, BUSY_POLL = 0.1, 0.01  # between two looks at the log; while a generation is being formed
FORMING = 5.0  # after which those that have not come to form a generation are left out of it
CONNECT = 10.0  # for those that have come
RETIRE = 5.0  # that links of the generation before stay open, for ranks that are behind
PROBE = 0.5  # for an answer to the question whether a worker lives
KNOCK = 5.0  # between two such questions
# Between two attempts to reach a job that goes on without this worker, and between two looks whether the process of
# an accused worker has ended.
RETRY = 1.0
ENDED = 2.0  # for an answer in the log, where the processes of all members seem to have ended
LOG_EVENTS = 256  # entries of the log, not seconds: after so many it is cut
