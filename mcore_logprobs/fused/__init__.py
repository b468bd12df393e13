"""Public operations from hidden states and a head: logits exist one chunk at a time."""
