"""Training of drafters: teacher data from the target itself, trainers for heads and small models, presets.

Importing this package loads no torch. `split` is the rule that keeps training and evaluation apart.
"""
