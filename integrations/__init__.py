"""Applications around MetaSDLLM and ChatMetaSD. Not in the wheel."""
