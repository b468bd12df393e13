"""What happens inside one rank: raw logits to row statistics, and back to their gradient.

Nothing here communicates. `stats` says what a row's statistics are and how shards merge,
`reference` computes them readably in torch and is the ground truth for every other backend,
`backend` chooses a backend and says why.
"""
