"""Frameworks' own training code, plain and switched, on CPU ranks: do both train the same?

To add a framework, write `tests/trainers/NAME.py` with four names and put NAME into
`frame.FRAMEWORKS`. `ROWS` is a list of `frame.Row`: layout, option, number of processes, the
switch's log lines, the names of ours that must be called. `paths(row)` gives the folders that go
first on PYTHONPATH (the framework's source and what it needs), or a string: why the row cannot run
here. `prepare(row, folder)` runs once, before the ranks are forked: it may write a model into the
folder and import what the ranks share, but for what the switch must come before; no process group,
no threads. `drive(row, how)` runs in every rank, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
set. It calls the framework's unmodified training code through two or more updates of several
micro-batches and returns a `frame.Trace`; `how.switched` says whether to switch the drop-in on, in
the way that the framework's page describes, and `how.temperature` is the temperature to train at.

Everything else is in `frame`: the runs (plain, switched, and switched at another temperature, which
must differ), the counts of calls, the comparison. A row with `night=False` is a pytest test;
`python -m tests.trainers [NAME]` runs all and prints the table.
"""
