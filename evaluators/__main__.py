"""``python -m evaluators COMMAND``; without a command it lists them."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from evaluators.errors import EvaluatorError
from metasd_langchain import MetaSDError

COMMANDS = {
    "speed": "tokens a second of engines and arms on prompts, as ratios to bare transformers generate",
    "cost": "milliseconds of a forward by width and context, for transformers and for us, and where they go",
    "hostile": "what a drafter that is always wrong costs beside plain",
    "spans": "what a span costs as a share of the call it describes",
    "stream": "a policy on a mixed stream of prompts, beside every arm of its pool played alone",
    "record": "rounds of every arm on every prompt, written down for `replay`",
    "replay": "policies over recorded rounds, without a model",
    "theory": "the papers' model without a language model: rewards' signal, regret against ln B",
    "policies": "what a choice costs: microseconds of select and update, milliseconds to load a memory",
    "drafters": "which trained head is best for which task, what a pool with heads gains, what switching costs",
    "priors": "what each arm earns by its drafter's hint: the table the default policy starts from",
    "routers": "how often a router names a prompt's domain, also when asked otherwise; routed heads against the bandit",
    "constrained": "JSON under a grammar: tokens a second beside plain constrained decoding, cost, validity",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 when it measured what it was asked to."""
    parser = argparse.ArgumentParser(prog="python -m evaluators", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, about in COMMANDS.items():
        module = importlib.import_module(f"evaluators.{name}")
        module.add_arguments(commands.add_parser(name, help=about, description=module.__doc__))
    args = parser.parse_args(argv)
    try:
        importlib.import_module(f"evaluators.{args.command}").run(args)
    except (EvaluatorError, MetaSDError) as error:
        print(f"{args.command}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
