"""WAGMA-SGD: averages in small groups of ranks, which do not wait for late members.

The algorithm stands in `engine.WaitAvoidingEngine`: its docstring shows one round, `_average_in_group` and
`_average_globally` are its lines. `worker` has the thread that averages, `group_average` the mean over a group.
`control`, `failure_detector`, `peer_status` and `barrier` let ranks tell each other where they are and who has failed.
"""
