"""``python -m metasd_langchain.cli``: the ``metasd`` command."""

from metasd_langchain.cli import main

if __name__ == "__main__":
    main()
