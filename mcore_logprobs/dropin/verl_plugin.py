"""Importing this switches `mcore_logprobs.dropin.verl` on: a module for verl to load by name.

VERL_USE_EXTERNAL_MODULES=mcore_logprobs.dropin.verl_plugin      in the environment, or
actor_rollout_ref.model.external_lib=mcore_logprobs.dropin.verl_plugin
"""

from mcore_logprobs.dropin.switch import switch_on

switch_on("verl")
