"""rl_step.py runs as a script, so that its helpers are `rl.*`; in tests too, ranks included."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))
