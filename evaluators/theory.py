"""The papers' model without a language model: arms whose accepted length is a truncated geometric.

An arm accepts each drafted token with its own probability alpha until the first refusal, at most N of them (MetaSD,
arXiv 2604.05417, assumption 1; BanditSpec, arXiv 2505.15141). Checked: the means of both rewards,
``E[BD] = alpha`` and ``E[BE] = alpha (1 - alpha^N) / (N (1 - alpha))``; their signal, the squared gap to the best arm
over the larger variance (larger is better); regret in rounds against B tokens with its line over ln B; and what full
information is worth, gross and net of its cost, as drafters become more (``information.py``).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluators.arguments import at_least, numbers
from evaluators.curves import draw_lines
from evaluators.errors import EvaluatorError
from evaluators.information import compare
from evaluators.report import number, table, write
from metasd_langchain.bandits.registry import policy_factory
from metasd_langchain.values import Situation

__all__ = ["add_arguments", "regret", "run", "signals"]

_POLICIES = "ucb+bd,ucb+be,exp3+bd,exp3spec+be,ucbspec+be,etc+bd,halving+bd,thompson+bd,random+bd"
_SPREAD = 0.15  # of 1 - TV around alpha, clipped to [0, 1]
_SAMPLES = 20_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--alphas", default="0.75,0.6,0.5,0.4,0.3", help="acceptance of each arm, joined by commas")
    parser.add_argument("--length", type=at_least(1), default=5, metavar="N", help="drafted tokens a round")
    parser.add_argument("--tokens", type=at_least(64), default=8192, metavar="B", help="longest answer")
    parser.add_argument("--runs", type=at_least(1), default=50)
    parser.add_argument("--policies", default=_POLICIES, help="policy+reward, joined by commas")
    parser.add_argument("--curves", metavar="FILE", help="draw regret over tokens (.png or .svg)")
    parser.add_argument("--drafters", type=numbers, default=[2, 4, 8, 16], help="how many, for full information")
    parser.add_argument("--rounds", type=at_least(1), default=200, help="for full information")
    parser.add_argument("--score-cost", type=float, default=0.033, help="forwards that scoring one drafter takes")
    parser.add_argument("--every", type=at_least(1), default=4, help="rounds between two scorings")
    parser.add_argument("--quick", action="store_true", help="fewer runs; the same keys")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="OUT", help="write every figure to this file")


def run(args: argparse.Namespace) -> None:
    """Simulate, print, write."""
    alphas = _alphas(args.alphas)
    if min(args.drafters) < 2 or args.score_cost < 0.0:
        raise EvaluatorError("--drafters: at least 2; --score-cost: at least 0")
    runs = min(args.runs, 10) if args.quick else args.runs
    found = signals(alphas, args.length, args.seed)
    lengths = [64 * 2**i for i in range(32) if 64 * 2**i <= args.tokens]
    figures: dict[str, Any] = {}
    lines: dict[str, NDArray[np.float64]] = {}
    for spec in args.policies.split(","):
        policy, _, reward = spec.partition("+")
        if reward not in ("bd", "be"):
            raise EvaluatorError(f"{spec}: the toy knows the rewards bd and be")
        values = np.mean(
            [regret(policy, reward, alphas, args.length, lengths, args.seed + i) for i in range(runs)], axis=0
        )
        design = np.stack([np.ones(len(lengths)), np.log(lengths)], axis=1)
        line, *_ = np.linalg.lstsq(design, values, rcond=None)
        residual = float(np.sqrt(np.mean((values - design @ line) ** 2)))
        lines[spec] = values
        figures[spec] = {"regret": values.tolist(), "ln_b_slope": float(line[1]), "ln_b_residual": residual}
    _print(found, figures, lengths, alphas, args.length)
    cost = (args.score_cost, args.every)
    informed = compare(args.drafters, args.length, args.rounds, runs, cost, args.seed)
    if args.curves:
        draw_lines(args.curves, lengths, lines, ("tokens B", "rounds beyond the best arm"), "Regret, toy arms")
    write(args, {}, {"signals": found, "lengths": lengths, "policies": figures, "information": informed})


def signals(alphas: Sequence[float], length: int, seed: int) -> dict[str, Any]:
    """Mean, variance and share of zeros of both rewards by arm, beside what the formulas say, and the signals."""
    rng = np.random.default_rng(seed)
    arms: list[dict[str, float]] = []
    for alpha in alphas:
        bd, be = np.array([_round(alpha, length, rng)[:2] for _ in range(_SAMPLES)]).T
        closed = alpha * (1 - alpha**length) / (length * (1 - alpha)) if alpha < 1 else 1.0
        arms.append(
            {"alpha": alpha, "bd": float(bd.mean()), "be": float(be.mean()), "be_formula": closed}
            | {"bd_variance": float(bd.var()), "be_variance": float(be.var())}
            | {"bd_zeros": float((bd == 0).mean()), "be_zeros": float((be == 0).mean())}
        )
    best = max(arms, key=lambda arm: arm["alpha"])
    for arm in arms:
        for name in ("bd", "be"):
            gap = (best[name] - arm[name]) ** 2
            arm[f"{name}_signal"] = gap / max(arm[f"{name}_variance"], best[f"{name}_variance"])
    return {"arms": arms}


def regret(
    policy: str, reward: str, alphas: Sequence[float], length: int, lengths: Sequence[int], seed: int
) -> NDArray[np.float64]:
    """Rounds that a policy needs for B tokens beyond what the best arm needs on average, for each B of `lengths`."""
    rng = np.random.default_rng(seed)
    live = policy_factory(policy)()
    names = tuple(f"arm{i}@{length}" for i in range(len(alphas)))
    best = max(alphas)
    per_round = 1.0 + best * (1 - best**length) / (1 - best) if best < 1 else 1.0 + length
    tokens = rounds = 0
    found = []
    for goal in lengths:
        while tokens < goal:
            situation = Situation(names)
            choice = live.select(situation, rng)
            bd, be, accepted = _round(alphas[names.index(choice.arm)], length, rng)
            live.update(situation, choice, {choice.arm: bd if reward == "bd" else be})
            tokens += accepted + 1
            rounds += 1
        found.append(rounds - tokens / per_round)
    return np.array(found)


def _round(alpha: float, length: int, rng: np.random.Generator) -> tuple[float, float, int]:
    """A round's BD, BE and accepted tokens: 1 - TV varies around alpha, and a token is accepted with just that."""
    width = min(_SPREAD, alpha, 1.0 - alpha)  # so that the mean stays alpha
    agreement = alpha + width * rng.uniform(-1.0, 1.0, length)
    refused = rng.uniform(size=length) >= agreement
    accepted = int(refused.argmax()) if refused.any() else length
    return float(agreement.mean()), accepted / length, accepted


def _alphas(text: str) -> list[float]:
    try:
        alphas = [float(part) for part in text.split(",")]
    except ValueError as cause:
        raise EvaluatorError(f"--alphas {text}: numbers joined by commas") from cause
    if len(alphas) < 2 or not all(0.0 < alpha < 1.0 for alpha in alphas):
        raise EvaluatorError("--alphas: at least two numbers between 0 and 1")
    return alphas


def _print(
    found: Mapping[str, Any],
    figures: Mapping[str, Mapping[str, Any]],
    lengths: Sequence[int],
    alphas: Sequence[float],
    length: int,
) -> None:
    rows = [
        [number(arm["alpha"]), number(arm["bd"], 3), number(arm["be"], 3), number(arm["be_formula"], 3)]
        + [number(arm[f"{name}_{what}"], 4) for what in ("variance", "zeros", "signal") for name in ("bd", "be")]
        for arm in found["arms"]
    ]
    columns = [
        "alpha",
        "E[BD]",
        "E[BE]",
        "formula",
        "var BD",
        "var BE",
        "zeros BD",
        "zeros BE",
        "signal BD",
        "signal BE",
    ]
    table(f"rewards of truncated geometric arms, N = {length}", columns, rows)
    rows = [
        [spec, *(number(value, 0) for value in f["regret"]), number(f["ln_b_slope"], 1), number(f["ln_b_residual"], 1)]
        for spec, f in sorted(figures.items(), key=lambda item: float(item[1]["regret"][-1]))
    ]
    table(f"regret in rounds after B tokens, arms {', '.join(map(str, alphas))}",
          ["policy+reward", *(f"B={b}" for b in lengths), "slope of ln B", "residual"], rows)  # fmt: skip
