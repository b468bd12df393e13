"""What is installed, what is used and why, and whether it computes what it should: `report`."""

from mcore_logprobs.debug.doctor import SelfTest, report, self_test

__all__ = ["SelfTest", "report", "self_test"]
