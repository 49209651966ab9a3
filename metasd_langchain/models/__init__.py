"""Models: transformers' classes, our own key/value slots, one packed forward for rows of different length and shape.

The only package (with ``training`` and ``testing``) that imports transformers.
"""
