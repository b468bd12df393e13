"""Every operation, written once over a source of logits: given (`source`) or a head's (`head`)."""
