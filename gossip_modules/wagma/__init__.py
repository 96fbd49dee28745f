"""WAGMA-SGD: averages in small groups of ranks, without waiting for late members.

`engine.WaitAvoidingEngine` is the algorithm: its docstring shows one round, and `_average_in_group` and
`_average_globally` are its lines. `worker` has the averaging thread, `group_average` the mean over a group, and
`elastic` the changes with a membership. `engine.liveness` carries the messages between ranks and names failed ranks.
"""
