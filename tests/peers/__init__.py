"""Frameworks' own unit tests, unedited, with the drop-ins' functions in place of theirs.

    python -m tests.peers [FRAMEWORK] [-k WORDS]    one table; `bash tests/run.sh --all --peers DIR`

A framework's test files are copied from its checkout (`MCORE_LOGPROBS_PEERS`) to a folder of their
own, which goes first on the path, and pytest runs them twice: with the framework's functions, then
with `switch_on(FRAMEWORK)`. A test is applicable if it calls a function that the switch replaces;
every other test is named in `suites.py` with the reason.

- `suites.py`: the files, and the tests that are left out or differ by design;
- `run.py`: one suite run by pytest, and the results of its two runs compared;
- `process.py`: what each of its processes does first (`at_start/sitecustomize.py` starts it):
  CUDA is the CPU, NCCL is gloo, missing packages are stood in for, calls are counted.
"""
