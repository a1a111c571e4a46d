"""Rejection sampling over flattened drafts: logits in, tokens out."""
