"""One policy a file; the module's name is the policy's name, ``create(options) -> Policy`` makes a fresh one.

Policies break ties by the order of ``situation.arms``, take randomness from the caller's generator only, and keep
their statistics by arm name, so arms may come and go. A policy that can also forget in part offers
``fade(keep: float)`` (see ``selector.Fading``); one that does not simply starts every new key from nothing.
"""
