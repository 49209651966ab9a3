"""Questions about a folder of texts."""
