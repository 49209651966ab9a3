"""Policies over recorded rounds (``record``), without a model: thousands of streams in seconds.

At a position of an answer the played arm is given the round that it played nearest to there when it played alone, cut
to the answer's end; seconds come from the record's medians by width and arm. Answers do not depend on the drafter, so
every stream writes the same tokens.

**Bias.** A recorded round began at most a few tokens away, and a drafter that learns from what was scored (recycling)
had learned from its own rounds only. `live` says how far that goes: rounds of the default policy in this replay over
its rounds when it ran, on the same prompts in the same order.

Policies with full information hear of every arm, as in the engine with drafters that score: what each would have got
where the round began, once as many tokens are known as the longest draft has. What scoring takes is not in the rounds'
seconds; speeds are printed without (gross) and with it (net), by what the record measured.

Regret is counted in rounds beyond those of the best single arm (MetaSD, arXiv 2604.05417, section 4), over streams of
growing length B; the least-squares line over ln B is printed with the size of its residual.
"""

from __future__ import annotations

import argparse
import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluators.arguments import at_least
from evaluators.curves import draw_lines
from evaluators.errors import EvaluatorError
from evaluators.record import costs, read, scoring_seconds
from evaluators.report import number, say, table, write
from metasd_langchain.assemble import DEFAULT_POLICY, DEFAULT_REWARD
from metasd_langchain.bandits.registry import policy_factory, reward_named
from metasd_langchain.bandits.rewards import Reward
from metasd_langchain.values import Choice, Outcome, Situation

__all__ = ["Answer", "add_arguments", "run", "stream"]

_POLICIES = (
    "hinted_ucb+throughput,ucb+throughput,ucb+bd,ucb+be,ucbspec+length,exp3+bd,exp3spec+length,etc+bd,halving+bd,"
    "thompson+throughput,discounted_ucb+throughput,sliding_ucb+throughput,linucb+throughput,hedge+expected_length,"
    "hedge+throughput,normalhedge+expected_length,normalhedge+throughput,random+bd"
)
_QUICK_STREAMS = 5
_Late = tuple[int, Situation, Choice, Mapping[str, float]]  # when it is known; what `update` takes
_SHOWN = (
    ("regret", 0),
    ("ln_b_slope", 1),
    ("ln_b_residual", 1),
    ("speed_vs_best_single", 3),
    ("net", 3),
    ("best_arm_share", 2),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """Recorded rounds of one answer.

    Attributes:
        group: the prompt's task.
        length: tokens of the answer.
        starts: arm -> where its rounds began.
        rounds: arm -> its rounds, as recorded.
        places: where hints are known, in order.
        hints: arm -> hint, for each of `places`.
        seconded: arm -> how far its draft agrees with another one, for each of `places`.
        live: rounds of the default policy when it ran.
    """

    group: str
    length: int
    starts: Mapping[str, Sequence[int]]
    rounds: Mapping[str, Sequence[Mapping[str, Any]]]
    places: Sequence[int]
    hints: Sequence[Mapping[str, float]]
    seconded: Sequence[Mapping[str, int]]
    live: int

    def at(self, arm: str, position: int) -> Mapping[str, Any]:
        """The arm's round that began nearest to a position."""
        return self.rounds[arm][_nearest(self.starts[arm], position)]

    def situation(self, arms: Sequence[str], position: int, *, compares: bool) -> Situation:
        """What a policy sees at a position, by the notes taken nearest to it."""
        place = _nearest(self.places, position)
        seconded = self.seconded[place] if compares else {}
        return Situation(tuple(arms), self.hints[place], {"position": float(position)}, seconded=seconded)


@dataclass(frozen=True, slots=True)
class _How:
    """A policy's name, what teaches it, and whether it starts fresh for each prompt."""

    policy: str
    reward: Reward
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class _Played:
    """A stream as a policy played it: rounds and seconds of each answer, and who played how often; whether all drafters
    were scored.
    """

    rounds: NDArray[np.int64]
    seconds: NDArray[np.float64]
    arms: Counter[str]
    informed: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--record", metavar="FILE", required=True, help="what `evaluators record` wrote")
    parser.add_argument("--policies", default=_POLICIES, help="policy+reward, joined by commas")
    parser.add_argument("--arms", help="only these arms of the record, joined by commas (e.g. of one budget)")
    parser.add_argument("--streams", type=at_least(1), default=20, help="shuffled streams to average over")
    parser.add_argument("--passes", type=at_least(1), default=4, help="how often a stream repeats the prompts")
    parser.add_argument(
        "--memory", choices=("process", "request"), default="process", help="request: fresh each prompt"
    )
    parser.add_argument("--curves", metavar="FILE", help="draw regret over tokens (.png or .svg)")
    parser.add_argument("--quick", action="store_true", help="fewer streams; the same keys")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="OUT", help="write every figure to this file")


def run(args: argparse.Namespace) -> None:
    """Replay, print, write."""
    head, rows = read(args.record)
    arms = args.arms.split(",") if args.arms else list(head["arms"])
    missing = [arm for arm in arms if arm not in head["arms"]]
    if missing:
        raise EvaluatorError(f"the record has no arm {missing[0]}; it has {', '.join(head['arms'])}")
    answers = _answers(rows, arms)
    prices = _Prices(*costs(rows), scoring_seconds(rows))
    streams = _QUICK_STREAMS if args.quick else args.streams
    orders = [_order(len(answers), args.passes, args.seed + i) for i in range(streams)]
    singles = {arm: _single(answers, prices, arm) for arm in arms}
    best_rounds = min(singles, key=lambda arm: int(singles[arm].rounds.sum()))
    best_seconds = min(singles, key=lambda arm: float(singles[arm].seconds.sum()))
    figures: dict[str, Any] = {}
    curves: dict[str, NDArray[np.float64]] = {}
    tokens = np.mean([np.cumsum([answers[i].length for i in order]) for order in orders], axis=0)
    for spec in args.policies.split(","):
        policy, _, reward = spec.partition("+")
        how = _How(policy, reward_named(reward or DEFAULT_REWARD), args.memory == "request")
        played = [stream(answers, order, prices, arms, how, args.seed + i) for i, order in enumerate(orders)]
        figures[spec], curves[spec] = _figures(played, orders, singles, best_rounds, best_seconds, tokens)
        own = np.array([one.seconds.sum() for one in played])
        paid = own + np.array([prices.scoring * one.rounds.sum() for one in played]) if played[0].informed else own
        figures[spec]["net"] = figures[spec]["speed_vs_best_single"] * float(np.mean(own / paid))
        say(f"{spec}: {figures[spec]['rounds']:.0f} rounds a stream")
    live = _live(answers, prices, arms)
    _print(figures, args, live, best_rounds, best_seconds)
    if args.curves:
        draw_lines(args.curves, tokens.tolist(), curves, ("tokens", "rounds beyond the best single arm"), "Regret")
    write(args, head["machine"], {"policies": figures, "live": live, "arms": arms, "best_single": best_rounds,
                                  "best_single_by_seconds": best_seconds})  # fmt: skip


class _Prices:
    """Seconds of forwards by width and of drafts by arm; and of a round's scoring, nan where it was not measured."""

    def __init__(self, forwards: Mapping[int, float], drafts: Mapping[str, float], scoring: float = math.nan) -> None:
        self.scoring = scoring
        self._widths = sorted(forwards)
        self._seconds = [forwards[width] for width in self._widths]
        self._drafts = drafts

    def forward(self, width: int) -> float:
        return float(np.interp(width, self._widths, self._seconds))

    def at(self, answer: Answer, arm: str, position: int) -> Outcome:
        """An arm's round at a position of an answer."""
        recorded = answer.at(arm, position)
        return self.outcome(arm, recorded, max(1, min(int(recorded["committed"]), answer.length - position)))

    def outcome(self, arm: str, recorded: Mapping[str, Any], committed: int) -> Outcome:
        """The round as a reward sees it, cut to what was left of the answer."""
        drafted = int(recorded["drafted"])
        budget = int(arm.partition("@")[2] or 0)
        return Outcome(
            arm=arm,
            budget=budget,
            drafted=drafted,
            accepted=min(int(recorded["accepted"]), committed),
            committed=committed,
            agreement=tuple(recorded["agreement"]) or (0.0,) * drafted,
            draft_s=self._drafts.get(arm, 0.0) if drafted else 0.0,
            score_s=self.forward(1 + drafted),
            plain_s=self.forward(1),
        )


def stream(
    answers: Sequence[Answer],
    order: Sequence[int],
    prices: _Prices,
    arms: Sequence[str],
    how: _How,
    seed: int,
) -> _Played:
    """One stream under a policy.

    Args:
        answers: the recorded ones.
        order: which answers come one after another.
        prices: what rounds cost.
        arms: those on offer.
        how: policy, reward and memory.
        seed: of the policy's own draws.
    """
    make, reward = policy_factory(how.policy), how.reward
    informed, late = make().full_information and len(arms) > 1, _longest(arms)
    live, rng = make(), np.random.default_rng(seed)
    compares = bool(getattr(live, "compares", False))
    rounds: list[int] = []
    seconds: list[float] = []
    played: Counter[str] = Counter()
    for index in order:
        answer = answers[index]
        if how.fresh:
            live = make()
        at, count, spent = 0, 0, 0.0
        waiting: deque[_Late] = deque()
        while at < answer.length:
            situation = answer.situation(arms, at, compares=compares)
            choice = live.select(situation, rng)
            outcome = prices.at(answer, choice.arm, at)
            told = {arm: outcome if arm == choice.arm else prices.at(answer, arm, at) for arm in arms if informed}
            worth = {arm: reward.rescaled(reward(one)) for arm, one in (told or {choice.arm: outcome}).items()}
            waiting.append((at + late if informed else at, situation, choice, worth))
            at += int(outcome.committed)
            while waiting and (waiting[0][0] <= at or at >= answer.length):
                live.update(*waiting.popleft()[1:])
            count += 1
            spent += outcome.draft_s + outcome.score_s
            played[choice.arm] += 1
        rounds.append(count)
        seconds.append(spent)
    return _Played(np.array(rounds), np.array(seconds), played, informed)


def _longest(arms: Sequence[str]) -> int:
    """Tokens of the longest draft."""
    return max(int(arm.partition("@")[2] or 0) for arm in arms)


def _single(answers: Sequence[Answer], prices: _Prices, arm: str) -> _Played:
    return stream(answers, range(len(answers)), prices, [arm], _How("fixed", reward_named("length")), 0)


def _answers(rows: Sequence[Mapping[str, Any]], arms: Sequence[str]) -> list[Answer]:
    """Answers of which every arm has rounds; cut to the shortest where arms differ (near-ties in half precision)."""
    by_prompt: dict[int, dict[str, list[Mapping[str, Any]]]] = {}
    groups: dict[int, str] = {}
    live: dict[int, int] = {}
    for row in rows:
        groups[row["prompt"]] = row["group"]
        if "live" in row:
            live[row["prompt"]] = len(row["live"])
        elif row.get("arm") in arms and row["rounds"]:
            by_prompt.setdefault(row["prompt"], {})[row["arm"]] = row["rounds"]
    answers = []
    for prompt, rounds in by_prompt.items():
        if len(rounds) < len(arms):
            continue
        length = min(own[-1]["at"] + own[-1]["committed"] for own in rounds.values())
        known: dict[int, tuple[dict[str, float], dict[str, int]]] = {}
        for own in rounds.values():
            for one in own:
                if one["hints"]:
                    own_hints = {arm: math.nan if hint is None else hint for arm, hint in one["hints"].items()}
                    known[one["at"]] = own_hints, one.get("seconded", {})
        places = sorted(known) or [0]
        starts = {arm: [one["at"] for one in own] for arm, own in rounds.items()}
        hints, seconded = zip(*(known.get(place, ({}, {})) for place in places), strict=True)
        answers.append(Answer(groups[prompt], length, starts, rounds, places, hints, seconded, live.get(prompt, 0)))
    if not answers:
        raise EvaluatorError("the record holds no prompt that every arm answered")
    return answers


def _figures(
    played: Sequence[_Played],
    orders: Sequence[Sequence[int]],
    singles: Mapping[str, _Played],
    best: str,
    fastest: str,
    tokens: NDArray[np.float64],
) -> tuple[dict[str, Any], NDArray[np.float64]]:
    rounds = np.array([one.rounds.sum() for one in played], dtype=float)
    seconds = np.array([one.seconds.sum() for one in played])
    base = np.array([singles[fastest].seconds[list(order)].sum() for order in orders])
    regret = np.mean(
        [np.cumsum(one.rounds - singles[best].rounds[list(order)]) for one, order in zip(played, orders, strict=True)],
        axis=0,
    )
    design = np.stack([np.ones(len(tokens)), np.log(tokens)], axis=1)
    line, *_ = np.linalg.lstsq(design, regret, rcond=None)
    arms: Counter[str] = sum((one.arms for one in played), Counter())
    total = sum(arms.values())
    return {
        "rounds": float(rounds.mean()),
        "rounds_deviation": float(rounds.std()),
        "speed_vs_best_single": float(np.mean(base / seconds)),
        "regret": float(regret[-1]),
        "ln_b_slope": float(line[1]),
        "ln_b_residual": float(np.sqrt(np.mean((regret - design @ line) ** 2))),
        "best_arm_share": arms[best] / total,
        "shares": {arm: count / total for arm, count in arms.most_common()},
    }, regret


def _live(answers: Sequence[Answer], prices: _Prices, arms: Sequence[str]) -> dict[str, float]:
    """Rounds of the default policy in the replay and when it ran, in the order of the record."""
    order = range(len(answers))
    played = stream(answers, order, prices, arms, _How(DEFAULT_POLICY, reward_named(DEFAULT_REWARD)), 0)
    ran = sum(answer.live for answer in answers)
    replayed = int(played.rounds.sum())
    return {"rounds_live": ran, "rounds_replayed": replayed, "ratio": replayed / ran if ran else math.nan}


def _order(answers: int, passes: int, seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    return [int(i) for _ in range(passes) for i in rng.permutation(answers)]


def _nearest(places: Sequence[int], position: int) -> int:
    after = bisect_left(places, position)
    if after == len(places):
        return after - 1
    if after and position - places[after - 1] < places[after] - position:
        return after - 1
    return after


def _print(
    figures: Mapping[str, Mapping[str, Any]], args: argparse.Namespace, live: Mapping[str, float], best: str, fast: str
) -> None:
    rows = [
        [
            spec,
            f"{f['rounds']:.0f} ± {f['rounds_deviation']:.0f}",
            *(number(f[name], digits) for name, digits in _SHOWN),
        ]
        for spec, f in sorted(figures.items(), key=lambda item: item[1]["rounds"])
    ]
    columns = [
        "policy+reward",
        "rounds",
        "regret",
        "slope of ln B",
        "residual",
        f"speed / {fast}",
        "net",
        "share of best",
    ]
    table(f"replay, memory {args.memory}; fewest rounds alone: {best}", columns, rows)
    if live["rounds_live"]:
        say(f"replay / live, rounds of {DEFAULT_POLICY}: {live['ratio']:.3f} (all arms must be replayed for this)")
