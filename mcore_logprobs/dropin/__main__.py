"""`python -m mcore_logprobs.dropin FRAMEWORK [-m] SCRIPT ARGS...`: see `switch`."""

import sys

from mcore_logprobs.dropin.switch import main

if __name__ == "__main__":
    sys.exit(main())
