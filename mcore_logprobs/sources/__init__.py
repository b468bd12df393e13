"""Where logits come from: given, or a head over hidden states."""
